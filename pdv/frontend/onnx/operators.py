"""What each ONNX operator becomes. One line per operator; the decisions are in `lowering` and `layers`.

Handlers take a `Call` and give one node, or a tuple of one entry per output. Opsets 11 to 24 are read; where an
attribute became an input, both are looked at. Entry points: `handler_of`, `is_standard`, `title_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.einsum import einsum
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx import movement
from pdv.frontend.onnx.call import Call, Handler, NanMask, in_torch
from pdv.frontend.onnx.readers import (
    as_torch,
    classic,
    draws,
    functions,
    fused,
    known,
    logic,
    quantized,
    recurrent,
    rows,
    sequences,
    windows,
)
from pdv.frontend.onnx.schema import dtype_of
from pdv.frontend.registered import IN_TORCH


def unary(op: str) -> Handler:
    """A function of each element."""
    return lambda c: c.k.apply(op, c[0])


def cast_to(c: Call) -> Node:
    """ONNX numbers its element types."""
    return cast(c, c[0], dtype_of(c.attrs["to"]))


def cast(c: Call, x: Node, dtype: DType) -> Node:
    """x in another type; floats of eight bits end at the largest, unless what is larger is not to be a number."""
    narrower = dtype.is_floating and dtype.itemsize == 1 and x.type.dtype.itemsize > 1
    if narrower and not c.attrs.get("saturate", 1):
        if dtype is DType.F8E4M3:
            raise Unsupported(f"{dtype.torch_name} whose ends torch does not mark")
    elif narrower:
        most = float(ml_dtypes.finfo(dtype.torch_name).max)  # type: ignore[no-untyped-call]  # has no types
        x = masks.clamp(c.k, x, -most, most)
    return c.k.cast(x, dtype)


def where(c: Call) -> Node:
    """x where the mask holds, else y; guarding against NaN the softmax of rows that show something is no work."""
    mask = c.inputs[0]
    if isinstance(mask, NanMask) and mask.of is c[2] and layers.is_constant(c.k, c[1], 0):
        if _is_never_nan(c.k, c[2]):
            return c[2]
        if (shares := _masked_softmax(c.k, c[2])) is not None:
            return shares
    return c.k.apply("where", c[0], c[1], c[2])


def _is_never_nan(k: Lowering, node: Node) -> bool:
    """True for the softmax of scores, plus at most a constant mask, that are finite somewhere in each row."""
    if node.op.name != "softmax":
        return False
    (scores,) = node.operands
    if scores.op.name != "add":
        return True
    masks = [array for x in scores.operands if (array := k.value(x)) is not None]
    return len(masks) == 1 and bool(np.isfinite(masks[0]).any(axis=-1).all())


def _masked_softmax(k: Lowering, node: Node) -> Node | None:
    """The softmax of scores under a mask of truth values, of rows that see nothing zero; None of any other softmax."""
    scores = node.operands[0] if node.op.name == "softmax" else node
    if scores.op.name != "add":
        return None
    for scored, mask in (scores.operands, reversed(scores.operands)):
        if mask.op.name == "where" and layers.is_constant(k, mask.operands[1], 0):
            hidden = k.value(mask.operands[2])
            if hidden is not None and np.isneginf(hidden).all():
                return masks.masked_softmax(k, scored, mask.operands[0])
    return None


def dropout(c: Call) -> tuple[Node, Node | None]:
    """A share of the elements dropped in training mode, by masks of the program's own; else nothing."""
    training = c.get(2) is not None and bool(c.array(2))
    ratio = float(c.array(1)) if c.get(1) is not None else c.attrs.get("ratio", 0.5)
    c.attrs.get("seed")  # masks are the program's own
    if training and ratio > 0:
        share = float(str(np.float32(ratio)))
        if not c.is_used(1):
            return masks.dropout(c.k, c[0], share), None
        drawn = masks.dropout(c.k, masks.fill(c.k, 1, c[0].type.shape, c[0].type.dtype), share)
        return c.k.mul(c[0], drawn), masks.compare_number(c.k, "!=", drawn, 0.0)
    return c[0], c.k.const(np.ones(c[0].type.shape, np.bool_)) if c.is_used(1) else None


def reduce(op: str) -> Handler:
    """Axes as operand or attribute; without any, all, unless noop_with_empty_axes."""

    def handle(c: Call) -> Node:
        axes = c.reduced()
        return c[0] if axes is None else c.k.reduce(op, c[0], axes, bool(c.attrs.get("keepdims", 1)))

    return handle


def gemm(c: Call) -> Node:
    """alpha A B + beta C, A and B transposed on demand."""
    k, a, b, bias = c.k, c[0], c[1], c.get(2)
    alpha, beta = c.attrs.get("alpha", 1.0), c.attrs.get("beta", 1.0)
    a = k.permute(a, (1, 0)) if c.attrs.get("transA", 0) else a
    w = b if c.attrs.get("transB", 0) else k.permute(b, (1, 0))
    y = k.scale(k.apply("linear", a, w), alpha)
    return y if bias is None or layers.is_constant(k, bias, 0) else k.add(y, k.scale(bias, beta))


def softmax(op: str) -> Handler:
    """Before opset 13 the dims from the axis on are one row."""

    def handle(c: Call) -> Node:
        axis, shape = c.axis(), c[0].type.shape
        if c.opset < 13 and math.prod(shape[axis + 1 :]) > 1:
            rows = c.k.reshape(c[0], (*shape[:axis], -1))
            return c.k.reshape(layers.softmax(c.k, rows, axis, op), shape)
        return layers.softmax(c.k, c[0], axis, op)

    return handle


def attention(c: Call) -> tuple[Node | None, ...]:
    """Heads as a dim ([b, h, s, e]), or within the last one ([b, s, h e])."""
    if c.attrs.get("softcap", 0.0) or c.get(4) is not None or c.get(5) is not None:
        raise Unsupported("attention with a soft cap or a cache")
    k, q, key, v = c.k, c[0], c[1], c[2]
    flat = q.type.rank == 3
    heads, groups = c.attrs.get("q_num_heads"), c.attrs.get("kv_num_heads")
    if flat:
        if not heads or not groups:
            raise ValueError("q_num_heads and kv_num_heads are needed where heads are no dim")
        q, key, v = (_split_heads(k, x, n) for x, n in ((q, heads), (key, groups), (v, groups)))
    causal, mask = bool(c.attrs.get("is_causal", 0)), c.get(3)
    if mask is not None and (mask.type.rank < 2 or mask.type.shape[-1] != key.type.shape[-2]):
        raise Unsupported(f"attention over {key.type.shape[-2]} keys, masked by {list(mask.type.shape)}")
    if any(c.is_used(i) for i in (1, 2, 3)):
        raise Unsupported("attention with results besides its values")
    y = layers.attention(k, q, key, v, c.get(3), causal=causal, scale=c.attrs.get("scale"))
    if flat:
        b, h, s, f = y.type.shape
        y = k.reshape(k.permute(y, (0, 2, 1, 3)), (b, s, h * f))
    return y, None, None, None


def _split_heads(k: Lowering, x: Node, heads: int) -> Node:
    """[b, s, h e] -> [b, h, s, e]."""
    b, s, width = x.type.shape
    return k.permute(k.reshape(x, (b, s, heads, width // heads)), (0, 2, 1, 3))


def layer_norm(c: Call) -> tuple[Node | None, ...]:
    """From the axis on; the statistics are not computed."""
    if c.is_used(1) or c.is_used(2):
        raise Unsupported("the statistics of a layer norm")
    dims = c[0].type.rank - c.axis()
    return layers.layer_norm(c.k, c[0], dims, c[1], c.get(2), c.attrs.get("epsilon", 1e-5)), None, None


def rms_norm(c: Call) -> Node:
    """From the axis on."""
    return layers.rms_norm(c.k, c[0], c[1], c.attrs.get("epsilon", 1e-5), c[0].type.rank - c.axis())


def batch_norm(c: Call) -> tuple[Node | None, ...]:
    """In training mode by the batch's statistics, else by the running ones; ONNX's momentum is 1 - torch's."""
    x, weight, bias, mean, var = (c[i] for i in range(5))
    eps = c.attrs.get("epsilon", 1e-5)
    momentum = 1 - c.attrs.get("momentum", 0.9)  # which running statistics that do not move have no use for
    by_results = c.opset < 14 and c.results > 1
    if by_results and not c.pytorch:
        raise Unsupported(f"a batch norm in training as opset {c.opset} has it, by further results")
    if not (by_results or c.attrs.get("training_mode", 0)):
        return layers.batch_norm(c.k, x, mean, var, weight, bias, eps), None, None
    return layers.training_batch_norm(
        c.k, x, (mean, var), (weight, bias), momentum=round(momentum, 7), eps=eps, unbiased=c.pytorch
    )


STANDARD = ("", "ai.onnx")
_UNARY = ("Neg", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tanh", "Sigmoid", "Erf", "Abs", "Reciprocal", "Relu")

HANDLERS: Mapping[str, Handler] = {
    **{op: unary(op.lower()) for op in _UNARY},
    "Add": lambda c: c.k.add(c[0], c[1]),
    "Sub": lambda c: c.k.sub(c[0], c[1]),
    "Mul": lambda c: c.k.mul(c[0], c[1]),
    "Div": lambda c: c.k.div(c[0], c[1]),
    "Gelu": lambda c: c.k.apply("gelu", c[0], approximate=c.attrs.get("approximate", "none")),
    **logic.READERS,
    **recurrent.READERS,
    **draws.READERS,
    "NonZero": rows.non_zero,
    "IsNaN": lambda c: NanMask(c[0]),
    "Where": where,
    "Identity": movement.identity,
    "Cast": cast_to,
    "CastLike": lambda c: cast(c, c[0], c[1].type.dtype),
    "Constant": movement.constant,
    "Dropout": dropout,
    "Shape": movement.shape,
    "Reshape": movement.reshape,
    "Transpose": movement.transpose,
    "Expand": lambda c: c.k.broadcast(c[0], c.ints(1) or ()),
    "Slice": movement.slice_,
    "Split": movement.split,
    "SplitToSequence": movement.split_to_sequence,
    **sequences.READERS,
    "Concat": movement.concat,
    "Squeeze": movement.squeeze,
    "Unsqueeze": movement.unsqueeze,
    "Flatten": movement.flatten,
    "Gather": movement.gather,
    "TopK": movement.top_k,
    "ScatterElements": movement.scatter_elements,
    "ConstantOfShape": movement.constant_of_shape,
    "ReduceMean": reduce("reduce_mean"),
    "ReduceSum": reduce("reduce_sum"),
    "GlobalAveragePool": lambda c: c.k.reduce("reduce_mean", c[0], tuple(range(2, c[0].type.rank)), True),
    "MatMul": lambda c: masks.hidden_attention(c.k, c[0], c[1]) or layers.matmul(c.k, c[0], c[1]),
    "Gemm": gemm,
    "Einsum": lambda c: einsum(c.k, c.attrs["equation"], [c[i] for i in range(len(c.inputs))]),
    "Softmax": softmax("softmax"),
    "LogSoftmax": softmax("log_softmax"),
    "Attention": attention,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "BatchNormalization": batch_norm,
    **functions.READERS,
    **known.READERS,
    **quantized.READERS,
    **windows.READERS,
    **as_torch.READERS,
}

FUSED: Mapping[str, Handler] = {**classic.CLASSIC, **fused.FUSED, f"{fused.DOMAIN}::FusedGemm": fused.fused_gemm(gemm)}


def title_of(node: onnx_ir.Node) -> str:
    """An operator's name, with its domain, if that is not ONNX's own."""
    return node.op_type if node.domain in STANDARD else f"{node.domain}::{node.op_type}"


def is_standard(node: onnx_ir.Node) -> bool:
    """Whether ONNX has a schema for a node, or should have."""
    return node.domain in STANDARD and node.op_type not in FUSED


def handler_of(node: onnx_ir.Node) -> Handler | None:
    """What reads a node; None if nothing does. What a user said of an operator goes first."""
    title = title_of(node)
    if is_standard(node):
        return HANDLERS.get(title)
    function = IN_TORCH.get(title)
    return FUSED.get(title) if function is None else partial(in_torch, function)
