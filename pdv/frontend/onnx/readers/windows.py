"""What ONNX's windows over space become: one to three dims, padded on either side, rounded up or down.

The IR has windows over two dims, padded alike on both sides. Others are made of these: one dim beside one of size one,
three as two and one, uneven padding as elements joined to the ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from pdv.frontend import layers
from pdv.frontend.lowering import Lowering, Pair, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.passes.fold_constants import Array

LOWEST = float(np.finfo(np.float32).min)  # padding under a maximum


@dataclass(frozen=True)
class Window:
    """A window for each dim of space; ``after`` has what rounding up adds, and ``given`` what the node says."""

    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]
    given: Sequence[int]

    @property
    def even(self) -> bool:
        """Whether torch pads so: alike on both sides, by half a window at most."""
        return tuple(self.before) == tuple(self.after) and all(
            2 * pad <= size for pad, size in zip(self.before, self.kernel, strict=True)
        )


def window(c: Call, kernel: Sequence[int]) -> Window:
    """The node's windows over its operand."""
    dims = len(kernel)
    space = c[0].type.shape[2:]
    if len(space) != dims or not 1 <= dims <= 3:
        raise Unsupported(f"a window of {dims} dims over {len(space)}")
    stride = tuple(c.attrs.get("strides", (1,) * dims))
    dilation = tuple(c.attrs.get("dilations", (1,) * dims))
    pads = list(c.attrs.get("pads", (0,) * (2 * dims)))
    auto, up = c.attrs.get("auto_pad", "NOTSET"), bool(c.attrs.get("ceil_mode", 0))
    if not len(stride) == len(dilation) == dims or len(pads) != 2 * dims:
        raise ValueError(f"strides {stride}, dilations {dilation}, pads {pads} of {dims} dims")
    if min(*stride, *dilation, *kernel) < 1:
        raise ValueError(f"strides {stride}, dilations {dilation}, kernel {tuple(kernel)}")
    before, after = pads[:dims], pads[dims:]
    for i, n in enumerate(space):
        span = dilation[i] * (kernel[i] - 1) + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max((-(-n // stride[i]) - 1) * stride[i] + span - n, 0)
            less, more = total // 2, total - total // 2
            before[i], after[i] = (less, more) if auto == "SAME_UPPER" else (more, less)
        elif auto == "VALID":
            before[i] = after[i] = 0
    given = tuple(after)
    for i, n in enumerate(space if up else ()):
        span = dilation[i] * (kernel[i] - 1) + 1
        count = -(-(n + before[i] + after[i] - span) // stride[i]) + 1
        if (count - 1) * stride[i] >= n + before[i]:
            count -= 1
        after[i] += max((count - 1) * stride[i] + span - (n + before[i] + after[i]), 0)
    return Window(kernel, stride, dilation, before, after, given)


def padded(k: Lowering, x: Node, before: Sequence[int], after: Sequence[int], value: float) -> Node:
    """x: [n, c, *space] with elements of one value at the ends of space; fewer than none are cut off."""
    for dim, ends in enumerate(zip(before, after, strict=True), 2):
        cut = [max(-end, 0) for end in ends]
        x = k.slice(x, dim, cut[0], x.type.shape[dim] - cut[1])
        pieces = [x]
        for at, width in enumerate(ends):
            if width > 0:
                shape = tuple(width if i == dim else n for i, n in enumerate(x.type.shape))
                pieces.insert(len(pieces) if at else 0, layers.fill(k, value, shape, x.type.dtype))
        x = k.concat(pieces, dim)
    return x


def conv(c: Call) -> Node:
    """A convolution over one to three dims."""
    k, x, w = c.k, c[0], c[1]
    kernel = w.type.shape[2:]
    if tuple(c.attrs.get("kernel_shape", kernel)) != kernel:
        raise ValueError(f"kernel_shape {c.attrs['kernel_shape']} of weights {list(w.type.shape)}")
    found = window(c, kernel)
    return convolved(k, x, w, c.get(2), found, c.attrs.get("group", 1))


def convolved(k: Lowering, x: Node, w: Node, bias: Node | None, over: Window, groups: int) -> Node:
    """x: [n, c, *space] by w: [co, c / groups, *kernel]."""
    dims = len(over.kernel)
    if dims == 3:
        return _convolved_volume(k, x, w, bias, over, groups)
    if tuple(over.before) != tuple(over.after):
        x = padded(k, x, over.before, over.after, 0.0)
        over = Window(over.kernel, over.stride, over.dilation, (0,) * dims, (0,) * dims, (0,) * dims)
    lead = (0,) * (2 - dims), (1,) * (2 - dims)
    if dims == 1:
        x, w = (k.reshape(v, (*v.type.shape[:2], 1, v.type.shape[2])) for v in (x, w))
    y = layers.conv2d(
        k, x, w, bias,
        stride=_pair((*lead[1], *over.stride)), padding=_pair((*lead[0], *over.before)),
        dilation=_pair((*lead[1], *over.dilation)), groups=groups,
    )  # fmt: skip
    return k.reshape(y, (*y.type.shape[:2], y.type.shape[3])) if dims == 1 else y


def _convolved_volume(k: Lowering, x: Node, w: Node, bias: Node | None, over: Window, groups: int) -> Node:
    """Over three dims: for each place of the kernel's first one a convolution of planes; these are added."""
    x = padded(k, x, (over.before[0], 0, 0), (over.after[0], 0, 0), 0.0)
    n, channels, depth, *space = x.type.shape
    kernel, stride, dilation = over.kernel[0], over.stride[0], over.dilation[0]
    count = (depth - dilation * (kernel - 1) - 1) // stride + 1
    plane = Window(
        *(each[1:] for each in (over.kernel, over.stride, over.dilation, over.before, over.after, over.given))
    )
    total: Node | None = None
    for at in range(kernel):
        chosen = k.slice(x, 2, at * dilation, at * dilation + (count - 1) * stride + 1, stride)
        flat = k.reshape(k.permute(chosen, (0, 2, 1, 3, 4)), (n * count, channels, *space))
        part = convolved(k, flat, k.select(w, 2, at), None, plane, groups)
        total = part if total is None else k.add(total, part)
    assert total is not None
    y = k.reshape(total, (n, count, *total.type.shape[1:]))
    y = k.permute(y, (0, 2, 1, 3, 4))
    return y if bias is None or layers.is_constant(k, bias, 0) else k.add(y, k.reshape(bias, (-1, 1, 1, 1)))


def conv_transpose(c: Call) -> Node:
    """A convolution of x with zeros between its elements, by the weights turned around."""
    k, x, w, groups = c.k, c[0], c[1], c.attrs.get("group", 1)
    kernel = w.type.shape[2:]
    dims = len(kernel)
    if tuple(c.attrs.get("kernel_shape", kernel)) != kernel or len(x.type.shape) != dims + 2 or dims > 3:
        raise Unsupported(f"a transposed convolution of {list(w.type.shape)} over {list(x.type.shape)}")
    stride, dilation = (tuple(c.attrs.get(name, (1,) * dims)) for name in ("strides", "dilations"))
    more = tuple(c.attrs.get("output_padding", (0,) * dims))
    pads, auto, wanted = c.attrs.get("pads"), c.attrs.get("auto_pad", "NOTSET"), c.attrs.get("output_shape")
    before, after = _transposed_pads(c, kernel, stride, dilation, more, pads, auto, wanted)
    if stride == kernel and groups == max(dilation) == 1 and not any((*before, *after, *more)):
        return layers.spread_out(k, x, w, c.get(2))
    for dim, step in enumerate(stride, 2):
        x = _spread(k, x, dim, step)
    inputs, each = w.type.shape[:2]
    w = k.reshape(w, (groups, inputs // groups, each, *kernel))
    w = k.permute(w, (0, 2, 1, *range(3, 3 + dims)))
    w = k.reshape(w, (groups * each, inputs // groups, *kernel))
    for dim in range(2, 2 + dims):
        w = layers.index_select(k, w, dim, k.const(np.arange(w.type.shape[dim])[::-1].copy()))
    span = [d * (n - 1) for d, n in zip(dilation, kernel, strict=True)]
    before = [s - p for s, p in zip(span, before, strict=True)]
    after = [s - p + m for s, p, m in zip(span, after, more, strict=True)]
    x = padded(k, x, before, after, 0.0)
    none = (0,) * dims
    return convolved(k, x, w, c.get(2), Window(kernel, (1,) * dims, dilation, none, none, none), groups)


def _transposed_pads(
    c: Call, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], more: Sequence[int],
    pads: Sequence[int] | None, auto: str, wanted: Sequence[int] | None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """What is cut off the ends of the result."""
    dims = len(kernel)
    if wanted is None and auto in ("NOTSET", "VALID"):
        given = list(pads or (0,) * (2 * dims))
        return given[:dims], given[dims:]
    before, after = [], []
    for i, n in enumerate(c[0].type.shape[2:]):
        size = (
            wanted[-dims:] if wanted is not None else [m * s for m, s in zip(c[0].type.shape[2:], stride, strict=True)]
        )[i]
        total = stride[i] * (n - 1) + more[i] + (kernel[i] - 1) * dilation[i] + 1 - size
        less, rest = total // 2, total - total // 2
        upper = auto == "SAME_UPPER"
        before.append(less if upper else rest)
        after.append(rest if upper else less)
    return before, after


def _spread(k: Lowering, x: Node, dim: int, step: int) -> Node:
    """x with step - 1 zeros between the elements of a dim."""
    if step == 1:
        return x
    shape, n = x.type.shape, x.type.shape[dim]
    wide = k.reshape(x, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    zeros = layers.fill(k, 0.0, (*shape[: dim + 1], step - 1, *shape[dim + 1 :]), x.type.dtype)
    joined = k.reshape(k.concat([wide, zeros], dim + 1), (*shape[:dim], n * step, *shape[dim + 1 :]))
    return k.slice(joined, dim, 0, (n - 1) * step + 1)


def max_pool(c: Call) -> tuple[Node, None]:
    """Maximum over windows; where it was is not computed."""
    k, x = c.k, c[0]
    if not x.type.dtype.is_floating:
        raise Unsupported(f"a maximum over windows of {x.type.dtype.value}")
    if c.results == 1:
        c.attrs.get("storage_order")  # of places, which nobody asks for
    over = window(c, tuple(c.attrs["kernel_shape"]))
    if not over.even:
        x = padded(k, x, over.before, over.after, LOWEST)
        over = _unpadded(over)
    return _pooled(k, x, over, "max"), None


def average_pool(c: Call) -> Node:
    """Mean over windows; of what they have of the operand, or of its padding, too."""
    over = window(c, tuple(c.attrs["kernel_shape"]))
    return averaged(c.k, c[0], over, padding_counts=bool(c.attrs.get("count_include_pad", 0)))


def averaged(k: Lowering, x: Node, over: Window, *, padding_counts: bool) -> Node:
    """Mean over windows: of all their places, or of those that lie on x."""
    counts = _counts(x, over, padding_counts=padding_counts)
    if any(over.before) or any(over.after):
        if over.even:
            y = _pooled(k, x, over, "avg")
        else:
            y = _pooled(k, padded(k, x, over.before, over.after, 0.0), _unpadded(over), "avg")
    else:
        y = _pooled(k, x, over, "avg")
    share = math.prod(over.kernel) / counts
    if (share == 1).all():
        return y
    return k.apply("mul", y, k.const(share.astype(np.float32), x.type.dtype))


def _unpadded(over: Window) -> Window:
    none = (0,) * len(over.kernel)
    return Window(over.kernel, over.stride, over.dilation, none, none, none)


def _counts(x: Node, over: Window, *, padding_counts: bool) -> Array:
    """Of each window, the places that count: what rounding up adds never does."""
    found = np.ones((1, 1))
    each: list[Array] = []
    for i, n in enumerate(x.type.shape[2:]):
        line = np.zeros(over.before[i] + n + over.after[i])
        first, last = (
            (0, over.before[i] + n + over.given[i]) if padding_counts else (over.before[i], over.before[i] + n)
        )
        line[first:last] = 1
        span = over.dilation[i] * (over.kernel[i] - 1) + 1
        starts = range(0, len(line) - span + 1, over.stride[i])
        each.append(np.array([line[s : s + span : over.dilation[i]].sum() for s in starts]))
    for counts in each:
        found = found[..., None] * counts
    return found


def _pooled(k: Lowering, x: Node, over: Window, kind: str) -> Node:
    """Windows padded alike, over one to three dims."""
    dims = len(over.kernel)
    if dims == 1:
        wide = k.reshape(x, (*x.type.shape[:2], 1, x.type.shape[2]))
        y = _pooled_plane(k, wide, kind, *((lead, *each) for lead, each in _spans(over)))
        return k.reshape(y, (*y.type.shape[:2], y.type.shape[3]))
    if dims == 2:
        return _pooled_plane(k, x, kind, over.kernel, over.stride, over.before, over.dilation)
    n, ch, d, h, w = x.type.shape
    flat = k.reshape(x, (n, ch * d, h, w))
    plane = [each[1:] for each in (over.kernel, over.stride, over.before, over.dilation)]
    y = _pooled_plane(k, flat, kind, *plane)
    h, w = y.type.shape[2:]
    deep = k.reshape(y, (n, ch, d, h * w))
    line = [
        (each[0], rest)
        for each, rest in zip((over.kernel, over.stride, over.before, over.dilation), (1, 1, 0, 1), strict=True)
    ]
    z = _pooled_plane(k, deep, kind, *line)
    return k.reshape(z, (n, ch, z.type.shape[2], h, w))


def _spans(over: Window) -> list[tuple[int, Sequence[int]]]:
    return list(zip((1, 1, 0, 1), (over.kernel, over.stride, over.before, over.dilation), strict=True))


def _pooled_plane(
    k: Lowering, x: Node, kind: str, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Node:  # fmt: skip
    spans = {"stride": _pair(stride), "padding": _pair(padding)}
    if kind == "max":
        return layers.max_pool2d(k, x, kernel=_pair(kernel), dilation=_pair(dilation), **spans)
    if tuple(dilation) == (1, 1):
        return layers.avg_pool2d(k, x, kernel=_pair(kernel), count_padding=True, **spans)
    channels = x.type.shape[1]
    weight = np.full((channels, 1, *kernel), 1 / math.prod(kernel), np.float32)
    w = k.const(weight, x.type.dtype)
    return layers.conv2d(k, x, w, None, dilation=_pair(dilation), groups=channels, **spans)


def _pair(values: Sequence[int]) -> Pair:
    first, second = values
    return int(first), int(second)


def lp_pool(c: Call) -> Node:
    """The p-th root of the sum of p-th powers over windows."""
    k, p = c.k, c.attrs["p"]
    over = window(c, tuple(c.attrs["kernel_shape"]))
    if any(more != given for more, given in zip(over.after, over.given, strict=True)):
        raise Unsupported("a norm over windows, rounded up")
    y = averaged(k, _power(k, c[0], p), over, padding_counts=True)
    return _root(k, k.scale(y, math.prod(over.kernel)), p)


def _power(k: Lowering, x: Node, p: float) -> Node:
    return k.mul(x, x) if p == 2 else k.pow(k.apply("abs", x), k.const(np.asarray(p, np.float64), x.type.dtype))


def _root(k: Lowering, x: Node, p: float) -> Node:
    return k.pow(x, k.const(np.asarray(1 / p, np.float64), x.type.dtype))


def global_max_pool(c: Call) -> Node:
    """Maximum over space."""
    x, ones = c[0], (1,) * (c[0].type.rank - 2)
    none = (0,) * len(ones)
    return _pooled(c.k, x, Window(x.type.shape[2:], ones, ones, none, none, none), "max")


def global_lp_pool(c: Call) -> Node:
    """The p-th root of the sum of p-th powers over space."""
    total = c.k.reduce("reduce_sum", _power(c.k, c[0], c.attrs["p"]), tuple(range(2, c[0].type.rank)), True)
    return _root(c.k, total, c.attrs["p"])


def local_response_norm(c: Call) -> Node:
    """x over a power of the sum of squares of neighbouring channels."""
    k, x, size = c.k, c[0], c.attrs["size"]
    alpha, beta, bias = c.attrs["alpha"], c.attrs["beta"], c.attrs["bias"]
    n, ch = x.type.shape[:2]
    flat = k.reshape(k.mul(x, x), (n, 1, ch, -1))
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    near = _pooled(
        k, padded(k, flat, (before, 0), (after, 0), 0.0), Window((size, 1), *([(1, 1)] * 2), *([(0, 0)] * 3)), "avg"
    )
    near = k.shift(k.scale(k.reshape(near, x.type.shape), alpha), bias)
    return k.mul(x, k.pow(near, k.const(np.asarray(-beta, np.float64), x.type.dtype)))


def instance_norm(c: Call) -> Node:
    """Over space, each channel of each row by itself."""
    return _normed(c, c[0].type.shape[1])


def group_norm(c: Call) -> Node:
    """Over groups of channels and space; before opset 21 by its body."""
    if c.opset < _BY_CHANNEL:
        raise Unsupported("with a scale for each group")
    c.attrs["stash_type"]  # in which type it is computed, which is this one's business
    return _normed(c, c.attrs["num_groups"])


_BY_CHANNEL = 21  # the first opset whose group norms have a scale for each channel


def _normed(c: Call, groups: int) -> Node:
    k, x = c.k, c[0]
    rows = k.reshape(x, (x.type.shape[0], groups, -1))
    y = k.reshape(layers.layer_norm(k, rows, 1, None, None, c.attrs["epsilon"]), x.type.shape)
    scale, shift = (k.reshape(c[i], (-1, *(1,) * (x.type.rank - 2))) for i in (1, 2))
    y = y if layers.is_constant(k, scale, 1) else k.mul(*k.alike(y, scale))
    return y if layers.is_constant(k, shift, 0) else k.add(*k.alike(y, shift))


READERS: Mapping[str, Handler] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalLpPool": global_lp_pool,
    "LRN": local_response_norm,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
}
