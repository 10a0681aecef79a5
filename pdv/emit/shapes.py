"""Local shapes as people write them, ``[b/dp, 1024, 768/tp]``, and which dims depend on the batch size.

A dim is a product of factors, each a number or the batch size ``b``; ``b`` is followed from the inputs through the
operators' loops, so that the emitted program can leave it open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.dims import Group, Loops
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.sharding import Partial, Shard, Sharding

BATCH = "b"


@dataclass(frozen=True, slots=True)
class Factor:
    """A number that a dim's size is a multiple of; ``symbol`` is its name if it has one."""

    extent: int
    symbol: str = ""

    def __str__(self) -> str:
        return self.symbol or str(self.extent)


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Shapes:
    """Symbolic dims of every node of a PCG, and the axes that cut them."""

    mesh: Mesh
    shardings: Mapping[Node, Sharding]
    dims: Mapping[Node, tuple[Dim, ...]]

    def has_batch(self, node: Node, dim: int) -> bool:
        """True if the size of ``dim`` is a multiple of the batch size."""
        return any(factor.symbol for factor in self.dims[node][dim])

    def is_batch(self, node: Node, dim: int) -> bool:
        """True if the size of ``dim`` is the batch size."""
        return [factor.symbol for factor in self.dims[node][dim]] == [BATCH]

    def cuts(self, node: Node, dim: int) -> tuple[str, ...]:
        """The axes that cut ``dim``, outer first."""
        states = zip(self.mesh.axes, self.shardings[node], strict=True)
        return tuple(axis.name for axis, state in states if state == Shard(dim))

    def partial_axes(self, node: Node) -> tuple[str, ...]:
        """The axes along which the value is a term of a sum."""
        states = zip(self.mesh.axes, self.shardings[node], strict=True)
        return tuple(axis.name for axis, state in states if isinstance(state, Partial))

    def text(self, node: Node) -> str:
        """``[b/dp, 1024, 768/tp]``, with the axes of a pending sum after it."""
        dims = []
        for dim, factors in enumerate(self.dims[node]):
            size = "*".join(str(factor) for factor in factors) or "1"
            dims.append("/".join((size, *self.cuts(node, dim))))
        partial = self.partial_axes(node)
        return f"[{', '.join(dims)}]" + (f", a term of the sum over {' and '.join(partial)}" if partial else "")


def symbolic_shapes(graph: Graph, mesh: Mesh, shardings: Mapping[Node, Sharding]) -> Shapes:
    """Follow the batch size (dim 0 of the first input) through the graph."""
    first = graph.inputs[0].type.shape if graph.inputs else ()
    batch = first[0] if first and first[0] > 1 else None
    dims: dict[Node, tuple[Dim, ...]] = {}
    for node in graph.nodes:
        if node.op.name == "input":
            dims[node] = _labelled_first(node.type.shape, batch)
        elif node.is_leaf:
            dims[node] = _labelled_first(node.type.shape, None)
        else:
            dims[node] = _result_dims(node, [dims[operand] for operand in node.operands], batch)
    return Shapes(mesh, shardings, dims)


def _labelled_first(shape: Sequence[int], batch: int | None) -> tuple[Dim, ...]:
    return tuple(
        (Factor(size, BATCH if dim == 0 and size == batch else ""),) if size > 1 else ()
        for dim, size in enumerate(shape)
    )


def _result_dims(node: Node, operands: Sequence[tuple[Dim, ...]], batch: int | None) -> tuple[Dim, ...]:
    symbols: dict[str, str] = {}
    for groups, dims in zip(node.loops.operands, operands, strict=True):
        for group, factors in zip(groups, dims, strict=True):
            symbols |= _loop_symbols(node.loops, group, factors)
    if node.op.name == "expand" and node.type.shape and node.type.shape[0] == batch:
        symbols |= dict.fromkeys(node.loops.result[0], BATCH)  # the one way to meet the batch size but as a size
    return tuple(_factors(node.loops, group, symbols) for group in node.loops.result)


def _loop_symbols(loops: Loops, group: Group, factors: Dim) -> dict[str, str]:
    """Which loop of a dim walks which factor, as far as they agree from the outside in."""
    found: dict[str, str] = {}
    walked = [loop for loop in group if loops.extents[loop] > 1]
    for loop, factor in zip(walked, factors, strict=False):
        if loops.extents[loop] != factor.extent:
            break
        if factor.symbol:
            found[loop] = factor.symbol
    return found


def _factors(loops: Loops, group: Group, symbols: Mapping[str, str]) -> Dim:
    """The loops of a dim, neighbours without a symbol multiplied together."""
    factors: list[Factor] = []
    for loop in group:
        extent, symbol = loops.extents[loop], symbols.get(loop, "")
        if extent == 1:
            continue
        if factors and not symbol and not factors[-1].symbol:
            factors[-1] = Factor(factors[-1].extent * extent)
        else:
            factors.append(Factor(extent, symbol))
    return tuple(factors)
