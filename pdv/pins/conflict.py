"""Which pins contradict each other: a smallest set that no plan keeps together, by dropping one after the other.

First operator by operator and parameter by parameter, which is instant and says what is contradictory; then by solving
the graph again under fewer pins. Dropping each pin in turn and keeping it out where the rest is still impossible
leaves a set of which every member is needed (deletion filter; Chinneck and Dravnieks, ORSA J. Computing 1991).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ir.errors import NoPlanFitsError, PinsError
from ir.graph import Node
from ir.operator import Split
from ir.verify import divides
from pdv.pins.constraint import Constraint, Joined, join
from pdv.pins.names import source_of
from pdv.problem import Problem
from pdv.search.blocks import tied_params
from pdv.search.chain import ChainSolver
from pdv.search.meshes import search_mesh
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.tables import TooWideError

Keeps = Callable[[Sequence[Constraint]], bool]


def contradiction(problem: Problem, refused: NoPlanFitsError) -> PinsError | None:
    """The error that names the pins to blame for ``refused``, or None if it is not theirs."""
    pins = problem.pins
    if not isinstance(pins, Joined) or not pins.constraints:
        return None
    if refused.needed_bytes < float("inf"):
        return _too_large(problem, pins, refused)
    return _at_one_place(problem, pins) or _anywhere(problem, pins)


def smallest(constraints: Sequence[Constraint], possible: Keeps) -> list[Constraint]:
    """A set of which no member can be dropped without making it possible; the given set is impossible."""
    kept = list(constraints)
    for entry in constraints:
        fewer = [other for other in kept if other is not entry]
        if not possible(fewer):
            kept = fewer
    return kept


def _at_one_place(problem: Problem, pins: Joined) -> PinsError | None:
    """An operator without a configuration, or a parameter without a place to rest."""
    seen: set[object] = set()
    for node in problem.graph.nodes:
        if node.is_param and node.needs_grad:
            found = _parameter(problem, pins, node)
        elif not node.is_leaf:
            key = (node.op.name, str(node.loops.extents), pins.mark([node]))
            if key in seen:
                continue
            seen.add(key)
            found = _operator(problem, pins, node)
        else:
            continue
        if found is not None:
            return found
    return None


def _operator(problem: Problem, pins: Joined, node: Node) -> PinsError | None:
    def possible(constraints: Sequence[Constraint]) -> bool:
        return bool(_table(problem, pins, constraints).of(node))

    if possible(pins.constraints):
        return None
    blamed = smallest(pins.constraints, possible)
    where = f"{node.op.name} {node.name}".strip()
    return _error(blamed, f"no way to run {where} -> {node.type} on {problem.mesh}{_why(problem, blamed, node)}")


def _why(problem: Problem, blamed: Sequence[Constraint], node: Node) -> str:
    """What a single pin asks for that sizes forbid."""
    if len(blamed) != 1:
        return ""
    options: list[list[Split]] = [
        [option for option in node.op.splits(node.loops) if blamed[0].split(node, axis.name, option)]
        for axis in problem.mesh.axes
    ]
    for chosen in itertools.product(*options):
        if not divides(node.loops, chosen, problem.mesh):
            cut = [
                f"{option.loop}={node.loops.extents[option.loop]} over {axis.name}={axis.size}"
                for option, axis in zip(chosen, problem.mesh.axes, strict=True)
                if option.loop is not None
            ]
            return f": {', '.join(cut)} does not divide"
    return ""


def _parameter(problem: Problem, pins: Joined, param: Node) -> PinsError | None:
    def possible(constraints: Sequence[Constraint]) -> bool:
        return bool(_table(problem, pins, constraints).storages(param))

    if possible(pins.constraints):
        return None
    return _error(smallest(pins.constraints, possible), f"no place to rest for {source_of(param)} {param.type}")


def _table(problem: Problem, pins: Joined, constraints: Sequence[Constraint]) -> ConfigTable:
    assert pins.role is not None
    loose = replace(problem, pins=join(constraints, pins.role, pins.name))
    return ConfigTable(loose, tied_params(problem.graph))


def _anywhere(problem: Problem, pins: Joined) -> PinsError | None:
    """No operator is impossible by itself: solve under fewer and fewer pins."""

    def possible(constraints: Sequence[Constraint]) -> bool:
        assert pins.role is not None
        held = join(constraints, pins.role, pins.name)
        # whole outputs are always possible: how they leave is not what makes pins impossible
        loose = replace(problem, pins=held, memory_limit=float("inf"), leaving=problem.exits[0])
        try:
            ChainSolver(loose).at_price(0.0)
        except NoPlanFitsError:
            return False
        return True

    try:
        if not possible([]):
            return None
        blamed = smallest(pins.constraints, possible)
    except TooWideError:
        return None
    return _error(blamed, f"no plan on {problem.mesh}, though each operator alone could be run")


def _too_large(problem: Problem, pins: Joined, refused: NoPlanFitsError) -> PinsError | None:
    """Plans exist, but none fits in memory; it is the pins' doing if one would without them."""

    def possible(constraints: Sequence[Constraint]) -> bool:
        assert pins.role is not None
        try:
            search_mesh(replace(problem, pins=join(constraints, pins.role, pins.name)))
        except NoPlanFitsError:
            return False
        return True

    if not possible([]):
        return None
    return _error(smallest(pins.constraints, possible), f"no plan that fits in memory ({refused.what})")


def _error(blamed: Sequence[Constraint], left: str) -> PinsError:
    """One pin that cannot be kept, or several that cannot be kept together."""
    if len(blamed) == 1:
        return PinsError(f"{blamed[0].label} cannot be kept: it leaves {left}", mend="Loosen it, or change the mesh")
    names = " and ".join(entry.label for entry in blamed)
    return PinsError(f"{names} contradict each other: together they leave {left}", mend="Drop one of them")
