"""Every operator between two states moves values and gradients as docs/architecture.md says, there and back."""

from __future__ import annotations

import itertools

import pytest

from ir.builder import Builder
from ir.errors import ShardingError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.ops import OPERATORS
from ir.ops.parallel import TRANSITIONS, move
from ir.proof.exact import verify_equal
from ir.sharding import Invariant, Partial, Replicate, Shard, State
from ir.types import DType, TensorType
from tests.property.programs import enter

STATES: tuple[State, ...] = (Invariant(), Replicate(), Partial(), Shard(0), Shard(1))
PAIRS = [pair for pair in itertools.product(STATES, repeat=2) if move(*pair) is not None]
TENSOR = TensorType((6, 12), DType.F32)
WEIGHT = TensorType((6, 12), DType.F32)


def step(k: Builder, x: Node, before: State, after: State, axis: str) -> Node:
    found = move(before, after)
    assert found is not None
    name, dims = found
    return k.apply(OPERATORS[name], (x,), {**dims, "axis": axis})


def leave(k: Builder, x: Node, state: State, axis: str) -> Node:
    """To Invariant; a Replicate is used up by a product with a cut weight."""
    if isinstance(state, Replicate):
        w = k.partition(k.param("w", WEIGHT), dim=0, axis=axis)
        return k.combine(k.linear(x, w), dim=1, axis=axis)
    return x if isinstance(state, Invariant) else step(k, x, state, Invariant(), axis)


def source(pair: tuple[State, State], terms: int, back: bool) -> Graph:
    k = Builder()
    before, after = pair
    if isinstance(before, Partial):
        x = k.reduce_sum(k.param("x.terms", TensorType((terms, *TENSOR.shape), DType.F32)), dims=(0,), keepdim=False)
    else:
        x = k.param("x", TENSOR)
    if isinstance(before if back else after, Replicate):
        x = k.linear(x, k.param("w", WEIGHT))
    return k.graph({"y": x})


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_there(pair: tuple[State, State], size: int) -> None:
    mesh = Mesh.of(a=size)
    k = Builder()
    x = enter(k, "x", TENSOR, [pair[0]], mesh)
    y = leave(k, step(k, x, *pair, "a"), pair[1], "a")
    verify_equal(source(pair, size, back=False), k.graph({"y": y}), mesh, scale=False)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("pair", [p for p in PAIRS if move(p[1], p[0])], ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_there_and_back(pair: tuple[State, State], size: int) -> None:
    mesh = Mesh.of(outer=2, a=size)
    k = Builder()
    x = enter(k, "x", TENSOR, [Invariant(), pair[0]], mesh)
    there = step(k, x, *pair, "a")
    y = leave(k, step(k, there, pair[1], pair[0], "a"), pair[0], "a")
    verify_equal(source(pair, size, back=True), k.graph({"y": y}), mesh, scale=False)


def test_every_parallel_operator_is_one_of_the_moves() -> None:
    assert {move(*pair)[0] for pair in PAIRS} == set(TRANSITIONS)  # type: ignore[index]  # PAIRS have a move


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_dim_is_cut_by_the_outer_axis_first(order: tuple[str, str]) -> None:
    """Two axes on one dim: cut outer first, joined inner first; the other order is refused."""
    mesh = Mesh.of(a=2, b=3)
    k = Builder()
    x = k.param("x", TENSOR)
    y = k.partition(k.partition(x, dim=1, axis=order[0]), dim=1, axis=order[1])
    y = k.combine(k.combine(k.gelu(y), dim=1, axis=order[1]), dim=1, axis=order[0])
    serial = Builder()
    whole = serial.graph({"y": serial.gelu(serial.param("x", TENSOR))})
    if order == ("a", "b"):
        verify_equal(whole, k.graph({"y": y}), mesh, scale=False)
    else:
        with pytest.raises(ShardingError, match="inner axis cuts too"):
            verify_equal(whole, k.graph({"y": y}), mesh, scale=False)


JOINT_MESHES = (Mesh.of(a=2, b=3), Mesh.of(a=2, c=3, b=2))


@pytest.mark.parametrize("mesh", JOINT_MESHES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_several_axes_as_one(pair: tuple[State, State], mesh: Mesh) -> None:
    """A step along a joint axis is its steps along each: cuts from the outer axis in, joins from the inner axis out."""
    tensor, square = TensorType((36, 12), DType.F32), TensorType((12, 12), DType.F32)
    before, after = pair
    inner_first = ("b", "a") if isinstance(before, Shard) else ("a", "b")
    if isinstance(before, Shard) and isinstance(after, Shard):
        return  # an exchange along both is no chain of exchanges: a dim would be cut out of order
    programs = []
    for axes in (("a+b",), inner_first):
        k = Builder()
        entered = k.param("x", tensor) if not isinstance(before, Partial) else None
        x = entered if entered is not None else k.linear(
            k.partition(k.param("x", tensor), dim=1, axis="a+b"), k.partition(k.param("v", square), dim=1, axis="a+b")
        )  # fmt: skip
        if isinstance(before, Shard):
            x = k.partition(x, dim=before.dim, axis="a+b")
        for axis in axes:
            x = step(k, x, before, after, axis)
        if isinstance(after, Replicate):
            w = k.partition(k.param("w", TensorType((12, x.type.shape[-1]), DType.F32)), dim=0, axis="a+b")
            x = k.combine(k.linear(x, w), dim=1, axis="a+b")
        elif isinstance(after, Shard):
            x = k.combine(x, dim=after.dim, axis="a+b")
        programs.append(k.graph({"y": x}))
    serial = Builder()
    y = serial.param("x", tensor)
    if isinstance(before, Partial):
        y = serial.linear(y, serial.param("v", square))
    if isinstance(after, Replicate):
        y = serial.linear(y, serial.param("w", TensorType((12, y.type.shape[-1]), DType.F32)))
    for program in programs:
        verify_equal(serial.graph({"y": y}), program, mesh, scale=False)


@pytest.mark.parametrize("axis", ["b+a", "a+d", "a+a", "a+"])
def test_joint_axes_name_axes_in_mesh_order(axis: str) -> None:
    k = Builder()
    y = k.combine(k.partition(k.param("x", TENSOR), dim=0, axis=axis), dim=0, axis=axis)
    with pytest.raises(ShardingError, match="names axis"):
        verify_equal(source(PAIRS[0], 1, back=True), k.graph({"y": y}), JOINT_MESHES[0], scale=False)
