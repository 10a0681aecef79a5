"""Whether a model takes any number of rows, asked of the model itself where it can be read at another number.

Entry point: ``why_fixed``.
"""

from __future__ import annotations

from ir.errors import PdvError
from ir.graph import Graph
from pdv.emit.opened import BATCH, open_sizes
from pdv.frontend.program import Program

# what a model's own code raises at a size that it does not know
BROKEN = (PdvError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def why_fixed(program: Program) -> str:
    """What fixes the number of rows of a program's inputs; nothing if it may be any.

    A source that can be read at twice the rows must be the same program there. One that cannot is taken to be, unless
    it takes a slice of the rows or sums over them: the numbers in such a program may follow from how many there are.
    """
    opened = open_sizes(program.graph)
    if BATCH not in opened.symbols:
        return opened.fixed
    atom = opened.symbols[BATCH]
    if program.again is None:
        return opened.sizes.doubt((atom,)) or ""
    try:
        twice, _ = opened.sizes.resized({atom: 2 * opened.sizes.atoms.extents[atom]})
        found = program.again({node.attr("name"): node.type.shape for node in twice.inputs})
    except BROKEN as error:
        return f"twice as many cannot be read: {error.what if isinstance(error, PdvError) else repr(error)}"
    return "" if found.digest == twice.digest else f"at twice as many {_difference(twice, found)}"


def _difference(one: Graph, other: Graph) -> str:
    """The first operator of the other program that the one has not, in words."""
    known = {node.digest for node in one.nodes}
    found = next((node for node in other.nodes if node.digest not in known), None)
    if found is None:
        return "the model computes less"
    attrs = ", ".join(f"{name}={value}" for name, value in found.attrs.items())
    return f"the model takes {found.op.name} {found.name} ({attrs})" if attrs else f"the model takes {found.op.name}"
