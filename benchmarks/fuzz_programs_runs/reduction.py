"""Steps that reduce or normalise along dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fuzz_programs_runs.pool import Attrs, Drawn, Operation, Pool, Weights, at_least, rank


def reduce(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Sum or mean over dims."""
    function = torch.mean if attrs["f"] == "mean" else torch.sum
    return function(xs[0], dim=attrs["dims"], keepdim=attrs["keep"])


def draw_reduce(pool: Pool) -> Drawn | None:
    """Over any dims, rows too."""
    x = pool.pick(at_least(1))
    if x is None:
        return None
    dims = list(range(pool[x].dim()))
    chosen = sorted(pool.rng.sample(dims, pool.rng.choice([1, 1, 1, min(2, len(dims))])))
    return (x,), {"f": pool.rng.choice(["mean", "sum"]), "dims": chosen, "keep": pool.chance(0.5)}


def softmax(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Softmax or its logarithm along a dim, after a mask where there is one."""
    x = xs[0]
    if "mask" in attrs:
        x = x.masked_fill(w("mask", *attrs["mask"], kind="mask"), -1e9)
    return functional.softmax(x, attrs["dim"]) if attrs["f"] == "softmax" else functional.log_softmax(x, attrs["dim"])


def draw_softmax(pool: Pool) -> Drawn | None:
    """Along any dim."""
    x = pool.pick(at_least(2))
    if x is None:
        return None
    attrs = {"f": pool.rng.choice(["softmax", "log_softmax"]), "dim": pool.rng.randrange(-1, pool[x].dim())}
    return (x,), {**attrs, **({"mask": pool.constant_shape(x)} if pool.chance(0.15) else {})}


def layer_norm(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Over the last dim; with a gain and an offset, a gain alone, or neither."""
    n = xs[0].shape[-1]
    gain = w("w", n, scale=1.0) if attrs["affine"] else None
    offset = w("b", n) if attrs["affine"] and attrs["bias"] else None
    return functional.layer_norm(xs[0], (n,), gain, offset, 1e-5)


def rms_norm(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Over the last dim, by torch's function or written out."""
    n, x = xs[0].shape[-1], xs[0]
    gain = w("w", n, scale=1.0)
    if attrs["written"]:
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    return functional.rms_norm(x, (n,), gain, 1e-5)


def draw_norm(pool: Pool) -> Drawn | None:
    """Over a dim that does not grow with the batch."""
    x = pool.pick(at_least(2))
    if x is None or pool.sizes(x)[-1] < 2:
        return None
    return (x,), {"affine": pool.chance(0.8), "bias": pool.chance(0.7), "written": pool.chance(0.5)}


def batch_norm(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """By the batch's own statistics; the running ones follow."""
    c = xs[0].shape[1]
    mean, variance = w("running_mean", c, kind="buffer"), w("running_var", c, kind="buffer", scale=1.0)
    gain, offset = (w("w", c, scale=1.0), w("b", c)) if attrs["affine"] else (None, None)
    return functional.batch_norm(xs[0], mean, variance, gain, offset, True, attrs["momentum"], 1e-5)


def draw_batch_norm(pool: Pool) -> Drawn | None:
    """Over enough points that no statistic is of rounding alone."""
    x = pool.pick(lambda t: t.dim() in (2, 3, 4) and t.numel() // t.shape[1] >= 4)
    if x is None or pool.sizes(x)[1] < 2:
        return None
    return (x,), {"affine": pool.chance(0.8), "momentum": pool.rng.choice([0.1, 0.3])}


def group_norm(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Written out: groups of channels as rows of a layer norm."""
    x = xs[0]
    y = functional.layer_norm(
        x.reshape(x.size(0), attrs["groups"], -1), (x[0].numel() // attrs["groups"],), None, None, 1e-5
    )
    return y.reshape(x.shape) * w("w", x.shape[1], 1, 1, scale=1.0)


def draw_group_norm(pool: Pool) -> Drawn | None:
    """Of images."""
    x = pool.pick(rank(4))
    if x is None or pool.sizes(x)[0] > 0 or min(pool.sizes(x)[1:]) < 1 or pool[x].shape[1] % 2:
        return None
    return (x,), {"groups": 2}


def trail(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """A running mean kept by hand; the value is moved by what it was before, or by what it is now."""
    x, dims = xs[0], list(range(xs[0].dim() - 1))
    held = w("trail", x.shape[-1], kind="buffer", scale=1.0)
    y = x + held
    with torch.no_grad():
        held.mul_(0.75).add_(x.mean(dims) * 0.25)
    return y if attrs["before"] else y + held


def draw_trail(pool: Pool) -> Drawn | None:
    """Over a dim that does not grow with the batch."""
    x = pool.pick(at_least(2))
    if x is None or pool.sizes(x)[-1] < 2:
        return None
    return (x,), {"before": x.startswith("v") or pool.chance(0.5)}  # a gradient that stops is refused


OPERATIONS = {
    "reduce": Operation(reduce, draw_reduce, 1.2),
    "softmax": Operation(softmax, draw_softmax, 0.8),
    "layer_norm": Operation(layer_norm, draw_norm, 1.0),
    "rms_norm": Operation(rms_norm, draw_norm, 0.6),
    "batch_norm": Operation(batch_norm, draw_batch_norm, 0.5),
    "trail": Operation(trail, draw_trail, 0.3),
    "group_norm": Operation(group_norm, draw_group_norm, 0.4),
}
