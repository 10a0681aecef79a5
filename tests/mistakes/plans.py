"""Two programs and a right plan for each, their nodes named, so that single mistakes can be put in by name.

``transformer``: data parallel × (tensor + sequence parallel), vocabulary-parallel tied embedding, one ZeRO-sharded
weight. ``convnet``: the batch cut by both axes, batch normalisation with running statistics.
"""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType

F32, I64 = DType.F32, DType.I64
MESH = Mesh.of(dp=2, tp=2)
B, S, D, H, E, M, V = 4, 8, 16, 4, 4, 24, 12


def weight(k: Builder, name: str, *shape: int, stored: str = "") -> Node:
    """A parameter."""
    return k.param(name, TensorType(shape, F32), stored=stored)


def heads(k: Builder, x: Node) -> Node:
    """[b, s, (h e)] -> [b, h, s, e]."""
    return k.permute(k.reshape(x, shape=(B, S, H, E)), perm=(0, 2, 1, 3))


def merged(k: Builder, x: Node) -> Node:
    """[b, h, s, e] -> [b, s, (h e)]."""
    return k.reshape(k.permute(x, perm=(0, 2, 1, 3)), shape=(B, S, D))


def transformer() -> Graph:
    """On one device."""
    k = Builder()
    wte = weight(k, "wte", V, D)
    x = k.embedding(wte, k.input("ids", TensorType((B, S), I64)))
    h = k.layer_norm(x, weight(k, "g", D), weight(k, "b", D), eps=1e-5)
    qkv = k.add(k.linear(h, weight(k, "wqkv", 3 * D, D)), weight(k, "bqkv", 3 * D))
    q, key, v = (heads(k, k.chunk(qkv, dim=2, parts=3, index=i)) for i in range(3))
    a = merged(k, k.attention(q, key, v, causal=True, scale=0.5))
    x = k.add(x, k.add(k.linear(a, weight(k, "wo", D, D)), weight(k, "bo", D)))
    u = k.gelu(k.add(k.linear(x, weight(k, "w1", M, D)), weight(k, "c1", M)))
    x = k.add(x, k.linear(u, weight(k, "w2", D, M)))
    wq2 = k.linear(x, weight(k, "wr", D, D))
    x = k.add(x, merged(k, k.attention(heads(k, wq2), heads(k, x), heads(k, x), causal=True, scale=0.25)))
    mean = k.reduce_mean(x, dims=(0, 1), keepdim=False)
    return k.graph({"logits": k.linear(x, wte), "mean": mean})


def transformer_plan() -> Graph:
    """On dp × tp. Between blocks x is cut by batch over dp and by sequence over tp."""
    k = Builder()

    def used(w: Node) -> Node:  # by all data ranks
        return k.replicate(w, axis="dp", name=f"{w.name}.used")

    def token(w: Node) -> Node:  # on tokens that both axes cut
        return k.replicate(used(w), axis="tp", name=f"{w.name}.per_token")

    wte = weight(k, "wte", V, D, stored="I,S0")
    ids = k.partition(k.input("ids", TensorType((B, S), I64)), dim=0, axis="dp", name="ids.batch")
    x = k.embedding(used(wte), k.replicate(ids, axis="tp"), name="embed")
    x = k.reduce_scatter(x, dim=1, axis="tp", name="embed.sum")

    h = k.layer_norm(x, token(weight(k, "g", D)), token(weight(k, "b", D)), eps=1e-5, name="norm")
    h = k.all_gather(h, dim=1, axis="tp", name="norm.whole")
    parts = []
    for i, part in enumerate("qkv"):
        view = (("chunk", 0, 3, i),)
        w = k.param(f"w{part}", TensorType((D, D), F32), source="wqkv", view=view, stored="I,S0")
        c = k.param(f"b{part}", TensorType((D,), F32), source="bqkv", view=view, stored="I,S0")
        parts.append(heads(k, k.add(k.linear(h, used(w)), used(c))))
    a = merged(k, k.attention(*parts, causal=True, scale=0.5, name="attention"))
    # ZeRO: wo is cut over dp too, and gathered where it is used
    wo = k.all_gather(weight(k, "wo", D, D, stored="S0,S1"), dim=0, axis="dp", name="wo.whole")
    a = k.reduce_scatter(k.linear(a, wo, name="out"), dim=1, axis="tp", name="out.sum")
    x = k.add(x, k.add(a, token(weight(k, "bo", D)), name="out.bias"), name="residual")

    h = k.all_gather(x, dim=1, axis="tp", name="mlp.whole")
    up = k.linear(h, used(weight(k, "w1", M, D, stored="I,S0")))
    u = k.gelu(k.add(up, used(weight(k, "c1", M, stored="I,S0"))), name="act")
    y = k.linear(u, used(weight(k, "w2", D, M, stored="I,S1")), name="down")
    x = k.add(x, k.reduce_scatter(y, dim=1, axis="tp", name="down.sum"), name="residual2")

    # queries stay cut by sequence; keys and values are gathered whole (context parallelism)
    q = k.linear(x, token(weight(k, "wr", D, D)))
    kv = k.all_gather(heads(k, x), dim=2, axis="tp", name="kv.whole")
    c = k.attention(heads(k, q), kv, kv, causal=True, scale=0.25, name="context")
    x = k.add(x, merged(k, c), name="residual3")

    mean = k.reduce_mean(x, dims=(0, 1), keepdim=False, name="mean")
    mean = k.reduce(k.reduce(mean, axis="tp", name="mean.tp"), axis="dp", name="mean.dp")
    whole = k.all_gather(x, dim=1, axis="tp", name="head.whole")
    logits = k.linear(whole, used(wte), name="head")
    logits = k.all_to_all(logits, dim=2, to_dim=1, axis="tp", name="logits.sequence")
    return k.graph({"logits": logits, "mean": mean})


def convnet() -> Graph:
    """On one device."""
    k = Builder()
    x = k.input("x", TensorType((8, 4, 6, 6), F32))
    y = k.conv2d(x, weight(k, "w", 6, 4, 3, 3), padding=(1, 1))
    mean = k.channel_mean(y)
    variance = k.channel_variance(y, mean)
    z = k.relu(k.batch_norm(y, mean, variance, weight(k, "g", 6), weight(k, "b", 6), eps=1e-5))
    old = k.param("running", TensorType((6,), F32), trainable=False)
    running = k.add(k.scale(old, factor=0.9), k.scale(mean, factor=0.1))
    pooled = k.reduce_mean(k.max_pool2d(z, kernel=(2, 2), stride=(2, 2)), dims=(2, 3), keepdim=False)
    return k.graph({"y": k.linear(pooled, weight(k, "head", 10, 6))}, {"running": running})


def convnet_plan() -> Graph:
    """On dp × tp, the batch cut by both: dp first, then tp."""
    k = Builder()

    def used(w: Node) -> Node:
        return k.replicate(k.replicate(w, axis="dp", name=f"{w.name}.dp"), axis="tp", name=f"{w.name}.tp")

    def total(x: Node, name: str) -> Node:
        return k.reduce(k.reduce(x, axis="dp", name=f"{name}.dp"), axis="tp", name=f"{name}.tp")

    x = k.partition(k.input("x", TensorType((8, 4, 6, 6), F32)), dim=0, axis="dp", name="x.dp")
    x = k.partition(x, dim=0, axis="tp", name="x.tp")
    y = k.conv2d(x, used(weight(k, "w", 6, 4, 3, 3)), padding=(1, 1), name="conv")
    mean = total(k.channel_mean(y, name="statistics"), "mean")
    variance = total(k.channel_variance(y, used(mean), name="spread"), "variance")
    g, b = weight(k, "g", 6), weight(k, "b", 6)
    z = k.relu(k.batch_norm(y, used(mean), used(variance), used(g), used(b), eps=1e-5, name="norm"))
    old = k.param("running", TensorType((6,), F32), trainable=False)
    running = k.add(k.scale(old, factor=0.9), k.scale(mean, factor=0.1), name="momentum")
    pooled = k.reduce_mean(k.max_pool2d(z, kernel=(2, 2), stride=(2, 2)), dims=(2, 3), keepdim=False, name="pool")
    y = k.linear(pooled, used(weight(k, "head", 10, 6)))
    y = k.combine(k.combine(y, dim=0, axis="tp", name="y.tp"), dim=0, axis="dp", name="y.dp")
    return k.graph({"y": y}, {"running": running})
