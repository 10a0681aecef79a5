"""Programs at small sizes: every cut divides, masks stay masks, the proof is the same and says what was done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import NO_SIZES, Operator
from ir.ops import OPERATORS
from ir.proof.exact import verify_equal
from ir.proof.smaller_mesh import meshes_to_try
from ir.scaling.scale import shrink
from ir.scaling.size_factors import Atoms
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
    constants = [node.attr("value").array for node in small.graphs[0].nodes if node.is_const]
    mask = next(array for array in constants if array.ndim == 4)[0, 0]
    np.testing.assert_array_equal(np.isfinite(mask), np.tri(len(mask), dtype=bool))
    ids = next(array for array in constants if array.dtype.kind == "i")
    assert ids.max() < small.stored["wpe"].shape[0]
    assert small.ranges["ids"] == (0, small.stored["wte"].shape[0])


def test_meshes_that_are_simulated() -> None:
    """A small mesh itself, else divisors of a large one; then one of other sizes. Axes differ where they can."""
    assert meshes_to_try(Mesh.of(a=2, b=8), 0)[0] == Mesh.of(a=2, b=8)
    assert meshes_to_try(Mesh.of(a=8, b=8), 0)[0] == Mesh.of(a=2, b=4)
    assert meshes_to_try(Mesh.of(a=128, b=8), 0)[0] == Mesh.of(a=2, b=4)
    assert meshes_to_try(Mesh.of(a=2, b=2), 1)[0] == Mesh.of(a=2, b=4)
    assert meshes_to_try(Mesh.of(a=2, b=4), 1)[0] == Mesh.of(a=4, b=2)
    assert meshes_to_try(Mesh.of(a=17), 0)[0] == Mesh.of(a=4)
    assert meshes_to_try(Mesh.of(a=8, b=8), 1)[-1] == Mesh.of(a=1, b=2)
    assert meshes_to_try(Mesh.of(a=1), 1)[0] == Mesh.of(a=1)
    mesh = Mesh.of(a=8, b=2, c=2)
    wide = Builder()
    x = wide.linear(wide.input("x", TensorType((64, 32), F32)), weight(wide, "w", 32, 32))
    source = wide.graph({"y": x})
    assert "a=4xb=2xc=2" in verify_equal(source, spread(source, mesh), mesh).scaled


def test_both_turns_differ_in_every_size_that_may_change() -> None:
    source = language_model()
    one, other = (shrink((source,), Mesh(()), turn=turn) for turn in (0, 1))
    free = {node for node in source.nodes if node.is_input}
    for node in free:
        assert all(a != b for a, b in zip(one.nodes[node].type.shape, other.nodes[node].type.shape, strict=True))


def with_constant(constant: np.ndarray[Any, Any], kind: str) -> Graph:
    k = Builder()
    if kind == "added":
        h = k.add(k.input("x", TensorType((4, len(constant)), F32)), k.const(constant))
    elif kind == "positions":
        h = k.embedding(weight(k, "wpe", 128, 8), k.const(constant))
    else:
        q = k.linear(k.input("x", TensorType((2, len(constant), 8), F32)), weight(k, "w", 8, 8))
        h = k.attention(q, q, q, k.const(constant), scale=0.3)
    return k.graph({"y": h})


def mask(size: int, window: int) -> np.ndarray[Any, Any]:
    """[size, size]: a row sees itself and what is up to ``window`` - 1 before."""
    return np.asarray(np.tri(size, dtype=bool) & ~np.tri(size, k=-window, dtype=bool))


POSITIONS = np.arange(64)
TAIL = np.concatenate([np.zeros(63), np.ones(1)]).astype(np.float32)
OTHER_CONSTANTS = {
    "tail": ("added", np.zeros(64, dtype=np.float32), TAIL),
    "window": ("mask", mask(64, 64), mask(64, 16)),
    **{f"shift {by}": ("positions", POSITIONS, POSITIONS + by) for by in (4, 8, 16, 48)},
    "reversed": ("positions", POSITIONS, np.concatenate([POSITIONS[:32], POSITIONS[:31:-1]])),
}


@pytest.mark.parametrize("name", OTHER_CONSTANTS)
def test_constants_are_compared_whole(name: str) -> None:
    """Two programs whose constants begin alike are not the same program."""
    kind, right, wrong = OTHER_CONSTANTS[name]
    source = with_constant(right, kind)
    verify_equal(source, with_constant(right, kind), Mesh(()))
    with pytest.raises(VerificationError):
        verify_equal(source, with_constant(wrong, kind), Mesh(()))


def test_a_constant_folded_into_another_is_evaluated_whole() -> None:
    """x + (a + b) == (x + a) + b holds for these values: where constants differ, they keep all of their elements."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, 64).astype(np.float32) for _ in range(2))

    def program(*constants: np.ndarray[Any, Any]) -> Graph:
        k = Builder()
        x = k.linear(k.input("x", TensorType((4, 32), F32)), weight(k, "w", 64, 32))
        for constant in constants:
            x = k.add(x, k.const(constant))
        return k.graph({"y": x})

    verify_equal(program(a, b), program(a + b), Mesh(()))
    wrong = (a + b).copy()
    wrong[-1] += 1
    with pytest.raises(VerificationError):
        verify_equal(program(a, b), program(wrong), Mesh(()))


@pytest.mark.parametrize(("factor", "right"), [(1 / 64, True), (1 / 2, False), (1 / 3, False), (1 / 4, False)])
def test_a_mean_is_the_sum_over_its_true_count(factor: float, right: bool) -> None:
    def program(*, mean: bool) -> Graph:
        k = Builder()
        x = k.linear(k.input("x", TensorType((4, 32), F32)), weight(k, "w", 64, 32))
        if mean:
            return k.graph({"y": k.reduce_mean(x, dims=(1,), keepdim=False)})
        return k.graph({"y": k.scale(k.reduce_sum(x, dims=(1,), keepdim=False), factor=factor)})

    if right:
        verify_equal(program(mean=True), program(mean=False), Mesh(()))
    else:
        with pytest.raises(VerificationError):
            verify_equal(program(mean=True), program(mean=False), Mesh(()))


def test_slices_that_differ_stay_apart() -> None:
    """A slice from 3 and one from 16 may begin at the same place of a small dim."""

    def program(start: int) -> Graph:
        k = Builder()
        x = k.linear(k.input("x", TensorType((4, 32), F32)), weight(k, "w", 64, 32))
        return k.graph({"y": k.reduce_sum(k.slice(x, dim=1, start=start, stop=64), dims=(1,), keepdim=False)})

    for start in range(1, 64):
        if start != 16:
            with pytest.raises(VerificationError):
                verify_equal(program(16), program(start), Mesh(()))


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


def test_every_attribute_is_known_to_name_a_size_or_none() -> None:
    for op in OPERATORS.values():
        unknown = set(op.attrs) - NO_SIZES
        assert op.kind == "leaf" or not unknown or op.ties, (op.name, unknown)
    with pytest.raises(AssertionError, match="'width'"):
        Operator("crop", "... -> ...", "map", attrs=("width",))


def test_a_slice_stays_within_a_dim_that_follows_from_others() -> None:
    """A token in front of twelve, of which the first seven are taken: the dim of thirteen is no size of its own."""
    k = Builder()
    x = k.linear(k.input("x", TensorType((6, 12, 8), F32)), weight(k, "w", 8, 8))
    x = k.concat(k.expand(weight(k, "token", 1, 1, 8), shape=(6, 1, 8)), x, dim=1)
    graph = k.graph({"y": k.slice(x, dim=1, start=0, stop=7)})
    for turn in (0, 1):
        (small,) = shrink((graph,), Mesh(()), turn=turn).graphs
        assert small.outputs[0][1].operands[0].type.shape[1] >= 7
    verify_equal(graph, graph, Mesh(()))


def test_sizes_that_stay_and_follow_from_each_other() -> None:
    atoms = Atoms()
    first, second, third = (atoms.new(12) for _ in range(3))
    atoms.follows(first, [(second,)], lambda size: size)
    atoms.follows(second, [(third,)], lambda size: size)
    atoms.keep((first, second))
    assert {atoms.choose().get(atom, 12) for atom in (first, second, third)} == {12}


def test_a_dim_that_follows_stays_with_what_it_follows_from_where_it_is_made_of_others() -> None:
    """All but the last of 256 elements as [15, 17]: neither program may have another number of them."""
    k = Builder()
    x = k.input("x", TensorType((16, 16), F32))
    rows = k.reshape(k.slice(k.reshape(x, shape=(256,)), dim=0, start=0, stop=255), shape=(15, 17))
    graph = k.graph({"y": k.reduce_sum(k.slice(rows, dim=1, start=1, stop=17), dims=(0, 1), keepdim=False)})
    mesh = Mesh.of(a=4)
    verify_equal(graph, spread(graph, mesh), mesh)


def test_a_dim_that_is_repeated_and_summed_away_has_one_size_in_both_programs() -> None:
    k = Builder()
    whole = k.reduce_sum(k.input("x", TensorType((4, 3, 6), F32)), dims=(0, 1, 2), keepdim=True)
    many = k.abs(k.expand(whole, shape=(2, 6, 4)))
    source = k.graph({"y": k.reduce_sum(many, dims=(0, 1, 2), keepdim=True)})
    mesh = Mesh.of(x=2)
    parallel = Builder()
    x = parallel.input("x", TensorType((4, 3, 6), F32))
    repeated = parallel.expand(parallel.reduce_sum(x, dims=(0, 1, 2), keepdim=True), shape=(2, 6, 4))
    cut = parallel.abs(parallel.partition(repeated, dim=0, axis="x"))
    summed = parallel.reduce(parallel.reduce_sum(cut, dims=(0, 1, 2), keepdim=True), axis="x")
    pcg = parallel.graph({"y": summed})
    assert verify_equal(source, pcg, mesh).error_bound < 1e-20


@pytest.mark.parametrize(("symbols", "sizes"), [(True, range(2, 8)), (False, range(48, 49))])
def test_images_chosen_from_by_constants_are_small_where_these_are_symbols(symbols: bool, sizes: range) -> None:
    """Interpolations and windows choose rows by numbers that are known: a proof is of any numbers."""
    k = Builder()
    x = k.input("x", TensorType((4, 3, 48, 48), DType.F32))
    for dim in (2, 3):
        x = k.index_select(x, k.const(np.arange(48) // 2 * 2), dim=dim)
    graph = k.graph({"y": k.relu(x)})
    small = shrink((graph, graph), Mesh.of(a=2), symbols=symbols)
    assert all(size in sizes for size in small.graphs[0].inputs[0].type.shape[2:])
