"""What layers become: linear maps, attention, norms, convolution and pooling, over `Lowering`.

Each function here is one decision of the canonical form, shared by the frontends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ir.evaluation.rational import short_float
from ir.graph import Node
from ir.types import DType
from pdv.frontend.lowering import Lowering, Pair, TopK, Unsupported


def linear(k: Lowering, x: Node, w: Node, bias: Node | None = None) -> Node:
    """x: [..., k], w: [n, k], bias: [n] -> [..., n]; the bias is an addition of its own."""
    y = k.apply("linear", x, w)
    return y if bias is None else k.add(y, bias)


def matmul(k: Lowering, a: Node, b: Node) -> Node:
    """a: [..., m, k], b: [..., k, n]; a matrix or vector b is a linear map, like the weight that it usually is."""
    if a.type.rank == 0 or b.type.rank == 0:
        raise ValueError("matmul of a scalar")
    if b.type.rank == 1:
        y = k.apply("linear", a, k.reshape(b, (1, *b.type.shape)))
        return k.reshape(y, y.type.shape[:-1])
    if b.type.rank == 2:
        return k.apply("linear", a, k.permute(b, (1, 0)))
    if a.type.rank == 1:
        y = k.apply("matmul", k.reshape(a, (1, *a.type.shape)), b)
        return k.reshape(y, (*y.type.shape[:-2], y.type.shape[-1]))
    return k.apply("matmul", a, b)


def attention(
    k: Lowering,
    q: Node,
    key: Node,
    v: Node,
    mask: Node | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Node:
    """q: [b, h, s, e], key: [b, g, t, e], v: [b, g, t, f] -> [b, h, s, f]; where h > g each of the g serves h / g
    heads in a row.
    """
    if q.type.rank < 3 or key.type.rank != q.type.rank or v.type.rank != q.type.rank:
        raise Unsupported(f"attention over ranks {q.type.rank}, {key.type.rank} and {v.type.rank}")
    heads = q.type.shape[-3]
    key, v = repeat_heads(k, key, heads), repeat_heads(k, v, heads)
    factor = 1 / math.sqrt(q.type.shape[-1]) if scale is None else short_float(scale, q.type.dtype)
    operands = (q, key, v) if mask is None else (q, key, v, mask)
    return k.apply("attention", *operands, causal=bool(causal), scale=factor)


def repeat_heads(k: Lowering, x: Node, heads: int) -> Node:
    """x: [b, g, t, e] -> [b, heads, t, e], each head heads / g times in a row."""
    *lead, groups, t, e = x.type.shape
    if groups == heads:
        return x
    if heads % groups:
        raise ValueError(f"{heads} heads over {groups} groups of keys and values")
    x = k.expand(k.reshape(x, (*lead, groups, 1, t, e)), (*lead, groups, heads // groups, t, e))
    return k.reshape(x, (*lead, heads, t, e))


def softmax(k: Lowering, x: Node, dim: int, op: str = "softmax") -> Node:
    """`softmax` or `log_softmax` along any dim."""
    if dim % x.type.rank == x.type.rank - 1:
        return k.apply(op, x, dim=-1)
    return k.transpose(k.apply(op, k.transpose(x, dim, -1), dim=-1), dim, -1)


def top_k(k: Lowering, x: Node, count: int, dim: int, *, largest: bool) -> tuple[TopK, TopK]:
    """The `count` largest elements of each row, and where they are; `scatter` puts them back."""
    if dim % x.type.rank != x.type.rank - 1 or not largest:
        raise Unsupported("the k largest or smallest elements, other than the largest along the last dim")
    return TopK(x, count, "values"), TopK(x, count, "places")


def scatter(k: Lowering, base: Node, dim: int, places: Node | TopK, values: Node | TopK) -> Node:
    """Elements written into zeros where `top_k` found them: rows with all but their largest elements zero."""
    if not (isinstance(places, TopK) and isinstance(values, TopK) and places == replace(values, part="places")):
        raise Unsupported("a scatter of anything but the k largest elements of each row, where they were")
    x = values.of
    if not is_constant(k, base, 0) or base.type.shape != x.type.shape or dim % x.type.rank != x.type.rank - 1:
        raise Unsupported("a scatter of the k largest elements into anything but zeros")
    return k.apply("top_k", x, k=values.k)


def fill(k: Lowering, value: float, shape: Sequence[int], dtype: DType) -> Node:
    """A constant tensor of one value."""
    return k.expand(k.const(np.asarray(value, np.float64), dtype), shape)


def embedding(
    k: Lowering, table: Node, ids: Node, padding: int = -1, scale_by_frequency: bool = False, sparse: bool = False
) -> Node:
    """Rows of a table; that of ``padding`` takes no gradient, unless it is negative. Gradients are not sparse."""
    if scale_by_frequency:
        raise Unsupported("gradients of rows divided by how often they were read")
    if padding < 0 or not table.needs_grad:
        return k.apply("embedding", table, ids)
    return k.apply("padded_embedding", table, ids, padding_idx=padding)


def index_select(k: Lowering, x: Node, dim: int, ids: Node) -> Node:
    """Elements of a dim, by number: [..., v, ...], [p] -> [..., p, ...]; neighbours in order are a slice."""
    if ids.type.rank != 1:
        raise Unsupported(f"a selection by ids of rank {ids.type.rank}")
    known, size = k.value(ids), x.type.shape[dim]
    if known is not None:
        if known.min() < -size or known.max() >= size:
            raise ValueError(f"index {known.min()} to {known.max()} of a dim of size {size}")
        known = known % size
        if (np.diff(known) == 1).all():
            return k.slice(x, dim, int(known[0]), int(known[-1]) + 1)
        ids = k.const(known.astype(np.int64))
    return k.apply("index_select", x, ids, dim=dim % x.type.rank)


def layer_norm(k: Lowering, x: Node, dims: int, weight: Node | None, bias: Node | None, eps: float) -> Node:
    """Over the last `dims` dims, of which the IR takes one: several are normed as one."""
    if dims != 1:
        return _over_dims(k, x, dims, (weight, bias), lambda flat, w, b: layer_norm(k, flat, 1, w, b, eps))
    if bias is not None and is_constant(k, bias, 0):
        bias = None
    if bias is None and weight is not None and is_constant(k, weight, 1):
        weight = None
    if weight is None and bias is not None:
        weight = k.const(np.ones(bias.type.shape, np.float32), bias.type.dtype)
    affine = [v for v in (weight, bias) if v is not None]
    normed = k.apply("layer_norm", *k.alike(x, *affine), eps=short_float(eps, x.type.dtype))
    return k.cast(normed, x.type.dtype)  # as torch: a half x is normed in its weights' type, and stays half


def diagonal(k: Lowering, x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """Elements of two dims whose places differ by ``offset``, as the last dim: by number, of both dims as one."""
    rank = x.type.rank
    two = dim1 % rank, dim2 % rank
    x = k.permute(x, (*(dim for dim in range(rank) if dim not in two), *two))
    *lead, rows, columns = x.type.shape
    count = min(rows + min(offset, 0), columns - max(offset, 0))
    if count < 1:
        raise Unsupported("a diagonal without elements")
    places = max(offset, 0) - min(offset, 0) * columns + np.arange(count) * (columns + 1)
    return index_select(k, k.reshape(x, (*lead, rows * columns)), rank - 2, k.const(places))


def _over_dims(
    k: Lowering, x: Node, dims: int, affine: tuple[Node | None, Node | None], norm: Callable[..., Node]
) -> Node:
    """norm(x, weight, bias) over the last ``dims`` dims as one: x [..., *of], weight and bias [*of]."""
    lead, of = x.type.shape[: x.type.rank - dims], x.type.shape[x.type.rank - dims :]
    if not lead or not of or any(v is not None and v.type.shape != of for v in affine):
        raise Unsupported(f"a norm over {dims} dims of {x.type.rank}")
    flat = (v if v is None else k.reshape(v, (-1,)) for v in affine)
    return k.reshape(norm(k.reshape(x, (*lead, -1)), *flat), x.type.shape)


def rms_norm(k: Lowering, x: Node, weight: Node | None, eps: float, dims: int = 1) -> Node:
    """x: [..., d], weight: [d]; torch multiplies what is normed, in x's type, by a weight of another."""
    if dims != 1:
        return _over_dims(k, x, dims, (weight, None), lambda flat, w, _: rms_norm(k, flat, w, eps))
    ones = k.const(np.ones(x.type.shape[-1:], np.float32), x.type.dtype)
    if weight is not None and weight.type.dtype is not x.type.dtype:
        return k.mul(*k.alike(rms_norm(k, x, ones, eps), weight))
    return k.apply("rms_norm", x, ones if weight is None else weight, eps=short_float(eps, x.type.dtype))


def batch_norm(
    k: Lowering, x: Node, mean: Node, variance: Node, weight: Node | None, bias: Node | None, eps: float
) -> Node:
    """x: [n, c, ...] normalised by statistics [c]."""
    if x.type.rank < 2:
        raise Unsupported(f"batch norm over rank {x.type.rank}")
    channels = mean.type.shape
    weight = k.const(np.ones(channels, np.float32), mean.type.dtype) if weight is None else weight
    bias = k.const(np.zeros(channels, np.float32), mean.type.dtype) if bias is None else bias
    operands = k.alike(x, mean, variance, weight, bias)
    return k.cast(k.apply("batch_norm", *operands, eps=short_float(eps, x.type.dtype)), x.type.dtype)


def training_batch_norm(
    k: Lowering,
    x: Node,
    running: tuple[Node | None, Node | None],
    affine: tuple[Node | None, Node | None],
    *,
    momentum: float,
    eps: float,
    unbiased: bool = True,
) -> tuple[Node, Node | None, Node | None]:
    """Normalised by the batch's own statistics; the running ones move by `momentum` (torch's meaning) towards them.

    unbiased: the running variance takes n / (n - 1) of the batch's, as torch has it and ONNX's definition has not.
    Returns y and the new running statistics, which a norm that is applied again moves on.
    """
    held = [v for v in (*running, *affine) if v is not None]
    image = k.alike(x, *held)[0]  # statistics of a half x are taken in the type that they are kept in
    mean = k.apply("channel_mean", image)
    variance = k.apply("channel_variance", image, mean)
    n = x.type.num_elements // x.type.shape[1]
    told = k.apply("unbiased", variance, points=n) if unbiased and n > 1 else variance
    y = k.cast(batch_norm(k, image, mean, variance, *affine, eps=eps), x.type.dtype)
    pairs = zip(running, (mean, told), strict=True)
    moved = [None if buffer is None else _move(k, buffer, statistic, momentum) for buffer, statistic in pairs]
    return y, moved[0], moved[1]


def _move(k: Lowering, buffer: Node, statistic: Node, momentum: float) -> Node:
    """The new value of a buffer, or of what an earlier norm has made of it."""
    share = short_float(momentum)
    new = k.add(k.scale(buffer, 1 - share), k.scale(statistic, share))
    source = k.buffers.get(buffer) or (buffer.attr("source") if buffer.is_param else "")
    if source:
        k.buffers[new] = source
        k.updates[source] = new
    return new


def spread_out(k: Lowering, x: Node, w: Node, bias: Node | None = None) -> Node:
    """A transposed convolution into blocks of their own: x [n, c, *space], w [c, o, *kernel] -> [n, o, *larger].

    By points, each of which gives a channel for each place of its block: x stays as it lies.
    """
    channels, outs, *kernel = w.type.shape
    rows, _, *space = x.type.shape
    dims = len(kernel)
    flat = k.reshape(k.permute(w, (*range(1, 2 + dims), 0)), (outs * math.prod(kernel), channels, 1, 1))
    plane = x if dims == 2 else k.reshape(x, (rows, channels, space[0], math.prod(space[1:])))
    y = conv2d(k, plane, flat, None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    y = k.reshape(y, (rows, outs, *kernel, *space))
    order = [place for dim in range(dims) for place in (2 + dims + dim, 2 + dim)]
    larger = (n * step for n, step in zip(space, kernel, strict=True))
    y = k.reshape(k.permute(y, (0, 1, *order)), (rows, outs, *larger))
    return y if bias is None else k.add(y, k.reshape(bias, (outs, *(1,) * dims)))


def conv2d(
    k: Lowering, x: Node, w: Node, bias: Node | None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Node:
    """x: [n, c, h, w], w: [co, c / groups, kh, kw]; the bias [co] is an addition of its own."""
    if x.type.rank != 4 or w.type.rank != 4:
        raise Unsupported(f"convolution over rank {x.type.rank}")
    y = k.apply("conv2d", x, w, stride=stride, padding=padding, dilation=dilation, groups=int(groups))
    if bias is None or is_constant(k, bias, 0):
        return y
    return k.add(y, k.reshape(bias, (*bias.type.shape, 1, 1)))


def is_constant(k: Lowering, node: Node, value: float) -> bool:
    """True for a constant that is `value` throughout, which exporters write where a layer has no weight or bias."""
    array = k.value(node)
    return array is not None and bool((array == value).all())


def check_rounding(x: Node, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> None:
    """Windows counted by rounding up (`ceil_mode`) are those by rounding down, where they fit without a rest."""
    for n, f, s, p, d in zip(x.type.shape[-2:], kernel, stride, padding, dilation, strict=True):
        if (n + 2 * p - d * (f - 1) - 1) % s:
            raise Unsupported(f"pooling with ceil_mode where windows of {f} every {s} leave a rest of {n}")


def max_pool2d(k: Lowering, x: Node, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Node:
    """Maximum over windows; padding never wins."""
    if x.type.rank != 4:
        raise Unsupported(f"pooling over rank {x.type.rank}")
    return k.apply("max_pool2d", x, kernel=kernel, stride=stride, padding=padding, dilation=dilation)


def avg_pool2d(k: Lowering, x: Node, *, kernel: Pair, stride: Pair, padding: Pair, count_padding: bool) -> Node:
    """Mean over windows."""
    if x.type.rank != 4:
        raise Unsupported(f"pooling over rank {x.type.rank}")
    if padding != (0, 0) and not count_padding:
        raise Unsupported("average pooling that does not count its padding")
    return k.apply("avg_pool2d", x, kernel=kernel, stride=stride, padding=padding)


def adaptive_avg_pool2d(k: Lowering, x: Node, size: Sequence[int]) -> Node:
    """To [n, c, *size]; to one point it is a mean."""
    height, width = x.type.shape[-2:]
    if tuple(size) == (1, 1):
        return k.reduce("reduce_mean", x, (-2, -1), keepdim=True)
    if height % size[0] or width % size[1]:
        raise Unsupported(f"adaptive pooling of {height}x{width} to {size[0]}x{size[1]}, which do not divide")
    window = (height // size[0], width // size[1])
    return avg_pool2d(k, x, kernel=window, stride=window, padding=(0, 0), count_padding=True)


def flatten(k: Lowering, x: Node, start: int, end: int) -> Node:
    """Dims start to end (inclusive) as one."""
    rank = max(x.type.rank, 1)
    start, end = start % rank, end % rank
    shape = x.type.shape
    return k.reshape(x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))
