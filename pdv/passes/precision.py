"""Compute in another floating-point type: every floating leaf changes type, and casts between them vanish."""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import DType, TensorType


def with_dtype(graph: Graph, dtype: DType) -> Graph:
    """The same program with floating inputs, parameters, constants and casts in ``dtype``."""
    k = Builder()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        new[node] = _leaf(k, node, dtype) if node.is_leaf else _inner(k, node, new, dtype)
    outputs = {name: new[node] for name, node in graph.outputs}
    return k.graph(outputs, {name: new[node] for name, node in graph.updates}, graph.name)


def _leaf(k: Builder, node: Node, dtype: DType) -> Node:
    if not node.type.dtype.is_floating:
        return k.copy(node, ())
    tensor = TensorType(node.type.shape, dtype)
    if node.op.name == "input":
        return k.input(node.attr("name"), tensor)
    if node.op.name == "const":
        return k.const(node.attr("value").array, node.name, dtype)
    return k.param(
        node.attr("name"),
        tensor,
        source=node.attr("source"),
        view=node.attr("view"),
        trainable=node.attr("trainable"),
    )


def _inner(k: Builder, node: Node, new: dict[Node, Node], dtype: DType) -> Node:
    operands = tuple(new[operand] for operand in node.operands)
    if node.op.name == "cast" and node.type.dtype.is_floating:
        if operands[0].type.dtype is dtype:
            return operands[0]
        return k.apply(node.op, operands, {"dtype": dtype.value}, node.name)
    return k.copy(node, operands)
