"""Whether a plan keeps its pins, asked of what was found and not of how: a check on every search.

Entry point: ``check_kept``.
"""

from __future__ import annotations

from ir.errors import PinsError
from ir.graph import Node
from pdv.pcg.techniques import gathered_axes
from pdv.pins.constraint import Constraint, Joined
from pdv.pins.names import source_of
from pdv.search.best import BestPlan


def check_kept(found: BestPlan) -> BestPlan:
    """The plan itself, if it keeps every pin.

    Raises:
        PinsError: naming a pin that it does not keep, or that nothing in it follows.
    """
    pins = found.solution.problem.pins
    if isinstance(pins, Joined):
        for entry in pins.constraints:
            checks = (_check_splits, _check_storage, _check_gathers, _check_rewrites)
            broken = next(filter(None, (check(entry, found) for check in checks)), "")
            if broken:
                raise PinsError(
                    f"{entry.label} is not kept by the plan found: {broken}",
                    "Plans that keep every pin",
                    'Plan without rewrites, --rules none (rules="none"), and report this',
                )
    return found


def _check_splits(entry: Constraint, found: BestPlan) -> str:
    """An operator that is cut against a pin; or that none follows it."""
    axes, follows = found.solution.problem.mesh.axes, entry.does is None
    for node, splits in found.solution.assignment.splits.items():
        for axis, split in zip(axes, splits, strict=True):
            if not entry.split(node, axis.name, split):
                return f"{_words(node)} is run with loop {split.label} along {axis.name}"
            follows = follows or (entry.does is not None and entry.does(node, axis.name, split))
    return "" if follows else "no operator of it follows"


def _check_storage(entry: Constraint, found: BestPlan) -> str:
    """A parameter that rests against a pin."""
    solution = found.solution
    mesh = solution.problem.mesh
    for param, storage in solution.assignment.storage.items():
        states = zip(mesh.axes, storage.sharding, strict=True)
        kept = all(entry.storage(param, axis.name, state) for axis, state in states)
        if not (kept and entry.rests(param, storage)):
            return f"{source_of(param)} rests as {storage.sharding}"
    return ""


def _check_gathers(entry: Constraint, found: BestPlan) -> str:
    """A parameter that is gathered against a pin."""
    for param in found.pcg.params:
        for axis in sorted(gathered_axes(found.pcg, param)):
            if not entry.gathers(param, axis, bool(param.attr("regather"))):
                return f"{source_of(param)} is gathered along {axis}"
    return ""


def _check_rewrites(entry: Constraint, found: BestPlan) -> str:
    """What a rewrite took away."""
    lost = entry.traces_of(found.solution.problem.graph.nodes) - entry.traces_of(found.solution.graph.nodes)
    return f"rewrites took {min(map(str, lost))} away" if lost else ""


def _words(node: Node) -> str:
    return f"{node.op.name} {node.name}".strip()
