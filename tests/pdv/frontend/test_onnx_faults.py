"""ONNX models that were once read as another model without a word: each is read right now, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.frontend import load_program
from pdv.frontend.torch.opaque import call_torch
from tests.pdv.worlds import cluster

F32, I64, I8, F64 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT8, TensorProto.DOUBLE
rng = np.random.default_rng(0)


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int]]], outputs: dict[str, tuple[int, Any]],
    stored: dict[str, Any] | None = None, opset: int = 23,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *each) for name, each in inputs.items()],
        [helper.make_tensor_value_info(name, *each) for name, each in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (stored or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def save(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    return path


def check(tmp_path: Path, proto: onnx.ModelProto, **inputs: Any) -> None:
    """The program computes what onnx's reference implementation does, in values, shapes and types."""
    program = load_program(save(tmp_path, proto))
    wanted = ReferenceEvaluator(proto).run(None, inputs)
    stored = {name: program.weights.load(name) for name in program.weights.names}
    found = evaluate(program.graph, {**inputs, **stored}, field=FloatField(foreign=call_torch)).gather()
    assert len(wanted) == len(program.graph.outputs)
    for (name, node), want in zip(program.graph.outputs, wanted, strict=True):
        assert node.type.dtype.torch_name == want.dtype.name.replace("bool_", "bool"), name
        np.testing.assert_allclose(np.asarray(found[name]).reshape(want.shape), want, rtol=1e-5, atol=1e-6)


def n(op: str, inputs: list[str], outputs: list[str] | str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [outputs] if isinstance(outputs, str) else outputs, name="node", **attrs)


def refused(tmp_path: Path, proto: onnx.ModelProto, match: str) -> None:
    with pytest.raises((ModelError, UnsupportedOperatorsError), match=match):
        load_program(save(tmp_path, proto))


X = {"x": (F32, [2, 4])}
Y = {"y": (F32, None)}


def test_outputs_of_equal_value_are_all_returned(tmp_path: Path) -> None:
    nodes = [n("Relu", ["x"], "a"), n("Relu", ["x"], "b"), n("Identity", ["a"], "c")]
    proto = model(nodes, X, {"a": (F32, [2, 4]), "b": (F32, [2, 4]), "c": (F32, [2, 4])})
    plan = pdv.optimize(save(tmp_path, proto), cluster=cluster(2), mode="infer", mesh={"x": 2})
    x = torch.randn(2, 4)
    assert [output.tolist() for output in plan.build("cpu")(x)] == [x.relu().tolist()] * 3


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2, 3])
def test_flatten_at_every_axis(tmp_path: Path, axis: int) -> None:
    proto = model([n("Flatten", ["x"], axis=axis)], {"x": (F32, [2, 3, 4])}, {"y": (F32, None)})
    check(tmp_path, proto, x=rng.standard_normal((2, 3, 4)).astype("f"))


@pytest.mark.parametrize("stored", ["x", ""])
def test_gather_of_known_negative_ids(tmp_path: Path, stored: str) -> None:
    x, ids = rng.standard_normal((5, 4)).astype("f"), np.array([-1, 0, -5, 2])
    proto = model(
        [n("Gather", ["x", "ids"], "g"), n("Add", ["g", "z"])],
        {"z": (F32, [4, 4]), **({} if stored else {"x": (F32, [5, 4])})},
        Y,
        {"ids": ids, **({"x": x} if stored else {})},
    )
    given = {"z": np.ones((4, 4), "f"), **({} if stored else {"x": x})}
    check(tmp_path, proto, **given)


@pytest.mark.parametrize(
    ("op", "attrs", "inputs"),
    [
        ("Flatten", {"axis": 4}, ["x"]),
        ("Gather", {"axis": 2}, ["x", "ids"]),
        ("Concat", {"axis": 2}, ["x", "x"]),
        ("Softmax", {"axis": 2}, ["x"]),
        ("LogSoftmax", {"axis": -3}, ["x"]),
        ("Split", {"axis": -3, "num_outputs": 1}, ["x"]),
        ("Squeeze", {}, ["x", "seven"]),
        ("Unsqueeze", {}, ["x", "seven"]),
        ("ReduceSum", {}, ["x", "seven"]),
        ("LayerNormalization", {"axis": 2}, ["x", "w"]),
        ("Transpose", {"perm": [0, 2]}, ["x"]),
        ("Transpose", {"perm": [0, -1]}, ["x"]),
    ],
)
def test_an_axis_out_of_range_is_refused(tmp_path: Path, op: str, attrs: dict[str, Any], inputs: list[str]) -> None:
    stored = {"ids": np.array([0, 1]), "seven": np.array([7]), "w": np.arange(4, dtype="f")}
    refused(tmp_path, model([n(op, inputs, **attrs)], X, Y, {k: v for k, v in stored.items() if k in inputs}), "node")


@pytest.mark.parametrize(
    "node",
    [
        n("Relu", ["x"], axis=1),
        n("Softmax", ["x"], axis=1.0),
        n("Softmax", ["x"], dim=1),
        n("Relu", ["x", "x"]),
        n("LayerNormalization", ["x", "w"], stash_type=10),
        n("Cast", ["x"], to=F32, strict=1),
        n("Gelu", ["x"], approximate="none", alpha=1.0),
    ],
    ids=lambda node: f"{node.op_type}-{node.attribute[0].name if node.attribute else 'operands'}",
)
def test_what_no_reader_takes_is_refused_by_name(tmp_path: Path, node: onnx.NodeProto) -> None:
    stored = {"w": np.arange(4, dtype="f")} if "w" in node.input else {}
    refused(tmp_path, model([node], X, Y, stored), node.attribute[0].name if node.attribute else "operands")


def test_attention_over_a_part_of_the_keys(tmp_path: Path) -> None:
    shapes = {name: (F32, [1, 2, 4, 8]) for name in "qkv"}
    node = n("Attention", ["q", "k", "v", "", "", "", "seen"])
    proto = model([node], {**shapes, "seen": (I64, [1])}, Y, opset=24)
    q, k, v = (rng.standard_normal((1, 2, 4, 8)).astype("f") for _ in range(3))
    check(tmp_path, proto, q=q, k=k, v=v, seen=np.array([2]))


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("dtype", ["int64", "int8", "float64", "bool"])
def test_operands_of_two_types_are_refused(tmp_path: Path, op: str, dtype: str) -> None:
    stored = {"c": np.ones(4, dtype)}
    proto = model([n(op, ["x", "c"])], X, Y, stored)
    refused(tmp_path, proto, "node.*operand 1")


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
@pytest.mark.parametrize(("dtype", "value"), [("int64", 2**53 + 1), ("int8", 100), ("int32", 2**30), ("uint8", 200)])
def test_integers_stay_integers(tmp_path: Path, op: str, dtype: str, value: int) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = model([n(op, ["x", "c"])], {"x": (element, [3])}, {"y": (element, None)}, {"c": np.array(value, dtype)})
    x = np.array([3, 1, 100], dtype)
    try:
        program = load_program(save(tmp_path, proto))
    except UnsupportedOperatorsError:
        return
    found = evaluate(program.graph, {"x": x}).gather()["output"]
    with np.errstate(all="ignore"):
        (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert found.astype(dtype).tolist() == wanted.tolist()


def test_float64_constants_keep_their_digits(tmp_path: Path) -> None:
    c = np.array([np.pi, 1 / 3])
    nodes = [n("Mul", ["x", "c"], "a"), n("Add", ["a", "d"])]
    proto = model(nodes, {"x": (F64, [2])}, {"y": (F64, None)}, {"c": c, "d": np.array(0.1)})
    program = load_program(save(tmp_path, proto))
    stored = {name: program.weights.load(name) for name in program.weights.names}
    found = evaluate(program.graph, {"x": np.array([1.0, 3.0]), **stored}).gather()["output"]
    np.testing.assert_allclose(found, [np.pi + 0.1, 1.1], rtol=1e-15)


@pytest.mark.parametrize("opset", [9999, 0, -1])
def test_an_opset_that_nobody_knows_is_refused(tmp_path: Path, opset: int) -> None:
    refused(tmp_path, model([n("Relu", ["x"])], X, Y, opset=opset), "opset")


@pytest.mark.parametrize(
    ("dtype", "shape"), [(F32, [4, 2]), (F32, [2]), (F32, [2, 4, 1]), (I64, [2, 4]), (F64, ["b", 4])]
)
def test_outputs_that_are_not_as_declared_are_refused(tmp_path: Path, dtype: int, shape: list[Any]) -> None:
    refused(tmp_path, model([n("Relu", ["x"])], X, {"y": (dtype, shape)}), "'y' is declared")


def test_a_tensor_with_two_payloads_is_refused(tmp_path: Path) -> None:
    proto = model([n("Add", ["x", "w"])], X, Y, {"w": np.arange(4, dtype="f")})
    proto.graph.initializer[0].float_data.extend([9, 9, 9, 9])
    refused(tmp_path, proto, "'w'.*raw_data.*float_data")


def test_a_payload_of_another_type_is_refused(tmp_path: Path) -> None:
    proto = model([n("Add", ["x", "w"])], X, Y, {"w": np.arange(4, dtype="f")})
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].int64_data.extend([9, 9, 9, 9])
    refused(tmp_path, proto, "'w'.*int64_data")


def test_a_payload_of_another_length_is_refused(tmp_path: Path) -> None:
    proto = model([n("Add", ["x", "w"])], X, Y, {"w": np.arange(4, dtype="f")})
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].float_data.extend([9, 9])
    refused(tmp_path, proto, "'w'")


def test_duplicate_initializers_are_refused(tmp_path: Path) -> None:
    proto = model([n("Add", ["x", "w"])], X, Y, {"w": np.arange(4, dtype="f")})
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(4, "f"), "w"))
    refused(tmp_path, proto, "'w'.*twice")


def test_duplicate_inputs_and_results_are_refused(tmp_path: Path) -> None:
    proto = model([n("Relu", ["x"])], X, Y)
    proto.graph.input.append(helper.make_tensor_value_info("x", F32, [2, 4]))
    refused(tmp_path, proto, "'x'.*twice")
    refused(tmp_path, model([n("Relu", ["x"]), n("Neg", ["x"])], X, Y), "'y'.*twice")
