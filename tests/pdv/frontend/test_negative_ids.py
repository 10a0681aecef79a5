"""Negative ids of an ONNX Gather count from the end, unless torch wrote it for a lookup that refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ir.evaluation.id_ranges import ranges_of
from ir.evaluation.interpret import evaluate
from pdv.check.file.reading import _draw, check_file
from pdv.frontend import Program, load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.frontend.onnx.readers.ids import _is_wrapped

IDS = torch.tensor([[0, 3, 2], [4, 1, 0]])


class _Rows(nn.Module):
    """w[i]"""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 3))

    def forward(self, i: Tensor) -> Tensor:
        return self.w[i] * 2


class _Functional(_Rows):
    def forward(self, i: Tensor) -> Tensor:
        return F.embedding(i, self.w) * 2


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(5, 3), nn.ReLU())
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.inner[0].weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.inner(i))


def written(path: Path, make: list[onnx.NodeProto], kind: int = onnx.TensorProto.INT64) -> Program:
    """A file that looks up rows of a table of five by what ``make`` makes of an input x."""
    nodes = [*make, helper.make_node("Gather", ["table", "ids"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids" if not make else "x", kind, [4, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.random.default_rng(0).standard_normal((5, 3)).astype("f"), "table")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return load_program(path)


def wraps(program: Program) -> bool:
    return any(_is_wrapped(node) for node in program.graph.nodes)


def test_negative_ids_count_from_the_end(tmp_path: Path) -> None:
    program, ids = written(tmp_path / "m.onnx", []), np.random.default_rng(1).integers(-5, 5, (4, 6))
    table = program.weights.load("table")
    found = evaluate(program.graph, {"table": table, "ids": ids}).gather()["output"]
    assert np.array_equal(found, table.astype(found.dtype)[ids])
    assert _draw(program.graph, 0, ranges_of(program.graph))["ids"].min() < 0
    assert "the outputs are the same" in check_file(program, tmp_path / "m.onnx")


@pytest.mark.parametrize("op", ["ArgMax", "Cast", "Neg", "Abs"])
def test_ids_that_cannot_be_negative_are_taken_as_they_are(tmp_path: Path, op: str) -> None:
    kind = {"ArgMax": onnx.TensorProto.FLOAT, "Cast": onnx.TensorProto.BOOL}.get(op, onnx.TensorProto.INT64)
    more = {"ArgMax": {"axis": 1}, "Cast": {"to": onnx.TensorProto.INT64}}.get(op, {})
    program = written(tmp_path / "m.onnx", [helper.make_node(op, ["x"], ["ids"], **more)], kind)
    assert wraps(program) == (op == "Neg")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the older exporter
@pytest.mark.parametrize("way", ["older", "newer", "ours"])
@pytest.mark.parametrize("kind", [_Rows, _Functional, _Tied])
def test_what_torch_writes_for_lookups_that_refuse_them_is_read_as_one(
    tmp_path: Path, kind: type[nn.Module], way: str
) -> None:
    module, path = kind().eval(), tmp_path / "m.onnx"
    if way == "ours":
        export_onnx(module, (IDS,), path)
    else:
        torch.onnx.export(module, (IDS,), str(path), dynamo=way == "newer", input_names=["i"], verbose=False)
    assert wraps(load_program(module, (IDS,))) == (kind is _Rows)
    is_unknown = (kind, way) == (_Functional, "older")  # the file does not say which it was
    assert wraps(load_program(path)) == (kind is _Rows or is_unknown)
