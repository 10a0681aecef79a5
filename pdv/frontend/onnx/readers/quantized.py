"""What ONNX's quantization becomes: scaled, rounded to integers, held to their range; and products of such integers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.readers import windows
from pdv.frontend.onnx.schema import dtype_of


def quantize(c: Call) -> Node:
    """Rounded to even, in the type of the zero point."""
    c.attrs.get("saturate")  # of floats of eight bits, which are no types here
    k, x, scale, zero = c.k, c[0], c[1], c.get(2)
    number = c.attrs.get("output_dtype", 0)
    dtype = zero.type.dtype if zero is not None else dtype_of(number) if number else DType.U8
    if number and dtype is not dtype_of(number):
        raise ValueError(f"output_dtype {number}, and a zero point of {dtype.value}")
    if dtype.is_floating or dtype is DType.BOOL:
        raise Unsupported(f"quantized to {dtype.value}")
    precision = c.attrs.get("precision", 0)
    working = dtype_of(precision) if precision else scale.type.dtype
    x = k.cast(x, working)
    if not working.is_floating:
        raise Unsupported(f"a scale of {working.value}")
    return _quantized(k, x, _along(c, x, k.cast(scale, working)), None if zero is None else _along(c, x, zero), dtype)


def _quantized(k: Lowering, x: Node, scale: Node, zero: Node | None, dtype: DType) -> Node:
    y = k.apply("round", k.div(x, scale))
    if zero is not None:
        y = k.add(y, k.cast(zero, y.type.dtype))
    info = np.iinfo(dtype.torch_name)
    return k.cast(masks.clamp(k, y, float(info.min), float(info.max)), dtype)


def dequantize(c: Call) -> Node:
    """In the type of the scale, or as it says."""
    k, x, scale, zero = c.k, c[0], c[1], c.get(2)
    number = c.attrs.get("output_dtype", 0)
    return _dequantized(
        k,
        x,
        _along(c, x, scale),
        None if zero is None else _along(c, x, zero),
        dtype_of(number) if number else scale.type.dtype,
    )


def _dequantized(k: Lowering, x: Node, scale: Node, zero: Node | None, dtype: DType) -> Node:
    wide = DType.F32 if scale.type.dtype.is_half else scale.type.dtype
    y = k.cast(x, wide)
    if zero is not None:
        y = k.sub(y, k.cast(zero, wide))
    return k.cast(k.mul(y, k.cast(scale, wide)), dtype)


def _along(c: Call, x: Node, given: Node) -> Node:
    """A scale or zero point as x is broadcast with it: one for all, one for each place of a dim, or one for a block."""
    k, size, rank = c.k, c.attrs.get("block_size", 0), x.type.rank
    axis = c.attrs.get("axis", 1)
    if given.type.num_elements == 1:
        return k.reshape(given, (1,) * rank)
    axis = c.dim(axis)
    if size:
        shape = given.type.shape
        wide = k.reshape(given, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
        wide = k.expand(wide, (*shape[: axis + 1], size, *shape[axis + 1 :]))
        joined = k.reshape(wide, (*shape[:axis], shape[axis] * size, *shape[axis + 1 :]))
        return k.slice(joined, axis, 0, x.type.shape[axis])
    return k.reshape(given, [n if dim == axis else 1 for dim, n in enumerate(x.type.shape)])


def _line(k: Lowering, given: Node, rank: int, dim: int) -> Node:
    """One number for all, or one for each place of a dim."""
    if given.type.num_elements == 1:
        return k.reshape(given, (1,) * rank)
    if given.type.rank > 1:
        return given
    return k.reshape(given, [-1 if at == dim else 1 for at in range(rank)])


def product(c: Call) -> Node:
    """A product of quantized matrices: of what they stand for, quantized again."""
    k, a, b = c.k, c[0], c[3]
    of_a = _dequantized(
        k, a, _line(k, c[1], a.type.rank, a.type.rank - 2), _line(k, c[2], a.type.rank, a.type.rank - 2), DType.F32
    )
    of_b = _dequantized(
        k, b, _line(k, c[4], b.type.rank, b.type.rank - 1), _line(k, c[5], b.type.rank, b.type.rank - 1), DType.F32
    )
    y = layers.matmul(k, of_a, of_b)
    rank = y.type.rank
    scale, zero = (_line(k, c[i], rank, rank - 2) for i in (6, 7))
    return _quantized(k, y, k.cast(scale, DType.F32), zero, c[7].type.dtype)


def integer_product(c: Call) -> Node:
    """A product of integers less their zero points, in int32; computed in floats of 64 bits, which hold its sums."""
    k, a, b = c.k, c[0], c[1]
    x, y = _less(k, a, c.get(2), a.type.rank - 2), _less(k, b, c.get(3), b.type.rank - 1)
    return k.cast(layers.matmul(k, x, y), DType.I32)


def _less(k: Lowering, x: Node, zero: Node | None, dim: int) -> Node:
    wide = k.cast(x, DType.F64)
    return wide if zero is None else k.sub(wide, k.cast(_line(k, zero, x.type.rank, dim), DType.F64))


def integer_conv(c: Call) -> Node:
    """A convolution of integers less their zero points, in int32."""
    k, x, w = c.k, c[0], c[1]
    kernel = w.type.shape[2:]
    if tuple(c.attrs.get("kernel_shape", kernel)) != kernel:
        raise ValueError(f"kernel_shape {c.attrs['kernel_shape']} of weights {list(w.type.shape)}")
    over = windows.window(c, kernel)
    y = windows.convolved(k, _less(k, x, c.get(2), 1), _less(k, w, c.get(3), 0), None, over, c.attrs.get("group", 1))
    return k.cast(y, DType.I32)


def quantized_conv(c: Call) -> Node:
    """A convolution of what quantized operands stand for, quantized again."""
    k, x, w, bias = c.k, c[0], c[3], c.get(8)
    kernel = w.type.shape[2:]
    if tuple(c.attrs.get("kernel_shape", kernel)) != kernel:
        raise ValueError(f"kernel_shape {c.attrs['kernel_shape']} of weights {list(w.type.shape)}")
    of_x = _dequantized(k, x, _line(k, c[1], x.type.rank, 1), _line(k, c[2], x.type.rank, 1), DType.F32)
    of_w = _dequantized(k, w, _line(k, c[4], w.type.rank, 0), _line(k, c[5], w.type.rank, 0), DType.F32)
    if bias is not None:  # in steps of both scales
        bias = k.mul(k.cast(bias, DType.F32), k.mul(k.reshape(c[1], (1,)), k.reshape(c[4], (-1,))))
    y = windows.convolved(k, of_x, of_w, bias, windows.window(c, kernel), c.attrs.get("group", 1))
    return _quantized(k, y, _line(k, c[6], y.type.rank, 1), _line(k, c[7], y.type.rank, 1), c[7].type.dtype)


READERS: Mapping[str, Handler] = {
    "QuantizeLinear": quantize,
    "DequantizeLinear": dequantize,
    "QLinearMatMul": product,
    "MatMulInteger": integer_product,
    "ConvInteger": integer_conv,
    "QLinearConv": quantized_conv,
}
