"""Files of torch's older exporter that another tool went over: what is stored since is not trained without a word."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import pdv
from ir.views import trained_sources_of
from pdv.check.file.reading import check_file
from pdv.frontend.load import load_program
from pdv.frontend.program import Program
from tests.pdv.worlds import cluster

LEVELS = onnxruntime.GraphOptimizationLevel


class Attended(nn.Module):
    """Attention with rows of a buffer and a mask that tools compute, a norm and a gelu with numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        mask = torch.full((6, 6), -1e4).triu(1)
        shares = (q @ k.transpose(1, 2) / 4 + mask).softmax(-1)
        return nn.functional.gelu(self.up(self.out(shares @ v))) * self.temperature


def trained(program: Program) -> set[str]:
    return set(trained_sources_of(program.graph))


def exported(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Attended().eval(), (torch.randn(2, 6, 16),), path, input_names=["x"], opset_version=14, dynamo=False,
            dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    return path


def optimized(path: Path, level: onnxruntime.GraphOptimizationLevel) -> Path:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Path(options.optimized_model_filepath)


@pytest.mark.parametrize("level", [LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED], ids=["basic", "extended"])
def test_files_that_the_runtime_optimized_train_the_modules_parameters(
    level: onnxruntime.GraphOptimizationLevel, tmp_path: Path
) -> None:
    path = exported(tmp_path / "m.onnx")
    own = {name for name, _ in Attended().named_parameters()}
    assert trained(load_program(path, batch=4)) == own
    program = load_program(optimized(path, level), batch=4)
    assert trained(program) == own
    assert "outputs are the same" in check_file(program, optimized(path, level))


def _promoted(path: Path, **stored: np.ndarray) -> Path:
    """x W + a folded tensor, to the power of a stored constant; as a tool leaves it behind."""
    nodes = [
        helper.make_node("MatMul", ["x", "fc.weight"], ["/fc/MatMul_output_0"], name="/fc/MatMul"),
        helper.make_node("Add", ["/fc/MatMul_output_0", "/Slice_output_0"], ["/Add_output_0"], name="/Add"),
        helper.make_node("Pow", ["/Add_output_0", "/Constant_1_output_0"], ["y"], name="/Pow"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy")
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets, ir_version=8)
    made.producer_name = "pytorch"
    onnx.save(made, path)
    return path


@pytest.mark.parametrize("signed", ["pytorch", "onnxruntime.transformers"])
def test_what_a_tool_computed_is_frozen_by_its_name_or_refused(signed: str, tmp_path: Path) -> None:
    folded = {"fc.weight": np.eye(8), "/Slice_output_0": np.arange(8), "/Constant_1_output_0": np.array(2)}
    path = _promoted(tmp_path / "m.onnx", **folded)
    model = onnx.load(path)
    model.producer_name = signed
    onnx.save(model, path)
    with pytest.raises(pdv.ModelError, match=r"what /Slice_output_0 was made of.*--freeze /Slice_output_0 leaves"):
        pdv.optimize(path, cluster=cluster(2))
    plan = pdv.optimize(path, cluster=cluster(2), freeze="/Slice_output_0")
    assert trained_sources_of(plan.source) == ("fc.weight",)


def test_a_constant_is_one_of_any_shape(tmp_path: Path) -> None:
    stored = {"fc.weight": np.eye(8), "/Slice_output_0": np.arange(8), "/Constant_1_output_0": np.full((4, 8), 2)}
    assert trained(load_program(_promoted(tmp_path / "m.onnx", **stored))) == {"fc.weight", "/Slice_output_0"}


def test_quantized_weights_are_inferred_with_and_not_trained(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size]) for name, size in (("x", 8), ("y", 3))]
    nodes = [
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale"], ["w"]),
        helper.make_node("QuantizeLinear", ["x", "x_scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "x_scale"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    stored = {
        "w_quantized": np.arange(-12, 12, dtype=np.int8).reshape(8, 3),
        "w_scale": np.array([0.1], np.float32),
        "x_scale": np.array([0.05], np.float32),
        "b": np.ones(3, np.float32),
    }
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert trained(load_program(tmp_path / "m.onnx")) == {"b"}
    with pytest.raises(pdv.ModelError, match=r"1 weights are quantized, stored as integers .w_quantized."):
        pdv.optimize(tmp_path / "m.onnx", cluster=cluster(2))
    assert pdv.optimize(tmp_path / "m.onnx", cluster=cluster(2), mode="infer").document["mode"] == "infer"


def test_an_exponent_of_another_maker_is_no_parameter(tmp_path: Path) -> None:
    stored = {"fc.weight": np.eye(8), "/Slice_output_0": np.arange(8), "/Constant_1_output_0": np.full(1, 2)}
    model = onnx.load(_promoted(tmp_path / "m.onnx", **stored))
    renamed = {"/Constant_1_output_0": "two", "/Slice_output_0": "shift"}
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [name.strip("/") for name in node.output]
        node.input[:] = [name.strip("/") for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    for producer, exponents in (("mxnet", set()), ("pytorch", {"two"})):
        model.producer_name = producer
        onnx.save(model, tmp_path / "m.onnx")
        program = load_program(tmp_path / "m.onnx")
        assert trained(program) == {"fc.weight", "shift"} | exponents
        assert [doubt for doubt in program.doubts if "exponents (two)" in doubt] == (
            [] if exponents else ["1 stored exponents (two) are constants: torch's export writes trained ones"]
        )
