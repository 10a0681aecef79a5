"""A forward pass a few positions at a time: its axis is time, and what earlier positions gave is kept.

It is context parallelism whose ranks run one after the other: a rank is a moment and has its positions, and where other
programs gather keys and values of all ranks, it has those of earlier moments (a cache: Shazeer 2019, section 2.4).
Which values are cut follows from the operators' splits; nothing is said of attention. Entry point: ``over_time``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ir.builder import Builder
from ir.errors import ShardingError
from ir.graph import Graph, Node
from ir.mesh import Axis, Mesh
from ir.operator import Split
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, Shard, Sharding, State, format_sharding, invariant, parse_sharding
from ir.verify import infer_shardings, node_splits

TIME = "time"


def over_time(pcg: Graph, mesh: Mesh, positions: int) -> tuple[Graph, Mesh]:
    """The first output of a PCG of ``mesh``, and the mesh with an axis of time before its own.

    Operators keep their splits along the axes of ``mesh``, but for those that cut positions: all do these. The inputs,
    [rows, positions], are cut along time, and so is what is made of them as far as the operators allow; what they do
    not is gathered. Whether what is gathered of later moments changes nothing, no split says: who runs it checks that.

    Raises:
        ShardingError: if it is not legal, or the output has to be made for all positions at once.
    """
    wide = Mesh((Axis(TIME, positions), *mesh.axes))
    made = _Pass(pcg, mesh, wide)
    name, output = pcg.outputs[0]
    if made.sharding(output)[0] != Shard(1):
        raise ShardingError(f"output {name} is not made position by position", "[rows, positions, ...]")
    graph = made.builder.graph({name: made.at(output, (Invariant(), *made.shardings[output]))}, {}, pcg.name)
    infer_shardings(graph, wide)
    return graph, wide


class _Pass:
    def __init__(self, pcg: Graph, mesh: Mesh, wide: Mesh) -> None:
        self.builder, self.shardings = Builder(), infer_shardings(pcg, mesh)
        self._mesh, self._wide = mesh, wide
        self._made: dict[Node, tuple[Node, Sharding]] = {}
        self._moving: set[Node] = set()  # what is made of inputs
        for node in pcg.nodes:
            if node.is_input or any(operand in self._moving for operand in node.operands):
                self._moving.add(node)
            if node.op.kind == "parallel":
                self._made[node] = self._made[node.operands[0]]
            else:
                self._made[node] = self._leaf(node) if node.is_leaf else self._split(node)

    def sharding(self, node: Node) -> Sharding:
        """How a value is made."""
        return self._made[node][1]

    def at(self, node: Node, after: Sharding) -> Node:
        """A value in another sharding: made whole, inner axes first, and cut; only then gathered in time."""
        made, before = self._made[node]
        whole = tuple(
            Invariant() if old != new and (isinstance(old, Shard | Partial) or isinstance(new, Shard)) else old
            for old, new in zip(before, after, strict=True)
        )
        inner = range(1, len(before))
        late = isinstance(before[0], Shard) and before[0] not in after[1:]
        first, last = ([], [0]) if late else ([0], [])
        state = list(before)
        phases = (whole, [*reversed(inner), *first]), (after, [*first, *inner]), (whole, last), (after, last)
        for there, order in phases:
            for place in order:
                if found := move(state[place], there[place]):
                    attrs: Mapping[str, int | str] = {**found[1], "axis": self._wide.axes[place].name}
                    made = getattr(self.builder, found[0])(made, **attrs)
                state[place] = there[place]
        return made

    def _leaf(self, node: Node) -> tuple[Node, Sharding]:
        if node.is_input:
            self._made[node] = self.builder.copy(node, ()), invariant(self._wide)
            cut: Sharding = (Shard(1), *invariant(self._mesh))
            return self.at(node, cut), cut
        if not node.is_param:
            return self.builder.copy(node, ()), invariant(self._wide)
        rests: Sharding = (Invariant(), *(parse_sharding(node.attr("stored")) or invariant(self._mesh)))
        attrs: dict[str, Any] = {**node.attrs, "stored": format_sharding(rests), "regather": False}
        return self.builder.param(attrs.pop("name"), node.type, **attrs), rests

    def _split(self, node: Node) -> tuple[Node, Sharding]:
        options = node.op.splits(node.loops)
        along = self._along_time(node, options)
        whole = next(split for split in options if split.label == "none")
        kept = node_splits(node, [self.shardings[operand] for operand in node.operands], self._mesh)
        free = (whole if split.loop == along.loop is not None else split for split in kept)
        splits = (along, *free)
        operands = tuple(
            self.at(operand, tuple(split.operands[i] for split in splits)) for i, operand in enumerate(node.operands)
        )
        return self.builder.copy(node, operands), tuple(split.result for split in splits)

    def _along_time(self, node: Node, options: Sequence[Split]) -> Split:
        """The split that gathers least, and cuts the first dim that it can; none where nothing is cut."""
        states = [self._made[operand][1][0] for operand in node.operands]
        size = self._wide.axes[0].size

        def price(split: Split) -> tuple[int, int]:
            gathered = sum(_gathers(old, new) for old, new in zip(states, split.operands, strict=True))
            return gathered, split.result.dim if isinstance(split.result, Shard) else len(node.type.shape)

        cut = any(isinstance(state, Shard) for state in states)
        allowed = [
            split
            for split in options
            if not any(isinstance(state, Partial) for state in (*split.operands, split.result))
            and (split.loop is None or (cut and node.loops.extents[split.loop] % size == 0))
            and all(map(self._may_be, node.operands, split.operands))
        ]
        return min(allowed, key=price)

    def _may_be(self, operand: Node, state: State) -> bool:
        """What is made of inputs is cut into positions as it is made: another cut of it would be of something else."""
        return not isinstance(state, Shard) or state == self._made[operand][1][0] or operand not in self._moving


def _gathers(before: State, after: State) -> bool:
    return isinstance(before, Shard) and before != after
