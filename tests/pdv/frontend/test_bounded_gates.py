"""Recurrent layers of files whose gates are bounded (``clip``), and sparse weights, held to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.evaluation.interpret import evaluate
from pdv.frontend.load import load_program

RANDOM = np.random.default_rng(0)
STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4
X = RANDOM.normal(size=(STEPS, BATCH, INPUTS)).astype(np.float32)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def stored(*shape: int) -> Any:
    return (2 * RANDOM.normal(size=shape)).astype(np.float32)


def save(path: Path, op: str, weights: dict[str, Any], sparse: list[Any] | None = None, **attrs: Any) -> None:
    inputs = ["x", *weights] if weights else ["x", "w"]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, ["y"], **attrs)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    graph.sparse_initializer.extend(sparse or [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), path)


def check_same(path: Path) -> None:
    (wanted,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    program = load_program(path)
    weights = {name: program.weights.load(name) for name in program.weights.names}
    found = evaluate(program.graph, {"x": X, **weights}).gather()[program.graph.outputs[0][0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(("op", "more"), [("RNN", {}), ("LSTM", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1})])
def test_what_goes_into_gates_is_bounded(op: str, more: dict[str, Any], direction: str, tmp_path: Path) -> None:
    ways, rows = 1 + (direction == "bidirectional"), GATES[op] * HIDDEN
    weights = {"w": stored(ways, rows, INPUTS), "r": stored(ways, rows, HIDDEN), "b": stored(ways, 2 * rows)}
    save(tmp_path / "m.onnx", op, weights, hidden_size=HIDDEN, clip=0.4, direction=direction, **more)
    check_same(tmp_path / "m.onnx")


def sparse(places: Any, dims: list[int]) -> Any:
    count = len(places)
    values = helper.make_tensor("w", TensorProto.FLOAT, [count], [float(i + 1) for i in range(count)])
    array = np.asarray(places, np.int64)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(array, "places"), dims)


@pytest.mark.parametrize("places", [[0, 5, 10], [[0, 0], [1, 1], [2, 2]]])
def test_sparse_weights_are_filled_with_zeros(places: Any, tmp_path: Path) -> None:
    save(tmp_path / "m.onnx", "MatMul", {}, [sparse(places, [INPUTS, 4])])
    (tensor,) = onnx.load(tmp_path / "m.onnx").graph.sparse_initializer
    program = load_program(tmp_path / "m.onnx")
    (name,) = program.weights.names
    wanted = np.zeros((INPUTS, 4))
    wanted[[0, 1, 2], [0, 1, 2]] = [1, 2, 3]
    assert program.graph.params[0].attr("trainable")
    assert np.array_equal(program.weights.load(name).reshape(wanted.shape), wanted)
    assert list(tensor.dims) == [INPUTS, 4]


@pytest.mark.parametrize(
    ("places", "dims", "why"),
    [
        ([0, 5, 12], [3, 4], "malformed"),
        ([0, -5, 1], [3, 4], "malformed"),
        ([0, 1, 1], [3, 4], "malformed"),
        ([[0, 0], [1, 1], [2, 4]], [3, 4], "malformed"),
        ([0, 5, 10], [1 << 20, 1 << 20], "at most"),
        ([0, 5, 10], [], "at most"),
    ],
)
def test_sparse_weights_that_are_none_are_refused(places: Any, dims: list[int], why: str, tmp_path: Path) -> None:
    save(tmp_path / "m.onnx", "MatMul", {}, [sparse(places, dims)])
    with pytest.raises(ModelError, match=why) as told:
        load_program(tmp_path / "m.onnx")
    assert "the sparse initializer 'w'" in told.value.what
