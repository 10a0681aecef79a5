"""The reading of an ONNX file against ONNX Runtime or onnx's reference implementation: what differs is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import pdv
from ir.errors import ModelError
from ir.graph import Graph
from pdv.check.file import reading, run
from pdv.check.file.reading import check_file
from pdv.frontend import Program, load_program
from pdv.frontend.onnx import operators
from pdv.frontend.onnx.call import Call
from tests.pdv.worlds import cluster

rng = np.random.default_rng(0)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """ids -> table -> layer norm -> linear, its batch and sequence open."""
    stored = {
        "table": rng.standard_normal((11, 8)).astype("f"),
        "scale": np.ones(8, "f"),
        "w": rng.standard_normal((8, 4)).astype("f"),
        "b": np.zeros(4, "f"),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("LayerNormalization", ["e", "scale"], ["n"]),
        helper.make_node("MatMul", ["n", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def read(path: Path) -> Program:
    return load_program(path, batch=4, dims={"length": 3000})


def test_a_right_reading_is_said_to_be_one(mlp: Path) -> None:
    assert "in ONNX Runtime: the outputs are the same" in check_file(read(mlp), mlp)


def test_without_onnx_runtime_the_reference_implementation_judges(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert "in onnx's reference implementation" in check_file(read(mlp), mlp)


def test_where_the_judges_differ_one_of_them_is_enough(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run._run_fast
    monkeypatch.setattr(run, "_run_fast", lambda *args: [x + 1 for x in right(*args)])
    said = check_file(read(mlp), mlp)
    assert "in onnx's reference implementation" in said
    assert "(ONNX Runtime makes something else of it)" in said


@pytest.mark.parametrize("op", ["Add", "Gather", "MatMul", "LayerNormalization"])
def test_a_wrong_reading_is_an_error(mlp: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    right: Callable[[Call], object] = operators.HANDLERS[op]

    def wrong(c: Call) -> object:
        found = right(c)
        return (c.k.apply("relu", found[0]), None, None) if isinstance(found, tuple) else c.k.apply("relu", found)

    monkeypatch.setitem(operators.HANDLERS, op, wrong)
    with pytest.raises(ModelError, match="is not what ONNX Runtime makes of it: output 0 differs"):
        check_file(read(mlp), mlp)


def test_outputs_that_went_missing_are_an_error(mlp: Path) -> None:
    program = read(mlp)
    graph = program.graph

    def fewer(graph: Graph) -> Graph:
        return replace(graph, outputs=(*graph.outputs, ("again", graph.outputs[0][1])))

    with pytest.raises(ModelError, match="number of outputs"):
        check_file(replace(program, graph=fewer(graph), again=None), mlp)


def test_what_nothing_runs_is_not_an_error_and_said(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[object]:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(run, "_run_fast", fail)
    monkeypatch.setattr(run, "_run_slowly", fail)
    assert "was not run against the file: ONNX Runtime: no kernel" in check_file(read(mlp), mlp)


def test_what_is_too_big_is_not_run_and_said(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_WEIGHTS", 10)
    assert "was not run against the file: it has" in check_file(read(mlp), mlp)


def test_plans_say_what_was_checked(mlp: Path) -> None:
    plan = pdv.optimize(mlp, cluster=cluster(2), batch=4, dims={"length": 8}, mode="infer")
    assert "outputs are the same" in json.dumps(plan.document["reading"])
    plan = pdv.optimize(mlp, cluster=cluster(2), batch=4, dims={"length": 8}, mode="infer", check=False)
    assert "--no-check" in plan.document["reading"]


@pytest.fixture
def fixed(tmp_path: Path) -> Path:
    """x [8, 2, 6] -> its last dims as one, by a Reshape that says 8 -> linear -> times eight equal constant rows."""
    stored = {
        "shape": np.array([8, 12]),
        "w": rng.standard_normal((12, 4)).astype("f"),
        "rows": np.array([8, 4]),
    }
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["m"]),
        helper.make_node("Constant", [], ["mask"], value=numpy_helper.from_array(rng.random((1, 4)).astype("f"))),
        helper.make_node("Expand", ["mask", "rows"], ["masks"]),
        helper.make_node("Mul", ["m", "masks"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [8, 2, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [8, 4])],
        [numpy_helper.from_array(stored[name], name) for name in ("shape", "w", "rows")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_files_of_fixed_sizes_are_run_over_few_rows(fixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_program(fixed)
    assert [node.type.shape for node in program.graph.inputs] == [(8, 2, 6)]
    graph, model = reading._smaller(program, fixed)
    assert [node.type.shape for node in graph.inputs] == [(2, 2, 6)]
    assert model is not None
    assert "in ONNX Runtime: the outputs are the same" in check_file(program, fixed)
    right = operators.HANDLERS["MatMul"]
    monkeypatch.setitem(operators.HANDLERS, "MatMul", lambda c: c.k.apply("relu", right(c)))
    with pytest.raises(ModelError, match="is not what ONNX Runtime makes of it: output 0 differs"):
        check_file(load_program(fixed), fixed)


def test_constants_that_a_check_leaves_out_are_compared_first(fixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_program(fixed)
    assert reading._smaller(program, fixed)[1] is not None
    monkeypatch.setattr(reading, "run_constants", lambda path, names: [np.ones((8, 4), "f") for _ in names])
    assert reading._smaller(program, fixed)[1] is None


def test_rows_that_a_file_numbers_are_fewer(tmp_path: Path) -> None:
    """As torch's older exporter reads a mask: all of it flat, at row * 6 + column."""
    numbers = {"rows": np.arange(8).reshape(8, 1), "columns": np.arange(6).reshape(1, 6), "six": np.array(6)}
    nodes = [
        *(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(x)) for name, x in numbers.items()),
        helper.make_node("Flatten", ["x"], ["flat"], axis=2),
        helper.make_node("Reshape", ["flat", "all"], ["line"]),
        helper.make_node("Mul", ["rows", "six"], ["starts"]),
        helper.make_node("Add", ["starts", "columns"], ["places"]),
        helper.make_node("Gather", ["line", "places"], ["again"]),
        helper.make_node("MatMul", ["again", "w"], ["y"]),
    ]
    stored = {"all": np.array([-1]), "w": rng.standard_normal((6, 4)).astype("f")}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [8, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [8, 4])],
        [numpy_helper.from_array(x, name) for name, x in stored.items()],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    program = load_program(path)
    small, model = reading._smaller(program, path)
    assert model is not None
    assert [node.type.shape for node in small.inputs] == [(2, 6)]
    assert "in ONNX Runtime: the outputs are the same" in check_file(program, path)
