"""Windows over space: convolution and pooling. Space is not cut (a cut needs a halo); batch and channels are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ir.dims import Loops, Shape
from ir.errors import ShapeError
from ir.operator import Attrs, Operator
from ir.tape import Call, Tape

Pair = tuple[int, int]


def _pair(value: object) -> Pair:
    return cast(Pair, value)


def output_extent(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Windows that fit: floor((size + 2·padding - dilation·(kernel - 1) - 1) / stride) + 1.

    Raises:
        ShapeError: if none does, or the numbers describe no window.
    """
    if min(kernel, stride, dilation) < 1 or padding < 0:
        what = f"kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation} describe no window"
        raise ShapeError(what, "Padding is 0 or more, the others 1 or more")
    extent = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if extent < 1:
        raise ShapeError(f"a window of {kernel} (dilation {dilation}) does not fit into {size} + 2 x {padding}")
    return extent


def _windows(shape: Shape, kernel: Pair, attrs: Attrs) -> dict[str, int]:
    stride, padding, dilation = (_pair(attrs[name]) for name in ("stride", "padding", "dilation"))
    return {
        name: output_extent(shape[2 + i], kernel[i], stride[i], padding[i], dilation[i])
        for i, name in enumerate(("h'", "w'"))
    }


def _conv_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    groups = cast(int, attrs["groups"])
    if len(shapes[0]) != 4 or len(shapes[1]) != 4:
        raise ShapeError(f"conv2d takes [n, c, h, w] and [c', c, kh, kw], not {shapes[0]} and {shapes[1]}")
    extents = {"g": groups, **_windows(shapes[0], (shapes[1][2], shapes[1][3]), attrs)}
    return "n (g ci) h* w*, (g co) ci kh* kw* -> n (g co) h'* w'*", extents


def _conv_flops(loops: Loops) -> float:
    """Two per multiply-add of every (output point, kernel point)."""
    e = loops.extents
    return 2.0 * e["n"] * e["g"] * e["co"] * e["ci"] * e["kh"] * e["kw"] * e["h'"] * e["w'"]


def _conv2d(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """A product per kernel point, summed: exact in any field."""
    x, w = operands
    e = call.loops.extents
    total = None
    for i in range(e["kh"]):
        for j in range(e["kw"]):
            patch = _shifted(t, x, i, j, call, 0.0)
            n, _, h, v = patch.shape[-4:]
            patch = t.reshape(patch, (n, e["g"], e["ci"], h, v))
            tap = t.slice(t.slice(w, 2, i, i + 1), 3, j, j + 1)
            tap = t.reshape(tap, (e["g"], e["co"], e["ci"]))
            term = t.einsum("ngchw,goc->ngohw", patch, tap)
            total = term if total is None else t.add(total, term)
    return t.reshape(total, call.loops.result_shape)


def _shifted(t: Tape, x: Any, i: int, j: int, call: Call, fill: float) -> Any:
    """[n, c, h', w']: the element of each window under kernel point (i, j)."""
    attrs, e = call.attrs, call.loops.extents
    for dim, at, name in ((2, i, "h'"), (3, j, "w'")):
        stride, padding, dilation = (_pair(attrs[key])[dim - 2] for key in ("stride", "padding", "dilation"))
        x = _strided(t, x, dim, at * dilation - padding, stride, e[name], fill)
    return x


def _strided(t: Tape, x: Any, dim: int, start: int, step: int, count: int, fill: float) -> Any:
    """Elements start, start + step, … of one dim, ``fill`` where that is outside."""
    size = x.shape[dim + 1]
    pieces = []
    for index in range(start, start + step * count, step):
        if 0 <= index < size:
            pieces.append(t.slice(x, dim, index, index + 1))
        else:
            shape = [extent if d != dim else 1 for d, extent in enumerate(x.shape[1:])]
            pieces.append(t.constant(fill, shape))
    return t.concat(pieces, dim)


conv2d = Operator(
    "conv2d",
    _conv_loops,
    "stencil",
    emit="F.conv2d({0}, {1}, None, {stride}, {padding}, {dilation}, {groups})",
    attrs=("stride", "padding", "dilation", "groups"),
    defaults={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1},
    linear=(frozenset({0}), frozenset({1})),
    flops=_conv_flops,
    saved=(0, 1),
    evaluate=_conv2d,
)


def _pool_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    if len(shapes[0]) != 4:
        raise ShapeError(f"pooling takes [n, c, h, w], not {shapes[0]}")
    return "n c h* w* -> n c h'* w'*", _windows(shapes[0], _pair(attrs["kernel"]), attrs)


def _pool_flops(loops: Loops) -> float:
    """One per element read or written; a window's points are in cache, and no device is slow enough to notice them."""
    return float(loops.size_of(loops.operands[0]) + loops.size_of(loops.result))


def _max_pool2d(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    return _row_of_window(t, operands[0], call, "max", float("-inf"))


def _avg_pool2d(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    kernel = _pair(call.attrs["kernel"])
    taps = [_shifted(t, operands[0], i, j, call, 0.0) for i, j in np.ndindex(*kernel)]
    total = taps[0]
    for tap in taps[1:]:
        total = t.add(total, tap)
    return t.scale(total, 1.0 / (kernel[0] * kernel[1]))


def _row_of_window(t: Tape, x: Any, call: Call, name: str, fill: float) -> Any:
    taps = [_shifted(t, x, i, j, call, fill) for i, j in np.ndindex(*_pair(call.attrs["kernel"]))]
    stacked = t.concat([t.reshape(tap, (*tap.shape[1:], 1)) for tap in taps], 4)
    return t.reshape(t.row_reduce(name, stacked), call.loops.result_shape)


def _pool(name: str, emit: str, evaluate: Any, saved: tuple[int | str, ...], linear: Any = ()) -> Operator:
    return Operator(
        name,
        _pool_loops,
        "stencil",
        emit=emit,
        attrs=("kernel", "stride", "padding", "dilation"),
        defaults={"padding": (0, 0), "dilation": (1, 1)},
        linear=linear,
        flops=_pool_flops,
        backward_factor=1,
        saved=saved,
        evaluate=evaluate,
    )


max_pool2d = _pool(
    "max_pool2d", "F.max_pool2d({0}, {kernel}, {stride}, {padding}, {dilation})", _max_pool2d, (0, "out")
)
# windows count their padding, as F.avg_pool2d(count_include_pad=True) does; it takes no dilation
avg_pool2d = _pool("avg_pool2d", "F.avg_pool2d({0}, {kernel}, {stride}, {padding})", _avg_pool2d, (), (frozenset({0}),))

OPS = (conv2d, max_pool2d, avg_pool2d)
