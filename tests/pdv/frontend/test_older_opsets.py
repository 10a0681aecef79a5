"""Operators in the forms that they had in older opsets, held to ONNX Runtime; what such files say of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.check.file.reading import check_file
from pdv.frontend.load import load_program
from pdv.frontend.torch.opaque import call_torch
from tests.pdv.worlds import cluster

X = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype(np.float32)
INTS, FLOATS, FORMS = np.int64, np.float32, "opset, op, operands, attributes"


def model(
    opset: int, op: str, operands: Sequence[Any], *, results: int = 1, also: dict[str, Any] | None = None, **attrs: Any
) -> onnx.ModelProto:
    """One node on x [2, 3, 4, 6]; arrays are stored, None is left out."""
    stored = {f"stored_{i}": array for i, array in enumerate(operands) if array is not None} | (also or {})
    names = ["x", *(f"stored_{i}" if array is not None else "" for i, array in enumerate(operands))]
    graph = helper.make_graph(
        [helper.make_node(op, names, [f"y{i}" for i in range(results)], **attrs)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize(
    FORMS,
    [
        (9, "Pad", [], {"pads": [0, 0, 0, 1, 0, 0, 2, 0], "mode": "constant", "value": 0.5}),
        (9, "Pad", [], {"pads": [0, 0, 1, 2, 0, 0, 1, 3], "mode": "reflect"}),
        (9, "Pad", [], {"pads": [0, 0, -1, 0, 0, 0, 0, -2]}),
        (11, "Pad", [np.array([0, 0, 1, 0, 0, 0, 0, -1], INTS)], {"mode": "edge"}),
        (7, "Softmax", [], {"axis": 1}),
        (11, "LogSoftmax", [], {"axis": 2}),
        (11, "Hardmax", [], {}),
        (7, "Hardmax", [], {"axis": 0}),
        (11, "Hardmax", [], {"axis": -1}),
        (9, "Upsample", [np.array([1, 1, 2, 2], FLOATS)], {"mode": "linear"}),
        (7, "Upsample", [], {"mode": "linear", "scales": [1.0, 1.0, 2.0, 3.0]}),
        (10, "Resize", [np.array([1, 1, 2, 2], FLOATS)], {"mode": "linear"}),
        (10, "Resize", [np.array([1, 1, 0.5, 1.5], FLOATS)], {"mode": "nearest"}),
        (11, "ScatterND", [np.array([[1], [0]], INTS), X[:, ::-1].copy()], {}),
        (11, "GatherND", [np.array([[0, 1], [1, -1]], INTS)], {}),
    ],
)
def test_forms_of_older_opsets_are_read(
    opset: int, op: str, operands: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    onnx.save(made := model(opset, op, operands, **attributes), path := tmp_path / "m.onnx")
    (wanted,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": X})
    program = load_program(path)
    stored = {name: program.weights.load(name) for name in program.weights.names}
    values = evaluate(program.graph, {"x": X, **stored}, field=FloatField(foreign=call_torch)).gather()
    np.testing.assert_allclose(values[program.graph.outputs[0][0]], wanted, rtol=1e-5, atol=1e-6)


def test_a_batch_norm_in_training_of_older_opsets_is_refused_by_name(tmp_path: Path) -> None:
    onnx.save(model(9, "BatchNormalization", [np.ones(3, FLOATS)] * 4, results=5), path := tmp_path / "m.onnx")
    with pytest.raises(UnsupportedOperatorsError, match="a batch norm in training as opset 9 has it"):
        load_program(path)


def test_weights_that_are_constants_are_named_where_nothing_is_trained(tmp_path: Path) -> None:
    made = model(13, "Gemm", [])
    flat = helper.make_node("Flatten", ["x"], ["flat"])
    weight = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.ones((72, 4), FLOATS)))
    made.graph.node[0].input[:] = ["flat", "w"]
    nodes = [flat, weight, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    onnx.save(made, path := tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"no parameters to train: 1 weights are constants of the file \(w"):
        pdv.optimize(path, cluster=cluster(1))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_number_that_torchs_older_exporter_names_is_trained_and_of_others_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    torch.onnx.export(Scaled(), (torch.randn(2, 6),), path := tmp_path / "m.onnx", dynamo=False, **options)
    assert [param.attr("name") for param in load_program(path).graph.params] == [
        "linear.weight",
        "linear.bias",
        "scale",
    ]
    made = onnx.load(path)
    made.producer_name = "another"
    onnx.save(made, path)
    (doubt,) = load_program(path).doubts
    assert doubt.startswith("1 stored numbers of no dims (scale) are constants")


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x[:, 0] > 0].sum(0)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("opset", [11, 12])
def test_rows_that_a_mask_chooses_in_opsets_with_and_without_batch_dims(opset: int, tmp_path: Path) -> None:
    torch.onnx.export(Chosen(), (torch.randn(5, 6),), path := tmp_path / "m.onnx", dynamo=False, opset_version=opset)
    assert "GatherND" in [node.op_type for node in onnx.load(path).graph.node]
    assert "outputs are the same" in check_file(load_program(path), path)
