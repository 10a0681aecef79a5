"""Cuts of a model into chunks: by layers, by a list, by weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.builder import Builder
from ir.errors import UsageError
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.pipelines.pinned import trained_pieces
from pdv.schedule.pieces import pieces
from pdv.schedule.stages import balance, cut, even, units


def chain(widths: list[int]) -> Graph:
    """Products and gelus without any repeated module."""
    k = Builder()
    x = k.input("x", TensorType((4, widths[0]), DType.F32))
    for number, width in enumerate(widths[1:]):
        weight = k.param(f"w{number}", TensorType((width, x.type.shape[-1]), DType.F32))
        x = k.gelu(k.linear(x, weight))
    return k.graph({"y": x})


def test_layers_are_found_by_their_names() -> None:
    found = units(graph(arch("gpt:layers=5,hidden=16,heads=2,seq=8,vocab=32"), 2))
    assert (found.count, found.layers) == (5, True)
    per_unit = [sum(unit == place for unit in found.of.values()) for place in range(-1, 6)]
    assert len(set(per_unit[1:-1])) == 1
    assert per_unit[0] == 2  # embedding, positions
    assert per_unit[-1] == 2  # norm, head


def test_frozen_layers_are_layers() -> None:
    named = graph(arch("gpt:layers=5,hidden=16,heads=2,seq=8,vocab=32"), 2)
    k, made = Builder(), dict[Node, Node]()
    for node in named.nodes:
        operands = tuple(made[operand] for operand in node.operands)
        frozen = node.is_param and ".0." in str(node.attr("name"))
        made[node] = k.param(node.attr("name"), node.type, trainable=False) if frozen else k.copy(node, operands)
    found = units(k.graph({name: made[node] for name, node in named.outputs}))
    assert (found.count, found.layers) == (5, True)


def test_layers_are_found_by_their_structure() -> None:
    """Where a file has lost the names of parameters."""
    named = graph(arch("llama:layers=5,hidden=16,heads=2,seq=8,vocab=32"), 2)
    k, made = Builder(), dict[Node, Node]()
    for number, node in enumerate(named.nodes):
        if node.is_param:
            made[node] = k.param(f"MatMul_{number}", node.type)
        else:
            made[node] = k.copy(node, tuple(made[operand] for operand in node.operands))
    nameless = k.graph({name: made[node] for name, node in named.outputs})
    one, other = units(named), units(nameless)
    assert (other.count, other.layers) == (5, True)
    differing = [node for node, unit in one.of.items() if other.of[made[node]] != unit]
    assert not differing


def test_a_model_without_layers_is_cut_where_all_depends_on_one_value() -> None:
    made = chain([8, 64, 64, 8, 8, 8])
    of, sizes, found = cut(made, 2)
    assert not found.layers
    assert sum(sizes) == found.count
    work = [0.0, 0.0]
    for node, chunk in of.items():
        work[chunk] += node.loops.points
    assert max(work) < 0.9 * sum(work)


def test_numbered_modules_that_differ_are_no_layers() -> None:
    k = Builder()
    x = k.input("x", TensorType((4, 8), DType.F32))
    for number, width in enumerate((16, 32, 64, 8)):
        weight = k.param(f"stages.{number}.weight", TensorType((width, x.type.shape[-1]), DType.F32))
        x = k.gelu(k.linear(x, weight))
    assert not units(k.graph({"y": x})).layers


def test_too_few_units() -> None:
    with pytest.raises(UsageError, match="has 2 layers, too few for 3 chunks"):
        cut(graph(arch("gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32"), 2), 3)


@given(st.integers(1, 200), st.data())
def test_even_differs_by_one_at_most(count: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, count))
    sizes = even(count, chunks)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def best(weights: list[float], chunks: int) -> float:
    """The least heaviest run, by trying all cuts."""
    if chunks == 1:
        return sum(weights)
    tries = range(1, len(weights) - chunks + 2)
    return min(max(sum(weights[:first]), best(weights[first:], chunks - 1)) for first in tries)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_balanced_is_the_best_there_is(numbers: list[int], data: st.DataObject) -> None:
    weights = [float(number) for number in numbers]
    chunks = data.draw(st.integers(1, len(weights)))
    sizes = balance(weights, chunks)
    assert len(sizes) == chunks
    assert min(sizes) > 0
    heaviest, at = 0.0, 0
    for size in sizes:
        heaviest, at = max(heaviest, sum(weights[at : at + size])), at + size
    assert at == len(weights)
    assert heaviest == pytest.approx(best(weights, chunks), rel=1e-6)


def test_what_is_made_of_parameters_alone_is_no_piece() -> None:
    """A first state of zeros times a weight: each stage makes its own of it, and has nothing to train by that."""
    k = Builder()
    x = k.input("x", TensorType((4, 8), DType.F32))
    weight = k.param("w", TensorType((8, 8), DType.F32))
    zeros = k.const(np.zeros((1, 8), np.float32), dtype=DType.F32)
    bias = k.param("b", TensorType((8,), DType.F32))
    product = k.linear(zeros, weight)
    first = k.add(product, bias)
    entered = k.add(x, first)
    last = k.param("v", TensorType((8, 8), DType.F32))
    again = k.add(k.linear(k.gelu(entered), weight), bias)
    made = k.graph({"y": k.linear(again, last)})
    assert trained_pieces(made) == 2
    assert {pieces(made).of[node] for node in (product, first, entered)} == {0}
