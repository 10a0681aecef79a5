"""Whether the columns of a product may stay cut until a sum over them: what Megatron's tensor parallelism rests on."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import Shard

MOST = 64  # operators looked at behind one product


@dataclass(frozen=True)
class Columns:
    """Looks ahead in a graph of which ``splits`` are known so far; ``fixed`` values can be had in any state."""

    graph: Graph
    fixed: Set[Node]
    splits: Mapping[Node, tuple[Split, ...]]

    def stay_cut(self, product: Node, position: int, size: int) -> bool:
        """True if everything behind can work on columns cut ``size`` ways, down to attention, a product or the end.

        A router's or a norm's input cannot, for all columns are read together there; nor keys of fewer heads than
        ``size``; nor what is added to a residual that is not cut.
        """
        width = product.type.shape[-1]
        waiting, seen = [product], {product}
        while waiting and len(seen) < MOST:
            value = waiting.pop()
            for reader in self.graph.users[value]:
                if reader in seen:
                    continue
                if self._stops(reader, value, width, position, size):
                    return False
                seen.add(reader)
                if reader.op.kind in ("map", "move"):
                    waiting.append(reader)
        return True

    def _stops(self, reader: Node, value: Node, width: int, position: int, size: int) -> bool:
        whole = value.type.shape[-1] == width  # not yet apart into heads
        rank = value.type.rank
        if reader.op.kind == "row" and not reader.op.has_scores:
            return whole and _runs_over_columns(reader)
        if reader.op.names_shape:
            after = reader.type.shape
            apart = whole and len(after) >= rank and after[: rank - 1] == value.type.shape[:-1]
            return apart and after[rank - 1] % size != 0
        if reader.op.takes_part:
            return whole and reader.attr("dim") % rank == rank - 1
        if reader.op.broadcasts and len(reader.operands) == 2:
            return any(self._is_whole(other, position) for other in reader.operands if other is not value)
        return False

    def _is_whole(self, value: Node, position: int) -> bool:
        """Whether a value was made already, and not cut by columns."""
        if value in self.fixed:
            return False
        if value.is_leaf:
            return True
        splits = self.splits.get(value)
        return splits is not None and splits[position].result != Shard(value.type.rank - 1)


def _runs_over_columns(row: Node) -> bool:
    """Whether a function of rows reads the columns of its first operand together."""
    columns = set(row.loops.operands[0][-1])
    return bool(columns & (row.loops.whole | set(row.loops.contracted)))
