"""Windows over space: convolution and pooling. Space is not cut (a cut needs a halo); batch and channels are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from ir.dims import Loops, Shape
from ir.emission.code import Code, call
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.evaluation.einsum import Data
from ir.graph import Node
from ir.memory.layout import Memory
from ir.memory.local import INDEX_BYTES
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops as Atoms
from ir.scaling.ties import Ties, where
from ir.tape import Call, Known, Pair, Tape


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


def _tie_windows(node: Node, loops: Atoms, ties: Ties) -> None:
    """Kernels stay; the number of windows follows from space, which is no open size."""
    kernel = node.attr("kernel") if "kernel" in node.attrs else node.operands[1].type.shape[2:]
    moving = ("h", "w", "h'", "w'", "kh", "kw", "g") if ties.are_open else ("kh", "kw")
    for loop in moving:
        ties.keep(loops.get(loop, ()), f"{where(node)} moves windows over it")
    for i, (space, windows) in enumerate((("h", "h'"), ("w", "w'"))):
        span = (kernel[i], *(node.attr(name)[i] for name in ("stride", "padding", "dilation")))
        if node.loops.extents[windows] == 1:
            ties.keep(loops[space], f"{where(node)} has one window")
        elif not ties.are_open:
            ties.follow(loops[windows], [loops[space]], partial(_count, span), where(node))


def _count(span: tuple[int, int, int, int], size: int) -> int:
    """Windows that fit into ``size``; none if it is too small."""
    try:
        return output_extent(size, *span)
    except ShapeError:
        return 0


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
    x, w = operands
    e = call.loops.extents
    seen = _see_windows(t, x, call, (e["kh"], e["kw"]), 0.0)
    n = seen.shape[1]
    seen = t.reshape(seen, (n, e["g"], e["ci"], e["kh"], e["kw"], e["h'"], e["w'"]))
    kernels = t.reshape(w, (e["g"], e["co"], e["ci"], e["kh"], e["kw"]))
    return t.reshape(t.einsum("ngcijhw,gocij->ngohw", seen, kernels), call.loops.result_shape)


def _see_windows(t: Tape, x: Any, call: Call, kernel: Pair, fill: float) -> Any:
    """[n, c, h, w] -> [n, c, kh, kw, h', w']: what each window sees, ``fill`` outside."""
    for dim, padding in zip((2, 3), _pair(call.attrs["padding"]), strict=True):
        if padding:
            shape = [extent if d != dim else padding for d, extent in enumerate(x.shape[1:])]
            x = t.concat([t.constant(fill, shape), x, t.constant(fill, shape)], dim)
    counts = (call.loops.extents["h'"], call.loops.extents["w'"])
    return t.windows(x, kernel, _pair(call.attrs["stride"]), _pair(call.attrs["dilation"]), counts)


def _write_conv(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    options = _options(node, ("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))
    groups = node.attr("groups")
    if groups != 1:
        options.append("groups=" + "".join([str(groups), *(f" // {axis}.size" for axis in writing.cutting(node, "g"))]))
    return call("F.conv2d", *x, *([writing.bias] if writing.bias else []), *options)


def _options(node: Node, *defaults: tuple[str, tuple[int, int]]) -> list[str]:
    return [f"{name}={_text(node.attr(name))}" for name, default in defaults if node.attr(name) != default]


def _text(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else str(tuple(value))


conv2d = Operator(
    "conv2d",
    _conv_loops,
    "stencil",
    bias_rank=3,
    attrs=("stride", "padding", "dilation", "groups"),
    defaults={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1},
    linear=(frozenset({0}), frozenset({1})),
    flops=_conv_flops,
    saved=(0, 1),
    ties=_tie_windows,
    attrs_at=lambda node, x, shape, are_open: {"groups": x[0].type.shape[1] // x[1].type.shape[1]},
    evaluate=_conv2d,
    emit=_write_conv,
)


def _pool_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    if len(shapes[0]) != 4:
        raise ShapeError(f"pooling takes [n, c, h, w], not {shapes[0]}")
    return "n c h* w* -> n c h'* w'*", _windows(shapes[0], _pair(attrs["kernel"]), attrs)


def _pool_flops(loops: Loops) -> float:
    """One per element read or written; a window's points are in cache, and no device is slow enough to notice them."""
    return float(loops.size_of(loops.operands[0]) + loops.size_of(loops.result))


def _largest(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    """Of each row; equal elements leave the gradient to the first, as torch does."""
    first = np.arange(x.shape[-1]) == x.argmax(axis=-1)[..., None]
    return x.max(axis=-1, keepdims=True), lambda g: g * first


def _max_pool2d(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    kernel = _pair(call.attrs["kernel"])
    seen = t.transpose(_see_windows(t, operands[0], call, kernel, float("-inf")), (0, 1, 4, 5, 2, 3))
    rows = t.reshape(seen, (*seen.shape[1:5], math.prod(kernel)))
    return t.reshape(t.row_reduce(Known("max", _largest), rows), call.loops.result_shape)


def _avg_pool2d(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    kernel = _pair(call.attrs["kernel"])
    total = t.einsum("ncijhw->nchw", _see_windows(t, operands[0], call, kernel, 0.0))
    return t.scale(total, 1.0 / math.prod(kernel))


def _pool(name: str, evaluate: Any, **more: Any) -> Operator:
    return Operator(
        name,
        _pool_loops,
        "stencil",
        attrs=("kernel", "stride", "padding", "dilation"),
        defaults={"padding": (0, 0), "dilation": (1, 1)},
        flops=_pool_flops,
        backward_factor=1,
        ties=_tie_windows,
        evaluate=evaluate,
        **more,
    )


def _write_pool(head: str) -> Callable[[Node, Sequence[Code], Writing], Code]:
    def pool(node: Node, x: Sequence[Code], writing: Writing) -> Code:
        options = _options(node, ("padding", (0, 0)), ("dilation", (1, 1)))
        return call(head, x[0], _text(node.attr("kernel")), f"stride={_text(node.attr('stride'))}", *options)

    return pool


_INDICES = Memory(keeps=lambda local: float(local.result.elements * INDEX_BYTES), saved=(0,))
max_pool2d = _pool("max_pool2d", _max_pool2d, emit=_write_pool("F.max_pool2d"), saved=(0, "out"), memory=_INDICES)
# windows count their padding, as F.avg_pool2d(count_include_pad=True) does; it takes no dilation
avg_pool2d = _pool("avg_pool2d", _avg_pool2d, emit=_write_pool("F.avg_pool2d"), linear=(frozenset({0}),))

OPS = (conv2d, max_pool2d, avg_pool2d)
