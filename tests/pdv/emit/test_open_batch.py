"""Emitted programs at other batches than the planned one: right wherever the source has no number of rows in it, else
one error that names the number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.measured.parity import load_package
from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType
from pdv.emit.package import emit_package
from pdv.frontend.program import Weights
from tests.pdv.emit.graphs import emitted, floats, random_weights

ALONE = Mesh.of(dp=1)
ROWS, S, D = 8, 16, 8  # as many rows as features, so that numbers alone do not tell them apart


def program(make: Callable[[Builder, Node], Node], rows: int = ROWS) -> Graph:
    k = Builder()
    x = k.input("x", floats(rows, S, D))
    return k.graph({"y": make(k, x)})


def merged(k: Builder, x: Node) -> Node:
    h = k.linear(k.reshape(x, shape=(ROWS * S, D)), k.param("w", floats(D, D)))
    return k.reshape(h, shape=(ROWS, S, D))


def in_the_middle(k: Builder, x: Node) -> Node:
    h = k.reshape(k.permute(x, perm=(1, 0, 2)), shape=(S, ROWS * D))
    h = k.softmax(h, dim=-1)  # over rows and features together
    return k.permute(k.reshape(h, shape=(S, ROWS, D)), perm=(1, 0, 2))


def last(k: Builder, x: Node) -> Node:
    h = k.reshape(k.permute(x, perm=(2, 1, 0)), shape=(D * S, ROWS))
    return k.reshape(k.permute(k.tanh(h), perm=(1, 0)), shape=(ROWS, D, S))


def beside_as_many_heads(k: Builder, x: Node) -> Node:
    h = k.linear(x, k.param("w", floats(8 * 4, D)))
    h = k.permute(k.reshape(h, shape=(ROWS, S, 8, 4)), perm=(0, 2, 1, 3))
    h = k.attention(h, h, h, causal=True, scale=0.5)
    return k.reshape(k.permute(h, perm=(0, 2, 1, 3)), shape=(ROWS, S, 32))


def a_token_for_each_row(k: Builder, x: Node) -> Node:
    token = k.expand(k.param("token", floats(1, 1, D)), shape=(ROWS, 1, D))
    return k.concat(token, x, dim=1)


def a_row_more(k: Builder, x: Node) -> Node:
    h = k.concat(x, k.slice(x, dim=0, start=0, stop=1), dim=0)
    h = k.reshape(h, shape=((ROWS + 1) * S, D))
    return k.slice(k.reshape(k.tanh(h), shape=(ROWS + 1, S, D)), dim=0, start=1, stop=ROWS + 1)


def two_batches(k: Builder, x: Node) -> Node:
    both = k.reshape(k.concat(x, k.tanh(x), dim=0), shape=(2, ROWS, S, D))
    return k.reduce_sum(both, dims=(0,), keepdim=False)


def without_rows(k: Builder, x: Node) -> Node:
    return k.reduce_mean(x, dims=(0, 1), keepdim=False)


EXPECTED: list[tuple[Callable[[Builder, Node], Node], Callable[[Tensor, dict[str, Tensor]], Tensor]]] = [
    (merged, lambda x, w: x @ w["w"].T),
    (in_the_middle, lambda x, w: x.transpose(0, 1).flatten(1).softmax(-1).unflatten(1, x.shape[::2]).transpose(0, 1)),
    (last, lambda x, w: x.transpose(1, 2).tanh()),
    (a_token_for_each_row, lambda x, w: torch.cat((w["token"].expand(len(x), 1, D), x), 1)),
    (a_row_more, lambda x, w: torch.cat((x[1:], x[:1])).tanh()),
    (two_batches, lambda x, w: x + x.tanh()),
    (without_rows, lambda x, w: x.mean((0, 1))),
]


@pytest.mark.parametrize(("make", "expected"), EXPECTED, ids=[make.__name__ for make, _ in EXPECTED])
def test_any_number_of_rows(
    make: Callable[[Builder, Node], Node], expected: Callable[[Tensor, dict[str, Tensor]], Tensor], tmp_path: Path
) -> None:
    graph = program(make)
    text = emitted(graph, ALONE, tmp_path / "rows_pdv")
    assert "where b is the number of rows" in text
    weights = {name: torch.from_numpy(random_weights(graph).load(name)) for name in random_weights(graph).names}
    model = load_package(tmp_path / "rows_pdv").build(device="cpu")
    for rows in (ROWS, 2 * ROWS, 3, 1):
        x = torch.randn(rows, S, D)
        torch.testing.assert_close(model(x), expected(x, weights))


def test_as_many_heads_as_rows(tmp_path: Path) -> None:
    text = emitted(program(beside_as_many_heads), ALONE, tmp_path / "heads_pdv")
    assert ".unflatten(2, (8, 4)).transpose(1, 2)  # [b, 8, 16, 4]" in text
    model = load_package(tmp_path / "heads_pdv").build(device="cpu")
    x = torch.randn(3, S, D)
    torch.testing.assert_close(model(torch.cat((x, x))), torch.cat((model(x), model(x))))


def test_two_open_sizes_of_one_reshape_are_said_by_the_tensor_at_hand(tmp_path: Path) -> None:
    k = Builder()
    x = k.input("x", floats(ROWS, S, D))
    scores = k.softmax(k.matmul(k.permute(x, perm=(1, 0, 2)), k.permute(x, perm=(1, 2, 0))), dim=-1)  # [s, b, b]
    flat = k.reshape(scores, shape=(S, ROWS * ROWS))
    y = k.reshape(k.tanh(flat), shape=(S, ROWS, ROWS))
    text = emitted(k.graph({"y": y}), ALONE, tmp_path / "pairs_pdv")
    assert ".unflatten(1, (-1, x.size(0)))" in text
    model = load_package(tmp_path / "pairs_pdv").build(device="cpu")
    value = torch.randn(5, S, D)
    expected = torch.einsum("bsd,csd->sbc", value, value).softmax(-1).tanh()
    torch.testing.assert_close(model(value), expected)


FIXED: list[tuple[Callable[[Builder, Node], Node], str]] = [
    (
        lambda k, x: k.add(x, k.param("table", floats(ROWS, 1, D))),
        r"for batches of 8 rows: a parameter table of shape \[8, 1, 8\] has 8 there",
    ),
    (
        lambda k, x: k.mul(x, k.const(np.arange(ROWS * S * D, dtype=np.float32).reshape(ROWS, S, D))),
        "for batches of 8 rows: a constant of shape",
    ),
    (
        lambda k, x: k.linear(k.permute(x, perm=(1, 2, 0)), k.param("w", floats(4, ROWS))),
        "for batches of 8 rows: a parameter w",
    ),
]


@pytest.mark.parametrize(("make", "reason"), FIXED, ids=["parameter", "constant", "contracted"])
def test_a_fixed_number_of_rows_is_told_and_checked(
    make: Callable[[Builder, Node], Node], reason: str, tmp_path: Path
) -> None:
    text = emitted(program(make), ALONE, tmp_path / "fixed_pdv")
    assert re.search(reason, text)
    model = load_package(tmp_path / "fixed_pdv").build(device="cpu")
    assert model(torch.randn(ROWS, S, D)) is not None
    with pytest.raises(ValueError, match=r"wrong-size: .*\[16, 16, 8\]. This program takes \[8, 16, 8\]"):
        model(torch.randn(2 * ROWS, S, D))


def test_other_sizes_than_the_open_ones_are_checked(tmp_path: Path) -> None:
    k = Builder()
    x, y = k.input("x", floats(ROWS, D)), k.input("labels", TensorType((ROWS,), DType.F32))
    emitted(k.graph({"y": k.mul(x, k.reshape(y, shape=(ROWS, 1)))}), ALONE, tmp_path / "labels_pdv")
    model = load_package(tmp_path / "labels_pdv").build(device="cpu")
    assert model(torch.randn(3, D), labels=torch.randn(3)).shape == (3, D)
    with pytest.raises(ValueError, match=r"input x has shape \[3, 9\]. This program takes \[b, 8\], and b = 3 here"):
        model(torch.randn(3, 9), torch.randn(3))
    with pytest.raises(ValueError, match=r"input labels has shape \[4\]. This program takes \[b\], and b = 3 here"):
        model(torch.randn(3, D), torch.randn(4))


def test_an_unbiased_variance_counts_the_points_at_hand(tmp_path: Path) -> None:
    k = Builder()
    x = k.relu(k.input("x", floats(ROWS, 4, 3, 3)))
    mean = k.channel_mean(x)
    variance = k.channel_variance(x, mean)
    running = k.param("running", floats(4), trainable=False)
    n = ROWS * 9
    moved = k.add(k.scale(running, factor=0.9), k.scale(k.unbiased(variance, points=n), factor=0.1))
    graph = k.graph({"y": k.mul(x, x)}, {"running": moved})
    folder = tmp_path / "running_pdv"
    folder.mkdir()
    emit_package(graph, ALONE, {}, Weights({"running": lambda: np.ones(4, np.float32)}), folder)
    model = load_package(folder).build(device="cpu")
    value = torch.randn(2, 4, 3, 3)
    model(value)
    expected = 0.9 + 0.1 * value.relu().var((0, 2, 3), unbiased=True)
    torch.testing.assert_close(model.full_state_dict()["running"], expected)
