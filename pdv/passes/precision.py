"""Compute in another floating-point type, as ``module.to(dtype)`` does: what is of the parameters' type changes type.

What a module computes in a type of its own (``.float()`` around a norm, a table of angles in float32) stays in it.
"""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import DType, TensorType


def with_dtype(graph: Graph, dtype: DType) -> Graph:
    """The same program with inputs, parameters, constants and casts that are of the parameters' types in ``dtype``.

    A program without floating parameters computes in the types of its inputs. Casts that are none any more vanish.
    """
    own = _types(graph.params) or _types(graph.inputs)
    k = Builder()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        return _leaf(k, node, own, dtype) if node.is_leaf else _inner(k, node, operands, own, dtype)

    return k.rebuild(graph, make)[0]


def _types(leaves: tuple[Node, ...]) -> frozenset[DType]:
    return frozenset(node.type.dtype for node in leaves if node.type.dtype.is_floating)


def _leaf(k: Builder, node: Node, own: frozenset[DType], dtype: DType) -> Node:
    if node.type.dtype not in own:
        return k.copy(node, ())
    tensor = TensorType(node.type.shape, dtype)
    if node.is_input:
        return k.input(node.attr("name"), tensor)
    if node.is_const:
        return k.const(node.attr("value").array, node.name, dtype)
    return k.param(
        node.attr("name"),
        tensor,
        source=node.attr("source"),
        view=node.attr("view"),
        trainable=node.attr("trainable"),
    )


def _inner(k: Builder, node: Node, operands: tuple[Node, ...], own: frozenset[DType], dtype: DType) -> Node:
    if not node.op.names_dtype:
        return k.copy(node, operands)
    after = dtype if node.type.dtype in own else node.type.dtype
    if operands[0].type.dtype is after:
        return operands[0]
    return k.apply(node.op, operands, {"dtype": after.value}, node.name)
