"""Which values may be made again of what autograd keeps, and what is kept in their place."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.memory.kept import DEPTH, light_values, made_of
from tests.pdv.emit.graphs import floats


def gated(k: Builder) -> tuple[Graph, dict[str, Node]]:
    """A norm, and a gate of two products, read by a third; through a view."""
    x = k.linear(k.input("x", floats(4, 8)), k.param("in", floats(8, 8)))
    normed = k.layer_norm(x, k.param("weight", floats(8)), k.param("bias", floats(8)), eps=1e-5)
    gate, up = (k.linear(normed, k.param(name, floats(16, 8))) for name in ("gate", "up"))
    opened = k.silu(gate)
    joined = k.mul(opened, up)
    y = k.linear(k.permute(k.permute(joined, perm=(1, 0)), perm=(1, 0)), k.param("out", floats(8, 16)))
    named = {"x": x, "normed": normed, "gate": gate, "up": up, "opened": opened, "joined": joined}
    return k.graph({"y": y}), named


def test_what_keeps_all_that_it_takes_is_made_again_of_that() -> None:
    graph, named = gated(Builder())
    light = light_values(graph)
    assert {name: named[name] in light for name in named} == {
        "x": False, "normed": True, "gate": False, "up": False, "opened": True, "joined": True,
    }  # fmt: skip
    assert light[named["joined"]] == (named["opened"], named["up"])
    assert set(made_of(named.values(), light)) == {named["x"], named["gate"], named["up"]}


@pytest.mark.parametrize("name", ["relu", "exp", "sigmoid", "tanh"])
def test_what_keeps_what_it_gives_is_not(name: str) -> None:
    k = Builder()
    x = k.linear(k.input("x", floats(4, 8)), k.param("in", floats(8, 8)))
    made = getattr(k, name)(x)
    assert made not in light_values(k.graph({"y": k.linear(made, k.param("out", floats(8, 8)))}))


def test_nothing_is_made_again_that_backward_does_not_read() -> None:
    k = Builder()
    x = k.linear(k.input("x", floats(4, 8)), k.param("in", floats(8, 8)))
    assert not light_values(k.graph({"y": k.add(k.silu(x), x)}))


def test_few_are_made_of_one_another() -> None:
    """Who reads the last makes all of them, each time."""
    k = Builder()
    values = [k.linear(k.input("x", floats(4, 8)), k.param("in", floats(8, 8)))]
    for _ in range(2 * DEPTH + 2):
        values.append(k.silu(values[-1]))
    light = light_values(k.graph({"y": values[-1]}))
    assert [value in light for value in values[1:-1]] == [True, True, False, True, True]
    assert len(light_values(k.graph({"y": values[-1]}), depth=9)) == len(values) - 2
