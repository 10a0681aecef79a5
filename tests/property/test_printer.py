"""Graphs of every operator print and parse back to themselves."""

from __future__ import annotations

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import ModelError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.text import constants, parse_graph, print_graph
from ir.types import DType, TensorType
from ir.verify import infer_shardings
from tests.property.programs import EXAMPLES, Example, parallel, serial


def there_and_back(graph: Graph) -> Graph:
    again = parse_graph(print_graph(graph), constants(graph))
    assert again.digest == graph.digest
    assert print_graph(again) == print_graph(graph)
    return again


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_operator(example: Example) -> None:
    there_and_back(serial(example))


def test_every_parallel_operator_and_states() -> None:
    mesh = Mesh.of(a=2)
    for example in EXAMPLES[:6]:
        loops = example.declared.solve(example.op, example.types, example.declared.check_attrs(example.attrs))
        for split in example.declared.splits(loops):
            _, pcg = parallel(example, (split,), mesh)
            text = print_graph(pcg, infer_shardings(pcg, mesh))
            assert parse_graph(text).digest == pcg.digest


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5, dtype=np.float32),
        np.array([0.1, -np.inf, np.nan, np.inf], dtype=np.float32),
        np.array([[True, False]]),
        np.arange(17),
        np.zeros((0, 3), dtype=np.float64),
        np.tril(np.ones((8, 8), dtype=bool)),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_constants(array: np.ndarray) -> None:
    k = Builder()
    graph = k.graph({"y": k.const(array, "c")})
    again = there_and_back(graph)
    np.testing.assert_array_equal(again.outputs[0][1].attr("value").array, array)


def test_hostile_names_and_nested_attributes() -> None:
    k = Builder()
    name = 'it\'s "a" : f32[2]  # S0\n%1 = input()\\'
    x = k.input(name, TensorType((4, 6), DType.F32))
    w = k.param("w", TensorType((2, 6), DType.F32), source=name, view=(("chunk", 0, 3, 1), ("permute", (0, 1))))
    y = k.shift(k.linear(x, w, name=name), offset_by=float("-inf"))
    there_and_back(k.graph({name: y}, {"running": x}, name=name))


@pytest.mark.parametrize(
    "line",
    [
        "%0 = input(name='x') f32[2]",
        "output y",
        "%0 = relu(%7) : f32[2]",
        "%0 = no_op() : f32[2]",
        "%0 = input(name=oops()) : f32[2]",
        "%0 = input(name='x') : f32[2]\n%1 = relu(%0) : f32[3]",
    ],
)
def test_malformed_text_is_refused(line: str) -> None:
    with pytest.raises(ModelError, match="malformed"):
        parse_graph(f"graph 'm'\n{line}\n")
