"""Which outputs have the batch as their dim 0, and what a whole program may return."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ir.builder import Builder
from ir.errors import ShardingError
from ir.graph import Node
from ir.mesh import Mesh
from ir.rows import by_rows, rows_apart, what_joins_rows
from ir.types import DType, TensorType
from ir.verify import check_outputs, check_returned, infer_shardings

B, S, D = 4, 6, 8
MESH = Mesh.of(a=2, b=2)
Returned = Callable[[Builder, Node, Node], list[Node]]


def floats(*shape: int) -> TensorType:
    return TensorType(shape, DType.F32)


ROWS: dict[str, Returned] = {
    "as computed": lambda k, x, w: [k.linear(x, w)],
    "as given": lambda k, x, w: [x],
    "flat": lambda k, x, w: [k.reshape(x, shape=(B * S, D))],
    "there and back": lambda k, x, w: [k.permute(k.permute(x, perm=(1, 0, 2)), perm=(1, 0, 2))],
    "several": lambda k, x, w: [x, k.reduce_mean(x, dims=(1,), keepdim=False)],
}
NO_ROWS: dict[str, Returned] = {
    "nothing": lambda k, x, w: [],
    "sequence first": lambda k, x, w: [k.permute(x, perm=(1, 0, 2))],
    "flat from there": lambda k, x, w: [k.reshape(k.permute(x, perm=(1, 0, 2)), shape=(B * S, D))],
    "no dims": lambda k, x, w: [x, k.reduce_mean(x, dims=(0, 1, 2), keepdim=False)],
    "statistics": lambda k, x, w: [k.reduce_mean(x, dims=(0, 1), keepdim=False)],
    "a weight": lambda k, x, w: [x, w],
}


@pytest.mark.parametrize(("what", "expected"), [*((name, True) for name in ROWS), *((n, False) for n in NO_ROWS)])
def test_the_batch_is_followed_from_the_input(what: str, expected: bool) -> None:
    k = Builder()
    x, w = k.input("x", floats(B, S, D)), k.param("w", floats(D, D))
    found = {**ROWS, **NO_ROWS}[what](k, x, w)
    assert by_rows(k.graph({f"y{i}": y for i, y in enumerate(found)})) is expected


def returned(*cuts: tuple[tuple[str, int], ...]) -> None:
    """Check a program whose outputs are partitioned as said: (axis, dim), one after another."""
    k = Builder()
    x = k.input("x", floats(B, S, D))
    outputs = {}
    for number, steps in enumerate(cuts):
        y = x
        for axis, dim in steps:
            y = k.partition(y, dim=dim, axis=axis)
        outputs[f"y{number}"] = y
    graph = k.graph(outputs)
    shardings = infer_shardings(graph, MESH)
    check_outputs(graph, shardings)
    check_returned(graph, shardings)


def test_outputs_are_cut_alike() -> None:
    returned(())
    returned((("a", 0), ("b", 0)), (("a", 0), ("b", 0)))
    with pytest.raises(ShardingError, match=r"output y1 is returned as S0,S0, output y0 as I,S0"):
        returned((("b", 0),), (("a", 0), ("b", 0)))
    with pytest.raises(ShardingError, match=r"output y0 is returned as I,S1"):
        returned((("b", 1),))


APART: dict[str, Returned] = {
    "as computed": lambda k, x, w: [k.linear(x, w)],
    "flat": lambda k, x, w: [k.reshape(x, shape=(B * S, D))],
    "normed": lambda k, x, w: [k.softmax(x, dim=-1)],
    "summed over the sequence": lambda k, x, w: [k.reduce_mean(x, dims=(1,), keepdim=False)],
    "behind a class token": lambda k, x, w: [
        k.concat(k.linear(k.expand(k.param("t", floats(1, 1, D)), shape=(B, 1, D)), w), x, dim=1)
    ],
    "elsewhere for a while": lambda k, x, w: [k.permute(k.permute(x, perm=(1, 0, 2)), perm=(1, 0, 2))],
}
TOGETHER: dict[str, Returned] = {
    "centred": lambda k, x, w: [k.sub(x, k.reduce_mean(x, dims=(0,), keepdim=True))],
    "normed over the batch": lambda k, x, w: [
        k.permute(k.softmax(k.permute(x, perm=(1, 2, 0)), dim=-1), perm=(2, 0, 1)),
    ],
    "each with each": lambda k, x, w: [
        k.matmul(k.permute(x, perm=(1, 0, 2)), k.permute(x, perm=(1, 2, 0))),
    ],
    "a weight": lambda k, x, w: [x, w],
    "a weight of many rows": lambda k, x, w: [k.concat(k.param("t", floats(B, 1, D)), x, dim=1)],
    "nothing": lambda k, x, w: [],
}


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_rows_that_do_not_see_each_other_are_told_by_the_splits(name: str) -> None:
    k = Builder()
    x, w = k.input("x", floats(B, S, D)), k.param("w", floats(D, D))
    returned = {**APART, **TOGETHER}[name](k, x, w)
    assert rows_apart(k.graph({str(i): node for i, node in enumerate(returned)})) == (name in APART)


def test_a_weight_of_as_many_rows_is_no_batch() -> None:
    k = Builder()
    x, w = k.input("x", floats(B, S, D)), k.param("w", floats(B, 1, D))
    assert not rows_apart(k.graph({"y": k.concat(w, x, dim=1)}))


def test_a_program_of_one_row_has_no_other_to_see() -> None:
    """Whatever it computes, but a number that is of no row."""
    for name, made in {**APART, **TOGETHER}.items():
        k = Builder()
        x, w = k.input("x", floats(1, S, D)), k.param("w", floats(D, D))
        if name not in {
            "flat",
            "behind a class token",
            "a weight of many rows",
            "nothing",
        }:  # the former names sizes of several rows
            assert rows_apart(k.graph({str(i): node for i, node in enumerate(made(k, x, w))})), name
    k = Builder()
    x = k.input("x", floats(1, S, D))
    assert not rows_apart(k.graph({"loss": k.reduce_mean(x, dims=(0, 1, 2), keepdim=False)}))


def test_an_input_without_rows_leaves_the_batch_whole() -> None:
    k = Builder()
    x, mask = k.input("x", floats(B, D)), k.input("mask", floats(D))
    assert not rows_apart(k.graph({"y": k.mul(x, mask)}))


def test_what_joins_rows_is_said() -> None:
    k = Builder()
    x = k.input("x", floats(B, D))
    loss, mean = k.reduce_mean(x, dims=(0, 1), keepdim=False), k.reduce_mean(x, dims=(0,), keepdim=True)
    assert "an output, loss, that is one number" in what_joins_rows(k.graph({"y": x, "loss": loss}))
    assert f"a value, {mean.name} {mean.type}" in what_joins_rows(k.graph({"y": k.sub(x, mean)}))
    assert "an output, t, whose dim 0" in what_joins_rows(k.graph({"t": k.permute(x, perm=(1, 0))}))
    mask = k.input("mask", floats(D))
    assert "an input, mask" in what_joins_rows(k.graph({"y": k.mul(x, mask)}))


def test_a_value_made_of_as_many_copies_as_there_are_rows_says_how_many() -> None:
    """In parts of a batch there would be fewer of them."""
    for dim in (0, 1):
        k = Builder()
        x, w = k.input("x", floats(B, D)), k.param("w", floats(*((1, D) if dim == 0 else (1, 1, D))))
        copies = k.expand(w, shape=(B, D) if dim == 0 else (1, B, D))
        each = copies if dim == 0 else k.reshape(copies, shape=(B, D))
        assert rows_apart(k.graph({"y": k.add(x, each)}))
        total = k.reduce_sum(copies, dims=tuple(range(dim + 1)), keepdim=False)
        assert "as many copies as there are rows" in what_joins_rows(k.graph({"y": k.add(x, total)}))
