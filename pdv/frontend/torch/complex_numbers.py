"""Complex tensors of a torch program, as real ones with a last dim of two: rotary embeddings, Fourier transforms.

Programs have no complex elements; what becomes of such between real tensors is said here. Entry points: ``of_complex``,
``is_complex``, ``check_real``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ir.errors import ModelError
from ir.graph import Node
from ir.types import DType
from pdv.frontend import kinks, layers, masks
from pdv.frontend.linear_maps import applied, fourier_matrix
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.torch.more import constant_pad, roll

_DTYPES = {torch.complex64: DType.F32, torch.complex128: DType.F64}


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor: real and imaginary ``parts`` [..., 2]."""

    parts: Node

    @property
    def rank(self) -> int:
        """Its dims."""
        return self.parts.type.rank - 1


def is_complex(node: torch.fx.Node) -> bool:
    """Whether a node gives complex numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def check_real(node: torch.fx.Node, name: str) -> None:
    """What a program is given, or stores.

    Raises:
        ModelError: if it is complex.
    """
    if is_complex(node):
        raise ModelError(
            f"{name} is complex",
            "Inputs, parameters and buffers of real numbers",
            "Keep it real, with a last dim of two, and compute with torch.view_as_complex of it",
        )


def of_complex(
    k: Lowering, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Node | Complex:  # Any: an operator of torch; nodes, complex tensors, numbers, lists of them
    """What an operator gives, of which operands or the result are complex.

    Raises:
        Unsupported: if it is not one of those that are known.
    """
    handler = HANDLERS.get(str(target))
    if handler is None:
        raise Unsupported("of complex numbers")
    return handler(k, *args, **kwargs)


def _pair(k: Lowering, real: Node, imaginary: Node) -> Complex:
    real, imaginary = k.alike(real, imaginary)
    shape = np.broadcast_shapes(real.type.shape, imaginary.type.shape)
    return Complex(k.concat([k.reshape(k.broadcast(x, shape), (*shape, 1)) for x in (real, imaginary)], -1))


def _parts(k: Lowering, x: Any, dtype: DType) -> tuple[Node, Node]:  # Any: a complex or real tensor, or a number
    """Real and imaginary part; of what is real, in ``dtype``, and zero."""
    if isinstance(x, Complex):
        return k.select(x.parts, -1, 0), k.select(x.parts, -1, 1)
    if isinstance(x, Node):
        return k.cast(x, dtype), masks.fill(k, 0, (1,) * x.type.rank, dtype)
    kind = np.float64 if dtype is DType.F64 else np.float32
    real, imaginary = (k.const(np.asarray(part, kind), dtype) for part in (complex(x).real, complex(x).imag))
    return real, imaginary


def _type_of(k: Lowering, *values: Any) -> DType:  # Any: complex or real tensors, numbers
    """The type of the parts of what torch computes of them."""
    found = [x.parts if isinstance(x, Complex) else x for x in values if isinstance(x, Complex | Node)]
    floats = [x for x in found if x.type.dtype.is_floating]
    dtype = k.promote(*floats) if floats else DType.F32
    return DType.F32 if dtype is DType.BF16 else dtype


def _both_parts(k: Lowering, *values: Any) -> list[tuple[Node, Node]]:  # Any: complex or real tensors, numbers
    return [_parts(k, x, _type_of(k, *values)) for x in values]


def _to_copy(k: Lowering, x: Node | Complex, *, dtype: Any = None, **placement: Any) -> Complex:  # Any: torch types
    if dtype not in (None, *_DTYPES):
        raise Unsupported("complex numbers made real")
    if isinstance(x, Complex):
        return x if dtype is None else Complex(k.cast(x.parts, _DTYPES[dtype]))
    return _pair(k, *_parts(k, x, _DTYPES[dtype]))


def _mul(k: Lowering, x: Any, y: Any) -> Complex:  # Any: complex or real tensors, numbers
    if not isinstance(x, Complex):
        x, y = y, x
    if isinstance(x, Complex) and isinstance(y, int | float):
        return Complex(k.scale(x.parts, y))
    if isinstance(x, Complex) and isinstance(y, Node):
        return Complex(k.mul(*k.alike(x.parts, k.reshape(y, (*y.type.shape, 1)))))
    (a, b), (c, d) = _both_parts(k, x, y)
    return _pair(k, k.sub(k.mul(a, c), k.mul(b, d)), k.add(k.mul(a, d), k.mul(b, c)))


def _sum(sign: int) -> Callable[..., Complex]:
    def handle(k: Lowering, x: Any, y: Any, *, alpha: complex = 1) -> Complex:  # Any: tensors, numbers
        (a, b), (c, d) = _both_parts(k, x, y if alpha == 1 else _mul(k, y, alpha))
        return _pair(k, k.add(a, k.scale(c, sign)), k.add(b, k.scale(d, sign)))

    return handle


def _quotient(k: Lowering, x: Any, y: Any) -> Complex:  # Any: complex or real tensors, numbers
    """x / y: by a complex tensor a product with its conjugate, both over its larger part: squares stay finite."""
    if isinstance(y, int | float | complex):
        if y == 0:
            raise Unsupported("a complex number over zero")
        return _mul(k, x, 1 / y)
    if isinstance(y, Node):
        return _mul(k, x, k.apply("reciprocal", k.cast(y, _type_of(k, x, y))))
    ((c, d),) = _both_parts(k, y)
    largest = kinks.extreme(k, ">", *(k.apply("detach", k.apply("abs", part)) for part in (c, d)))
    c, d = k.div(c, largest), k.div(d, largest)
    over = k.mul(k.add(k.mul(c, c), k.mul(d, d)), largest)
    return _mul(k, x, _pair(k, k.div(c, over), k.scale(k.div(d, over), -1)))


def _exponential(k: Lowering, x: Complex) -> Complex:
    ((a, b),) = _both_parts(k, x)
    size = k.apply("exp", a)
    return _pair(k, k.mul(size, k.apply("cos", b)), k.mul(size, k.apply("sin", b)))


def _matmul(k: Lowering, x: Node | Complex, y: Node | Complex) -> Complex:
    if isinstance(x, Node) and isinstance(y, Complex):
        return _pair(k, *(layers.matmul(k, *k.alike(x, part)) for part in _parts(k, y, _type_of(k, y))))
    if isinstance(x, Complex) and isinstance(y, Node):
        return _pair(k, *(layers.matmul(k, *k.alike(part, y)) for part in _parts(k, x, _type_of(k, x))))
    (a, b), (c, d) = _both_parts(k, x, y)
    ac, bd, ad, bc = (layers.matmul(k, *k.alike(*both)) for both in ((a, c), (b, d), (a, d), (b, c)))
    return _pair(k, k.sub(ac, bd), k.add(ad, bc))


def _joined(k: Lowering, values: Sequence[Any], dim: int = 0) -> Complex:  # Any: complex or real tensors
    if not all(isinstance(x, Complex) for x in values):
        raise Unsupported("complex numbers joined with real ones")
    return Complex(k.concat(k.alike(*(x.parts for x in values)), dim % values[0].rank))


def _put(k: Lowering, x: Any, piece: Any, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Complex:
    """x with a piece of it overwritten."""
    if not (isinstance(x, Complex) and isinstance(piece, Complex)):
        raise Unsupported("complex numbers among real ones")
    dim %= x.rank
    ends = 0 if start is None else start, x.parts.type.shape[dim] if stop is None else stop
    return Complex(masks.put_slice(k, x.parts, piece.parts, dim, *ends, step))


def _copy(k: Lowering, x: Node | Complex, piece: Node | Complex, non_blocking: bool = False) -> Complex:
    """A piece, expanded to all of x."""
    if not isinstance(x, Complex):
        raise Unsupported("complex numbers made real")
    dtype, shape = x.parts.type.dtype, x.parts.type.shape
    found = piece if isinstance(piece, Complex) else _pair(k, *_parts(k, piece, dtype))
    return Complex(k.expand(k.cast(found.parts, dtype), shape))


def _zeros(k: Lowering, x: Any, *, dtype: Any = None, **placement: Any) -> Complex:  # Any: torch types
    if not isinstance(x, Complex) or dtype not in (None, *_DTYPES):
        raise Unsupported("complex numbers made real")
    return Complex(masks.fill(k, 0, x.parts.type.shape, x.parts.type.dtype if dtype is None else _DTYPES[dtype]))


def _conjugate(k: Lowering, x: Complex) -> Complex:
    return Complex(k.mul(x.parts, k.const(np.array([1, -1], np.float32), x.parts.type.dtype)))


def _absolute(k: Lowering, x: Complex) -> Node:
    return kinks.root(k, k.reduce("reduce_sum", k.mul(x.parts, x.parts), (-1,), False))


def _moved(op: Callable[[Lowering, Node, Any], Node]) -> Callable[..., Complex]:  # Any: dims or a shape, rewritten
    """A move of elements, its dims and shape as they are with the last dim of two."""
    return lambda k, x, given, **flags: Complex(op(k, x.parts, given))


def _behind(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    return (*(dim % rank for dim in dims), rank)


def _slice(k: Lowering, x: Complex, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Complex:
    size = x.parts.type.shape[dim % x.rank]
    ends = 0 if start is None else start, size if stop is None else stop
    return Complex(k.slice(x.parts, dim % x.rank, *ends, step))


def _rolled(k: Lowering, x: Complex, shifts: Sequence[int], dims: Sequence[int] = ()) -> Complex:
    """Dims turned round, or all elements in their order: what ``fftshift`` does."""
    if dims:
        return Complex(roll(k, x.parts, shifts, [dim % x.rank for dim in dims]))
    return Complex(k.reshape(roll(k, k.reshape(x.parts, (-1, 2)), shifts, (0,)), x.parts.type.shape))


def _padded(k: Lowering, x: Complex, widths: Sequence[int], mode: str = "constant", value: Any = None) -> Complex:
    """With zeros around."""
    if mode != "constant" or value:
        raise Unsupported("complex numbers padded by others than zeros")
    return Complex(constant_pad(k, x.parts, (0, 0, *widths)))


def _unsqueeze(k: Lowering, x: Complex, dim: int) -> Complex:
    at, shape = dim % (x.rank + 1), x.parts.type.shape
    return Complex(k.reshape(x.parts, (*shape[:at], 1, *shape[at:])))


def _transform(k: Lowering, x: Node | Complex, dims: Sequence[int], norm: int, flag: bool, *, real: bool) -> Complex:
    """torch's ``_fft_c2c``, of which ``flag`` is whether it goes forward, and ``_fft_r2c``: whether it is one-sided."""
    value = x.parts if isinstance(x, Complex) else k.reshape(x, (*x.type.shape, 1))
    rank, inverse = value.type.rank - 1, not (real or flag)
    sizes = [value.type.shape[dim] for dim in dims]
    for number, dim in enumerate(reversed([dim % rank for dim in dims])):
        size, parts = value.type.shape[dim], value.type.shape[-1]
        matrix = fourier_matrix(size, size, parts, inverse=inverse, one_sided=real and flag and not number)
        value = applied(k, value, [dim, rank], matrix, [matrix.shape[0] // 2, 2])
    whole = math.prod(sizes)
    return Complex(k.scale(value, (whole if inverse else 1) * {0: 1.0, 1: whole**-0.5, 2: 1 / whole}[norm]))


def _to_real(k: Lowering, x: Complex, dims: Sequence[int], norm: int, size: int) -> Node:
    """torch's ``_fft_c2r``: inverse, of which the last dim has the frequencies from zero on, and is real behind."""
    whole = math.prod([x.parts.type.shape[dim] for dim in dims[:-1]]) * size
    if len(dims) > 1:
        x = _transform(k, x, dims[:-1], 0, False, real=False)
    at, count = dims[-1] % x.rank, x.parts.type.shape[dims[-1] % x.rank]
    units = np.eye(2 * count).reshape(2 * count, count, 2) @ np.array([1, 1j])
    matrix = np.fft.irfft(units, size, axis=-1).T * size  # [elements, frequencies and parts]
    found = applied(k, x.parts, [at, x.rank], matrix, [size, 1])
    real = k.reshape(found, found.type.shape[:-1])
    return k.scale(real, {0: 1.0, 1: whole**-0.5, 2: 1 / whole}[norm])


HANDLERS: Mapping[str, Callable[..., Node | Complex]] = {
    "aten._to_copy.default": _to_copy,
    "aten.view_as_complex.default": lambda k, x: Complex(x),
    "aten.view_as_real.default": lambda k, x: x.parts,
    "aten.real.default": lambda k, x: k.select(x.parts, -1, 0),
    "aten.imag.default": lambda k, x: k.select(x.parts, -1, 1),
    "aten.complex.default": _pair,
    "aten.polar.default": lambda k, size, angle: _pair(
        k, k.mul(size, k.apply("cos", angle)), k.mul(size, k.apply("sin", angle))
    ),
    "aten.mul.Tensor": _mul,
    "aten.add.Tensor": _sum(1),
    "aten.sub.Tensor": _sum(-1),
    "aten.rsub.Scalar": lambda k, x, y: _sum(-1)(k, y, x),
    "aten.div.Tensor": _quotient,
    "aten.reciprocal.default": lambda k, x: _quotient(k, 1, x),
    "aten.neg.default": lambda k, x: Complex(k.scale(x.parts, -1)),
    "aten.exp.default": _exponential,
    "aten.zeros_like.default": _zeros,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.cat.default": _joined,
    "aten.slice_scatter.default": _put,
    "aten.copy.default": _copy,
    "aten._conj.default": _conjugate,
    "aten.conj_physical.default": _conjugate,
    "aten._conj_physical.default": _conjugate,
    "aten.abs.default": _absolute,
    "aten.clone.default": lambda k, x, **layout: x,
    "aten.alias.default": lambda k, x: x,
    "aten.view.default": _moved(lambda k, x, shape: k.reshape(x, (*shape, 2))),
    "aten.reshape.default": _moved(lambda k, x, shape: k.reshape(x, (*shape, 2))),
    "aten._unsafe_view.default": _moved(lambda k, x, shape: k.reshape(x, (*shape, 2))),
    "aten.expand.default": _moved(lambda k, x, shape: k.expand(x, (*shape, 2))),
    "aten.permute.default": _moved(lambda k, x, dims: k.permute(x, _behind(x.type.rank - 1, dims))),
    "aten.transpose.int": lambda k, x, i, j: Complex(k.transpose(x.parts, i % x.rank, j % x.rank)),
    "aten.roll.default": _rolled,
    "aten.slice.Tensor": _slice,
    "aten.pad.default": _padded,
    "aten.constant_pad_nd.default": lambda k, x, widths, value=0: _padded(k, x, widths, value=value),
    "aten.unsqueeze.default": _unsqueeze,
    "aten.select.int": lambda k, x, dim, at: Complex(k.select(x.parts, dim % x.rank, at)),
    "aten.index_select.default": lambda k, x, dim, ids: Complex(
        k.apply("index_select", x.parts, ids, dim=dim % x.rank)
    ),
    "aten._fft_c2c.default": partial(_transform, real=False),
    "aten._fft_r2c.default": partial(_transform, real=True),
    "aten._fft_c2r.default": _to_real,
}
