"""Steps that compute element by element, with what is broadcast over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fuzz_programs_runs.pool import Attrs, Drawn, Operation, Pool, Weights

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": lambda x: x**2,
    "cube": lambda x: x.pow(3),
    "sqrt": lambda x: torch.sqrt(x * x + 1),
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "log": lambda x: torch.log(x * x + 1),
    "reciprocal": lambda x: torch.reciprocal(x * x + 1),
}
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y * y + 1),
}
SCALAR: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "mul": lambda x, c: x * c,
    "add": lambda x, c: x + c,
    "rsub": lambda x, c: c - x,
    "div": lambda x, c: x / c,
    "add_alpha": lambda x, c: torch.add(x, x.tanh(), alpha=c),
}
NUMBERS = (2, -1, 0.5, 0.1, 1 / 3, 1.7, math.pi, 3)


def unary(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A function of each element."""
    return UNARY[attrs["f"]](xs[0])


def draw_unary(pool: Pool) -> Drawn | None:
    """Of any value."""
    x = pool.pick()
    return None if x is None else ((x,), {"f": pool.rng.choice(list(UNARY))})


def binary(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Two values, one broadcast over the other or both over each other."""
    return BINARY[attrs["f"]](xs[0], xs[1])


def draw_binary(pool: Pool) -> Drawn | None:
    """Of values whose shapes go together, at either batch."""
    x = pool.pick()
    if x is None:
        return None
    y = pool.pick(lambda t: _together(t.shape, pool[x].shape))
    if y is None or not _together(pool.values[x][1].shape, pool.values[y][1].shape):
        return None
    return (x, y), {"f": pool.rng.choice(list(BINARY))}


def _together(one: Sequence[int], other: Sequence[int]) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(one, other)) <= 1 << 14
    except RuntimeError:
        return False


def scalar(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A value and a number."""
    return SCALAR[attrs["f"]](xs[0], attrs["c"])


def draw_scalar(pool: Pool) -> Drawn | None:
    """Whole, simple, and unwieldy numbers."""
    x = pool.pick()
    return None if x is None else ((x,), {"f": pool.rng.choice(list(SCALAR)), "c": pool.rng.choice(NUMBERS)})


def held(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A value and a tensor of the module's own: a parameter, a saved buffer or a constant."""
    return BINARY[attrs["f"]](xs[0], w("w", *attrs["shape"], kind=attrs["kind"], scale=1.0))


def draw_held(pool: Pool) -> Drawn | None:
    """One that is broadcast at any batch."""
    x = pool.pick()
    if x is None:
        return None
    kind = pool.rng.choice(["param", "param", "const", "buffer"])
    return (x,), {"f": pool.rng.choice(list(BINARY)), "kind": kind, "shape": pool.constant_shape(x)}


def where(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A value where a constant mask holds; else another value, or a number."""
    mask = w("mask", *attrs["shape"], kind="mask")
    if attrs["form"] == "fill":
        return xs[0].masked_fill(mask, attrs["c"])
    if attrs["form"] == "scalar":
        return torch.where(mask, xs[0], attrs["c"])
    return torch.where(mask, xs[0], xs[-1])


def draw_where(pool: Pool) -> Drawn | None:
    """The other value has the same shape."""
    x = pool.pick()
    if x is None:
        return None
    attrs = {"shape": pool.constant_shape(x), "c": pool.rng.choice([0.0, 1.0, -0.5])}
    form = pool.rng.choice(["fill", "scalar", "other"])
    y = pool.pick(lambda t: t.shape == pool[x].shape)
    if form == "other" and y is not None and pool.sizes(x) == pool.sizes(y):
        return (x, y), {**attrs, "form": form}
    return (x,), {**attrs, "form": "fill" if form == "other" else form}


OPERATIONS = {
    "unary": Operation(unary, draw_unary, 2.5),
    "binary": Operation(binary, draw_binary, 3.0),
    "scalar": Operation(scalar, draw_scalar, 1.0),
    "held": Operation(held, draw_held, 1.5),
    "where": Operation(where, draw_where, 0.5),
}
