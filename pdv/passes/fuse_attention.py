"""Recognise attention written out as two products around a softmax: "eager" models, and ONNX before opset 23.

The scale may sit on the queries, the keys, the scores, or be shared out between them. A mask that trains (a relative
position bias) is left alone, for the fused operator gives it no gradient.
"""

from __future__ import annotations

import math

from ir.builder import Builder
from ir.graph import Node
from pdv.passes.match import close, is_op
from pdv.passes.numbers import short_float


def fuse_attention(k: Builder, node: Node) -> Node | None:
    """softmax(c q kᵀ + mask) v == attention(q, k, v, mask)"""
    if not is_op(node, "matmul") or not is_op(node.operands[0], "softmax"):
        return None
    weights, v = node.operands
    scores, mask = _unmasked(weights.operands[0])
    scores, factor = _unscaled(scores)
    if not is_op(scores, "matmul"):
        return None
    q, of_q = _unscaled(scores.operands[0])
    key, of_k = _keys(k, scores.operands[1])
    if key is None or not q.type.shape[:-2] == key.type.shape[:-2] == v.type.shape[:-2]:
        return None
    masks = () if mask is None else (mask,)
    scale = factor * of_q * of_k
    usual = 1 / math.sqrt(q.type.shape[-1])
    if close(scale, usual):  # shared out as a square root in float32, it comes back a little off
        scale = usual
    return k.attention(q, key, v, *masks, causal=False, scale=short_float(scale, q.type.dtype), name=node.name)


def _unmasked(scores: Node) -> tuple[Node, Node | None]:
    """The scores and what is added to them, if that broadcasts to them and needs no gradient."""
    if not is_op(scores, "add"):
        return scores, None
    for x, mask in (scores.operands, scores.operands[::-1]):
        if is_op(_unscaled(x)[0], "matmul") and x.type == scores.type and not mask.needs_grad:
            return x, mask
    return scores, None


def _unscaled(x: Node) -> tuple[Node, float]:
    """x and the product of the constants that it is scaled by."""
    factor = 1.0
    while is_op(x, "scale"):
        factor *= x.attr("factor")
        (x,) = x.operands
    return x, factor


def _keys(k: Builder, transposed: Node) -> tuple[Node | None, float]:
    """(key, c) of c keyᵀ, or None where the operand is no permutation that could be undone for free."""
    transposed, outer = _unscaled(transposed)
    if is_op(transposed, "reshape"):  # heads repeated after the transpose
        (inside,) = transposed.operands
        shape = transposed.type.shape
        key, factor = _keys(k, inside)
        if key is None or inside.type.shape[-2:] != shape[-2:]:
            return None, 1.0
        return k.reshape(key, shape=(*shape[:-2], shape[-1], shape[-2])), outer * factor
    if not is_op(transposed, "permute"):
        return None, 1.0
    base, inner = _unscaled(transposed.operands[0])
    *lead, i, j = transposed.attr("perm")
    return k.permute(base, perm=(*lead, j, i)), outer * inner
