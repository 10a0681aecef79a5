"""What each ONNX operator becomes. One line per operator; the decisions are in `lowering` and `layers`.

Handlers take a `Call`: operands as IR nodes (None where left out) and attributes as plain Python values. A handler
gives one node, or a tuple of one entry per output. Opsets 11 to 24 are read; where an attribute became an input, both
are looked at. Entry point: `HANDLERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers
from pdv.frontend.lowering import Lowering, Pair, TopK, Unsupported
from pdv.passes.fold_constants import Array


@dataclass(frozen=True, slots=True)
class NanMask:
    """Where a tensor is not a number; only the guard around a softmax asks this."""

    of: Node


Value = Node | tuple[Node, ...] | NanMask | TopK
"""A tensor, a sequence of tensors, a question about one, or its largest elements."""

Handler = Callable[["Call"], Any]  # Any: a Node, or a tuple with one entry per output (None: not computed)


@dataclass(frozen=True, slots=True)
class Call:
    """One ONNX node to be lowered."""

    k: Lowering
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any]  # Any: int, float, string, tensor or lists of them
    opset: int
    pytorch: bool

    def get(self, index: int) -> Node | None:
        """An optional tensor operand."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if isinstance(value, tuple):
            raise ValueError(f"operand {index} is a sequence")
        if isinstance(value, NanMask):
            raise Unsupported("IsNaN, other than as a guard of a softmax")
        if isinstance(value, TopK):
            raise Unsupported("TopK, other than put back by ScatterElements")
        return value

    def __getitem__(self, index: int) -> Node:
        """A required tensor operand."""
        node = self.get(index)
        if node is None:
            raise ValueError(f"operand {index} is missing")
        return node

    def array(self, index: int) -> Array:
        """A required operand that must be known."""
        array = self.k.value(self[index])
        if array is None:
            raise Unsupported(f"operand {index} depends on the model's inputs")
        return array

    def ints(self, index: int, attr: str = "") -> tuple[int, ...] | None:
        """Known integers from an operand or, in older opsets, an attribute; None if neither is there."""
        if self.get(index) is not None:
            return tuple(int(v) for v in self.array(index).reshape(-1))
        return tuple(self.attrs[attr]) if attr in self.attrs else None


def unary(op: str) -> Handler:
    """A function of each element."""
    return lambda c: c.k.apply(op, c[0])


def reshape(c: Call) -> Node:
    """0 copies a dim, unless allowzero; -1 takes what is left."""
    shape = list(c.ints(1, "shape") or ())
    if not c.attrs.get("allowzero", 0):
        shape = [c[0].type.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return c.k.reshape(c[0], shape)


def transpose(c: Call) -> Node:
    """Without perm, the dims reversed."""
    return c.k.permute(c[0], c.attrs.get("perm", tuple(reversed(range(c[0].type.rank)))))


def slice_(c: Call) -> Node:
    """Starts, stops, axes and steps, each known."""
    starts, stops = c.ints(1, "starts") or (), c.ints(2, "ends") or ()
    axes = c.ints(3, "axes") or tuple(range(len(starts)))
    steps = c.ints(4) or (1,) * len(starts)
    x = c[0]
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        x = c.k.slice(x, axis, start, stop, step)
    return x


def split(c: Call) -> tuple[Node, ...]:
    """By sizes, or into num_outputs pieces of which the last may be shorter."""
    axis = c.attrs.get("axis", 0)
    total = c[0].type.shape[axis]
    sizes = c.ints(1, "split")
    if sizes is None:
        parts = c.attrs["num_outputs"]
        size = -(-total // parts)
        sizes = tuple(min(size, total - i * size) for i in range(parts))
    return c.k.split(c[0], axis, sizes)


def split_to_sequence(c: Call) -> tuple[Value, ...]:
    """A scalar split is the size of every piece."""
    axis = c.attrs.get("axis", 0)
    total = c[0].type.shape[axis]
    sizes: tuple[int, ...] = (1,) * total
    if c.get(1) is not None:
        array = c.array(1)
        sizes = tuple(int(v) for v in array.reshape(-1))
        if array.ndim == 0:
            sizes = tuple(min(sizes[0], total - i) for i in range(0, total, sizes[0]))
    elif not c.attrs.get("keepdims", 1):
        return (tuple(c.k.select(c[0], axis, i) for i in range(total)),)
    return (c.k.split(c[0], axis, sizes),)


def sequence_at(c: Call) -> Node:
    """One tensor of a sequence."""
    sequence = c.inputs[0]
    if not isinstance(sequence, tuple):
        raise ValueError("operand 0 is not a sequence")
    return sequence[int(c.array(1))]


def concat(c: Call) -> Node:
    """Joined along an axis."""
    return c.k.concat([c[i] for i in range(len(c.inputs))], c.attrs["axis"])


def squeeze(c: Call) -> Node:
    """Without axes, every dim of size one goes."""
    x, axes = c[0], c.ints(1, "axes")
    chosen = {i for i, n in enumerate(x.type.shape) if n == 1} if axes is None else {a % x.type.rank for a in axes}
    return c.k.reshape(x, [n for i, n in enumerate(x.type.shape) if i not in chosen])


def unsqueeze(c: Call) -> Node:
    """Axes count dims of the result."""
    axes = c.ints(1, "axes") or ()
    rank = c[0].type.rank + len(axes)
    inserted = {axis % rank for axis in axes}
    sizes = iter(c[0].type.shape)
    return c.k.reshape(c[0], [1 if i in inserted else next(sizes) for i in range(rank)])


def flatten(c: Call) -> Node:
    """Two dims: before the axis, and from it on."""
    axis = c.attrs.get("axis", 1) % (c[0].type.rank + 1)
    return c.k.reshape(c[0], (math.prod(c[0].type.shape[:axis]), math.prod(c[0].type.shape[axis:])))


def gather(c: Call) -> Node:
    """Rows of a table are an embedding, one known index is a selection."""
    axis, x, ids = c.attrs.get("axis", 0), c[0], c[1]
    known = c.k.value(ids)
    if known is not None and known.ndim == 0:
        return c.k.select(x, axis, int(known))
    if axis % x.type.rank == 0 and x.type.rank == 2 and x.type.dtype.is_floating:
        return c.k.apply("embedding", x, ids)
    return layers.index_select(c.k, x, axis, ids)


def top_k(c: Call) -> tuple[TopK, TopK]:
    """The k largest along an axis, and where they are."""
    (count,) = c.ints(1) or ()
    return layers.top_k(c.k, c[0], count, c.attrs.get("axis", -1), largest=bool(c.attrs.get("largest", 1)))


def scatter_elements(c: Call) -> Node:
    """Only the k largest elements of each row, back where they were."""
    places, values = c.inputs[1], c.inputs[2]
    if c.attrs.get("reduction", "none") != "none" or not isinstance(places, TopK) or not isinstance(values, TopK):
        raise Unsupported("a scatter of anything but the k largest elements of each row, where they were")
    return layers.scatter(c.k, c[0], c.attrs.get("axis", 0), places, values)


def constant_of_shape(c: Call) -> Node:
    """One value throughout; without it, float zero."""
    value = c.attrs["value"].numpy().reshape(()) if "value" in c.attrs else np.zeros((), np.float32)
    return c.k.expand(c.k.const(value), c.ints(0) or ())


def shape(c: Call) -> Node:
    """All shapes are known."""
    return c.k.const(np.asarray(c[0].type.shape[slice(c.attrs.get("start", 0), c.attrs.get("end"))], np.int64))


def constant(c: Call) -> Node:
    """The value in any of its attributes."""
    for name, kind in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if name in c.attrs:
            return c.k.const(np.asarray(c.attrs[name], kind))
    if "value" not in c.attrs:
        raise Unsupported("a sparse or string constant")
    return c.k.const(c.attrs["value"].numpy())


def cast_to(c: Call) -> Node:
    """ONNX numbers its element types."""
    return c.k.cast(c[0], dtype_of(c.attrs["to"]))


def dtype_of(number: int) -> DType:
    """The element type with ONNX's number."""
    import onnx_ir

    name = onnx_ir.DataType(number).name
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    try:
        return DType.from_name(names.get(name, name.lower()))
    except KeyError:
        raise Unsupported(f"element type {name}") from None


def where(c: Call) -> Node:
    """x where the mask holds, else y; guarding against NaN the softmax of rows that show something is no work."""
    mask = c.inputs[0]
    if isinstance(mask, NanMask) and mask.of is c[2] and layers.is_constant(c.k, c[1], 0) and _is_never_nan(c.k, c[2]):
        return c[2]
    return c.k.apply("where", c[0], c[1], c[2])


def _is_never_nan(k: Lowering, node: Node) -> bool:
    """True for the softmax of scores, plus at most a constant mask, that are finite somewhere in each row."""
    if node.op.name != "softmax":
        return False
    (scores,) = node.operands
    masks = [array for x in scores.operands if (array := k.value(x)) is not None] if scores.op.name == "add" else []
    return all(bool(np.isfinite(array).any(axis=-1).all()) for array in masks)


def dropout(c: Call) -> tuple[Node, None]:
    """Only where it drops nothing."""
    training = c.get(2) is not None and bool(c.array(2))
    ratio = float(c.array(1)) if c.get(1) is not None else c.attrs.get("ratio", 0.5)
    if training and ratio > 0:
        raise Unsupported(f"dropout with ratio {ratio}: set it to 0 in the model's configuration")
    return c[0], None


def reduce(op: str) -> Handler:
    """Axes as operand or attribute; without any, all, unless noop_with_empty_axes."""

    def handle(c: Call) -> Node:
        axes = c.ints(1, "axes") or ()
        if not axes and c.attrs.get("noop_with_empty_axes", 0):
            return c[0]
        return c.k.reduce(op, c[0], axes, bool(c.attrs.get("keepdims", 1)))

    return handle


def gemm(c: Call) -> Node:
    """alpha A B + beta C, A and B transposed on demand."""
    k, a, b, bias = c.k, c[0], c[1], c.get(2)
    a = k.permute(a, (1, 0)) if c.attrs.get("transA", 0) else a
    w = b if c.attrs.get("transB", 0) else k.permute(b, (1, 0))
    y = k.scale(k.apply("linear", a, w), c.attrs.get("alpha", 1.0))
    return y if bias is None or layers.is_constant(k, bias, 0) else k.add(y, k.scale(bias, c.attrs.get("beta", 1.0)))


def softmax(op: str) -> Handler:
    """Before opset 13 the dims from the axis on are one row, which is the same only for the last."""

    def handle(c: Call) -> Node:
        axis = c.attrs.get("axis", -1 if c.opset >= 13 else 1)
        if c.opset < 13 and axis % c[0].type.rank != c[0].type.rank - 1:
            raise Unsupported(f"{op} over several dims (opset {c.opset})")
        return layers.softmax(c.k, c[0], axis, op)

    return handle


def attention(c: Call) -> tuple[Node | None, ...]:
    """Heads as a dim ([b, h, s, e]), or within the last one ([b, s, h e])."""
    if c.attrs.get("softcap", 0.0) or c.get(4) is not None or c.get(5) is not None:
        raise Unsupported("attention with a soft cap or a cache")
    k, q, key, v = c.k, c[0], c[1], c[2]
    flat = q.type.rank == 3
    if flat:
        heads, groups = c.attrs["q_num_heads"], c.attrs["kv_num_heads"]
        q, key, v = (_split_heads(k, x, n) for x, n in ((q, heads), (key, groups), (v, groups)))
    causal = bool(c.attrs.get("is_causal", 0))
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
    axis = c.attrs.get("axis", -1)
    dims = -axis if axis < 0 else c[0].type.rank - axis
    return layers.layer_norm(c.k, c[0], dims, c[1], c.get(2), c.attrs.get("epsilon", 1e-5)), None, None


def rms_norm(c: Call) -> Node:
    """Over the last dim."""
    if c.attrs.get("axis", -1) not in (-1, c[0].type.rank - 1):
        raise Unsupported("rms norm over several dims")
    return layers.rms_norm(c.k, c[0], c[1], c.attrs.get("epsilon", 1e-5))


def batch_norm(c: Call) -> tuple[Node | None, ...]:
    """In training mode by the batch's statistics, else by the running ones; ONNX's momentum is 1 - torch's."""
    x, weight, bias, mean, var = (c[i] for i in range(5))
    eps = c.attrs.get("epsilon", 1e-5)
    if not c.attrs.get("training_mode", 0):
        return layers.batch_norm(c.k, x, mean, var, weight, bias, eps), None, None
    momentum = 1 - c.attrs.get("momentum", 0.9)
    return layers.training_batch_norm(
        c.k, x, (mean, var), (weight, bias), momentum=round(momentum, 7), eps=eps, unbiased=c.pytorch
    )


def _padding(c: Call, kernel: Sequence[int], stride: Pair, dilation: Pair) -> Pair:
    """Equal padding on both sides of each dim, from pads or auto_pad."""
    auto = c.attrs.get("auto_pad", "NOTSET")
    if auto == "VALID":
        return (0, 0)
    pads = c.attrs.get("pads", (0, 0, 0, 0))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        sizes = c[0].type.shape[2:]
        spans = zip(sizes, kernel, stride, dilation, strict=True)
        total = [max((-(-n // s) - 1) * s + d * (f - 1) + 1 - n, 0) for n, f, s, d in spans]
        pads = (total[0] // 2, total[1] // 2, total[0] - total[0] // 2, total[1] - total[1] // 2)
    if tuple(pads[:2]) != tuple(pads[2:]):
        raise Unsupported(f"padding {list(pads)}, not equal on both sides")
    return (pads[0], pads[1])


def _window(c: Call, kernel: Sequence[int]) -> tuple[Pair, Pair, Pair]:
    """Stride, padding and dilation of a two-dimensional window."""
    if len(kernel) != 2:
        raise Unsupported(f"a window of {len(kernel)} dims")
    stride = cast(Pair, tuple(c.attrs.get("strides", (1, 1))))
    dilation = cast(Pair, tuple(c.attrs.get("dilations", (1, 1))))
    return stride, _padding(c, kernel, stride, dilation), dilation


def conv(c: Call) -> Node:
    """Two-dimensional convolution."""
    stride, padding, dilation = _window(c, c[1].type.shape[2:])
    return layers.conv2d(
        c.k, c[0], c[1], c.get(2), stride=stride, padding=padding, dilation=dilation, groups=c.attrs.get("group", 1)
    )


def max_pool(c: Call) -> tuple[Node, None]:
    """Maximum over windows; the indices are not computed."""
    kernel = cast(Pair, tuple(c.attrs["kernel_shape"]))
    stride, padding, dilation = _window(c, kernel)
    if c.attrs.get("ceil_mode", 0):
        layers.check_rounding(c[0], kernel, stride, padding, dilation)
    return layers.max_pool2d(c.k, c[0], kernel=kernel, stride=stride, padding=padding, dilation=dilation), None


def average_pool(c: Call) -> Node:
    """Mean over windows."""
    kernel = cast(Pair, tuple(c.attrs["kernel_shape"]))
    stride, padding, dilation = _window(c, kernel)
    if dilation != (1, 1):
        raise Unsupported("average pooling with dilation")
    if c.attrs.get("ceil_mode", 0):
        layers.check_rounding(c[0], kernel, stride, padding, dilation)
    counted = bool(c.attrs.get("count_include_pad", 0))
    return layers.avg_pool2d(c.k, c[0], kernel=kernel, stride=stride, padding=padding, count_padding=counted)


_UNARY = ("Neg", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tanh", "Sigmoid", "Erf", "Abs", "Reciprocal", "Relu")

HANDLERS: Mapping[str, Handler] = {
    **{op: unary(op.lower()) for op in _UNARY},
    "Add": lambda c: c.k.add(c[0], c[1]),
    "Sub": lambda c: c.k.sub(c[0], c[1]),
    "Mul": lambda c: c.k.mul(c[0], c[1]),
    "Div": lambda c: c.k.div(c[0], c[1]),
    "Pow": lambda c: c.k.pow(c[0], c[1]),
    "Gelu": lambda c: c.k.apply("gelu", c[0], approximate=c.attrs.get("approximate", "none")),
    "IsNaN": lambda c: NanMask(c[0]),
    "Where": where,
    "Identity": lambda c: c[0],
    "Cast": cast_to,
    "CastLike": lambda c: c.k.cast(c[0], c[1].type.dtype),
    "Constant": constant,
    "Dropout": dropout,
    "Shape": shape,
    "Reshape": reshape,
    "Transpose": transpose,
    "Expand": lambda c: c.k.broadcast(c[0], c.ints(1) or ()),
    "Slice": slice_,
    "Split": split,
    "SplitToSequence": split_to_sequence,
    "SequenceAt": sequence_at,
    "Concat": concat,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Flatten": flatten,
    "Gather": gather,
    "TopK": top_k,
    "ScatterElements": scatter_elements,
    "ConstantOfShape": constant_of_shape,
    "ReduceMean": reduce("reduce_mean"),
    "ReduceSum": reduce("reduce_sum"),
    "GlobalAveragePool": lambda c: c.k.reduce("reduce_mean", c[0], tuple(range(2, c[0].type.rank)), True),
    "MatMul": lambda c: layers.matmul(c.k, c[0], c[1]),
    "Gemm": gemm,
    "Softmax": softmax("softmax"),
    "LogSoftmax": softmax("log_softmax"),
    "Attention": attention,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "BatchNormalization": batch_norm,
    "Conv": conv,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
}
