"""Laws that recognise a function written out in elementary operators, and name it.

Sources write gelu, silu and the root-mean-square norm as half a dozen nodes; as one node they can be costed, sharded
and emitted as what they are.
"""

from __future__ import annotations

import math

from ir.builder import Builder
from ir.graph import Node
from pdv.passes.fuse_attention import fuse_attention
from pdv.passes.match import close, either_order, is_op
from pdv.passes.rewrite import Law


def fuse_silu(k: Builder, node: Node) -> Node | None:
    """x * sigmoid(x) == silu(x)"""
    if not is_op(node, "mul"):
        return None
    for x, gate in either_order(node):
        if is_op(gate, "sigmoid") and gate.operands[0] is x:
            return k.silu(x, name=node.name)
    return None


def fuse_rsqrt(k: Builder, node: Node) -> Node | None:
    """1 / sqrt(x) == rsqrt(x)"""
    if not is_op(node, "reciprocal") or not is_op(node.operands[0], "sqrt"):
        return None
    return k.rsqrt(node.operands[0].operands[0], name=node.name)


def fuse_gelu(k: Builder, node: Node) -> Node | None:
    """x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³))) == gelu(x, tanh), x / 2 * (1 + erf(x / √2)) == gelu(x)"""
    product, halves = _unhalved(node)
    if not is_op(product, "mul"):
        return None
    for left, right in either_order(product):
        (x, of_x), (gate, of_gate) = _unhalved(left), _unhalved(right)
        if halves + of_x + of_gate != 1 or not is_op(gate, "shift") or not close(gate.attr("offset_by"), 1.0):
            continue
        inner = gate.operands[0]
        if is_op(inner, "erf") and _scaled(inner.operands[0], math.sqrt(0.5)) is x:
            return k.gelu(x, approximate="none", name=node.name)
        if is_op(inner, "tanh") and _is_tanh_argument(inner.operands[0], x):
            return k.gelu(x, approximate="tanh", name=node.name)
    return None


def _unhalved(node: Node) -> tuple[Node, int]:
    """(x, 1) if the node is x / 2, else (node, 0)."""
    x = _scaled(node, 0.5)
    return (node, 0) if x is None else (x, 1)


def _scaled(node: Node, factor: float) -> Node | None:
    """x if the node is x * factor."""
    return node.operands[0] if is_op(node, "scale") and close(node.attr("factor"), factor) else None


def _is_tanh_argument(node: Node, x: Node) -> bool:
    """True for √(2/π) (x + 0.044715 x³)."""
    total = _scaled(node, math.sqrt(2 / math.pi))
    if total is None or not is_op(total, "add"):
        return False
    for left, right in either_order(total):
        cube = _scaled(right, 0.044715)
        if left is x and cube is not None and is_op(cube, "pow") and close(cube.attr("exponent"), 3):
            return cube.operands[0] is x
    return False


def fuse_rms_norm(k: Builder, node: Node) -> Node | None:
    """w * (x * rsqrt(mean(x²) + eps)) == rms_norm(x, w), also where a half x is normed in float32 and cast back"""
    if not is_op(node, "mul"):
        return None
    for scaled, weight in either_order(node):
        normed = scaled.operands[0] if is_op(scaled, "cast") else scaled
        if weight.type.shape != normed.type.shape[-1:] or not is_op(normed, "mul"):
            continue
        for x, inverse in either_order(normed):
            eps = _inverse_rms_eps(inverse, x)
            plain = x.operands[0] if is_op(x, "cast") else x
            if eps is not None and plain.type.dtype is scaled.type.dtype is weight.type.dtype:
                return k.rms_norm(plain, weight, eps=eps, name=node.name)
    return None


def _inverse_rms_eps(node: Node, x: Node) -> float | None:
    """eps if the node is rsqrt(mean(x², last dim) + eps)."""
    if not is_op(node, "rsqrt") or not is_op(node.operands[0], "shift"):
        return None
    shift = node.operands[0]
    mean = shift.operands[0]
    if not is_op(mean, "reduce_mean") or mean.attr("dims") != (x.type.rank - 1,) or not mean.attr("keepdim"):
        return None
    square = mean.operands[0]
    is_square = is_op(square, "pow") and close(square.attr("exponent"), 2) and square.operands[0] is x
    is_square = is_square or (is_op(square, "mul") and square.operands == (x, x))
    return float(shift.attr("offset_by")) if is_square else None


FUSIONS: tuple[Law, ...] = (fuse_silu, fuse_rsqrt, fuse_gelu, fuse_rms_norm, fuse_attention)
