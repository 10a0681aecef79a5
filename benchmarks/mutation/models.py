"""Small programs that have what models have: masks, positions, grouped heads, strides, statistics, ties, equal layers.

Sizes are small enough to be run whole, and large enough that a proof at smaller sizes could miss what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import DType, TensorType

F32, I64 = DType.F32, DType.I64


def weight(k: Builder, name: str, *shape: int) -> Node:
    """A trained parameter."""
    return k.param(name, TensorType(shape, F32))


def buffer(k: Builder, name: str, *shape: int) -> Node:
    """One that is not trained."""
    return k.param(name, TensorType(shape, F32), trainable=False)


def given(k: Builder, name: str, *shape: int) -> Node:
    """Numbers that the caller passes."""
    return k.input(name, TensorType(shape, F32))


def ids(k: Builder, name: str, *shape: int) -> Node:
    """Indices that the caller passes."""
    return k.input(name, TensorType(shape, I64))


def dense(k: Builder, name: str, x: Node, n: int) -> Node:
    """A linear layer with its bias."""
    return k.add(k.linear(x, weight(k, f"{name}.w", n, x.type.shape[-1])), weight(k, f"{name}.b", n))


def heads(k: Builder, x: Node, number: int) -> Node:
    """[b, s, (h e)] -> [b, h, s, e]."""
    b, s, d = x.type.shape
    return k.permute(k.reshape(x, shape=(b, s, number, d // number)), perm=(0, 2, 1, 3))


def merged(k: Builder, x: Node) -> Node:
    """[b, h, s, e] -> [b, s, (h e)]."""
    b, h, s, e = x.type.shape
    return k.reshape(k.permute(x, perm=(0, 2, 1, 3)), shape=(b, s, h * e))


def causal_mask(size: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[size, size]: a row sees itself and all before."""
    return np.tri(size, dtype=bool)


def language() -> Graph:
    """A decoder's layer with rotary embedding, a table of positions and a mask that is a constant."""
    k = Builder()
    b, s, d, h = 4, 24, 24, 12
    x = k.embedding(weight(k, "wte", 48, d), ids(k, "ids", b, s))
    x = k.add(x, k.embedding(weight(k, "wpe", 96, d), k.const(np.arange(s)[None], "positions")))
    n = k.layer_norm(x, weight(k, "g", d), weight(k, "c", d), eps=1e-5)
    angles = np.arange(s)[:, None] * np.array([1.0, 1.0])[None]
    cos, sin = (k.const(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    turned = []
    for name in ("q", "k"):
        y = heads(k, dense(k, name, n, d), h)
        half = k.concat(k.neg(k.slice(y, dim=3, start=1, stop=2)), k.slice(y, dim=3, start=0, stop=1), dim=3)
        turned.append(k.add(k.mul(y, cos), k.mul(half, sin)))
    mask = k.const(causal_mask(s)[None, None], "mask")
    a = k.attention(*turned, heads(k, dense(k, "v", n, d), h), mask, scale=0.5)
    x = k.add(x, dense(k, "o", merged(k, a), d))
    x = k.add(x, dense(k, "down", k.gelu(dense(k, "up", x, 48), approximate="tanh"), d))
    return k.graph({"logits": k.linear(x, weight(k, "head", 48, d))})


def grouped() -> Graph:
    """Attention whose keys and values serve several heads, causal by its flag, with a fused projection in chunks."""
    k = Builder()
    b, s, d = 4, 24, 24
    x = given(k, "x", b, s, d)
    n = k.rms_norm(x, weight(k, "g", d), eps=1e-6)
    q = heads(k, k.linear(n, weight(k, "wq", d, d)), 12)
    both = k.linear(n, weight(k, "wkv", 16, d))
    groups = []
    for index in range(2):
        y = heads(k, k.chunk(both, dim=2, parts=2, index=index), 4)
        y = k.expand(k.reshape(y, shape=(b, 4, 1, s, 2)), shape=(b, 4, 3, s, 2))
        groups.append(k.reshape(y, shape=(b, 12, s, 2)))
    a = merged(k, k.attention(q, *groups, causal=True, scale=0.7))
    x = k.add(x, k.linear(a, weight(k, "wo", d, d)))
    gate, up = (k.linear(x, weight(k, name, 48, d)) for name in ("gate", "up"))
    return k.graph({"y": k.add(x, k.linear(k.mul(k.silu(gate), up), weight(k, "down", d, 48)))})


def convolutions() -> Graph:
    """Residual blocks with strides on both branches, a depthwise convolution and pools."""
    k = Builder()
    x = k.conv2d(given(k, "x", 12, 3, 16, 16), weight(k, "stem", 8, 3, 3, 3), stride=(2, 2), padding=(1, 1))
    x = k.max_pool2d(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
    x = k.add(x, k.relu(k.conv2d(x, weight(k, "same", 8, 8, 3, 3), padding=(1, 1))))
    down = k.conv2d(x, weight(k, "down", 12, 8, 3, 3), stride=(2, 2), padding=(1, 1))
    x = k.add(down, k.conv2d(x, weight(k, "skip", 12, 8, 1, 1), stride=(2, 2)))
    x = k.conv2d(x, weight(k, "depthwise", 12, 1, 3, 3), padding=(1, 1), groups=12)
    x = k.avg_pool2d(x, kernel=(2, 2), stride=(1, 1))
    x = k.reduce_mean(x, dims=(2, 3), keepdim=False)
    return k.graph({"y": dense(k, "head", x, 24)})


def normalized() -> Graph:
    """Batch normalisation in training: statistics of the whole batch, and running ones that are kept."""
    k = Builder()
    x = k.conv2d(given(k, "x", 24, 4, 6, 6), weight(k, "w", 12, 4, 3, 3), padding=(1, 1))
    mean = k.channel_mean(x)
    variance = k.channel_variance(x, mean)
    z = k.relu(k.batch_norm(x, mean, variance, weight(k, "g", 12), weight(k, "b", 12), eps=1e-5))
    updates = {}
    for name, value in (("running_mean", mean), ("running_var", variance)):
        old = buffer(k, name, 12)
        updates[name] = k.add(k.scale(old, factor=0.9), k.scale(value, factor=0.1))
    y = k.linear(k.reduce_mean(z, dims=(2, 3), keepdim=False), weight(k, "head", 12, 12))
    return k.graph({"y": y}, updates)


def tied() -> Graph:
    """An embedding that the head reads too, with absolute positions from a sliced table."""
    k = Builder()
    wte = weight(k, "wte", 24, 12)
    x = k.embedding(wte, ids(k, "ids", 6, 24))
    x = k.add(x, k.slice(weight(k, "wpe", 48, 12), dim=0, start=0, stop=24))
    x = k.add(x, dense(k, "down", k.gelu(dense(k, "up", x, 24)), 12))
    return k.graph({"logits": k.linear(k.layer_norm(x, weight(k, "g", 12), weight(k, "c", 12), eps=1e-5), wte)})


def mixture() -> Graph:
    """Two of six experts for each token."""
    k = Builder()
    x = given(k, "x", 24, 12)
    routed = k.top_k(k.softmax(k.linear(x, weight(k, "router", 6, 12))), k=2)
    y = None
    for index in range(6):
        up = k.silu(k.linear(x, weight(k, f"up{index}", 12, 12)))
        share = k.slice(routed, dim=1, start=index, stop=index + 1)
        term = k.mul(k.linear(up, weight(k, f"down{index}", 12, 12)), share)
        y = term if y is None else k.add(y, term)
    return k.graph({"y": k.add(x, y)})


def tables() -> Graph:
    """Sparse features from tables, dense ones from layers, joined and multiplied (as DLRM does)."""
    k = Builder()
    bottom = k.relu(dense(k, "bottom", given(k, "features", 24, 6), 12))
    sparse = []
    for name, rows in (("a", 24), ("b", 48)):
        bag = k.embedding(weight(k, f"table_{name}", rows, 12), ids(k, f"ids_{name}", 24, 4))
        sparse.append(k.reduce_sum(bag, dims=(1,), keepdim=False))
    joined = k.concat(bottom, *sparse, dim=1)
    parts = k.reshape(joined, shape=(24, 3, 12))
    dots = k.reshape(k.matmul(parts, k.permute(parts, perm=(0, 2, 1))), shape=(24, 9))
    top = k.relu(dense(k, "top", k.concat(bottom, dots, dim=1), 24))
    return k.graph({"score": k.sigmoid(dense(k, "last", top, 1))})


def layers(number: int = 8) -> Graph:
    """Equal layers, which a proof may take by induction."""
    k = Builder()
    x = given(k, "x", 24, 12)
    for index in range(number):
        x = k.add(x, k.gelu(dense(k, f"layer{index}", x, 12)))
    return k.graph({"y": k.linear(x, weight(k, "head", 24, 12))})


def decoder(number: int = 6) -> Graph:
    """Equal decoder layers with attention, so that most of a depth is left out."""
    k = Builder()
    x = given(k, "x", 4, 12, 12)
    for index in range(number):
        n = k.rms_norm(x, weight(k, f"{index}.g", 12), eps=1e-6)
        q, key, v = (heads(k, k.linear(n, weight(k, f"{index}.{name}", 12, 12)), 6) for name in ("wq", "wk", "wv"))
        a = merged(k, k.attention(q, key, v, causal=True, scale=0.5))
        x = k.add(x, k.linear(a, weight(k, f"{index}.wo", 12, 12)))
    return k.graph({"y": x})


def vision() -> Graph:
    """Patches, a class token in front of them, positions, and the token cut out again."""
    k = Builder()
    x = k.conv2d(given(k, "x", 12, 3, 16, 16), weight(k, "w", 12, 3, 4, 4), stride=(4, 4))
    x = k.permute(k.reshape(x, shape=(12, 12, 16)), perm=(0, 2, 1))
    x = k.concat(k.expand(weight(k, "token", 1, 1, 12), shape=(12, 1, 12)), x, dim=1)
    x = k.add(x, weight(k, "positions", 1, 17, 12))
    q = heads(k, dense(k, "qkv", x, 12), 6)
    x = k.add(x, dense(k, "o", merged(k, k.attention(q, q, q, scale=0.6)), 12))
    first = k.reshape(k.slice(x, dim=1, start=0, stop=1), shape=(12, 12))
    return k.graph({"y": dense(k, "head", k.tanh(first), 24)})


def reshapes() -> Graph:
    """Windows cut out of an image and put together again, channels shuffled between groups (as Swin, ShuffleNet)."""
    k = Builder()
    x = given(k, "x", 12, 12, 12, 8)
    w = k.permute(k.reshape(x, shape=(12, 3, 4, 3, 4, 8)), perm=(0, 1, 3, 2, 4, 5))
    w = k.reshape(w, shape=(108, 16, 8))
    w = k.add(w, dense(k, "mixed", k.softmax(w), 8))
    y = k.permute(k.reshape(w, shape=(12, 3, 3, 4, 4, 8)), perm=(0, 1, 3, 2, 4, 5))
    y = k.reshape(y, shape=(12, 12, 12, 8))
    y = k.reshape(k.permute(k.reshape(y, shape=(12, 12, 12, 2, 4)), perm=(0, 1, 2, 4, 3)), shape=(12, 12, 12, 8))
    return k.graph({"y": k.linear(y, weight(k, "head", 12, 8))})


def outputs() -> Graph:
    """Three outputs of two types, one of them a mean over tokens."""
    k = Builder()
    x = given(k, "x", 12, 24, 12)
    h = k.tanh(dense(k, "shared", x, 24))
    left, right = dense(k, "left", h, 12), dense(k, "right", h, 12)
    return k.graph({"left": left, "right": right, "mean": k.reduce_mean(h, dims=(0, 1), keepdim=False)})


def means() -> Graph:
    """A loss over tokens: means and sums over dims that are cut, factors that depend on a size."""
    k = Builder()
    x, target = given(k, "x", 12, 24, 6), given(k, "target", 12, 24, 12)
    error = k.sub(k.linear(x, weight(k, "w", 12, 6)), target)
    square = k.mul(error, error)
    per_row = k.scale(k.reduce_sum(square, dims=(1,), keepdim=False), factor=1 / 24)
    loss = k.reduce_mean(square, dims=(0, 1, 2), keepdim=False)
    picked = k.log_softmax(k.linear(k.reduce_mean(x, dims=(1,), keepdim=False), weight(k, "v", 12, 6)))
    return k.graph({"loss": loss, "rows": per_row, "picked": picked})


def context() -> Graph:
    """A causal flag and shifted targets on long sequences that plans cut, a table read at constant places."""
    k = Builder()
    x = given(k, "x", 2, 24, 12)
    order = k.const(np.concatenate([np.arange(0, 24, 2), np.arange(1, 24, 2)]), "order")
    x = k.add(x, k.index_select(weight(k, "places", 96, 12), order, dim=0))
    q, key = (heads(k, k.linear(x, weight(k, name, 12, 12)), 2) for name in ("wq", "wk"))
    a = merged(k, k.attention(q, key, key, causal=True, scale=0.4))
    ramp = k.const(np.linspace(0.5, 1.5, 24, dtype=np.float32)[:, None], "ramp")
    return k.graph({"y": k.linear(k.mul(a, ramp), weight(k, "wo", 12, 12))})


def windows() -> Graph:
    """Layers that see all before them and layers that see a window, in turn; two kinds of positions."""
    k = Builder()
    x = k.embedding(weight(k, "wte", 24, 12), ids(k, "ids", 4, 12))
    x = k.add(x, k.embedding(weight(k, "segments", 12, 12), ids(k, "parts", 4, 12)))
    wpe = weight(k, "wpe", 48, 12)
    masks = [k.const(causal_mask(12) & ~np.tri(12, k=-size, dtype=bool), f"mask{size}") for size in (12, 4)]
    for index, mask in enumerate(masks):
        h = k.add(x, k.embedding(wpe, k.const(np.arange(12) * (index + 1), f"places{index}")))
        q, key, v = (heads(k, k.linear(h, weight(k, f"{index}.{name}", 12, 12)), 2) for name in ("q", "k", "v"))
        x = k.add(x, merged(k, k.attention(q, key, v, mask, scale=0.5)))
    return k.graph({"y": x})


MODELS: Mapping[str, Callable[[], Graph]] = {
    make.__name__: make
    for make in (
        language, grouped, convolutions, normalized, tied, mixture, tables, layers,
        decoder, vision, reshapes, outputs, means, context, windows,
    )
}  # fmt: skip
