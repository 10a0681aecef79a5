"""Random local shapes of each operator, log-uniform over what models use. Entry point: ``sampled``.

Most sizes are multiples of a power of two, as models have them; some are not, as uneven cuts leave them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from ir.types import DType, TensorType
from learned_cost.profile.programs.pieces import Piece

Maker = Callable[[random.Random, DType], Piece]
HEAD_SIZES = (32, 64, 80, 96, 128)
VOCABULARY = 1 << 26  # elements of an embedding's table, at most


def _size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform from low to high."""
    value = low * math.exp(rng.random() * math.log(high / low))
    grain = rng.choice((1, 8, 16, 64, 128))
    return max(low, min(high, round(value / grain) * grain or round(value)))


def _rows(rng: random.Random, dtype: DType) -> TensorType:
    """[m, n] of up to 2^24 elements."""
    n = _size(rng, 8, 16384)
    return TensorType((_size(rng, 1, max(2, min(65536, (1 << 24) // n))), n), dtype)


def _linear(rng: random.Random, dtype: DType) -> Piece:
    m, n, k = _size(rng, 1, 8192), _size(rng, 8, 16384), _size(rng, 8, 8192)
    return Piece("linear", (TensorType((m, k), dtype), TensorType((n, k), dtype)), (), (True, True))


def _matmul(rng: random.Random, dtype: DType) -> Piece:
    b, m, n, k = _size(rng, 2, 256), _size(rng, 1, 2048), _size(rng, 8, 2048), _size(rng, 8, 1024)
    return Piece("matmul", (TensorType((b, m, k), dtype), TensorType((b, k, n), dtype)), (), (True, True))


def _attention(rng: random.Random, dtype: DType) -> Piece:
    e, s = rng.choice(HEAD_SIZES), _size(rng, 16, 4096)
    head = TensorType((_size(rng, 1, 32), _size(rng, 1, 32), s, e), dtype)
    return Piece("attention", (head,) * 3, (("causal", rng.random() < 0.6), ("scale", e**-0.5)), (True,) * 3)


def _conv2d(rng: random.Random, dtype: DType) -> Piece:
    size, side, stride = rng.choice((1, 1, 3, 3, 3, 5, 7)), _size(rng, 7, 224), rng.choice((1, 1, 2))
    channels = _size(rng, 3, 1024)
    image = TensorType((_size(rng, 1, 64), channels, side, side), dtype)
    weight = TensorType((_size(rng, 8, 1024), channels, size, size), dtype)
    attrs = (("stride", (stride,) * 2), ("padding", (size // 2,) * 2), ("dilation", (1, 1)), ("groups", 1))
    return Piece("conv2d", (image, weight), attrs, (True, True))


def _pool(op: str) -> Maker:
    def make(rng: random.Random, dtype: DType) -> Piece:
        size, side = rng.choice((2, 3)), _size(rng, 7, 112)
        image = TensorType((_size(rng, 1, 32), _size(rng, 8, 512), side, side), dtype)
        attrs = (("kernel", (size, size)), ("stride", (2, 2)), ("padding", (size // 2,) * 2), ("dilation", (1, 1)))
        return Piece(op, (image,), attrs, (True,))

    return make


def _norm(op: str, vectors: int) -> Maker:
    def make(rng: random.Random, dtype: DType) -> Piece:
        x = _rows(rng, dtype)
        vector = TensorType(x.shape[-1:], dtype)
        return Piece(op, (x, *(vector,) * vectors), (("eps", 1e-5),), (True,) * (1 + vectors))

    return make


def _map(op: str, **attrs: str | float | int) -> Maker:
    return lambda rng, dtype: Piece(op, (_rows(rng, dtype),), tuple(attrs.items()), (True,))


def _binary(op: str) -> Maker:
    def make(rng: random.Random, dtype: DType) -> Piece:
        x = _rows(rng, dtype)
        other = x if rng.random() < 0.75 else TensorType(x.shape[-1:], dtype)
        return Piece(op, (x, other), (), (True, True))

    return make


def _reduce(op: str) -> Maker:
    def make(rng: random.Random, dtype: DType) -> Piece:
        attrs = (("dims", (rng.choice((0, 1)),)), ("keepdim", rng.random() < 0.5))
        return Piece(op, (_rows(rng, dtype),), attrs, (True,))

    return make


def _embedding(rng: random.Random, dtype: DType) -> Piece:
    n = _size(rng, 32, 8192)
    table = TensorType((_size(rng, 128, max(256, min(131072, VOCABULARY // n))), n), dtype)
    return Piece("embedding", (table, TensorType((_size(rng, 1, 16384),), DType.I64)), (), (True, False))


def _concat(rng: random.Random, dtype: DType) -> Piece:
    return Piece("concat", (_rows(rng, dtype),) * 2, (("dim", rng.choice((0, 1))),), (True, True))


def _where(rng: random.Random, dtype: DType) -> Piece:
    x = _rows(rng, dtype)
    return Piece("where", (TensorType(x.shape, DType.BOOL), x, x), (), (False, True, True))


def _batch_norm(rng: random.Random, dtype: DType) -> Piece:
    channels, side = _size(rng, 8, 1024), _size(rng, 7, 112)
    vector = TensorType((channels,), dtype)
    image = TensorType((_size(rng, 1, 32), channels, side, side), dtype)
    return Piece("batch_norm", (image, *(vector,) * 4), (("eps", 1e-5),), (True,) * 5)


def _cast(rng: random.Random, dtype: DType) -> Piece:
    other = DType.BF16 if dtype is DType.F32 else DType.F32
    return Piece("cast", (_rows(rng, dtype),), (("dtype", other.value),), (True,))


MAKERS: Mapping[str, Maker] = {
    "linear": _linear, "matmul": _matmul, "attention": _attention, "conv2d": _conv2d, "embedding": _embedding,
    "layer_norm": _norm("layer_norm", 2), "rms_norm": _norm("rms_norm", 1), "softmax": _map("softmax", dim=-1),
    "log_softmax": _map("log_softmax", dim=-1), "gelu": _map("gelu", approximate="tanh"), "relu": _map("relu"),
    "silu": _map("silu"), "tanh": _map("tanh"), "sigmoid": _map("sigmoid"), "exp": _map("exp"), "neg": _map("neg"),
    "add": _binary("add"), "mul": _binary("mul"), "div": _binary("div"), "scale": _map("scale", factor=0.125),
    "shift": _map("shift", offset_by=0.5), "pow": _map("pow", exponent=2.0), "cast": _cast, "where": _where,
    "reduce_sum": _reduce("reduce_sum"), "reduce_mean": _reduce("reduce_mean"), "concat": _concat,
    "max_pool2d": _pool("max_pool2d"), "avg_pool2d": _pool("avg_pool2d"), "batch_norm": _batch_norm,
}  # fmt: skip


def sampled(op: str, seed: int, dtypes: tuple[DType, ...]) -> Piece:
    """The piece of a seed: the same in every run."""
    rng = random.Random(f"{op} {seed}")
    return MAKERS[op](rng, rng.choice(dtypes))
