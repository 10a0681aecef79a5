"""ONNX operators that loops cannot say and torch has: run by torch as they are, on whole operands.

Entry points: ``READERS``; ``scatter_elements``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler, run_by_torch
from pdv.frontend.onnx.readers import known, windows

_INTERPOLATIONS = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


def sample(c: Call) -> Node:
    """x: [n, c, *space] at points [n, *places, dims], which lie between -1 and 1."""
    dims, mode = c[0].type.rank - 2, c.attrs["mode"]
    number = _INTERPOLATIONS.get(mode)
    if dims not in (2, 3) or number is None or (dims == 3 and number == 2):
        raise Unsupported(f"{mode} sampling over {dims} dims")
    how = (number, _PADDINGS[c.attrs["padding_mode"]], bool(c.attrs["align_corners"]))
    found: Node = run_by_torch(c.k, f"aten::grid_sampler_{dims}d", c[0], c[1], *how)
    return found


def deformed_conv(c: Call) -> Node:
    """A convolution that reads between elements, where offsets say, times a mask (https://arxiv.org/abs/1811.11168).

    x: [n, c, h, w], w: [co, c / groups, *kernel], offset: [n, (g *kernel 2), h', w'], mask: [n, (g *kernel), h', w']
    """
    k, x, w, offset, bias, mask = c.k, c[0], c[1], c[2], c.get(3), c.get(4)
    if (
        x.type.rank != 4
        or min(x.type.shape[2:]) < 2
        or c.attrs.get("kernel_shape", w.type.shape[2:]) != w.type.shape[2:]
    ):
        raise Unsupported(f"a deformed convolution of {list(w.type.shape)} over {list(x.type.shape)}")
    over, groups, moved = windows.window(c, w.type.shape[2:]), c.attrs["group"], c.attrs["offset_group"]
    (n, channels, *space), (height, width) = x.type.shape, offset.type.shape[2:]
    places = math.prod(over.kernel)
    lines = [
        stride * np.arange(count) - before + dilation * np.arange(size)[:, None]
        for count, size, stride, before, dilation in zip(
            (height, width), over.kernel, over.stride, over.before, over.dilation, strict=True
        )
    ]  # along each dim, [kernel, positions]
    shapes = ((over.kernel[0], 1, height, 1), (1, over.kernel[1], 1, width))
    offsets = k.reshape(offset, (n * moved, *over.kernel, 2, height, width))
    points = [
        k.add(k.select(offsets, 3, i), k.const(line.reshape(shape).astype(np.float32), x.type.dtype))
        for i, (line, shape) in enumerate(zip(lines, shapes, strict=True))
    ]
    read = _read_between(k, k.reshape(x, (n * moved, channels // moved, *space)), points, 0)
    if mask is not None:
        read = k.mul(read, k.reshape(mask, (n * moved, 1, *over.kernel, height, width)))
    columns = k.reshape(read, (n, groups, channels // groups * places, height * width))
    y = k.apply("matmul", k.reshape(w, (1, groups, w.type.shape[0] // groups, -1)), columns)
    y = k.reshape(y, (n, w.type.shape[0], height, width))
    return y if bias is None else k.add(y, k.reshape(bias, (-1, 1, 1)))


def _read_between(k: Lowering, x: Node, points: Sequence[Node], padding: int) -> Node:
    """x: [n, c, h, w] at two coordinates, each [n, *places], in elements -> [n, c, *places]; outside as torch pads."""
    n, *places = points[0].type.shape
    scaled = [
        k.reshape(k.shift(k.scale(point, 2 / (size - 1)), -1.0), (n, math.prod(places), 1, 1))
        for point, size in zip(points, x.type.shape[2:], strict=True)
    ]
    found = run_by_torch(k, "aten::grid_sampler_2d", x, k.concat(scaled[::-1], 3), 0, padding, True)
    return k.reshape(found, (n, x.type.shape[1], *places))


def aligned_regions(c: Call) -> Node:
    """x: [b, c, h, w], regions: [n, 4], the row of each: [n] -> [n, c, h', w'], means of what lies between elements."""
    k, x, regions, rows = c.k, c[0], c[1], c[2]
    count, scale, mode = c.attrs["sampling_ratio"], c.attrs["spatial_scale"], c.attrs["mode"]
    if mode != "avg" or count < 1 or min(x.type.shape[2:]) < 2:
        raise Unsupported(f"the {mode} of regions by {count} samples of {list(x.type.shape)}")
    half = c.attrs.get("coordinate_transformation_mode", "output_half_pixel") == "half_pixel"
    sizes = (c.attrs["output_height"], c.attrs["output_width"])
    n, ends = regions.type.shape[0], k.shift(k.scale(regions, scale), -0.5 if half else 0.0)
    points, inside = [], []
    for i, (size, most) in enumerate(zip(sizes, x.type.shape[2:], strict=True)):
        first, last = (k.reshape(k.select(ends, 1, at), (n, 1)) for at in (1 - i, 3 - i))
        length = k.sub(last, first)
        length = length if half else masks.clamp(k, length, 1.0, None)
        at = k.const(((np.arange(size * count) + 0.5) / (size * count)).astype(np.float32)[None], x.type.dtype)
        line = k.reshape(k.add(first, k.mul(length, at)), (n, *((1, -1) if i else (-1, 1))))
        inside += [masks.compare_number(k, ">=", line, -1.0), masks.compare_number(k, "<=", line, float(most))]
        points.append(k.expand(line, (n, sizes[0] * count, sizes[1] * count)))
    chosen = layers.index_select(k, x, 0, rows)
    read = _read_between(k, chosen, points, 1)
    seen = reduce(lambda one, other: masks.logical(k, "and", one, other), inside)
    zero = masks.fill(k, 0, (1, 1, 1, 1), x.type.dtype)
    read = k.apply("where", k.reshape(seen, (n, 1, *seen.type.shape[1:])), read, zero)
    parts = k.reshape(read, (n, x.type.shape[1], sizes[0], count, sizes[1], count))
    return k.reduce("reduce_mean", parts, (3, 5), False)


def determinant(c: Call) -> Node:
    """Of each matrix."""
    found: Node = run_by_torch(c.k, "aten::linalg_det", c[0])
    return found


def bits(op: str) -> Handler:
    """Of integers, bit by bit."""

    def handle(c: Call) -> Node:
        return _on_bits(c, f"aten::bitwise_{op}", [c[i] for i in range(len(c.inputs))])

    return handle


def shifted_bits(c: Call) -> Node:
    """Of integers; shifts by their width or more leave nothing."""
    direction = "left_shift" if c.attrs["direction"] == "LEFT" else "right_shift"
    return _on_bits(c, f"aten::bitwise_{direction}.Tensor", [c[0], c[1]])


def _on_bits(c: Call, function: str, operands: Sequence[Node]) -> Node:
    """Of types in which torch does not compute, wide ones on the way."""
    own = operands[0].type.dtype
    wide = [c.k.cast(x, DType.I64) for x in operands] if own.is_stored else operands
    found: Node = run_by_torch(c.k, function, *wide)
    return c.k.cast(found, own)


def max_pool(c: Call) -> tuple[Node, Node | None]:
    """Maximum over windows, and where each was, in all elements of the operand."""
    if not c.is_used(1):
        return windows.max_pool(c)
    over = windows.window(c, tuple(c.attrs["kernel_shape"]))
    x, dims = c[0], len(over.kernel)
    if not over.even or dims > 2 or c.attrs.get("storage_order", 0):
        raise Unsupported("the places of maxima over such windows")
    lead = ((1,) * (2 - dims), (0,) * (2 - dims))
    wide = c.k.reshape(x, (*x.type.shape[:2], *lead[0], *x.type.shape[2:]))
    spans = [[*lead[0], *over.kernel], [*lead[0], *over.stride], [*lead[1], *over.before], [*lead[0], *over.dilation]]
    values, places = run_by_torch(c.k, "aten::max_pool2d_with_indices", wide, *spans)
    planes = np.arange(math.prod(x.type.shape[:2])).reshape(*x.type.shape[:2], *(1,) * dims)
    shape = tuple(n for i, n in enumerate(values.type.shape) if i != 2 or dims == 2)
    places = c.k.reshape(places, shape)
    return c.k.reshape(values, shape), c.k.add(places, c.k.const(planes * math.prod(x.type.shape[2:])))


def max_unpool(c: Call) -> Node:
    """Elements put where they were, among all elements of the result; zeros elsewhere."""
    k, x, places = c.k, c[0], c[1]
    kernel = c.attrs["kernel_shape"]
    dims = len(kernel)
    stride, pads = c.attrs.get("strides", (1,) * dims), c.attrs.get("pads", (0,) * (2 * dims))
    space = [
        (n - 1) * s - pads[i] - pads[dims + i] + f
        for i, (n, s, f) in enumerate(zip(x.type.shape[2:], stride, kernel, strict=True))
    ]
    inner = (*x.type.shape[:2], *space)
    shape = tuple(c.ints(2) or ()) or inner
    zeros = k.const(np.zeros(math.prod(inner), np.float32).astype(x.type.dtype.torch_name), x.type.dtype)
    flat: Node = run_by_torch(k, "aten::scatter.src", zeros, 0, k.reshape(places, (-1,)), k.reshape(x, (-1,)))
    y = k.reshape(flat, inner)
    return windows.padded(k, y, (0,) * dims, [m - n for m, n in zip(shape[2:], space, strict=True)], 0.0)


def scatter_elements(c: Call) -> Node:
    """Elements put to places that inputs say; known places are a selection."""
    k, x, places, updates, how = c.k, c[0], c[1], c[2], c.attrs.get("reduction", "none")
    if k.value(places) is not None:
        return known.scatter_elements(c)
    dim = c.axis()
    from_front = masks.from_front(k, places, x.type.shape[dim])
    return _scattered(k, x, dim, from_front, updates, how)


def _scattered(k: Lowering, x: Node, dim: int, places: Node, updates: Node, how: str) -> Node:
    found: Node
    if how in ("none", "add"):
        name = "aten::scatter.src" if how == "none" else "aten::scatter_add"
        found = run_by_torch(k, name, x, dim, places, updates)
    else:
        found = run_by_torch(k, "aten::scatter_reduce.two", x, dim, places, updates, _REDUCTIONS[how])
    return found


def scatter_nd(c: Call) -> Node:
    """Slices put to places that inputs say."""
    k, x, ids, updates, how = c.k, c[0], c[1], c[2], c.attrs.get("reduction", "none")
    if k.value(ids) is not None:
        return known.scatter_nd(c)
    depth, shape = ids.type.shape[-1], x.type.shape
    rows, rest = math.prod(shape[:depth]), math.prod(shape[depth:])
    flat: Node | None = None
    for i in range(depth):
        each = masks.from_front(k, k.select(ids, ids.type.rank - 1, i), shape[i])
        flat = each if flat is None else k.add(k.scale(flat, shape[i]), each)
    if flat is None:
        raise Unsupported("slices put to no place")
    count = flat.type.num_elements
    wide = k.expand(k.reshape(flat, (count, 1)), (count, rest))
    y = _scattered(k, k.reshape(x, (rows, rest)), 0, wide, k.reshape(updates, (count, rest)), how)
    return k.reshape(y, shape)


READERS: Mapping[str, Handler] = {
    "GridSample": sample,
    "Det": determinant,
    "DeformConv": deformed_conv,
    "RoiAlign": aligned_regions,
    **{f"Bitwise{name}": bits(op) for name, op in (("And", "and.Tensor"), ("Or", "or.Tensor"), ("Xor", "xor.Tensor"))},
    "BitwiseNot": bits("not"),
    "BitShift": shifted_bits,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
    "ScatterND": scatter_nd,
}
