"""Steps with weights of their own: linear maps, embeddings, attention, convolution; and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fuzz_programs_runs.pool import Attrs, Drawn, Operation, Pool, Weights, at_least, rank

WIDTHS = (6, 8, 12, 24, 24, 10)


def linear(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """x W^T + b, by torch's function or as a product with the transpose."""
    matrix = w("w", attrs["out"], xs[0].shape[-1])
    bias = w("b", attrs["out"]) if attrs["bias"] else None
    if attrs["written"]:
        y = xs[0] @ matrix.t()
        return y if bias is None else y + bias
    return functional.linear(xs[0], matrix, bias)


def draw_linear(pool: Pool) -> Drawn | None:
    """Of a dim that does not grow with the batch."""
    x = pool.pick(at_least(2))
    if x is None or pool.sizes(x)[-1] < 2:
        return None
    return (x,), {"out": pool.rng.choice(WIDTHS), "bias": pool.chance(0.6), "written": pool.chance(0.2)}


def back(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """x W with the matrix of another step, the other way round: a tied head, an autoencoder."""
    return xs[0] @ w("w") if attrs["flip"] else functional.linear(xs[0], w("w"))


def draw_back(pool: Pool) -> Drawn | None:
    """The other step's name goes with the attributes, as ``weights``."""
    owners = [(name, shape) for name, (_, shape) in pool.owners.items() if len(shape) == 2]
    if not owners:
        return None
    owner, (rows, columns) = pool.rng.choice(owners)
    flip = pool.chance(0.5)
    wanted = rows if flip else columns
    x = pool.pick(lambda t: t.dim() >= 2 and t.shape[-1] == wanted)
    if x is None or pool.sizes(x)[-1] < 0:
        return None
    return (x,), {"flip": flip, "weights": owner}


def matmul(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Of two values, the second transposed."""
    return torch.matmul(xs[0], xs[1].transpose(-1, -2)) * (1 / xs[0].shape[-1])


def draw_matmul(pool: Pool) -> Drawn | None:
    """Of values of one rank with the same last dim and the same leading ones."""
    x = pool.pick(at_least(2))
    if x is None or pool.sizes(x)[-1] < 0:
        return None
    *lead, _, last = pool[x].shape
    y = pool.pick(lambda t: t.dim() == pool[x].dim() and [*t.shape[:-2], t.shape[-1]] == [*lead, last])
    return None if y is None or pool.sizes(y)[-1] < 0 else ((x, y), {})


def embedding(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Rows of a table by id; where asked for, with a learned or a constant table of positions added."""
    x = functional.embedding(xs[0], w("w", attrs["rows"], attrs["out"], scale=1.0))
    length = xs[0].shape[-1]
    match attrs["positions"]:
        case "learned":
            x = x + functional.embedding(torch.arange(length), w("p", length + 2, attrs["out"], scale=1.0))
        case "sliced":
            x = x + w("p", length + 2, attrs["out"], scale=1.0)[:length]
        case "constant":
            x = x + w("p", length, attrs["out"], kind="const", scale=1.0)
    return x


def draw_embedding(pool: Pool) -> Drawn | None:
    """Of ids."""
    ids = pool.pick(at_least(2), floating=False)
    if ids is None:
        return None
    attrs = {"rows": pool.rng.choice([12, 24, 30]), "out": pool.rng.choice([12, 24])}
    return (ids,), {**attrs, "positions": pool.rng.choice(["none", "learned", "sliced", "constant"])}


def attention(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Over [b, s, d]: queries of the first value, keys and values of the last; fewer heads of keys where grouped."""
    x, other = xs[0], xs[-1]
    heads, groups, e = attrs["heads"], attrs["groups"], attrs["size"]
    if attrs["fused"]:
        sizes = [heads * e, groups * e, groups * e]
        q, k, v = functional.linear(x, w("qkv", sum(sizes), x.shape[-1]), w("qkv_b", sum(sizes))).split(sizes, -1)
    else:
        q = functional.linear(x, w("q", heads * e, x.shape[-1]))
        k, v = (functional.linear(other, w(name, groups * e, other.shape[-1])) for name in "kv")
    q, k, v = (t.unflatten(-1, (-1, e)).transpose(1, 2) for t in (q, k, v))
    if attrs["rotary"]:
        q, k = (rotated(t, w("cos", t.shape[2], e, kind="cos"), w("sin", t.shape[2], e, kind="sin")) for t in (q, k))
    mask = _mask(w, attrs, q.shape[2], k.shape[2])
    if attrs["written"]:
        k, v = (_grouped(t, heads) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(e)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
        y = torch.softmax(scores, -1) @ v
    else:
        causal = attrs["mask"] == "causal"
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=heads != groups)
    y = y.transpose(1, 2).flatten(2)
    return functional.linear(y, w("o", attrs["out"], heads * e))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Each head of keys or values for several heads in a row."""
    groups = x.shape[1]
    if groups == heads:
        return x
    return x[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: halves of the last dim turned by an angle that grows with the position."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _mask(w: Weights, attrs: Attrs, rows: int, columns: int) -> Tensor | None:
    match attrs["mask"]:
        case "bool":
            return w("mask", rows, columns, kind="mask")
        case "additive":
            return w("bias", 1, 1, rows, columns, kind="const", scale=1.0)
        case "learned":
            return w("bias", 1, attrs["heads"], rows, columns, scale=1.0)
        case "window":
            near = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
            return (near >= 0) & (near < 3)
        case "causal" if attrs["written"]:
            return torch.arange(rows)[:, None] >= torch.arange(columns)[None, :]
    return None


def draw_attention(pool: Pool) -> Drawn | None:
    """Of sequences of the same batch."""

    def sequence(t: Tensor) -> bool:
        return t.dim() == 3 and t.shape[1] >= 2 and t.shape[2] >= 4

    x = pool.pick(sequence)
    if x is None or min(pool.sizes(x)[1:]) < 0:
        return None
    heads, groups = pool.rng.choice([(2, 2), (4, 4), (6, 6), (6, 3), (4, 2), (6, 2), (4, 1), (6, 1), (1, 1)])
    other = pool.pick(lambda t: sequence(t) and t.shape[0] == pool[x].shape[0]) if pool.chance(0.3) else x
    if other is None or min(pool.sizes(other)[1:]) < 0 or pool.sizes(other)[0] != pool.sizes(x)[0]:
        other = x
    attrs = {
        "heads": heads, "groups": groups, "size": pool.rng.choice([4, 4, 6]), "out": pool[x].shape[2],
        "fused": other == x and pool.chance(0.4), "written": pool.chance(0.35), "rotary": pool.chance(0.3),
        "mask": pool.rng.choice(["none", "causal", "bool", "additive", "learned", "window"]),
    }  # fmt: skip
    return ((x,) if other == x else (x, other)), attrs


def conv2d(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Over images; depthwise where there are as many groups as channels."""
    channels, groups = xs[0].shape[1], attrs["groups"]
    kernel = w("w", attrs["out"], channels // groups, *attrs["kernel"])
    bias = w("b", attrs["out"]) if attrs["bias"] else None
    return functional.conv2d(xs[0], kernel, bias, attrs["stride"], attrs["padding"], attrs["dilation"], groups)


def draw_conv2d(pool: Pool) -> Drawn | None:
    """Kernels that fit."""
    x = pool.pick(rank(4))
    if x is None or min(pool.sizes(x)[1:]) < 1:
        return None
    channels, rng = pool[x].shape[1], pool.rng
    groups = rng.choice([1, 1, 1, *(n for n in (2, 3, channels) if channels % n == 0)])
    return (x,), {
        "out": groups * rng.choice([1, 2, 3]) if groups > 1 else rng.choice([4, 6, 12]), "groups": groups,
        "kernel": [rng.choice([1, 2, 3]), rng.choice([1, 3])], "stride": [rng.choice([1, 1, 2]), rng.choice([1, 2])],
        "padding": [rng.choice([0, 1]), rng.choice([0, 1])], "dilation": [1, rng.choice([1, 1, 2])],
        "bias": pool.chance(0.5),
    }  # fmt: skip


def pool2d(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """The largest element or the mean of windows; or the mean of each of some equal windows."""
    if attrs["f"] == "adaptive":
        return functional.adaptive_avg_pool2d(xs[0], attrs["size"])
    function = functional.max_pool2d if attrs["f"] == "max" else functional.avg_pool2d
    return function(xs[0], attrs["kernel"], attrs["stride"], attrs["padding"])


def draw_pool2d(pool: Pool) -> Drawn | None:
    """Windows that fit."""
    x = pool.pick(rank(4))
    if x is None or min(pool.sizes(x)[2:]) < 2:
        return None
    rng, (height, width) = pool.rng, pool[x].shape[2:]
    f = rng.choice(["max", "avg", "adaptive"])
    if f == "adaptive":
        sizes = [[n for n in (1, 2, 3) if size % n == 0] for size in (height, width)]
        return (x,), {"f": f, "size": [1, 1] if pool.chance(0.5) else [rng.choice(fit) for fit in sizes]}
    kernel = [rng.choice([2, 3]) if height > 2 else 2, 2]
    padding = [rng.choice([0, 1]), rng.choice([0, 1])]
    return (x,), {"f": f, "kernel": kernel, "stride": [rng.choice([1, 2]), 2], "padding": padding}


def gate(w: Weights, attrs: Attrs, xs: Sequence[Tensor]) -> Tensor:
    """Rows of a softmax with all but their largest elements zero, as experts are chosen."""
    scores = torch.softmax(functional.linear(xs[0], w("w", attrs["out"], xs[0].shape[-1])), -1)
    values, places = torch.topk(scores, attrs["k"], -1)
    return torch.zeros_like(scores).scatter(-1, places, values)


def draw_gate(pool: Pool) -> Drawn | None:
    """One to three of some experts."""
    x = pool.pick(at_least(2))
    if x is None or pool.sizes(x)[-1] < 2:
        return None
    return (x,), {"out": pool.rng.choice([4, 6]), "k": pool.rng.choice([1, 2, 3])}


OPERATIONS = {
    "linear": Operation(linear, draw_linear, 4.0),
    "back": Operation(back, draw_back, 1.0),
    "matmul": Operation(matmul, draw_matmul, 0.8),
    "embedding": Operation(embedding, draw_embedding, 2.0),
    "attention": Operation(attention, draw_attention, 3.0),
    "conv2d": Operation(conv2d, draw_conv2d, 3.0),
    "pool2d": Operation(pool2d, draw_pool2d, 1.0),
    "gate": Operation(gate, draw_gate, 0.3),
}
