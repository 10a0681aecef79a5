"""Steps that move, cut, join and repeat values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzz_programs_runs.pool import Attrs, Drawn, Operation, Pool, Weights, at_least

MOST_DIMS = 5


def permute(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Dims in another order; the result is not contiguous."""
    return xs[0].permute(*attrs["perm"])


def draw_permute(pool: Pool) -> Drawn | None:
    """Often channels last."""
    x = pool.pick(at_least(2))
    if x is None:
        return None
    dims = list(range(pool[x].dim()))
    perm = [dims[0], *dims[2:], dims[1]] if pool.chance(0.3) else pool.rng.sample(dims, len(dims))
    return (x,), {"perm": perm}


def flatten(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Two dims as one."""
    return xs[0].flatten(attrs["dim"], attrs["dim"] + 1)


def draw_flatten(pool: Pool) -> Drawn | None:
    """Rows among them too."""
    x = pool.pick(at_least(2))
    return None if x is None else ((x,), {"dim": pool.rng.randrange(pool[x].dim() - 1)})


def unflatten(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A dim as two."""
    return xs[0].unflatten(attrs["dim"], tuple(attrs["sizes"]))


def draw_unflatten(pool: Pool) -> Drawn | None:
    """What grows with the batch keeps growing."""
    x = pool.pick(lambda t: 1 <= t.dim() < MOST_DIMS)
    if x is None:
        return None
    dim = pool.rng.randrange(pool[x].dim())
    size = pool[x].shape[dim]
    factors = [n for n in range(2, size) if size % n == 0]
    if not factors:
        return None
    inner = pool.rng.choice(factors)
    sizes = [-1, inner] if pool.sizes(x)[dim] < 0 or pool.chance(0.5) else [inner, size // inner]
    return (x,), {"dim": dim, "sizes": sizes}


def cut(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Some elements of a dim."""
    x, dim = xs[0], attrs["dim"]
    match attrs["form"]:
        case "slice":
            return x.narrow(dim, attrs["start"], attrs["stop"] - attrs["start"])
        case "step":
            return x[(slice(None),) * dim + (slice(attrs["start"], None, 2),)]
        case "select":
            return x.select(dim, attrs["start"])
        case "chunk":
            return x.chunk(attrs["parts"], dim)[attrs["part"]]
        case "split":
            return x.split([attrs["start"], x.size(dim) - attrs["start"]], dim)[attrs["part"] % 2]
        case "glu":
            left, right = x.chunk(2, dim)
            return left * torch.sigmoid(right)
        case _:
            ids = w("ids", attrs["count"], kind="ids", scale=attrs["size"])
            return x.index_select(dim, ids)


def draw_cut(pool: Pool) -> Drawn | None:
    """Along a dim that does not grow with the batch."""
    x = pool.pick(at_least(2))
    dims = [] if x is None else pool.fixed(x, 2)
    if x is None or not dims:
        return None
    dim = pool.rng.choice(dims)
    size = pool[x].shape[dim]
    form = pool.rng.choice(["slice", "step", "select", "chunk", "chunk", "split", "glu", "gather"])
    parts = [n for n in (2, 3, 4) if size % n == 0]
    if form in ("chunk", "glu") and (not parts or (form == "glu" and size % 2)):
        form = "slice"
    start = pool.rng.randrange(1 if form == "split" else 0, size)
    attrs: dict[str, Any] = {"dim": dim, "form": form, "start": start}  # Any: JSON
    match form:
        case "slice":
            attrs["stop"] = pool.rng.randint(start + 1, size)
        case "step":
            attrs["start"] = pool.rng.randrange(2)
        case "chunk":
            attrs["parts"] = pool.rng.choice(parts)
            attrs["part"] = pool.rng.randrange(attrs["parts"])
        case "split":
            attrs["part"] = pool.rng.randrange(2)
        case "gather":
            attrs["count"] = pool.rng.choice([1, 2, 6, 12])
            attrs["size"] = size
    return (x,), attrs


def join(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Values one behind another, along a dim that there is or a new one."""
    if attrs["form"] == "stack":
        return torch.stack(list(xs), attrs["dim"])
    if attrs["form"] == "token":
        token = w("w", *attrs["shape"], scale=1.0)
        sizes = [-1 if dim == attrs["dim"] else size for dim, size in enumerate(xs[0].shape)]
        return torch.cat([token.expand(*sizes), xs[0]], attrs["dim"])
    return torch.cat(list(xs), attrs["dim"])


def draw_join(pool: Pool) -> Drawn | None:
    """Two values or three, the same one among them; or a learned token before all others."""
    x = pool.pick(at_least(2))
    if x is None:
        return None
    form = pool.rng.choice(["cat", "cat", "stack", "token"])
    shape, dims = pool[x].shape, len(pool[x].shape)
    if form == "stack" and dims == MOST_DIMS:
        form = "cat"
    dim = pool.rng.randrange(dims + (form == "stack"))
    if form == "token":
        dims_fixed = pool.fixed(x)
        if not dims_fixed:
            return None
        dim = pool.rng.choice(dims_fixed)
        token = [1 if i == dim or size < 0 else size for i, size in enumerate(pool.sizes(x))]
        return (x,), {"form": form, "dim": dim, "shape": token}

    def but_one(sizes: Sequence[int]) -> list[int]:
        return [size for i, size in enumerate(sizes) if i != dim or form == "stack"]

    names = [x]
    for _ in range(pool.rng.choice([1, 1, 2])):
        y = pool.pick(lambda t: t.dim() == dims and but_one(t.shape) == but_one(shape))
        if y is not None and but_one(pool.sizes(x)) == but_one(pool.sizes(y)):
            names.append(y)
    return tuple(names), {"form": form, "dim": dim}


def repeat(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A new dim, along which the value is the same."""
    sizes = [-1] * xs[0].dim()
    sizes.insert(attrs["dim"], attrs["count"])
    return xs[0].unsqueeze(attrs["dim"]).expand(*sizes)


def draw_repeat(pool: Pool) -> Drawn | None:
    """Once (no copies) up to six times."""
    x = pool.pick(lambda t: t.dim() < MOST_DIMS and t.numel() < 1 << 11)
    if x is None:
        return None
    return (x,), {"dim": pool.rng.randint(0, pool[x].dim()), "count": pool.rng.choice([1, 2, 4, 6])}


def rows_as_columns(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """All but the first dim as one."""
    return xs[0].reshape(xs[0].size(0), -1)


def draw_rows(pool: Pool) -> Drawn | None:
    """Of values that are not too large for a linear map after it."""
    x = pool.pick(lambda t: t.dim() >= 3 and math.prod(t.shape[1:]) <= 192)
    return None if x is None else ((x,), {})


OPERATIONS = {
    "permute": Operation(permute, draw_permute, 1.5),
    "flatten": Operation(flatten, draw_flatten, 0.7),
    "unflatten": Operation(unflatten, draw_unflatten, 0.7),
    "cut": Operation(cut, draw_cut, 1.5),
    "join": Operation(join, draw_join, 1.0),
    "repeat": Operation(repeat, draw_repeat, 0.4),
    "rows": Operation(rows_as_columns, draw_rows, 0.4),
}
