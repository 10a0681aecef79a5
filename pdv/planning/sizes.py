"""Which sizes of its inputs a model leaves open, asked of the model itself where it can be read at others.

Entry point: ``sizes_document``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ir.errors import PdvError
from ir.graph import Graph
from pdv.emit.analysis.open_sizes import Opened, batch_of, open_sizes
from pdv.frontend.program import BATCH, Program
from pdv.frontend.tables import BROKEN


def sizes_document(program: Program) -> dict[str, dict[str, Any]]:
    """The sizes of the inputs that have names: where they stand, what fixes each, and the largest that each may be.

    A source that can be read at other sizes must be the same program there: each of them changed alone, then all
    together. One that cannot is taken to be, unless it takes a slice of the rows or sums over them: the numbers in such
    a program may follow from how many there are.
    """
    places = {**batch_of(program.graph), **{name: one.places for name, one in program.sizes.items()}}
    opened = open_sizes(program.graph, places)
    reasons = {name: opened.fixed.get(name, "") for name in places}
    reasons |= {name: "the model has it fixed" for name in places if not reasons[name] and name not in opened.symbols}
    for name in opened.symbols:
        reasons[name] = _why_fixed(program, opened, {name})
    left = {name for name, reason in reasons.items() if not reason}
    if len(left) > 1 and (reason := _why_fixed(program, opened, left)):
        reasons |= dict.fromkeys(left - {BATCH}, f"together with others, {reason}")
    return {
        name: {
            "inputs": [list(place) for place in where],
            "fixed_by": reasons[name],
            "most": program.sizes[name].most if name in program.sizes else None,
        }
        for name, where in places.items()
    }


def _why_fixed(program: Program, opened: Opened, names: set[str]) -> str:
    """Why some sizes cannot be others together; nothing if they may be any."""
    atoms = {opened.symbols[name]: name for name in names}
    if program.again is None:
        return opened.sizes.doubt(tuple(atoms)) or ""
    wanted: dict[int, int] = {}
    twice = BATCH not in program.sizes
    try:
        most = opened.bounded({name: one.most for name, one in program.sizes.items()}).most
        for atom, name in atoms.items():
            wanted[atom] = _other(opened.sizes.atoms.extents[atom], most.get(name), odd=len(names) > 1)
        there, _ = opened.sizes.resize(wanted)
        found = program.again({node.attr("name"): node.type.shape for node in there.inputs})
    except BROKEN as error:
        why = error.what if isinstance(error, PdvError) else repr(error)
        return f"{_say(wanted, atoms, twice=twice)} cannot be read: {why}"
    if found.digest == there.digest:
        return ""
    return f"at {_say(wanted, atoms, twice=twice)} {_difference(there, found)}"


def _other(size: int, most: int | None, *, odd: bool) -> int:
    """Another size: of one alone the largest that it may be, of several together one that divides nothing."""
    if odd:
        return size + 1 if most is None or size < most else max(size - 1, 1)
    return 2 * size if most is None else most if size < most else max(size // 2, 1)


def _say(wanted: Mapping[int, int], atoms: Mapping[int, str], *, twice: bool) -> str:
    """``twice as many``; ``b = 9 and s = 17``."""
    if not wanted:
        return "other sizes"
    if [atoms[atom] for atom in wanted] == [BATCH]:
        return "twice as many" if twice else f"{next(iter(wanted.values()))} rows"
    return " and ".join(f"{atoms[atom]} = {size}" for atom, size in sorted(wanted.items()))


def _difference(one: Graph, other: Graph) -> str:
    """The first operator of the other program that the one has not, in words."""
    known = {node.digest for node in one.nodes}
    found = next((node for node in other.nodes if node.digest not in known), None)
    if found is None:
        return "the model computes less"
    attrs = ", ".join(f"{name}={value}" for name, value in found.attrs.items())
    return f"the model takes {found.op.name} {found.name} ({attrs})" if attrs else f"the model takes {found.op.name}"
