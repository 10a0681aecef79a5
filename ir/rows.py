"""Which dim of a value is the batch: dim 0 of what the caller passes, followed through the operators' loops.

Decides whether what a program returns may leave it cut by rows: only where dim 0 of every output is the batch does each
rank hold whole samples, in the order of the targets that belong to them.
"""

from __future__ import annotations

from functools import lru_cache

from ir.dims import Loops
from ir.graph import Graph, Node


@lru_cache(maxsize=8)  # the problems of all meshes share a graph
def by_rows(graph: Graph) -> bool:
    """True if dim 0 of every output is the batch; False if there is no output, or one has no dims."""
    found: dict[Node, frozenset[int]] = {}
    for node in graph.nodes:
        found[node] = _of_leaf(graph, node) if node.is_leaf else _of_result(node.loops, node, found)
    return bool(graph.outputs) and all(0 in found[node] for _, node in graph.outputs)


def _of_leaf(graph: Graph, node: Node) -> frozenset[int]:
    """Dim 0 of the first input, and of others of that size."""
    if not node.is_input or not node.type.rank:
        return frozenset()
    batched = next(other for other in graph.inputs if other.type.rank)
    return frozenset({0} if node.type.shape[0] == batched.type.shape[0] else ())


def _of_result(loops: Loops, node: Node, found: dict[Node, frozenset[int]]) -> frozenset[int]:
    """The dims whose outermost loop walks the batch of some operand."""
    batch = {
        loop
        for dims, operand in zip(loops.operands, node.operands, strict=True)
        for dim in found[operand]
        if (loop := loops.outermost(dims[dim])) is not None
    }
    return frozenset(dim for dim, group in enumerate(loops.result) if loops.outermost(group) in batch)
