"""What operators become that ONNX Runtime's optimizers write in place of several of ONNX's.

`onnxruntime.transformers.optimizer`, and sessions that save their optimized model, make one operator of a norm and what
is added before it, of attention with its products, of a convolution and its activation. They are of the domain
com.microsoft, or stand among ONNX's own as `SimplifiedLayerNormalization`. Entry point: ``FUSED``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.readers.functions import leaky, sloped
from pdv.frontend.onnx.readers.windows import conv

DOMAIN = "com.microsoft"
BLOCKED = "com.microsoft.nchwc"
_EPSILON = 1e-12  # of a norm that does not say its own
_HIDDEN = -10000.0  # is added to the scores of what a mask hides, unless a node says another number


def matmul(c: Call) -> Node:
    """alpha A B, the last two dims of either turned on demand."""
    k, a, b = c.k, c[0], c[1]
    factor = c.attrs.get("alpha", 1.0)
    if c.attrs.get("transBatchA", 0) or c.attrs.get("transBatchB", 0):
        raise Unsupported("with the first dim moved behind others")
    a = k.transpose(a, -1, -2) if c.attrs.get("transA", 0) and a.type.rank > 1 else a
    b = k.transpose(b, -1, -2) if c.attrs.get("transB", 0) and b.type.rank > 1 else b
    return k.scale(masks.hidden_attention(k, a, b) or layers.matmul(k, a, b), factor)


def gelu(approximate: str) -> Handler:
    """Of an operand, or of its sum with a bias."""

    def handle(c: Call) -> Node:
        bias = c.get(1)
        return c.k.apply("gelu", c[0] if bias is None else c.k.add(c[0], bias), approximate=approximate)

    return handle


def gemm_gelu(c: Call) -> Node:
    """Of a product, and a bias."""
    y, bias = layers.matmul(c.k, c[0], c[1]), c.get(2)
    return c.k.apply("gelu", y if bias is None else c.k.add(y, bias), approximate="tanh")


def quick_gelu(c: Call) -> Node:
    """x sigmoid(alpha x)."""
    return c.k.mul(c[0], c.k.apply("sigmoid", c.k.scale(c[0], c.attrs.get("alpha", 1.702))))


def simple_norm(c: Call) -> Node:
    """A norm by the root of the mean square, over the last dim."""
    c.attrs.get("stash_type")
    if c.dim(int(c.attrs.get("axis", -1))) != c[0].type.rank - 1 or c.is_used(1):
        raise Unsupported("over several dims, or with its statistics as a value")
    return layers.rms_norm(c.k, c[0], c[1], c.attrs.get("epsilon", 1e-5))


def skip_norm(simple: bool) -> Handler:
    """The norm of the sum of two tensors, and a bias; and the sum."""

    def handle(c: Call) -> tuple[Node | None, ...]:
        k, scale, shift, bias = c.k, c[2], None if simple else c.get(3), c.get(3 if simple else 4)
        if c.is_used(1) or c.is_used(2):
            raise Unsupported("with its statistics as values")
        total = k.add(c[0], c[1])
        total = total if bias is None else k.add(total, bias)
        eps = c.attrs.get("epsilon", _EPSILON)
        y = layers.rms_norm(k, total, scale, eps) if simple else layers.layer_norm(k, total, 1, scale, shift, eps)
        return y, None, None, total

    return handle


def embeddings(c: Call) -> tuple[Node | None, ...]:
    """The norm of words, positions and segments; how many words of each row count; the sum."""
    k, words, segments, mask, places = c.k, c[0], c.get(1), c.get(7), c.get(8)
    c.attrs.get("mask_index_type")
    total = layers.embedding(k, c[2], words)
    rows = k.slice(c[3], 0, 0, words.type.shape[1]) if places is None else layers.embedding(k, c[3], places)
    total = k.add(total, rows)
    if segments is not None:
        total = k.add(total, layers.embedding(k, c[4], segments))
    if c.is_used(1) and mask is None:
        raise Unsupported("with the lengths of rows that no mask says")
    count = None if mask is None else k.cast(k.reduce("reduce_sum", k.cast(mask, DType.I64), (1,), False), DType.I32)
    return layers.layer_norm(k, total, 1, c[5], c[6], c.attrs.get("epsilon", _EPSILON)), count, total


def attention(c: Call) -> tuple[Node | None, ...]:
    """Of one tensor, by one product with all weights of queries, keys and values."""
    k, x, heads = c.k, c[0], int(c.attrs["num_heads"])
    bias, width = c.get(2), c[1].type.shape[-1] // 3
    if c.attrs.get("do_rotary", 0) or c.is_used(1):
        raise Unsupported("with turned queries, or with its keys and values as a value")
    y = layers.matmul(k, x, c[1])
    sizes = c.attrs.get("qkv_hidden_sizes", (width, width, width))
    parts = k.split(y if bias is None else k.add(y, bias), -1, tuple(sizes))
    return _attend(c, [_by_heads(k, each, heads) for each in parts], c.get(3), c.get(5)), None


def multi_head_attention(c: Call) -> tuple[Node | None, ...]:
    """Of queries, keys and values."""
    k, heads, parts = c.k, int(c.attrs["num_heads"]), (c[0], c.get(1), c.get(2))
    if any(c.is_used(i) for i in (1, 2, 3)):
        raise Unsupported("with its keys and values, or its scores, as values")
    found = [each for each in parts if each is not None]
    if len(found) < len(parts) or c[0].type.rank != len(parts):
        raise Unsupported("of queries, keys and values in one tensor")
    bias = c.get(3)
    if bias is not None:
        if any(each.type.rank != len(parts) for each in found):
            raise Unsupported("with a bias for keys that have heads as a dim")
        pieces = k.split(bias, 0, [each.type.shape[-1] for each in found])
        found = [k.add(each, piece) for each, piece in zip(found, pieces, strict=True)]
    split = [each if each.type.rank > len(parts) else _by_heads(k, each, heads) for each in found]
    return _attend(c, split, c.get(4), c.get(5)), None, None, None


def _by_heads(k: Lowering, x: Node, heads: int) -> Node:
    """[b, s, h e] -> [b, h, s, e]."""
    b, s, width = x.type.shape
    return k.permute(k.reshape(x, (b, s, heads, width // heads)), (0, 2, 1, 3))


def _attend(c: Call, parts: Sequence[Node], mask: Node | None, added: Node | None) -> Node:
    """Attention over heads, which are joined again; a mask says which keys count, ``added`` what scores get."""
    k, (q, key, v) = c.k, parts
    scale, hidden = float(c.attrs.get("scale", 0.0)), float(c.attrs.get("mask_filter_value", _HIDDEN))
    causal = bool(c.attrs.get("unidirectional", 0))
    if mask is not None:
        shown = k.scale(k.cast(masks.negate(k, _shown(k, mask, key.type.shape[-2])), q.type.dtype), hidden)
        added = shown if added is None else k.add(added, shown)
    if added is not None and causal:  # one of them beside the operator's own mask
        rows, columns = q.type.shape[-2], key.type.shape[-2]
        below = np.where(np.tril(np.ones((rows, columns), np.bool_)), np.float32(0), np.float32(-np.inf))
        added, causal = k.add(added, k.const(below, q.type.dtype)), False
    y = layers.attention(k, q, key, v, added, causal=causal, scale=scale or None)
    b, h, s, e = y.type.shape
    return k.reshape(k.permute(y, (0, 2, 1, 3)), (b, s, h * e))


def _shown(k: Lowering, mask: Node, keys: int) -> Node:
    """Which keys count, [b, 1, 1 or s, keys]: by the length of each row, or as the mask says for keys or pairs."""
    shape = mask.type.shape
    if mask.type.rank == 1 and shape:
        lengths = k.reshape(k.cast(mask, DType.I64), (shape[0], 1, 1, 1))
        return masks.compare(k, "<", k.const(np.arange(keys)), lengths)
    if mask.type.rank not in (2, 3) or shape[-1] != keys:
        raise Unsupported(f"masked by {list(shape)}")
    lead = (shape[0], 1, 1, keys) if mask.type.rank == 2 else (shape[0], 1, *shape[1:])
    return masks.compare_number(k, ">", k.reshape(k.cast(mask, DType.I64), lead), 0)


def rotated(c: Call) -> Node:
    """Halves of heads turned by the angles of their positions."""
    k, x, places, cos, sin = c.k, c[0], c[1], c[2], c[3]
    half, flat, scale = cos.type.shape[-1], x.type.rank == 3, c.attrs.get("scale", 1.0)
    heads, whole = int(c.attrs.get("num_heads", 0)), int(c.attrs.get("rotary_embedding_dim", 0))
    if c.attrs.get("interleaved", 0) or c.attrs.get("is_packed_batching", 0) or scale != 1.0:
        raise Unsupported("of neighbours in place of halves, of packed rows, or scaled")
    if flat:
        x = _by_heads(k, x, heads or x.type.shape[-1] // (2 * half))
    b, h, s, e = x.type.shape
    if places.type.num_elements == 1 and s > 1:
        places = k.add(k.cast(places, DType.I64), k.const(np.arange(s)))
    rows = [k.reshape(layers.embedding(k, table, places), (-1, 1, s, half)) for table in (cos, sin)]
    if whole not in (0, 2 * half):
        raise Unsupported(f"of {whole} elements by tables of {half} angles")
    one, other, *rest = k.split(x, -1, (half, half, *([e - 2 * half] if e > 2 * half else [])))
    turned = [k.sub(k.mul(one, rows[0]), k.mul(other, rows[1])), k.add(k.mul(other, rows[0]), k.mul(one, rows[1]))]
    y = k.concat([*turned, *rest], -1)
    return k.reshape(k.permute(y, (0, 2, 1, 3)), (b, s, h * e)) if flat else y


_ACTIVATIONS: Mapping[str, tuple[Sequence[float], Callable[..., Node]]] = {
    "Relu": ((), lambda k, x: k.apply("relu", x)),
    "Tanh": ((), lambda k, x: k.apply("tanh", x)),
    "Sigmoid": ((), lambda k, x: k.apply("sigmoid", x)),
    "LeakyRelu": ((0.01,), lambda k, x, slope: leaky(k, x, k.scale(x, slope))),
    "Clip": ((-math.inf, math.inf), masks.clamp),
    "HardSigmoid": ((0.2, 0.5), sloped),
}
"""Activations behind a product, and their numbers where a node does not say them."""


def _activated(c: Call, y: Node, name: str, numbers: Sequence[float | None]) -> Node:
    if name not in _ACTIVATIONS:
        raise Unsupported(f"with {name} behind it")
    defaults, function = _ACTIVATIONS[name]
    given = [*numbers, *([None] * len(defaults))]
    return function(c.k, y, *(each if one is None else one for each, one in zip(defaults, given, strict=False)))


def fused_conv(c: Call) -> Node:
    """A convolution, what is added to it, and an activation."""
    y, more = conv(c), c.get(3)
    name, numbers = c.attrs.get("activation", ""), tuple(c.attrs.get("activation_params", ()))
    y = y if more is None else c.k.add(y, more)
    return _activated(c, y, name, numbers) if name else y


def fused_gemm(gemm: Handler) -> Handler:
    """A product as ``Gemm`` has it, and an activation."""

    def handle(c: Call) -> Node:
        numbers = [c.attrs.get(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
        y: Node = gemm(c)
        return _activated(c, y, c.attrs["activation"], numbers)

    return handle


def blocked(c: Call) -> Node:
    """Layouts of one kind of processor."""
    raise Unsupported("of the layout of one processor: save the model at ORT_ENABLE_EXTENDED, or a level below")


FUSED: Mapping[str, Handler] = {
    "SimplifiedLayerNormalization": simple_norm,
    f"{DOMAIN}::SimplifiedLayerNormalization": simple_norm,
    f"{DOMAIN}::FusedMatMul": matmul,
    f"{DOMAIN}::Gelu": gelu("none"),
    f"{DOMAIN}::BiasGelu": gelu("none"),
    f"{DOMAIN}::FastGelu": gelu("tanh"),
    f"{DOMAIN}::GemmFastGelu": gemm_gelu,
    f"{DOMAIN}::QuickGelu": quick_gelu,
    f"{DOMAIN}::SkipLayerNormalization": skip_norm(simple=False),
    f"{DOMAIN}::SkipSimplifiedLayerNormalization": skip_norm(simple=True),
    f"{DOMAIN}::EmbedLayerNormalization": embeddings,
    f"{DOMAIN}::Attention": attention,
    f"{DOMAIN}::MultiHeadAttention": multi_head_attention,
    f"{DOMAIN}::RotaryEmbedding": rotated,
    f"{DOMAIN}::FusedConv": fused_conv,
    **{f"{BLOCKED}::{op}": blocked for op in ("Conv", "ReorderInput", "ReorderOutput", "MaxPool", "AveragePool")},
}
"""By ``domain::Operator``; without a domain, what stands among ONNX's own."""
