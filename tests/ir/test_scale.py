"""Programs at small sizes: every cut divides, masks stay masks, the proof is the same and says what was done."""

from __future__ import annotations

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.exact import verify_equal
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.scale import fewer_ranks, shrink
from ir.types import DType, TensorType
from tests.ir.spread import spread

F32, I64 = DType.F32, DType.I64


def weight(k: Builder, name: str, *shape: int) -> Node:
    return k.param(name, TensorType(shape, F32))


def language_model() -> Graph:
    """With grouped queries by expand, rotary halves by slice and concat, and a table of positions."""
    k = Builder()
    x = k.embedding(weight(k, "wte", 5000, 96), k.input("ids", TensorType((16, 128), I64)))
    x = k.add(x, k.embedding(weight(k, "wpe", 1024, 96), k.const(np.arange(128)[None])))
    q = k.permute(k.reshape(k.linear(x, weight(k, "wq", 96, 96)), shape=(16, 128, 12, 8)), perm=(0, 2, 1, 3))
    turned = k.concat(k.neg(k.slice(q, dim=3, start=4, stop=8)), k.slice(q, dim=3, start=0, stop=4), dim=3)
    q = k.add(q, k.mul(turned, k.const(np.random.default_rng(0).normal(size=(128, 8)).astype(np.float32))))
    kv = k.permute(k.reshape(k.linear(x, weight(k, "wk", 24, 96)), shape=(16, 128, 3, 8)), perm=(0, 2, 1, 3))
    kv = k.expand(k.reshape(kv, shape=(16, 3, 1, 128, 8)), shape=(16, 3, 4, 128, 8))
    kv = k.reshape(kv, shape=(16, 12, 128, 8))
    mask = k.const(np.where(np.tri(128, dtype=bool), 0, -np.inf).astype(np.float32)[None, None])
    a = k.reshape(k.permute(k.attention(q, kv, kv, mask, scale=0.3), perm=(0, 2, 1, 3)), shape=(16, 128, 96))
    return k.graph({"y": k.linear(a, weight(k, "head", 5000, 96))})


def vision_model() -> Graph:
    """Patches, a class token in front of them, and the token cut out again; 65 tokens divide by nothing."""
    k = Builder()
    x = k.conv2d(k.input("x", TensorType((8, 3, 64, 64), F32)), weight(k, "w", 48, 3, 8, 8), stride=(8, 8))
    x = k.permute(k.reshape(x, shape=(8, 48, 64)), perm=(0, 2, 1))
    token = k.expand(weight(k, "token", 1, 1, 48), shape=(8, 1, 48))
    x = k.add(k.concat(token, x, dim=1), weight(k, "positions", 1, 65, 48))
    h = k.attention(x, x, x, scale=0.1)
    first = k.reshape(k.slice(h, dim=1, start=0, stop=1), shape=(8, 48))
    return k.graph({"y": k.linear(first, weight(k, "head", 10, 48))})


def residual_convnet() -> Graph:
    """Strides that must agree along two branches, and convolutions that keep their size beside a skip."""
    k = Builder()
    x = k.conv2d(
        k.input("x", TensorType((8, 3, 64, 64), F32)), weight(k, "stem", 16, 3, 7, 7), stride=(2, 2), padding=(3, 3)
    )
    x = k.max_pool2d(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
    x = k.add(x, k.relu(k.conv2d(x, weight(k, "same", 16, 16, 3, 3), padding=(1, 1))))
    down = k.conv2d(x, weight(k, "down", 32, 16, 3, 3), stride=(2, 2), padding=(1, 1))
    x = k.add(down, k.conv2d(x, weight(k, "skip", 32, 16, 1, 1), stride=(2, 2)))
    x = k.conv2d(x, weight(k, "depthwise", 32, 1, 3, 3), padding=(1, 1), groups=32)
    return k.graph({"y": k.reduce_mean(x, dims=(2, 3), keepdim=False)})


MODELS = {"language": language_model, "vision": vision_model, "convnet": residual_convnet}
MESHES = [Mesh.of(a=2), Mesh.of(a=2, b=4), Mesh.of(a=8)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_scaled_proof(model: str, mesh: Mesh) -> None:
    source = MODELS[model]()
    pcg = spread(source, mesh)
    small = shrink((source, pcg), mesh)
    assert small.note == "scaled-down sizes"
    assert max(node.type.num_elements for node in small.graphs[0].nodes) <= 20_000
    assert verify_equal(source, pcg, mesh).error_bound < 1e-7


def test_every_node_keeps_its_place() -> None:
    source = language_model()
    (small,) = shrink((source,), Mesh(())).graphs
    assert [node.op.name for node in small.nodes] == [node.op.name for node in source.nodes]
    assert all(a.type.rank == b.type.rank for a, b in zip(small.nodes, source.nodes, strict=True))


def test_a_causal_mask_stays_causal_and_ids_stay_in_their_table() -> None:
    small = shrink((language_model(),), Mesh(()))
    constants = [node.attr("value").array for node in small.graphs[0].nodes if node.op.name == "const"]
    mask = next(array for array in constants if array.ndim == 4)[0, 0]
    np.testing.assert_array_equal(np.isfinite(mask), np.tri(len(mask), dtype=bool))
    ids = next(array for array in constants if array.dtype.kind == "i")
    assert ids.max() < small.stored["wpe"].shape[0]
    assert small.limits["ids"] == small.stored["wte"].shape[0]


def test_large_meshes_lose_ranks_but_no_axis() -> None:
    assert fewer_ranks(Mesh.of(a=8, b=8)) == Mesh.of(a=4, b=4)
    assert fewer_ranks(Mesh.of(a=2, b=2, c=8)) == Mesh.of(a=2, b=2, c=4)
    assert fewer_ranks(Mesh.of(a=2, b=8)) == Mesh.of(a=2, b=8)
    assert fewer_ranks(Mesh.of(a=17)) == Mesh.of(a=17)
    mesh = Mesh.of(a=8, b=2, c=2)
    wide = Builder()
    x = wide.linear(wide.input("x", TensorType((64, 32), F32)), weight(wide, "w", 32, 32))
    source = wide.graph({"y": x})
    assert "a=4xb=2xc=2 instead of a=8xb=2xc=2" in verify_equal(source, spread(source, mesh), mesh).scaled


def test_what_cannot_scale_stays_as_it_is() -> None:
    k = Builder()
    x = k.reshape(k.input("x", TensorType((6, 35, 8), F32)), shape=(6, 14, 20))  # 35 x 8 = 14 x 20: no common cut
    graph = k.graph({"y": k.gelu(x)})
    (small,) = shrink((graph,), Mesh(())).graphs
    assert small.inputs[0].type.shape == (2, 35, 8)


def test_too_large_to_stay_is_refused() -> None:
    k = Builder()
    x = k.reshape(k.input("x", TensorType((63936, 1000), F32)), shape=(1000, 63936))  # no common cut either
    for _ in range(5):
        x = k.gelu(x)
    graph = k.graph({"y": x})
    with pytest.raises(VerificationError, match="too large"):
        shrink((graph,), Mesh.of(a=64))
