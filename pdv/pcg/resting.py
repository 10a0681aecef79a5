"""Where parameters rest along data axes, exchanged: whole for cut and gathered once a step (ZeRO-1), or the other way.

A search of one micro-batch adds up what both take; what hides behind a backward pass, and what memory is left, is known
of a whole step alone. So the plan that it ends with is simulated the other way, too. Entry point: ``exchanged``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ir.graph import Graph, Node
from ir.mesh import JOINT
from ir.sharding import Invariant, Shard, Sharding, fits, invariant, with_states
from pdv.pcg.units import gathered_once
from pdv.problem import Problem, Solution, Storage


def exchanged(solution: Solution, pcg: Graph) -> Iterator[Solution]:
    """The same solution with all whole, and with as much as can be cut; nothing where that changes nothing."""
    for ways in (_whole, _cut):
        storage = dict(solution.assignment.storage)
        params = {node.attr("name"): node for node in solution.graph.params}
        for move in pcg.nodes:
            if move.op.kind != "parallel" or not move.operands[0].is_param or JOINT in move.attr("axis"):
                continue
            if len(pcg.users[move.operands[0]]) > 1:
                continue  # a step keeps one copy
            param = params[move.operands[0].attr("name")]
            before = storage.get(param, Storage(invariant(solution.problem.mesh)))
            after = ways(solution.problem, param, move, before.sharding)
            if after is not None:
                storage[param] = Storage(after)
        if storage != solution.assignment.storage:
            yield replace(solution, assignment=replace(solution.assignment, storage=storage), realized=None)


def _whole(problem: Problem, param: Node, move: Node, before: Sharding) -> Sharding | None:
    """Whole along the axis along which a move gathers it once a step."""
    after = with_states(before, problem.mesh.positions(move.attr("axis")), Invariant())
    once = gathered_once(move, several=True)
    return after if once and _is_allowed(problem, param, after) else None


def _cut(problem: Problem, param: Node, move: Node, before: Sharding) -> Sharding | None:
    """Cut along the axis along which its gradient is summed."""
    if not (move.op.transition.only_names and param.needs_grad):
        return None
    (position,) = problem.mesh.positions(move.attr("axis"))
    if before[position] != Invariant() or not problem.pins.gathers(param, move.attr("axis"), False):
        return None
    for dim in range(param.type.rank):
        after = with_states(before, (position,), Shard(dim))
        if Shard(dim) not in before and fits(param.type, after, problem.mesh) and _is_allowed(problem, param, after):
            return after
    return None


def _is_allowed(problem: Problem, param: Node, after: Sharding) -> bool:
    pins = problem.pins
    states = all(pins.storage(param, axis.name, one) for axis, one in zip(problem.mesh.axes, after, strict=True))
    cut = any(isinstance(state, Shard) for state in after)
    return states and not (cut and pins.regather == "always") and pins.rests(param, Storage(after))
