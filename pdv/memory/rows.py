"""A program at fewer rows of its batch: what one micro-batch computes. Entry point: ``fewer_rows``."""

from __future__ import annotations

from collections.abc import Hashable

from ir.builder import Builder
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.types import TensorType


def fewer_rows(graph: Graph, share: int) -> Graph | None:
    """``graph`` over one ``share``-th of the rows of each input; None where rows cannot be told from other sizes."""
    k = Builder()
    new: dict[Node, Node] = {}
    rows: dict[Node, int | None] = {}  # the dim of a value along which its rows lie, outermost
    try:
        for node in graph.nodes:
            if node.is_input:
                if not node.type.rank or node.type.shape[0] % share:
                    return None
                shape = (node.type.shape[0] // share, *node.type.shape[1:])
                new[node], rows[node] = k.input(node.attr("name"), TensorType(shape, node.type.dtype)), 0
            elif node.is_leaf:
                new[node], rows[node] = k.copy(node, ()), None
            else:
                rows[node] = _rows(node, rows)
                operands = tuple(new[operand] for operand in node.operands)
                new[node] = k.apply(node.op, operands, _attrs(node, rows[node], share), node.name)
    except (ShapeError, AssertionError):
        return None
    outputs = {name: new[node] for name, node in graph.outputs}
    return k.graph(outputs, {name: new[node] for name, node in graph.updates}, graph.name)


def _rows(node: Node, rows: dict[Node, int | None]) -> int | None:
    """Where the rows of a result lie: the loop that is outermost where they lie in an operand."""
    for number, operand in enumerate(node.operands):
        dim = rows[operand]
        if dim is not None:
            loop = next((name for name in node.loops.operands[number][dim] if node.loops.extents[name] > 1), None)
            return None if loop is None else node.loops.position(node.loops.result, loop)
    return None


def _attrs(node: Node, dim: int | None, share: int) -> dict[str, Hashable]:
    attrs = dict(node.attrs)
    if node.op.names_shape and dim is not None:
        shape = list(node.type.shape)
        assert shape[dim] % share == 0, node
        shape[dim] //= share
        attrs["shape"] = tuple(shape)
    return attrs
