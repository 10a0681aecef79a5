"""Files of torch's exporters of modules whose parameters start out equal, and files whose metadata a tool left out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ir.errors import ModelError
from ir.views import trained_sources_of
from pdv.check.file.reading import check_file
from pdv.frontend.load import load_program
from pdv.frontend.program import Program
from pdv.planning.model import check_trained


class Layers(nn.Module):
    """Convolutions that are copies of one another, or the same one."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        layer, gate = nn.Conv1d(6, 6, 3, padding=1), nn.Parameter(torch.full((1,), 0.7))
        layers = [layer] * 3 if shared else [copy.deepcopy(layer) for _ in range(3)]
        self.layers, self.gates = nn.ModuleList(layers), nn.ParameterList([gate, nn.Parameter(gate.detach().clone())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * self.gates[0] + layer(x).tanh() * self.gates[1]
        return x


class Scaled(nn.Module):
    """Two layers, and a number of the code that no parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down((self.up(x) / 8**0.5).tanh())
        return y.masked_fill(x == 0, -1e9)


class Resized(nn.Module):
    """A norm over groups, whose scale the exporter stores in another shape, and an image of twice the size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.norm(self.conv(x)), scale_factor=2.0, mode="bilinear")


class Normed(nn.Module):
    """A convolution with its norm, and two layers of which one is a copy of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6)
        nn.init.normal_(self.norm.bias)
        self.first = nn.Linear(8, 8)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(self.norm(self.conv(x))).tanh())
        return y


def exported(path: Path, module: nn.Module, shape: Sequence[int], *, dynamo: bool) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), (torch.randn(*shape),), path, input_names=["x"], dynamo=dynamo, external_data=False,
            opset_version=20 if dynamo else 17,
        )  # fmt: skip
    return path


def changed(path: Path, *, nodes: bool, producer: str = "pytorch") -> Path:
    """The same without the metadata of stored tensors, and of nodes and the graph, as tools write it."""
    model = onnx.load(path)
    model.producer_name = producer
    for value in (*model.graph.initializer, *([model.graph, *model.graph.node] if nodes else [])):
        del value.metadata_props[:]
    other = path.with_name("changed.onnx")
    onnx.save(model, other)
    return other


def trained(program: Program) -> set[str]:
    return set(trained_sources_of(program.graph))


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize("shared", [False, True])
def test_copies_of_a_layer_are_trained_apart_and_a_shared_one_as_one(shared: bool, tmp_path: Path) -> None:
    module = Layers(shared=shared)
    program = load_program(exported(tmp_path / "m.onnx", module, (2, 6, 9), dynamo=False))
    assert trained(program) == names(module)


@pytest.mark.parametrize("dynamo", [False, True])
def test_another_name_of_a_weight_is_no_other_weight(dynamo: bool, tmp_path: Path) -> None:
    module = Scaled() if dynamo else Layers(shared=False)
    shape = (2, 5, 8) if dynamo else (2, 6, 9)
    model = onnx.load(exported(tmp_path / "m.onnx", module, shape, dynamo=dynamo))
    for tensor in model.graph.initializer:
        for node in model.graph.node:
            renamed = [f"{name} alias" if name == tensor.name else name for name in node.input]
            del node.input[:]
            node.input.extend(renamed)
        model.graph.node.insert(0, helper.make_node("Identity", [tensor.name], [f"{tensor.name} alias"]))
    onnx.save(model, tmp_path / "alias.onnx")
    program = load_program(tmp_path / "alias.onnx")
    assert trained(program) == names(module)
    check_trained(program)


def test_what_is_read_in_several_places_is_said_where_a_tool_took_away_what_it_was(tmp_path: Path) -> None:
    path = changed(exported(tmp_path / "m.onnx", Layers(shared=False), (2, 6, 9), dynamo=True), nodes=True)
    assert any("layers.0.weight" in each and "read in several places" in each for each in load_program(path).doubts)


def test_weights_are_trained_where_a_tool_signed_the_file(tmp_path: Path) -> None:
    path = exported(tmp_path / "m.onnx", Scaled(), (2, 5, 8), dynamo=True)
    program = load_program(changed(path, nodes=False, producer="onnxruntime.transformers"))
    assert trained(program) == names(Scaled())
    check_trained(program)


def test_numbers_of_the_code_are_no_parameters_without_metadata(tmp_path: Path) -> None:
    path = changed(exported(tmp_path / "m.onnx", Scaled(), (2, 5, 8), dynamo=True), nodes=True)
    program = load_program(path)
    shapes = {node.attr("source"): node.type.shape for node in program.graph.params if node.attr("trainable")}
    assert sorted(shapes.values()) == [(8,), (8, 16), (16,), (16, 8)]
    check_trained(program)


def test_scales_of_norms_are_trained_and_those_of_sizes_are_not_without_metadata(tmp_path: Path) -> None:
    path = changed(exported(tmp_path / "m.onnx", Resized(), (2, 3, 6, 4), dynamo=True), nodes=True)
    program = load_program(path)
    check_trained(program)
    assert sum(node.type.num_elements for node in program.graph.params if node.attr("trainable")) == sum(
        parameter.numel() for parameter in Resized().parameters()
    )


def test_what_the_newer_exporter_merged_or_folded_is_refused_without_metadata(tmp_path: Path) -> None:
    path = changed(exported(tmp_path / "m.onnx", Normed(), (2, 6, 8), dynamo=True), nodes=True)
    program = load_program(path)
    assert len(program.folded) == 1
    assert any(what.startswith("whether val_") for what in program.untold.values())
    with pytest.raises(ModelError, match="1 batch norms were folded"):
        check_trained(program)


def test_weights_that_became_constants_are_trained_by_their_names(tmp_path: Path) -> None:
    model = onnx.load(exported(tmp_path / "m.onnx", Scaled(), (2, 5, 8), dynamo=True))
    for tensor in model.graph.initializer:
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    onnx.save(model, tmp_path / "constants.onnx")
    program = load_program(tmp_path / "constants.onnx")
    assert trained(program) == names(Scaled())
    check_trained(program)


def test_a_tied_weight_that_another_maker_stores_twice_is_said(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", "x"], ["rows"]), helper.make_node("MatMul", ["rows", "out"], ["y"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 12])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.ascontiguousarray(table.T), "out")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="tf2onnx", ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    (doubt,) = load_program(tmp_path / "m.onnx").doubts
    assert "table and out hold the same values" in doubt


class Twins(nn.Module):
    """One branch for both inputs, whose norms start out with scales of one and shifts of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv1d(6, 4, 3), nn.Tanh(), nn.BatchNorm1d(4), nn.Flatten(), nn.LayerNorm(28))
        self.last = nn.Linear(28, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.branch(x) - self.branch(2 * x)).abs())  # type: ignore[no-any-return]


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("training", [torch.onnx.TrainingMode.TRAINING, torch.onnx.TrainingMode.EVAL])
def test_layers_that_are_called_twice_stay_one(training: torch.onnx.TrainingMode, opset: int, tmp_path: Path) -> None:
    module, path = Twins(), tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 6, 9),), path, dynamo=False, opset_version=opset, training=training)
    program = load_program(path)
    trains = training is torch.onnx.TrainingMode.TRAINING
    assert trained(program) == names(module)
    assert [what for what in program.doubts if "read in several places" in what or "called several times" in what] == []
    assert {name for name, _ in program.graph.updates} == (
        {"branch.2.running_mean", "branch.2.running_var"} if trains else set()
    )
    assert {param.attr("name") for param in program.graph.params} - names(module) == {
        "branch.2.running_mean",
        "branch.2.running_var",
    }


class Again(nn.Module):
    """A norm by a name of its own, in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(self.norm(x)))  # type: ignore[no-any-return]


def test_a_layer_that_may_be_called_twice_is_said(tmp_path: Path) -> None:
    (one, other) = load_program(exported(tmp_path / "m.onnx", Again(), (2, 8), dynamo=False)).doubts
    assert one.startswith("norm.weight may be of one layer that is called several times")
    assert other.startswith("norm.bias may be of one layer")


def test_what_stands_for_on_and_off_and_around_a_tensor_is_not_trained(tmp_path: Path) -> None:
    """As tf2onnx writes ``tf.one_hot`` of a column of numbers and ``tf.pad``."""
    graph = helper.make_graph(
        [
            helper.make_node("OneHot", ["ids", "depth", "values"], ["hot"]),
            helper.make_node("MatMul", ["hot", "table"], ["found"]),
            helper.make_node("Pad", ["found", "widths", "around"], ["padded"]),
            helper.make_node("MatMul", ["padded", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.asarray(array), name)
            for name, array in {
                "depth": np.array([7]),
                "values": np.array([0, 1], np.float32),
                "table": np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32),
                "widths": np.array([0, 1, 0, 0, 0, 0]),
                "around": np.array([0.5], np.float32),
                "w": np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32),
            }.items()
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], producer_name="tf2onnx", ir_version=8)
    onnx.save(made, path := tmp_path / "m.onnx")
    program = load_program(path)
    assert set(trained_sources_of(program.graph)) == {"table", "w"}
    assert "outputs are the same" in check_file(program, path)
