"""Parameters that are slices of stored tensors, or joined of several: read, scaled down, differentiated, tied."""

from __future__ import annotations

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import VerificationError
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node, View
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.scaling.scale import shrink
from ir.text import parse_graph, print_graph
from ir.types import DType, TensorType
from ir.views import add_up, bases

ALONE = Mesh(())
SIZES = {"q": 4096, "k": 1024, "v": 1024}


def f32(*shape: int) -> TensorType:
    return TensorType(shape, DType.F32)


def joined(k: Builder, names: str, width: int, swap: bool = False) -> Node:
    order = "".join(reversed(names)) if swap else names
    parts = tuple((name, (), (SIZES[name], width)) for name in order)
    total = sum(SIZES[name] for name in names)
    return k.param("qkv", f32(total, width), view=(("concat", 0, parts),))


def programs(names: str, *, swap: bool = False) -> tuple[Graph, Graph]:
    """x times each of several weights, and times all of them at once."""
    k, width = Builder(), 512
    x = k.input("x", f32(2, 8, width))
    apart = k.graph({n: k.linear(x, k.param(n, f32(SIZES[n], width))) for n in names})
    k = Builder()
    whole = k.linear(k.input("x", f32(2, 8, width)), joined(k, names, width, swap))
    ends, at = {}, 0
    for n in names:
        ends[n] = k.slice(whole, dim=2, start=at, stop=at + SIZES[n])
        at += SIZES[n]
    return apart, k.graph(ends)


@pytest.mark.parametrize("names", ["qk", "kv", "qkv"])
def test_a_joined_weight_is_its_parts_at_any_size(names: str) -> None:
    apart, together = programs(names)
    assert shrink((apart, together), ALONE).note == "scaled-down sizes"
    verify_equal(apart, together, ALONE)
    verify_equal(together, apart, ALONE)


def test_parts_in_another_order_are_caught() -> None:
    with pytest.raises(VerificationError):
        verify_equal(*programs("kv", swap=True), ALONE)


def test_a_joined_view_prints_and_parses() -> None:
    _, together = programs("qkv")
    assert parse_graph(print_graph(together)).digest == together.digest


def test_a_slice_of_a_weight_is_read_and_takes_its_gradient() -> None:
    k = Builder()
    x = k.input("x", f32(3, 6))
    first, rest = (
        k.param(f"w.{a}", f32(b - a, 6), source="w", view=(("slice", 0, a, b, 10),)) for a, b in ((0, 4), (4, 10))
    )
    parts = k.graph({"y": k.concat(k.linear(x, first), k.linear(x, rest), dim=1)})
    k = Builder()
    whole = k.graph({"y": k.linear(k.input("x", f32(3, 6)), k.param("w", f32(10, 6)))})
    verify_equal(whole, parts, ALONE)
    values = {"x": np.random.default_rng(0).normal(size=(3, 6)), "w": np.random.default_rng(1).normal(size=(10, 6))}
    assert np.allclose(evaluate(whole, values).gather()["y"], evaluate(parts, values).gather()["y"])


def test_gradients_of_joined_views_go_to_their_stored_tensors() -> None:
    k = Builder()
    view: View = (("concat", 1, (("b", (("permute", (1, 0)),), (2, 3)), ("a", (), (2, 1)))), ("permute", (1, 0)))
    node = k.param("ba", f32(4, 2), view=view)
    plain = k.param("a", f32(2, 1))
    graph = k.graph({"y": node, "z": plain})
    gradient = np.arange(8.0).reshape(1, 4, 2)
    totals = add_up({node: gradient, plain: np.ones((1, 2, 1))}, bases([graph]))
    assert totals["b"].tolist() == [gradient[0, :3].T.reshape(-1).tolist()]
    assert totals["a"].tolist() == [(gradient[0, 3] + 1).tolist()]
