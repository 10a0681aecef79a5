"""Masks that files draw from random numbers are read as dropout of ones; other random numbers are noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ir.evaluation.interpret import evaluate
from pdv.check.file.reading import check_file
from pdv.check.steady import SteadyNoise
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.planning.model import read_model
from tests.pdv.emit.test_noise import Autoencoder

Row = tuple[str, list[str], str]
_LESS = [("Less", ["u", "keep"], "m"), ("Cast", ["m"], "f"), ("Div", ["f", "keep"], "s"), ("Mul", ["x", "s"], "y")]
_FLOOR = [
    ("Add", ["keep", "u"], "a"), ("Floor", ["a"], "f"), ("Div", ["x", "keep"], "s"), ("Mul", ["f", "s"], "y"),
]  # fmt: skip
_ABOVE = [("Greater", ["u", "keep"], "m"), ("Where", ["m", "x", "zero"], "y")]
_BELOW = [("GreaterOrEqual", ["keep", "u"], "m"), ("Not", ["m"], "n"), ("Where", ["n", "zero", "x"], "y")]
_SAID = [
    ("Expand", ["keep", "shape"], "c"),
    ("Bernoulli", ["c"], "f"),
    ("Div", ["f", "keep"], "s"),
    ("Mul", ["x", "s"], "y"),
]


def _file(path: Path, rows: list[Row]) -> Path:
    """x: [4, 3] and random numbers u of its shape."""
    nodes = [helper.make_node("RandomUniformLike", ["x"], ["u"], seed=1.0)] if "u" in str(rows) else []
    nodes += [helper.make_node(op, ins, [out], **({"to": 1} if op == "Cast" else {})) for op, ins, out in rows]
    stored = {"keep": np.float32(0.75), "zero": np.float32(0), "shape": np.array([4, 3])}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(("rows", "p"), [(_LESS, 0.25), (_FLOOR, 0.25), (_ABOVE, 0.75), (_BELOW, 0.25), (_SAID, 0.25)])
def test_masks_are_dropout(rows: list[Row], p: float, tmp_path: Path) -> None:
    path = _file(tmp_path / "m.onnx", rows)
    program = load_program(path)
    assert [node.attr("p") for node in program.graph.nodes if node.op.name == "dropout"] == [p]
    assert "both without dropout: the outputs are the same" in check_file(program, path)


@pytest.mark.parametrize(
    ("rows", "masks"),
    [
        ([("Mul", ["x", "u"], "y")], 0),
        ([("Identity", ["u"], "y")], 0),
        ([("Identity", ["u"], "i"), ("Mul", ["i", "i"], "m"), ("Add", ["m", "i"], "y")], 0),
        ([("Floor", ["u"], "f"), ("Mul", ["x", "f"], "y")], 0),
        ([*_LESS[:-1], ("Floor", ["u"], "g"), ("Add", ["g", "s"], "y")], 0),
        ([("Less", ["u", "x"], "m"), ("Where", ["m", "x", "zero"], "y")], 0),
        ([("Add", ["u", "keep"], "v"), ("Mul", ["v", "v"], "m"), ("Sub", ["m", "v"], "y")], 0),
        ([("Sub", ["keep", "u"], "v"), ("Mul", ["v", "x"], "y")], 0),
        ([("Sigmoid", ["x"], "p"), ("Bernoulli", ["p"], "y")], 0),
        ([("RandomNormalLike", ["x"], "n"), ("Mul", ["n", "n"], "m"), ("Add", ["m", "x"], "y")], 0),
        ([*_LESS[:-1], ("RandomNormalLike", ["x"], "n"), ("Mul", ["n", "s"], "y")], 1),
    ],
)
def test_other_random_numbers_are_noise(rows: list[Row], masks: int, tmp_path: Path) -> None:
    path = _file(tmp_path / "m.onnx", rows)
    program = load_program(path)
    (noise,) = [node for node in program.graph.nodes if node.op.name == "noise"]
    assert noise.attr("trains")
    assert sum(node.op.name == "dropout" for node in program.graph.nodes) == masks
    assert "with the same noise: the outputs are the same" in check_file(program, path)


def test_a_file_that_is_run_as_it_is_draws(tmp_path: Path) -> None:
    path = _file(tmp_path / "m.onnx", [("Mul", ["x", "u"], "y")])
    program, _ = read_model(path, None, None, lambda *_: None, train=False, check=False)
    assert [node.attr("trains") for node in program.graph.nodes if node.op.name == "noise"] == [False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the older exporter
@pytest.mark.parametrize("way", ["older", "newer", "ours"])
def test_a_variational_autoencoder_is_read_as_the_module(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    module, x, path = Autoencoder().eval(), torch.randn(4, 16), tmp_path / "m.onnx"
    if way == "ours":
        export_onnx(module, (x,), path)
    else:
        torch.onnx.export(module, (x,), str(path), dynamo=way == "newer", verbose=False)
    program = load_program(path)
    assert "with the same noise: the outputs are the same" in check_file(program, path)
    with SteadyNoise(), torch.no_grad():
        wanted = module(x)
    (name,) = [node.attr("name") for node in program.graph.inputs]
    values = program.as_stored({each: program.weights.load(each) for each in program.weights.names})
    found = evaluate(program.graph, {**values, name: x.numpy()}).gather()
    for one, other in zip(found.values(), wanted, strict=True):
        assert np.allclose(one, other.numpy(), atol=1e-5)


class _Paths(nn.Module):
    """A layer of rows that are kept or not, as vision models write it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.div(0.9) * (0.9 + torch.rand(x.shape[0], 1)).floor_() + torch.bernoulli(torch.full_like(x, 0.5)) * x


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    torch.onnx.export(_Paths().eval(), (torch.randn(4, 3),), path, dynamo=True, verbose=False, optimize=False)
    program = load_program(path)
    assert sorted(node.attr("p") for node in program.graph.nodes if node.op.name == "dropout") == [0.1, 0.5]
    assert "the outputs are the same" in check_file(program, path)
    assert not program.doubts


def test_a_mask_that_the_exporter_drew_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    torch.onnx.export(_Paths().eval(), (torch.randn(4, 3),), path, dynamo=True, verbose=False)
    (doubt,) = load_program(path).doubts
    assert "drew bernoulli once" in doubt
