"""chunk(linear(x, w), i) == join(chunk(heads(linear(x, w')), i)), w' the rows of w with heads outermost.

One product often makes queries, keys and values side by side, [q | k | v], and its columns cannot be cut without each
rank having all of one and none of another. Megatron-LM stores the same weight head by head, so that the columns of a
head stand together; a parameter read through such a view is that layout. Entry point: `heads_outermost`.
"""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node


def heads_outermost(graph: Graph) -> Graph:
    """The same program, each product whose columns are taken apart by chunks read with heads outermost."""
    found = {node: heads for node in graph.nodes if (heads := _heads(graph, node)) is not None}
    if not found:
        return graph
    return _Rewriting(graph, found).run()


def _heads(graph: Graph, node: Node) -> int | None:
    """Of a chunk of a product's columns, into how many heads each part is split; None for any other node."""
    if not node.op.takes_part or node.attr("dim") != node.type.rank - 1 or _product(node.operands[0]) is None:
        return None
    rank = node.type.rank
    for reader in graph.users[node]:
        shape = reader.type.shape
        if reader.op.names_shape and len(shape) == rank + 1 and shape[: rank - 1] == node.type.shape[:-1]:
            return int(shape[rank - 1])
    return None


def _product(value: Node) -> tuple[Node, Node | None] | None:
    """The product, and the bias added to it, that make a value."""
    bias = None
    if value.op.adds and value.operands[1].is_param and value.operands[1].type.rank == 1:
        value, bias = value.operands
    if value.op.is_dense and value.operands[1].is_param:
        return value, bias
    return None


class _Rewriting:
    def __init__(self, graph: Graph, heads: dict[Node, int]) -> None:
        self._graph = graph
        self._heads = heads
        self._k = Builder()
        self._made: dict[Node, Node] = {}

    def run(self) -> Graph:
        for node in self._graph.nodes:
            operands = tuple(self._made[operand] for operand in node.operands)
            self._made[node] = self._chunk(node) if node in self._heads else self._k.copy(node, operands)
        outputs, updates = (
            {name: self._made[node] for name, node in roots} for roots in (self._graph.outputs, self._graph.updates)
        )
        return self._k.graph(outputs, updates, self._graph.name)

    def _chunk(self, node: Node) -> Node:
        """[..., (p a d)] -> part i, [..., (a d)], of a product with columns (a p d)."""
        made = _product(node.operands[0])
        assert made is not None, node
        (product, bias), k = made, self._k
        heads, parts = self._heads[node], int(node.attr("parts"))
        value = k.linear(self._made[product.operands[0]], self._turn(product.operands[1], heads, parts))
        if bias is not None:
            value = k.add(value, self._turn(bias, heads, parts))
        *outer, width = value.type.shape
        apart = k.reshape(value, shape=(*outer, heads, width // heads), name=node.name)
        part = k.chunk(apart, dim=len(outer) + 1, parts=parts, index=node.attr("index"), name=node.name)
        joined: Node = k.reshape(part, shape=node.type.shape, name=node.name)
        return joined

    def _turn(self, param: Node, heads: int, parts: int) -> Node:
        """The parameter with its first dim (p a d) read as (a p d)."""
        width, *inner = param.type.shape
        order = (1, 0, *range(2, 3 + len(inner)))
        steps = (
            ("reshape", (parts, heads, width // (parts * heads), *inner)),
            ("permute", order),
            ("reshape", param.type.shape),
        )
        return self._k.param(
            param.attr("name"),
            param.type,
            source=param.attr("source"),
            view=(*param.attr("view"), *steps),
            trainable=param.attr("trainable"),
        )
