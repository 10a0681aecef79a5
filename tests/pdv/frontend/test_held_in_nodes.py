"""Weights that a file has in nodes (``Constant``), or asks for as inputs; exporters store them beside the graph."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from pdv.check.file.reading import check_file
from pdv.frontend import load_program
from pdv.frontend.program import Program
from tests.pdv.worlds import cluster


class Tied(nn.Module):
    """A table that is embedding and head, a norm, layers with biases, and a scale of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            for i, each in enumerate(self.parameters()):
                each.add_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(i)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        found: Tensor = self.head(x + self.scale * self.layer(self.norm(x)))
        return found


def exported(path: Path, *, newer: bool, **options: Any) -> onnx.ModelProto:
    ids = torch.arange(8).reshape(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Tied(), (ids,), path, dynamo=newer, **options)
    return onnx.load(path)


def in_nodes(made: onnx.ModelProto, names: set[str], path: Path) -> Path:
    """The same file with stored tensors of these names in nodes."""
    stored = [each for each in made.graph.initializer if each.name in names]
    assert {each.name for each in stored} == names
    for each in stored:
        made.graph.initializer.remove(each)
        made.graph.node.insert(0, helper.make_node("Constant", [], [each.name], value=each))
    onnx.save(made, path)
    return path


def floats(made: onnx.ModelProto) -> set[str]:
    return {each.name for each in made.graph.initializer if each.data_type == onnx.TensorProto.FLOAT}


def trained(program: Program) -> set[str]:
    return {str(param.attr("name")) for param in program.graph.params if param.attr("trainable")}


@pytest.mark.parametrize("optimize", [True, False])
def test_a_newer_file_is_the_same_with_all_its_weights_in_nodes(optimize: bool, tmp_path: Path) -> None:
    made = exported(tmp_path / "m.onnx", newer=True, optimize=optimize, verbose=False)
    before = load_program(tmp_path / "m.onnx")
    after = load_program(path := in_nodes(made, floats(made), tmp_path / "n.onnx"))
    assert trained(after) == trained(before)
    assert len(trained(after)) == 6
    assert (after.graph.digest, after.doubts, after.absent) == (before.graph.digest, before.doubts, before.absent)
    assert check_file(after, path).endswith("are the same")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_older_file_is_the_same_with_weights_that_it_names_in_nodes(tmp_path: Path) -> None:
    made = exported(tmp_path / "m.onnx", newer=False)
    before = load_program(tmp_path / "m.onnx")
    named = {"norm.weight", "norm.bias", "layer.bias", "table.weight"}
    after = load_program(in_nodes(made, named, tmp_path / "n.onnx"))
    assert trained(after) == trained(before)
    assert (after.graph.digest, after.doubts) == (before.graph.digest, before.doubts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("place", [0, 1], ids=["scale", "bias"])
def test_scales_and_biases_that_nothing_names_are_said(place: int, tmp_path: Path) -> None:
    made = exported(tmp_path / "m.onnx", newer=False)
    name = ("norm.weight", "layer.bias")[place]
    (value,) = (each for each in made.graph.initializer if each.name == name)
    value.name = "c"
    for node in made.graph.node:
        node.input[:] = ["c" if each == name else each for each in node.input]
    program = load_program(in_nodes(made, {"c"}, tmp_path / "n.onnx"))
    assert any(each.startswith("1 weights are constants of the file (c, …)") for each in program.doubts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_without_weights_have_none_in_nodes(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False))
    torch.onnx.export(module, (torch.randn(2, 8),), path := tmp_path / "m.onnx", dynamo=False, opset_version=17)
    program = load_program(path)
    assert (program.doubts, trained(program)) == ((), {"0.weight", "0.bias"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_that_are_inputs_are_named(tmp_path: Path) -> None:
    exported(path := tmp_path / "m.onnx", newer=False, export_params=False)
    with pytest.raises(ModelError, match=r"weights are inputs of the file \(.*Export with export_params=True"):
        pdv.optimize(path, cluster=cluster(1))
