"""The same file over fewer rows of its batch, though it has their number fixed: what a check of the reading runs.

The shapes that Reshape and Expand are given are those that the program has at fewer rows, and the numbers of rows
(0, 1, 2, …, as torch's older exporter writes them down) are fewer; what else names the number of rows is left, so that
the file may then be no such program, which whoever runs it has to see. Entry points: ``shapes_at`` and ``with_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ir.builder import Builder
from ir.dims import Shape
from ir.graph import Graph, Node
from ir.scaling.rows import few_rows
from pdv.frontend.onnx.file import read_onnx
from pdv.passes.fold_constants import Array

_INTEGERS = (onnx_ir.DataType.INT64, onnx_ir.DataType.INT32)


@dataclass(frozen=True)
class Cut:
    """What becomes of the values of a file, by their names.

    Attributes:
        shapes: over fewer rows, of those that the program reads.
        constants: what is the same in all rows, as it was read, of all rows.
        rows: how many there were, and how many there are.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, Array]
    rows: tuple[int, int]


def shapes_at(graph: Graph, values: Mapping[onnx_ir.Value, object], rows: int) -> Cut | None:
    """The values of a file over few rows, given the graph that was read of it; None where there are no fewer rows.

    values: what each was read as.
    """
    loose, became = _with_rows_once(graph)
    found = few_rows(loose, rows)
    if found is None:
        return None
    shapes: dict[str, Shape] = {}
    constants: dict[str, Array] = {}
    for value, node in values.items():
        if isinstance(node, Node) and node in became and value.name:
            shapes[value.name] = found[1][became[node]].type.shape
            if node.is_const and node.type.shape[0] != shapes[value.name][0]:
                constants[value.name] = node.attr("value").array
    before, after = (next(x.type.shape[0] for x in each.inputs if x.type.rank) for each in (loose, found[0]))
    return Cut(shapes, constants, (before, after))


def with_rows(path: Path, cut: Cut) -> onnx_ir.Model:
    """The model of a file, of fewer rows."""
    model = read_onnx(path)
    _cut_rows(model, cut)
    return model


def _cut_rows(model: onnx_ir.Model, cut: Cut) -> None:
    graph, shapes = model.graph, cut.shapes
    for value in graph.inputs:
        if value.name is not None and value.name in shapes:
            value.shape = onnx_ir.Shape(shapes[value.name])
    known = {
        value.name: value for value in (*graph.initializers.values(), *(x for node in graph for x in node.outputs))
    }
    for name, array in cut.constants.items():
        onnx_ir.convenience.replace_all_uses_with(known[name], _constant(graph, name, array[: shapes[name][0]]))
    RemoveUnusedNodesPass()(model)
    _cut_numbers(graph, *cut.rows)
    for node in list(graph):
        output = node.outputs[0]
        for each in node.outputs:
            each.shape = None  # that of all rows
        shape = shapes.get(output.name or "")
        if node.op_type in ("Reshape", "Expand") and node.domain == "" and shape is not None:
            sizes = np.asarray(shape, dtype=np.int64)
            node.replace_input_with(1, _constant(graph, f"the shape of {output.name}", sizes))


def _cut_numbers(graph: onnx_ir.Graph, before: int, after: int) -> None:
    """Constants that number the rows number fewer."""
    values = (*graph.initializers.values(), *(node.outputs[0] for node in graph if node.op_type == "Constant"))
    for value in values:
        tensor = onnx_ir.convenience.get_const_tensor(value)
        shape = () if tensor is None else tensor.shape.numpy()
        if tensor is None or shape[:1] != (before,) or math.prod(shape) != before or tensor.dtype not in _INTEGERS:
            continue
        array = tensor.numpy()
        if (array.reshape(-1) == np.arange(before)).all():
            onnx_ir.convenience.replace_all_uses_with(value, _constant(graph, value.name or "numbers", array[:after]))


def _with_rows_once(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """The program in which constants that are the same in each row of the batch are one row, expanded."""
    batch = next((node.type.shape[0] for node in graph.inputs if node.type.rank), 0)
    k = Builder()

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if not (node.is_const and _is_of_equal_rows(node, batch)):
            return k.copy(node, operands)
        row = k.const(node.attr("value").array[:1], node.name, node.type.dtype)
        return k.expand(row, shape=node.type.shape, name=node.name)

    return k.rebuild(graph, make)


def _is_of_equal_rows(node: Node, batch: int) -> bool:
    array = node.attr("value").array
    return bool(array.ndim > 1 and array.shape[0] == batch > 1 and (array == array[:1]).all())


def _constant(graph: onnx_ir.Graph, of: str, array: Array) -> onnx_ir.Value:
    """The value of a new constant: no stored tensor, which would be a parameter."""
    tensor = onnx_ir.Tensor(np.ascontiguousarray(array), name=f"{of} over fewer rows")
    node = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", tensor)], num_outputs=1)
    node.outputs[0].name = tensor.name
    graph.insert_before(next(iter(graph)), node)
    return node.outputs[0]
