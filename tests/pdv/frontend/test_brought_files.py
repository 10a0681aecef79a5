"""Files as people bring them: inputs beside the batch, masks that nothing marks, divisions that are rounded next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ir.errors import ModelError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.frontend.load import load_program
from pdv.frontend.program import Program
from pdv.frontend.torch.opaque import call_torch

Array = np.ndarray[Any, Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def file_of(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Any],
    stored: Mapping[str, Any],
    opset: int = 18,
    producer: str = "",
) -> Path:
    """A file that gives y; inputs: shapes, or pairs of a shape and a type."""
    kinds = {name: given if isinstance(given, tuple) else (given, FLOAT) for name, given in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in kinds.items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in stored.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, producer_name=producer
    )
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def computed(program: Program, given: Mapping[str, Array]) -> Array:
    """What was read gives of these inputs."""
    stored = {name: program.weights.load(name) for name in program.weights.names}
    field = FloatField(np.float32, foreign=call_torch)
    return np.asarray(evaluate(program.graph, {**given, **stored}, field=field).gather()["output"])


def wanted(path: Path, given: Mapping[str, Array]) -> Array:
    """What ONNX Runtime makes of the file."""
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, dict(given))[0])


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def _beside(folder: Path, shape: list[Any], rows: Any = "N") -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "z"], ["y"])]
    return file_of(folder, nodes, {"x": [rows, 8], "z": shape}, {"w": ones(8, 4)})


@pytest.mark.parametrize("shape", [[1], [1, 4]], ids=["a temperature", "a mask of all rows"])
def test_what_is_for_all_rows_is_no_batch(tmp_path: Path, shape: list[int]) -> None:
    program = load_program(_beside(tmp_path, shape), batch=6)
    assert [node.type.shape for node in program.graph.inputs] == [(6, 8), tuple(shape)]


def test_a_fixed_batch_is_none_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has batch 3, not 6"):
        load_program(_beside(tmp_path, [1], 3), batch=6)


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, -10000.0])
def test_a_mask_that_hides_is_not_trained(tmp_path: Path, hidden: float) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "m"], ["y"])]
    mask = np.triu(np.full((4, 4), hidden, np.float32), 1)
    program = load_program(file_of(tmp_path, nodes, {"x": ["N", 4, 8]}, {"w": ones(8, 4), "m": mask}), batch=2)
    assert [node.attr("name") for node in program.graph.params if node.attr("trainable")] == ["w"]


def test_zeros_and_ones_may_be_a_mask_or_a_weight(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "m"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    path = file_of(tmp_path, nodes, {"x": ["N", 4]}, {"w": ones(4, 4) / 3, "m": np.tril(ones(4, 4))})
    assert any("zeros and ones are trained (m)" in doubt for doubt in load_program(path, batch=4).doubts)


def test_a_weight_of_few_numbers_is_trained(tmp_path: Path) -> None:
    binary = np.where(np.eye(4) > 0, 0.5, -0.5).astype(np.float32)
    path = file_of(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["N", 4]}, {"w": binary})
    program = load_program(path, batch=4)
    assert len(program.graph.params) == 1
    assert not program.doubts


@pytest.mark.parametrize("then", ["Floor", "Ceil", "Round"])
def test_what_is_rounded_is_divided(tmp_path: Path, then: str) -> None:
    """41 * (1 / 41) is less than one in float32."""
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=FLOAT), helper.make_node("Div", ["f", "c"], ["d"])]
    nodes += [helper.make_node("Neg", ["d"], ["n"]), helper.make_node(then, ["n"], ["h"])]
    nodes += [helper.make_node("Mul", ["h", "w"], ["y"])]
    path = file_of(tmp_path, nodes, {"x": (["N", 80], INT64)}, {"c": np.float32(41), "w": ones(80)})
    given = {"x": np.arange(0, 41 * 160, 41).reshape(2, 80)}
    np.testing.assert_array_equal(computed(load_program(path, batch=2), given), wanted(path, given))


def test_a_module_that_rounds_quotients_is_itself() -> None:
    class Places(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.floor(x / 49), (x / 41).to(torch.int64), torch.round((x / 47) + 0.0)

    x = torch.arange(0, 200.0).view(4, 50)
    program = load_program(Places(), (x,))
    found = evaluate(program.graph, {"x": x.numpy()}, field=FloatField(np.float32, foreign=call_torch)).gather()
    for value, want in zip(found.values(), Places()(x), strict=True):
        np.testing.assert_array_equal(value, want.numpy())


def test_the_rest_of_a_division_by_itself_is_zero(tmp_path: Path) -> None:
    path = file_of(tmp_path, [helper.make_node("Mod", ["x", "z"], ["y"], fmod=1)], {"x": ["N", 40], "z": ["N", 40]}, {})
    x = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    given = {"x": np.concatenate([x[:1], 3 * x[:1]]), "z": np.abs(np.concatenate([x[:1], x[:1]]))}
    np.testing.assert_allclose(computed(load_program(path, batch=2), given), wanted(path, given), atol=1e-6)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_corners_are_aligned_to_the_last_element(tmp_path: Path, mode: str) -> None:
    """7 by 1.5 are 10, not 10.5: so count torch and ONNX Runtime, unlike onnx's own tests."""
    how = {"mode": mode, "coordinate_transformation_mode": "align_corners"}
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], **how)
    stored = {"s": np.array([1, 1, 1.5, 0.6], np.float32)}
    path = file_of(tmp_path, [node], {"x": ["N", 1, 7, 9]}, stored, producer="pytorch")
    given = {"x": np.random.default_rng(0).normal(size=(2, 1, 7, 9)).astype(np.float32)}
    np.testing.assert_allclose(computed(load_program(path, batch=2), given), wanted(path, given), atol=1e-5)


def test_an_empty_region_of_what_is_nearest(tmp_path: Path) -> None:
    """Torch's older exporter writes one up to opset 12."""
    node = helper.make_node("Resize", ["x", "r", "s"], ["y"], mode="nearest")
    stored = {"r": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 2], np.float32)}
    path = file_of(tmp_path, [node], {"x": ["N", 1, 2, 3]}, stored, opset=11)
    given = {"x": np.arange(12, dtype=np.float32).reshape(2, 1, 2, 3)}
    np.testing.assert_array_equal(computed(load_program(path, batch=2), given), wanted(path, given))
