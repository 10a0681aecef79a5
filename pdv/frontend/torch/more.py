"""What further ATen operators become: comparisons, masks, lookups, integers, losses. Entry point: `HANDLERS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import kinks, layers, masks, places
from pdv.frontend.lowering import Lowering, Number, Unsupported
from pdv.frontend.torch.scalars import Handler, Result, Scalar, dtype_of, operands


def comparison(relation: str) -> Handler:
    """With ATen's promotion."""
    return lambda k, x, y: masks.compare(k, relation, *operands(k, x, y))


def logical(op: Any) -> Handler:  # Any: and, or, xor
    """Of truth values, or (``logical_and``) of what is taken for such."""

    def handle(k: Lowering, x: Node, y: Scalar) -> Node:
        y = y if isinstance(y, Node) else k.const(np.asarray(y))
        return masks.logical(k, op, x, y)

    return handle


def logical_of_any(op: Any) -> Handler:  # Any: and, or, xor
    """What is no zero is true."""
    return lambda k, x, y: masks.logical(k, op, masks.truth(k, x), masks.truth(k, y))


def clamp(k: Lowering, x: Node, least: Number | None = None, most: Number | None = None) -> Node:
    """Between two numbers."""
    if any(isinstance(end, float) for end in (least, most)) and not x.type.dtype.is_floating:
        x = k.cast(x, DType.F32)
    return masks.clamp(k, x, least, most)


def pad(k: Lowering, x: Node, widths: Sequence[int], mode: str = "constant", value: Number | None = None) -> Node:
    """With one value, or with elements of its own; widths from the last dim backwards."""
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    if mode != "constant":
        return places.pad_by_elements(k, x, pairs, mode)
    return masks.pad(k, x, pairs, 0 if value is None else value)


def constant_pad(k: Lowering, x: Node, widths: Sequence[int], value: Number = 0) -> Node:
    """As ``pad``."""
    return pad(k, x, widths, "constant", value)


def filled(value: Number) -> Handler:
    """Like another tensor, of one value."""

    def handle(k: Lowering, x: Node, *, dtype: Any = None, **placement: Any) -> Node:  # Any: torch types
        return masks.fill(k, value, x.type.shape, _dtype(dtype, x))

    return handle


def new_filled(value: Number) -> Handler:
    """Of a shape, of one value, in a tensor's type."""

    def handle(k: Lowering, x: Node, shape: Sequence[int], *, dtype: Any = None, **placement: Any) -> Node:
        return masks.fill(k, value, shape, _dtype(dtype, x))

    return handle


def full_like(k: Lowering, x: Node, value: Number, *, dtype: Any = None, **placement: Any) -> Node:
    """Like another tensor, of one value."""
    return masks.fill(k, value, x.type.shape, _dtype(dtype, x))


def new_full(k: Lowering, x: Node, shape: Sequence[int], value: Number, *, dtype: Any = None, **placement: Any) -> Node:
    """Of a shape, of one value, in a tensor's type."""
    return masks.fill(k, value, shape, _dtype(dtype, x))


def fill_with(k: Lowering, x: Node, value: Scalar) -> Node:
    """Like x, of one value."""
    if not isinstance(value, Node):
        return masks.fill(k, value, x.type.shape, x.type.dtype)
    return k.expand(k.cast(value, x.type.dtype), x.type.shape)


def copy(k: Lowering, x: Node, source: Node, non_blocking: bool = False) -> Node:
    """What stands in x once ``source`` was copied there."""
    return k.expand(k.cast(source, x.type.dtype), x.type.shape)


def slice_scatter(
    k: Lowering, x: Node, piece: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    """x with a piece of it overwritten."""
    size = x.type.shape[dim]
    return masks.put_slice(k, x, piece, dim, 0 if start is None else start, size if end is None else end, step)


def select_scatter(k: Lowering, x: Node, piece: Node, dim: int, at: int) -> Node:
    """x with one element of a dim overwritten."""
    dim, at = dim % x.type.rank, at % x.type.shape[dim]
    shape = tuple(1 if i == dim else size for i, size in enumerate(x.type.shape))
    return masks.put_slice(k, x, k.reshape(piece, shape), dim, at, at + 1)


def cumsum(k: Lowering, x: Node, dim: int, *, dtype: Any = None) -> Node:  # Any: a torch type
    """Of what stands before, and itself; of integers in int64."""
    kind = _dtype(dtype, x) if dtype is not None else x.type.dtype if x.type.dtype.is_floating else DType.I64
    return k.apply("cumsum", k.cast(x, kind), dim=dim % x.type.rank)


def flip(k: Lowering, x: Node, dims: Sequence[int]) -> Node:
    """Dims from their ends."""
    for dim in dims:
        size = x.type.shape[dim]
        x = layers.index_select(k, x, dim % x.type.rank, k.const(np.arange(size)[::-1].copy()))
    return x


def roll(k: Lowering, x: Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    """Dims turned round."""
    if not dims:
        return k.reshape(roll(k, k.reshape(x, (-1,)), shifts, (0,)), x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.type.shape[dim]
        if shift % size:
            at = size - shift % size
            x = k.concat([k.slice(x, dim, at, size), k.slice(x, dim, 0, at)], dim)
    return x


def cross_entropy(
    k: Lowering, logits: Node, labels: Node, weight: Node | None = None, reduction: int = 1, ignored: int = -100,
    smoothing: float = 0.0,
) -> Node:  # fmt: skip
    """Of labels by number, without weights of classes."""
    if weight is not None or labels.type.dtype.is_floating or logits.type.rank == 1:
        raise Unsupported("cross entropy with weights, with probabilities as labels, or of one row")
    kind: Any = ("none", "mean", "sum")[reduction]
    return masks.cross_entropy(k, logits, labels, ignored=ignored, reduction=kind, smoothing=smoothing)


def vector_norm(
    k: Lowering, x: Node, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: Any = None,
) -> Node:  # fmt: skip
    """Over dims, or of all: of squares, of sizes, or the largest size; without a gradient where it is zero."""
    if order not in (1, 2, math.inf) or dtype is not None or not x.type.rank:
        raise Unsupported(f"a norm of order {order}, in a type of its own, or of a number")
    if order == math.inf:
        return kinks.largest(k, k.apply("abs", x), dims or (), keep=keepdim)
    total = k.reduce("reduce_sum", k.mul(x, x) if order == 2 else k.apply("abs", x), dims or (), keepdim)
    return kinks.root(k, total) if order == 2 else total


def loss_of(each: Callable[..., Node], **defaults: float) -> Handler:
    """A function of differences, its mean, or its sum."""

    def handle(k: Lowering, x: Node, y: Node, reduction: int = 1, *given: float, **named: float) -> Node:
        numbers = {**defaults, **dict(zip(defaults, given, strict=False)), **named}
        losses = each(k, k.sub(*k.alike(x, y)), *numbers.values())
        return losses if reduction == 0 else k.reduce(("", "reduce_mean", "reduce_sum")[reduction], losses, (), False)

    return handle


def smooth_l1(k: Lowering, gap: Node, beta: float) -> Node:
    """Huber's loss over its bound; without one the size of the gap."""
    return k.apply("abs", gap) if beta == 0 else k.scale(kinks.linear_beyond(k, gap, beta), 1 / beta)


def group_norm(
    k: Lowering, x: Node, groups: int, weight: Node | None = None, bias: Node | None = None, eps: float = 1e-5,
    cudnn: bool = True,
) -> Node:  # fmt: skip
    """x: [n, c, ...], normed over each group of channels and all points."""
    n, channels, *points = x.type.shape
    normed = layers.layer_norm(k, k.reshape(x, (n, groups, -1)), 1, None, None, eps)
    y = k.reshape(normed, x.type.shape)
    each = (channels, *(1 for _ in points))
    y = y if weight is None else k.mul(*k.alike(y, k.reshape(weight, each)))
    return y if bias is None else k.add(*k.alike(y, k.reshape(bias, each)))


def native_group_norm(
    k: Lowering, x: Node, weight: Node | None, bias: Node | None, n: int, c: int, points: int, groups: int, eps: float
) -> Result:
    """Group norm with its statistics, which only a backward pass reads."""
    return group_norm(k, x, groups, weight, bias, eps), None, None


def broadcast_in_dim(k: Lowering, x: Node, shape: Sequence[int], dims: Sequence[int]) -> Node:
    """x, whose dims become these of a shape, spread over the others."""
    sizes = dict(zip(dims, x.type.shape, strict=True))
    return k.expand(k.reshape(x, [sizes.get(dim, 1) for dim in range(len(shape))]), shape)


def variance(k: Lowering, x: Node, dims: Sequence[int], correction: float = 1.0) -> Node:
    """Over dims, without these; of so many elements less than there are."""
    count = math.prod(x.type.shape[dim] for dim in dims)
    gap = k.sub(x, k.reduce("reduce_mean", x, dims, True))
    if count <= correction:
        raise Unsupported(f"the variance of {count} elements less {correction}")
    return k.scale(k.reduce("reduce_mean", k.mul(gap, gap), dims, False), count / (count - correction))


def broadcast_tensors(k: Lowering, xs: Sequence[Node]) -> Result:
    """Each of the shape of all."""
    shape = np.broadcast_shapes(*(x.type.shape for x in xs))
    return tuple(k.expand(x, shape) for x in xs)


def square(k: Lowering, x: Node) -> Node:
    """x * x."""
    return k.mul(x, x)


def softplus(k: Lowering, x: Node, beta: float = 1.0, threshold: float = 20.0) -> Node:
    """log(1 + exp(x)); beyond the threshold that is x but for rounding."""
    if threshold < 20:
        raise Unsupported(f"softplus with a threshold of {threshold}")
    return k.scale(k.apply("softplus", k.scale(x, beta)), 1 / beta)


def deviation(
    k: Lowering, x: Node, dims: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False,
    squared: bool = False,
) -> Node:  # fmt: skip
    """Over dims, without them unless they are kept, or its square; no gradient where it is zero, as in torch."""
    over = sorted({dim % x.type.rank for dim in dims or range(x.type.rank)})
    spread = variance(k, x, over, 1.0 if correction is None else correction)
    kept = [1 if i in over else n for i, n in enumerate(x.type.shape)] if keepdim else spread.type.shape
    if squared:
        return k.reshape(spread, kept)
    return k.reshape(kinks.root(k, spread), kept)


def beside_mean(*, squared: bool) -> Handler:
    """The deviation, or its square, and the mean."""

    def handle(k: Lowering, x: Node, dims: Sequence[int] | None = None, **how: Any) -> Result:  # Any: as ``deviation``
        mean = k.reduce("reduce_mean", x, dims or (), bool(how.get("keepdim", False)))
        return deviation(k, x, dims, squared=squared, **how), mean

    return handle


def binary_cross_entropy(k: Lowering, x: Node, target: Node, weight: Node | None = None, reduction: int = 1) -> Node:
    """Of probabilities; torch bounds the logarithms, and in backward the variance, which has gradients of its own."""
    if target.needs_grad or (weight is not None and weight.needs_grad):
        raise Unsupported("binary cross entropy with trained targets or weights")
    p = k.apply("detach", x) if x.needs_grad else x
    rest, other = (k.shift(k.scale(each, -1), 1.0) for each in (p, target))
    likely, unlikely = (k.apply("clamp", k.apply("log", v), minimum=-100.0, maximum=math.inf) for v in (p, rest))
    losses = k.scale(k.add(k.mul(target, likely), k.mul(other, unlikely)), -1)
    if x.needs_grad:  # of value zero
        spread = k.apply("clamp", k.mul(p, rest), minimum=1e-12, maximum=math.inf)
        losses = k.add(losses, k.mul(k.sub(x, p), k.div(k.sub(p, target), spread)))
    losses = losses if weight is None else k.mul(losses, weight)
    return losses if reduction == 0 else k.reduce(("", "reduce_mean", "reduce_sum")[reduction], losses, (), False)


def conv1d(
    k: Lowering, x: Node, w: Node, bias: Node | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,), dilation: Sequence[int] = (1,), groups: int = 1,
) -> Node:  # fmt: skip
    """x: [n, c, l], w: [o, c / groups, k]: an image of one row."""
    if isinstance(padding, str):
        raise Unsupported(f"a convolution padded by {padding!r}")
    image, kernel = (k.reshape(t, (*t.type.shape[:2], 1, t.type.shape[2])) for t in (x, w))
    found = layers.conv2d(
        k, image, kernel, bias, stride=(1, stride[0]), padding=(0, padding[0]), dilation=(1, dilation[0]), groups=groups
    )
    return k.reshape(found, (*found.type.shape[:2], found.type.shape[3]))


def _segments(k: Lowering, numbers: Node, like: Node, rows: Node) -> Node:
    return k.apply("segment_sum", rows, numbers, like)


def embedding_bag(
    k: Lowering, table: Node, ids: Node, offsets: Node, scale_by_frequency: bool = False, mode: int = 0,
    sparse: bool = False, weights: Node | None = None, include_last: bool = False, padding: int | None = None,
) -> Result:  # fmt: skip
    """Sums (mode 0) or means (1) of bags of rows, without those of ``padding``; ids [n] in a line, offsets [bags]."""
    if mode not in (0, 1) or scale_by_frequency:
        raise Unsupported("bags reduced by maximum, or gradients of rows divided by how often they were read")
    starts, n = k.value(offsets), ids.type.shape[0]
    bags = offsets.type.shape[0] - include_last
    is_even = starts is not None and bags > 0 and np.array_equal(starts, np.arange(starts.size) * (n / bags))
    if is_even:
        ids = k.reshape(ids, (bags, n // bags))
        total: Callable[[Node], Node] = partial(k.reduce, "reduce_sum", dims=(1,), keepdim=False)
    else:
        numbers, like = k.apply("bag_numbers", ids, offsets), k.slice(offsets, 0, 0, bags)
        total = partial(_segments, k, numbers, like)
    rows = k.apply("embedding", table, ids)
    if weights is not None:
        rows = k.mul(*k.alike(rows, k.reshape(weights, (*ids.type.shape, 1))))
    skipped = -1 if padding is None else padding
    if mode == 1 and is_even and skipped < 0:
        return k.reduce("reduce_mean", rows, (1,), keepdim=False), None, None, None
    counted = k.reshape(masks.compare_number(k, "!=", ids, skipped), (*ids.type.shape, 1))
    kept = rows if skipped < 0 else k.apply("where", counted, rows, layers.fill(k, 0, (), rows.type.dtype))
    sums = total(kept)
    if mode == 1:
        count = total(k.cast(counted, rows.type.dtype))
        sums = k.div(sums, k.apply("clamp", count, minimum=1.0, maximum=math.inf))
    return sums, None, None, None


def _dtype(dtype: Any, x: Node) -> DType:  # Any: a torch type
    return x.type.dtype if dtype is None else dtype_of(dtype)


_RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_FORMS = ("Tensor", "Scalar")

HANDLERS: Mapping[str, Callable[..., Result]] = {
    **{f"aten.{op}.{form}": comparison(sign) for op, sign in _RELATIONS.items() for form in _FORMS},
    **{f"aten.bitwise_{op}.{form}": logical(op) for op in ("and", "or", "xor") for form in _FORMS},
    **{f"aten.__{op}__.{form}": logical(op) for op in ("and", "or", "xor") for form in _FORMS},
    **{f"aten.logical_{op}.default": logical_of_any(op) for op in ("and", "or", "xor")},
    "aten.bitwise_not.default": masks.negate,
    "aten.logical_not.default": lambda k, x: masks.negate(k, masks.truth(k, x)),
    "aten.clamp.default": clamp,
    "aten.clamp_min.default": clamp,
    "aten.clamp_max.default": lambda k, x, most: clamp(k, x, None, most),
    "aten.hardtanh.default": lambda k, x, least=-1.0, most=1.0: kinks.hardtanh(k, x, least, most),
    "aten.relu6.default": lambda k, x: kinks.hardtanh(k, x, 0.0, 6.0),
    "aten.hardsigmoid.default": kinks.hard_sigmoid,
    "aten.hardswish.default": kinks.hard_swish,
    "aten.elu.default": kinks.elu,
    "aten.celu.default": kinks.celu,
    "aten.linalg_vector_norm.default": vector_norm,
    "aten.isnan.default": lambda k, x: k.apply("compare", x, x, relation="!="),
    "aten.maximum.default": lambda k, x, y: kinks.extreme(k, ">=", x, y),
    "aten.minimum.default": lambda k, x, y: kinks.extreme(k, "<=", x, y),
    "aten.pad.default": pad,
    "aten.constant_pad_nd.default": constant_pad,
    "aten.zeros_like.default": filled(0),
    "aten.ones_like.default": filled(1),
    "aten.new_zeros.default": new_filled(0),
    "aten.new_ones.default": new_filled(1),
    "aten.new_full.default": new_full,
    "aten.full_like.default": full_like,
    "aten.fill.Tensor": fill_with,
    "aten.fill.Scalar": fill_with,
    "aten.copy.default": copy,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.cumsum.default": cumsum,
    "aten.gather.default": lambda k, x, dim, ids, sparse_grad=False: masks.gather(k, x, dim, ids),
    "aten.any.default": masks.anywhere,
    "aten.any.dim": lambda k, x, dim, keepdim=False: masks.anywhere(k, x, [dim], keepdim),
    "aten.any.dims": masks.anywhere,
    "aten.flip.default": flip,
    "aten.repeat.default": places.repeated,
    "aten.unfold.default": places.windows,
    "aten.unfold_copy.default": places.windows,
    "aten.index_put.default": places.put,
    "aten.roll.default": roll,
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.mse_loss.default": loss_of(square),
    "aten.smooth_l1_loss.default": loss_of(smooth_l1, beta=1.0),
    "aten.huber_loss.default": loss_of(kinks.linear_beyond, delta=1.0),
    "aten.group_norm.default": group_norm,
    "aten.native_group_norm.default": native_group_norm,
    "aten.amax.default": lambda k, x, dims=(), keepdim=False: kinks.largest(k, x, dims, keep=bool(keepdim)),
    "aten.max.default": kinks.largest,
    "aten.min.default": lambda k, x: k.scale(kinks.largest(k, k.scale(x, -1)), -1),
    "aten.amin.default": lambda k, x, dims=(), keepdim=False: k.scale(
        kinks.largest(k, k.scale(x, -1), dims, keep=bool(keepdim)), -1
    ),
    "aten.logsumexp.default": kinks.log_sum_exp,
    "aten.log1p.default": lambda k, x: k.apply("log1p", x),
    "aten.expm1.default": lambda k, x: k.apply("expm1", x),
    "aten.broadcast_tensors.default": broadcast_tensors,
    "prims.broadcast_in_dim.default": broadcast_in_dim,
    "prims.var.default": variance,
    "aten.square.default": square,
    "aten.softplus.default": softplus,
    "aten.conv1d.default": conv1d,
    "aten.std.correction": deviation,
    "aten.var_mean.correction": beside_mean(squared=True),
    "aten.std_mean.correction": beside_mean(squared=False),
    "aten.binary_cross_entropy.default": binary_cross_entropy,
    "aten.embedding_bag.padding_idx": embedding_bag,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
}
