"""A PCG whose micro-batch passes slice by slice in time: what each slice reads of earlier ones, and nothing of later.

all_gather(slices(f)) == f, where f at a position depends on positions up to it: token-level pipelines (TeraPipe, Li et
al., ICML'21). As in ``over_time`` an axis of time stands before those of the mesh, whose ranks run one after the other;
but the plan's own moves stay what they are, and along time there are three: ``partition`` (of what is there at once),
``replicate`` (of parameters), and ``all_gather``, which gives a slice what earlier ones made. Outputs are combined.
Whether what later slices make changes nothing, no split says: ``ir.proof.in_time`` proves it.
Entry points: ``in_slices``, ``workload_in_slices``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ir.builder import Builder
from ir.errors import ShardingError
from ir.graph import Graph, Node
from ir.mesh import Axis, Mesh
from ir.operator import Split
from ir.ops.parallel import move
from ir.sharding import (
    Invariant,
    Partial,
    Replicate,
    Shard,
    Sharding,
    State,
    format_sharding,
    invariant,
    parse_sharding,
)
from ir.verify import describe, infer_shardings
from pdv.cluster import Link
from pdv.cost.comm import AxisLink
from pdv.pcg.over_time import TIME
from pdv.problem.workload import Workload

POSITIONS = 1
"""The dim of inputs along which positions lie: they are [rows, positions, ...]."""
ONE_DEVICE = AxisLink(1, Link("time", float("inf"), 0.0))


@dataclass(frozen=True)
class InSlices:
    """The program of a slice.

    Attributes:
        graph: a PCG of ``mesh``, whose outputs leave whole.
        mesh: with the axis of time first.
        places: by node of the PCG, what runs it here.
    """

    graph: Graph
    mesh: Mesh
    places: Mapping[Node, Node]


def in_slices(pcg: Graph, mesh: Mesh, count: int, *, whole: bool = True) -> InSlices:
    """A PCG of ``mesh``, or a serial graph on none, in so many slices; ``whole``: outputs leave so, else by slices.

    Raises:
        ShardingError: naming what is not made slice by slice.
    """
    if pcg.draws:
        raise ShardingError("dropout draws masks of all positions at once", "No dropout")
    if any(axis.name == TIME for axis in mesh.axes):
        raise ShardingError(f"an axis of the mesh is called {TIME}", "Another name")
    made = _Slicing(pcg, mesh, count)
    graph = made.builder.graph({name: made.leave(name, node, whole) for name, node in pcg.outputs}, {}, pcg.name)
    infer_shardings(graph, made.mesh)
    return InSlices(graph, made.mesh, made.places)


def workload_in_slices(work: Workload) -> Workload:
    """The same workload, of whose passes each is of one slice; losses are of slices."""
    count = work.execution.moments
    if count == 1:
        return work
    made = in_slices(work.pcg, work.problem.mesh, count, whole=False)
    there = set(made.graph.nodes)

    def placed(of: Mapping[Node, int]) -> dict[Node, int]:
        found = {made.places[node]: number for node, number in of.items() if made.places[node] in there}
        return with_moves(made.graph, found)

    stages = replace(work.stages, chunk_of=placed(work.stages.chunk_of), layer_of=placed(work.stages.layer_of))
    problem = replace(work.problem, mesh=made.mesh, axes=(ONE_DEVICE, *work.problem.axes), leaving=None)
    axes = tuple((ONE_DEVICE, *links) for links in work.axes)
    return replace(work, problem=problem, pcg=made.graph, stages=stages, axes=axes)


def with_moves(graph: Graph, of: Mapping[Node, int]) -> dict[Node, int]:
    """The same, and of moves along time, each with its first reader; what is of leaves alone each has for itself."""
    found, fixed = dict(of), set[Node]()
    for node in graph.nodes:
        if not node.is_input and all(operand in fixed for operand in node.operands):
            fixed.add(node)
    for node in reversed(graph.nodes):
        if node.op.kind == "parallel" and node not in found and node not in fixed:
            readers = [found[reader] for reader in graph.users[node] if reader in found]
            found |= {node: min(readers)} if readers else {}
    return found


class _Slicing:
    def __init__(self, pcg: Graph, mesh: Mesh, count: int) -> None:
        self.builder, self.mesh = Builder(), Mesh((Axis(TIME, count), *mesh.axes))
        self.places: dict[Node, Node] = {}
        self._states: dict[Node, State] = {}
        self._inside, self._count = mesh, count
        self._positions = self._find_positions(pcg)
        for node in pcg.nodes:
            if node.op.kind == "parallel":
                (below,) = node.operands
                self.places[node] = self.builder.copy(node, (self.places[below],))
                self._states[node] = self._states[below]
            elif node.is_leaf:
                self._leaf(node)
            else:
                self._split(node)

    def leave(self, name: str, output: Node, whole: bool) -> Node:
        """An output, of all positions or of those of a slice."""
        state = self._states[output]
        if not isinstance(state, Shard):
            raise ShardingError(f"output {name} is not made position by position", "Outputs [rows, positions, ...]")
        return self._move(self.places[output], state, Invariant()) if whole else self.places[output]

    def _find_positions(self, pcg: Graph) -> int:
        """How many positions the inputs have."""
        found = [node.type.shape[POSITIONS] for node in pcg.inputs if node.type.rank > POSITIONS]
        if not found:
            raise ShardingError("no input has positions", "Inputs [rows, positions, ...]")
        if found[0] % self._count:
            raise ShardingError(f"{found[0]} positions in {self._count} slices", f"A number that divides {found[0]}")
        return found[0]

    def _move(self, made: Node, before: State, after: State) -> Node:
        found = move(before, after)
        if isinstance(after, Shard) and before != after and self._is_cut_inside(made, after.dim):
            return self._move_below(made, before, after)
        return made if found is None else getattr(self.builder, found[0])(made, **found[1], axis=TIME)

    def _move_below(self, made: Node, before: State, after: Shard) -> Node:
        """A value whose dim other axes cut, too: axes cut a dim in mesh order, time before the others."""
        if not made.is_leaf:
            (below,) = made.operands
            return self.builder.copy(made, (self._move(below, before, after),))
        cuts = [
            axis.name for axis, state in zip(self.mesh.axes, _rests(made, self.mesh), strict=True) if state == after
        ]
        for axis in reversed(cuts):  # a parameter that rests so is put together first
            made = self.builder.combine(made, dim=after.dim, axis=axis)
        made = self._move(made, before, after)
        for axis in cuts:
            made = self.builder.partition(made, dim=after.dim, axis=axis)
        return made

    def _is_cut_inside(self, node: Node, dim: int) -> bool:
        """True if a value is cut along a dim as it rests, or by moves above that, none of which undoes it."""
        while node.op.kind == "parallel":
            before, after = node.op.transition.states(node.attrs)
            if Shard(dim) in (before, after):
                return after == Shard(dim)
            (node,) = node.operands
        return node.is_param and Shard(dim) in _rests(node, self.mesh)

    def _leaf(self, node: Node) -> None:
        self._states[node] = Invariant()
        if node.is_param:
            rests = _rests(node, self._inside)
            cut = any(isinstance(state, Shard) for state in rests)
            attrs: dict[str, Any] = {**node.attrs, "stored": format_sharding((Invariant(), *rests)) if cut else ""}
            self.places[node] = self.builder.param(attrs.pop("name"), node.type, **attrs)
            return
        self.places[node] = self.builder.copy(node, ())
        if node.is_input and node.type.rank > POSITIONS and node.type.shape[POSITIONS] == self._positions:
            self._states[node] = Shard(POSITIONS)
            self.places[node] = self._move(self.places[node], Invariant(), Shard(POSITIONS))

    def _split(self, node: Node) -> None:
        split = self._along_time(node)
        operands = tuple(
            self._move(self.places[operand], self._states[operand], after)
            for operand, after in zip(node.operands, split.operands, strict=True)
        )
        self.places[node], self._states[node] = self.builder.copy(node, operands), split.result

    def _along_time(self, node: Node) -> Split:
        """The split that gathers least, and cuts the first dim that it can; none of what is made of nothing cut.

        Raises:
            ShardingError: if there is none.
        """
        states, options = [self._states[operand] for operand in node.operands], node.op.splits(node.loops)
        allowed = [split for split in options if self._is_allowed(node, states, split)]
        if not allowed:
            position = next(state.dim for state in states if isinstance(state, Shard))
            raise ShardingError(
                f"{describe(node)} is not made slice by slice: it has no split along time, which is dim {position} of "
                "what it reads",
                "Operators that work position by position, or read earlier ones (causal attention)",
            )
        return min(allowed, key=lambda split: self._price(states, split))

    def _price(self, states: Sequence[State], split: Split) -> tuple[int, int]:
        gathered = sum(old != new for old, new in zip(states, split.operands, strict=True) if isinstance(old, Shard))
        return gathered, split.result.dim if isinstance(split.result, Shard) else -1

    def _is_allowed(self, node: Node, states: Sequence[State], split: Split) -> bool:
        if split.loop is not None and node.loops.extents[split.loop] % self._count:
            return False
        cut = any(isinstance(state, Shard) for state in states)
        if cut != (split.loop is not None) or not isinstance(split.result, Shard if cut else Invariant):
            return False
        pairs = list(zip(states, split.operands, strict=True))
        stays = any(isinstance(before, Shard) and before == after for before, after in pairs)
        return stays == cut and all(_may_become(*pair) for pair in pairs)


def _rests(parameter: Node, mesh: Mesh) -> Sharding:
    return parse_sharding(parameter.attr("stored")) or invariant(mesh)


def _may_become(before: State, after: State) -> bool:
    """What is cut stays so, or each slice reads it for itself; what is there at once may be either."""
    if isinstance(after, Partial):
        return False
    return before == after or not isinstance(before, Shard) or isinstance(after, Replicate)
