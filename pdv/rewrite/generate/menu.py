"""The worlds that are enumerated, simple ones first: what they show need not be found again in later ones."""

from __future__ import annotations

from collections.abc import Mapping

from pdv.rewrite.generate.worlds import World


def _world(
    name: str, operands: str, offers: str, max_ops: int = 3, given: str = "", flat: str = "", **values: object
) -> World:
    return World(name, operands, values, offers, max_ops, given, frozenset(flat.split()))


def _images(
    name: str,
    operands: str,
    offers: str,
    max_ops: int = 3,
    given: str = "",
    flat: str = "",
    values: Mapping[str, object] | None = None,
) -> World:
    return World(name, operands, {**_IMAGES, **(values or {})}, offers, max_ops, given, frozenset(flat.split()))


_IMAGES: Mapping[str, object] = {
    "b": 2,
    "c": 3,
    "h": 4,
    "w": 5,
    "e": 7,
    "r": 1,
    "q": 2,
    "stride": (2, 1),
    "padding": (1, 0),
}
_CONV = "conv2d(_, _, stride=stride, padding=padding)"

ELEMENTS = (
    _world("sums", "x[t, k] y[t, k] z[t, k]", "add(_, _), mul(_, _), scale(_, factor=c), neg(_)", t=3, k=5, c=0.17),
    _world(
        "factors",
        "x[t, k]",
        "add(_, _), scale(_, factor=c), scale(_, factor=e)",
        2,
        "scale(x, factor=c * e), scale(x, factor=c + e)",
        t=3, k=5, c=0.17, e=0.23,
    ),
    _world("signs", "x[t, k] y[t, k] z[t, k]", "add(_, _), sub(_, _), neg(_), scale(_, factor=c)",
        flat="neg", t=3, k=5, c=0.17),
)  # fmt: skip

MOVES = (
    _world(
        "slices of slices",
        "x[t, k] y[t, m]",
        "slice(_, dim=-1, start=a, stop=e), slice(_, dim=-1, start=f, stop=g), concat(_, _, dim=-1),"
        " slice(_, dim=-1, start=k + a, stop=k + e)",
        2,
        "slice(x, dim=-1, start=a + f, stop=a + g)",
        t=2, k=9, m=11, a=1, e=7, f=2, g=4,
    ),
    _world(
        "joins",
        "x[t, k] y[t, m] z[t, k]",
        "slice(_, dim=-1, start=0, stop=k), slice(_, dim=-1, start=k, stop=k + m), concat(_, _, dim=-1), relu(_),"
        " add(_, _), scale(_, factor=c)",
        t=2, k=3, m=4, c=0.17,
    ),
    _world(
        "chunks",
        "x[t, k] y[t, k] z[k]",
        "chunk(_, dim=-1, parts=2, index=0), chunk(_, dim=-1, parts=2, index=1), concat(_, _, dim=-1), relu(_),"
        " add(_, _), mul(_, _), scale(_, factor=c)",
        t=3, k=4, c=0.17,
    ),
    _world(
        "permutations alone",
        "x[a, e, f]",
        "permute(_, perm=(0, 2, 1)), permute(_, perm=(1, 0, 2)), permute(_, perm=(1, 2, 0)),"
        " permute(_, perm=(2, 0, 1))",
        2,
        a=2, e=3, f=4,
    ),
    _world(
        "permutations",
        "x[a, e, f] y[a, e, f] z[f]",
        "permute(_, perm=(0, 2, 1)), permute(_, perm=(1, 0, 2)), relu(_), add(_, _), mul(_, _), scale(_, factor=c),"
        " chunk(_, dim=-1, parts=2, index=0), concat(_, _, dim=-1)",
        flat="permute",
        a=2, e=3, f=4, c=0.17,
    ),
    _world(
        "reshapes",
        "x[a, e, h, d] y[a, e, h, d] z[a, e, h, d]",
        "reshape(_, shape=(a, e, h * d)), reshape(_, shape=(a, e, h, d)), reshape(_, shape=(a * e, h * d)), relu(_),"
        " add(_, _), scale(_, factor=c), permute(_, perm=(0, 2, 1, 3))",
        a=2, e=3, h=5, d=7, c=0.17,
    ),
    _world(
        "expansions",
        "x[t, 1] y[t, k]",
        "expand(_, shape=(t, k)), relu(_), add(_, _), mul(_, _), scale(_, factor=c)",
        t=3, k=5, c=0.17,
    ),
)  # fmt: skip

SUMS = (
    _world(
        "reductions",
        "x[a, e, f] y[a, e, f] z[e, f]",
        "reduce_sum(_, dims=(-1,), keepdim=keep), reduce_sum(_, dims=(-2,), keepdim=keep), add(_, _),"
        " scale(_, factor=c), permute(_, perm=(0, 2, 1))",
        flat="reduce_sum permute",
        a=2, e=3, f=5, c=0.17, keep=True,
    ),
    _world(
        "means",
        "x[a, e, f] y[a, e, f]",
        "reduce_mean(_, dims=(-1,), keepdim=keep), reduce_mean(_, dims=(-2,), keepdim=keep), add(_, _),"
        " scale(_, factor=c), permute(_, perm=(0, 2, 1))",
        flat="reduce_mean permute",
        a=2, e=3, f=5, c=0.17, keep=True,
    ),
)  # fmt: skip

PRODUCTS = (
    _world("chains", "x[t, k] y[k, n] w[n, p]", "matmul(_, _), permute(_, perm=(1, 0))", t=3, k=4, n=5, p=2),
    _world(
        "transposes",
        "x[t, k] y[k, n] w[n, p] z[t, k]",
        "permute(_, perm=(1, 0)), matmul(_, _), linear(_, _), add(_, _)",
        4,
        t=3, k=4, n=5, p=2,
    ),
    _world(
        "linear",
        "x[t, k] y[t, k] u[n, k] v[n, k] w[p, n]",
        "linear(_, _), matmul(_, _), add(_, _), scale(_, factor=c)",
        4,
        t=3, k=4, n=5, p=2, c=0.17,
    ),
    _world(
        "batched products",
        "x[b, t, k] y[b, k, n] z[b, n, p] w[b, k, n]",
        "matmul(_, _), add(_, _), scale(_, factor=c), permute(_, perm=(0, 2, 1))",
        b=2, t=3, k=4, n=5, p=7, c=0.17,
    ),
    _world(
        "linear of scaled rows",
        "x[t, k] w[n, k] g[k] z[n] a[t, 1]",
        "linear(_, w), linear(x, _), mul(_, _)",
        2,
        "reshape(z, shape=(n, 1))",
        t=3, k=4, n=5,
    ),
    _world(
        "linear fused",
        "x[t, k] y[r, k] u[n, k] v[m, k]",
        "linear(_, _), concat(_, _, dim=0), concat(_, _, dim=-1), slice(_, dim=-1, start=0, stop=n)",
        flat="concat",
        t=2, r=3, k=4, n=5, m=7,
    ),
    _world(
        "linear joined",
        "x[t, k] y[t, m] u[n, k] v[n, m]",
        "linear(_, _), concat(_, _, dim=-1), add(_, _)",
        4,
        t=2, k=3, m=4, n=5,
    ),
    _world(
        "linear in pieces",
        "x[t, k] w[n, k] b[n]",
        "linear(_, _), chunk(_, dim=0, parts=2, index=0), chunk(_, dim=-1, parts=2, index=0),"
        " slice(_, dim=-1, start=a, stop=e), slice(_, dim=0, start=a, stop=e), add(_, b)",
        flat="chunk slice",
        t=6, k=8, n=14, a=1, e=6,
    ),
    _world(
        "matmul in pieces",
        "x[t, k] y[k, n] z[k, m] u[r, k]",
        "matmul(_, _), concat(_, _, dim=-1), concat(_, _, dim=0), chunk(_, dim=-1, parts=2, index=0),"
        " chunk(_, dim=0, parts=2, index=0)",
        flat="concat chunk",
        t=6, k=4, n=10, m=7, r=9,
    ),
    _world(
        "reduced products",
        "x[b, t, k] w[n, k] y[k, n]",
        "linear(_, _), matmul(_, _), reduce_sum(_, dims=(-2,), keepdim=keep), reduce_mean(_, dims=(-2,), keepdim=keep)",
        2,
        b=2, t=3, k=4, n=5, keep=True,
    ),
)  # fmt: skip

ROWS = (
    _world(
        "norms",
        "x[t, k] y[r, k] g[k] b[k] a[k]",
        "layer_norm(_, g, b, eps=eps), rms_norm(_, g, eps=eps), softmax(_), mul(_, a), add(_, a), concat(_, _, dim=0)",
        3,
        "layer_norm(x, mul(g, a), mul(b, a), eps=eps), layer_norm(x, g, add(a, b), eps=eps),"
        " rms_norm(x, mul(g, a), eps=eps)",
        flat="layer_norm rms_norm softmax concat",
        t=2, r=3, k=5, eps=1e-5,
    ),
    _world(
        "norms moved",
        "x[a, e, k] g[k] b[k]",
        "layer_norm(_, g, b, eps=eps), rms_norm(_, g, eps=eps), softmax(_), permute(_, perm=(1, 0, 2)),"
        " chunk(_, dim=0, parts=2, index=0), reshape(_, shape=(a * e, k)), reshape(_, shape=(a, e, k))",
        a=2, e=3, k=5, eps=1e-5,
    ),
    _world(
        "attention",
        "q[b, h, t, d] k[b, h, e, d] v[b, h, e, f]",
        "attention(_, k, v, scale=a), matmul(_, _), softmax(_), scale(_, factor=a), scale(_, factor=c)",
        4,
        "permute(k, perm=(0, 1, 3, 2)), attention(q, k, v, scale=c * a), attention(q, k, scale(v, factor=c), scale=a),"
        " attention(q, scale(k, factor=c), v, scale=a)",
        b=1, h=2, t=3, e=4, d=5, f=6, a=0.5, c=0.17,
    ),
    _world(
        "attention in pieces",
        "q[b, h, t, d] k[b, h, e, d] v[b, h, e, f]",
        "chunk(_, dim=1, parts=2, index=0), chunk(_, dim=0, parts=2, index=0)",
        2,
        "attention(q, k, v, scale=a, causal=causal),"
        " attention(chunk(q, dim=1, parts=2, index=0), chunk(k, dim=1, parts=2, index=0),"
        " chunk(v, dim=1, parts=2, index=0), scale=a, causal=causal),"
        " attention(chunk(q, dim=0, parts=2, index=0), chunk(k, dim=0, parts=2, index=0),"
        " chunk(v, dim=0, parts=2, index=0), scale=a, causal=causal)",
        b=2, h=4, t=3, e=5, d=1, f=7, a=0.5, causal=True,
    ),
    _world(
        "embedding",
        "t[v, d] u[v, d] i[n]:i64 w[e, d] y[v, f]",
        "embedding(_, i), linear(_, w), add(_, _), scale(_, factor=c), relu(_), concat(_, _, dim=-1)",
        v=3, d=4, n=5, e=7, f=2, c=0.17,
    ),
)  # fmt: skip

IMAGES = (
    _images("conv sums", "x[b, c, h, w] y[b, c, h, w] f[e, c, r, q] g[e, c, r, q]",
           f"{_CONV}, add(_, _), scale(_, factor=a)", 4, values={"a": 0.17}, flat="scale"),
    _images("conv fused", "x[b, c, h, w] f[e, c, r, q] g[m, c, r, q]",
           f"{_CONV}, concat(_, _, dim=0), concat(_, _, dim=1), relu(_), slice(_, dim=1, start=0, stop=e)",
           values={"m": 6}, flat="concat relu slice"),
    _images("conv joined", "x[b, c, h, w] y[b, m, h, w] f[e, c, r, q] g[e, m, r, q]",
           f"{_CONV}, concat(_, _, dim=1), add(_, _)", 4, values={"m": 6}, flat="concat"),
    _images("conv of batches", "x[b, c, h, w] y[m, c, h, w] f[e, c, r, q]", f"{_CONV}, concat(_, _, dim=0), relu(_)",
           values={"m": 1}, flat="concat relu"),
    _images("conv in pieces", "x[b, c, h, w] f[e, c, r, q]",
           f"{_CONV}, chunk(_, dim=0, parts=2, index=0), chunk(_, dim=1, parts=2, index=0)",
           values={"e": 8}, flat="chunk"),
    _images("conv in groups", "x[b, c, h, w] y[b, c, h, w] f[e, c, r, q] g[e, c, r, q]",
           f"{_CONV}, conv2d(_, _, stride=stride, padding=padding, groups=2), concat(_, _, dim=0),"
           " concat(_, _, dim=1)", flat="concat conv2d"),
    _images("conv scaled", "x[b, c, h, w] f[e, c, r, q] s[e] t[c]", f"{_CONV}, mul(_, _)", 3,
           "reshape(s, shape=(e, 1, 1)), reshape(s, shape=(e, 1, 1, 1)), reshape(t, shape=(c, 1, 1))",
           flat="mul conv2d"),
    _images("conv-norm", "x[b, c, h, w] z[b, e, h, w] f[e, c, r, q] m[e] v[e] g[e] a[e]",
           f"{_CONV}, mul(_, _), add(_, _), batch_norm(_, m, v, g, a, eps=eps)", 3,
           "reshape(mul(g, rsqrt(shift(v, offset_by=eps))), shape=(e, 1, 1)),"
           " reshape(mul(g, rsqrt(shift(v, offset_by=eps))), shape=(e, 1, 1, 1)),"
           " reshape(sub(a, mul(m, mul(g, rsqrt(shift(v, offset_by=eps))))), shape=(e, 1, 1))",
           values={"eps": 1e-5}, flat="mul add batch_norm conv2d"),
    _images("conv of points", "x[b, c, h, w] f[e, c, 1, 1] g[p, e, 1, 1]", "conv2d(_, f), conv2d(_, g)", 2,
           "conv2d(x, reshape(matmul(reshape(g, shape=(p, e)), reshape(f, shape=(e, c))), shape=(p, c, 1, 1)))",
           values={"p": 8}),
    _images("conv as product", "x[b, c, h, w] f[e, c, 1, 1]", "conv2d(_, f), permute(_, perm=(0, 3, 1, 2))", 2,
           "linear(permute(x, perm=(0, 2, 3, 1)), reshape(f, shape=(e, c)))"),
    _images("pools", "x[b, c, h, w] y[b, c, h, w] z[b, m, h, w] f[e, c, 1, 1]",
           "avg_pool2d(_, kernel=kernel, stride=stride, padding=padding),"
           " max_pool2d(_, kernel=kernel, stride=stride, padding=padding), add(_, _), scale(_, factor=a), relu(_),"
           " concat(_, _, dim=1), conv2d(_, f)",
           values={"m": 1, "kernel": (2, 2), "a": 0.17}, flat="avg_pool2d max_pool2d scale relu concat conv2d"),
    _images("norm of images", "x[b, c, h, w] y[b, m, h, w] z[b, c, h, w]",
           "channel_mean(_), concat(_, _, dim=1), concat(_, _, dim=0), add(_, _), scale(_, factor=a), relu(_)",
           values={"m": 1, "a": 0.17}, flat="concat scale relu"),
)  # fmt: skip

# What the written library has already; `benchmarks/rules.py` looks whether it would be found without.
FOLDS = _images(
    "normed convolution",
    "x[b, c, h, w] f[e, c, r, q] m[e] v[e] g[e] a[e]",
    "conv2d(x, _, stride=stride, padding=padding), mul(f, _), add(_, _), batch_norm(_, m, v, g, a, eps=eps)",
    3,
    "reshape(mul(g, rsqrt(shift(v, offset_by=eps))), shape=(e, 1, 1, 1)),"
    " reshape(sub(a, mul(m, mul(g, rsqrt(shift(v, offset_by=eps))))), shape=(e, 1, 1))",
    values={"eps": 1e-5},
    flat="add batch_norm conv2d",
)

WORLDS = (*ELEMENTS, *MOVES, *SUMS, *PRODUCTS, *ROWS, *IMAGES)
