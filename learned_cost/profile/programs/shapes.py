"""Random local shapes of each operator, log-uniform over what models use. Entry point: ``sample_piece``.

Most sizes are multiples of a power of two, as models have them; some are not, as uneven cuts leave them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping

from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType, TensorType
from learned_cost.profile.programs.library import can_call
from learned_cost.profile.programs.pieces import Piece

Types = tuple[TensorType, ...]
Drawn = tuple[Types, Mapping[str, Hashable]]
"""Operands, and the attributes that are drawn with them."""
Maker = Callable[[Operator, random.Random, DType], Drawn]
HEAD_SIZES = (32, 64, 80, 96, 128)
VOCABULARY = 1 << 26  # elements of an embedding's table, at most
# Attributes that are not drawn.
TYPICAL: Mapping[str, Hashable] = {
    "eps": 1e-5, "dim": -1, "approximate": "tanh", "factor": 0.125, "offset_by": 0.5, "exponent": 2.0, "k": 2,
    "points": 64, "dilation": (1, 1), "groups": 1, "minimum": -1.0, "maximum": 1.0, "padding_idx": 0, "number": 41.0,
}  # fmt: skip


def _size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform from low to high."""
    value = low * math.exp(rng.random() * math.log(high / low))
    grain = rng.choice((1, 8, 16, 64, 128))
    return max(low, min(high, round(value / grain) * grain or round(value)))


def _rows(rng: random.Random, dtype: DType) -> TensorType:
    """[m, n] of up to 2^24 elements."""
    n = _size(rng, 8, 16384)
    return TensorType((_size(rng, 1, max(2, min(65536, (1 << 24) // n))), n), dtype)


def _dense(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    m, n, k = _size(rng, 1, 8192), _size(rng, 8, 16384), _size(rng, 8, 8192)
    return (TensorType((m, k), dtype), TensorType((n, k), dtype)), {}


def _batch(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    b, m, n, k = _size(rng, 2, 256), _size(rng, 1, 2048), _size(rng, 8, 2048), _size(rng, 8, 1024)
    return (TensorType((b, m, k), dtype), TensorType((b, k, n), dtype)), {}


def _attention(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    e, s = rng.choice(HEAD_SIZES), _size(rng, 16, 4096)
    head = TensorType((_size(rng, 1, 32), _size(rng, 1, 32), s, e), dtype)
    return (head,) * 3, {"causal": rng.random() < 0.6, "scale": e**-0.5}


def _convolution(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    size, side, stride = rng.choice((1, 1, 3, 3, 3, 5, 7)), _size(rng, 7, 224), rng.choice((1, 1, 2))
    channels = _size(rng, 3, 1024)
    image = TensorType((_size(rng, 1, 64), channels, side, side), dtype)
    weight = TensorType((_size(rng, 8, 1024), channels, size, size), dtype)
    return (image, weight), {"stride": (stride,) * 2, "padding": (size // 2,) * 2}


def _pool(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    size, side = rng.choice((2, 3)), _size(rng, 7, 112)
    image = TensorType((_size(rng, 1, 32), _size(rng, 8, 512), side, side), dtype)
    return (image,), {"kernel": (size, size), "stride": (2, 2), "padding": (size // 2,) * 2}


def _norm(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    """Rows, and the weight and bias (if it takes one) of their elements."""
    x = _rows(rng, dtype)
    vectors = 2 if callable(op.loops) else op.loops.count(",")
    return (x, *(TensorType(x.shape[-1:], dtype),) * vectors), {}


def _channel_norm(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    channels, side = _size(rng, 8, 1024), _size(rng, 7, 112)
    image = TensorType((_size(rng, 1, 32), channels, side, side), dtype)
    return (image, *(TensorType((channels,), dtype),) * 4), {}


def _alone(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    attrs = {"dtype": (DType.BF16 if dtype is DType.F32 else DType.F32).value} if op.names_dtype else {}
    return (_rows(rng, dtype),), attrs


def _pair(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    x = _rows(rng, dtype)
    return (x, x if rng.random() < 0.75 else TensorType(x.shape[-1:], dtype)), {}


def _choice(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    x = _rows(rng, dtype)
    return (TensorType(x.shape, DType.BOOL), x, x), {}


def _reduction(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    dim = rng.choice((0, 1))
    attrs = {op.dims_attr: (dim,) if op.dims_attr == "dims" else dim, "keepdim": rng.random() < 0.5}
    return (_rows(rng, dtype),), attrs


def _lookup(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    n = _size(rng, 32, 8192)
    table = TensorType((_size(rng, 128, max(256, min(131072, VOCABULARY // n))), n), dtype)
    return (table, TensorType((_size(rng, 1, 16384),), DType.I64)), {}


def _join(op: Operator, rng: random.Random, dtype: DType) -> Drawn:
    return (_rows(rng, dtype),) * 2, {"dim": rng.choice((0, 1))}


def _maker(op: Operator) -> Maker | None:
    """Who draws shapes of an operator, by what it declares; None if nobody does.

    Rows of profiles are of floating types, so nobody draws comparisons and functions of truth values; nor what is no
    call.
    """
    if op.differentiable == () or not can_call(op):
        return None
    found: Mapping[Maker, bool] = {
        _dense: op.is_dense,
        _batch: op.kind == "contraction",
        _attention: op.has_scores,
        _convolution: op.kind == "stencil" and op.bias_rank > 0,
        _pool: op.kind == "stencil",
        _lookup: op.looks_up_rows,
        _join: op.joins,
        _norm: op.is_row_norm,
        _reduction: op.kind == "row" and bool(op.dims_attr),
        _channel_norm: op.kind == "map" and callable(op.loops),
        _alone: op.loops == "... -> ..." if op.kind == "map" else op.kind == "row" and "out" in op.saved,
        _pair: op.loops == "..., ... -> ...",
        _choice: op.broadcasts,
    }
    return next((maker for maker, fits in found.items() if fits), None)


def is_sampled(op: str) -> bool:
    """Whether shapes of an operator are drawn."""
    return _maker(OPERATORS[op]) is not None


def sample_piece(name: str, seed: int, dtypes: tuple[DType, ...]) -> Piece:
    """The piece of a seed: the same in every run."""
    op, rng = OPERATORS[name], random.Random(f"{name} {seed}")
    maker = _maker(op)
    assert maker is not None, f"no shapes of {name} are drawn"
    types, drawn = maker(op, rng, rng.choice(dtypes))
    given = {**op.defaults, **TYPICAL, **drawn}
    missing = set(op.attrs) - set(given)
    assert not missing, f"{missing} of {name} are neither drawn nor in TYPICAL"
    return Piece(
        name,
        types,
        tuple((attr, given[attr]) for attr in op.attrs),
        tuple(t.dtype.is_floating and op.differentiates(place) for place, t in enumerate(types)),
    )
