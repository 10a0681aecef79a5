"""Integers in ONNX files: their arithmetic, types that torch only stores, floats that become integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from ir.evaluation.interpret import evaluate
from pdv.frontend import load_program
from tests.pdv.frontend.test_onnx_faults import check, model, n, save

KINDS = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int16": TensorProto.INT16, "int32": TensorProto.INT32}
KINDS |= {"uint16": TensorProto.UINT16, "uint32": TensorProto.UINT32}
F32, I64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["Div", "Mod", "Mul", "Add", "Sub", "Max", "Greater"])
def test_operators_of_small_integers(tmp_path: Path, op: str, kind: str) -> None:
    """As in their own type, in which sums and products may wrap around."""
    x = np.array([[-100, 7, 100, 3], [90, -7, 5, 1]]).astype(kind)
    y = np.array([[3, 2, 4, 2], [3, 2, 7, 5]]).astype(kind)
    number = KINDS[kind]
    result = TensorProto.BOOL if op == "Greater" else number
    proto = model([n(op, ["a", "b"])], {"a": (number, [2, 4]), "b": (number, [2, 4])}, {"y": (result, [2, 4])})
    check(tmp_path, proto, a=x, b=y)


def test_integers_that_wrap_are_compared_as_they_are(tmp_path: Path) -> None:
    kinds = {name: (TensorProto.UINT8, [4]) for name in "ab"}
    proto = model([n("Add", ["a", "b"], "s"), n("Greater", ["s", "a"])], kinds, {"y": (TensorProto.BOOL, [4])})
    check(tmp_path, proto, a=np.array([200, 1, 255, 0], "u1"), b=np.array([100, 2, 1, 0], "u1"))


@pytest.mark.parametrize("kind", [*KINDS, "int64"])
def test_bits_are_those_of_the_own_type(tmp_path: Path, kind: str) -> None:
    number = KINDS.get(kind, I64)
    proto = model([n("BitwiseNot", ["x"])], {"x": (number, [4])}, {"y": (number, [4])})
    check(tmp_path, proto, x=np.array([0, 1, 100, np.iinfo(kind).max - 2], kind))


def test_floats_become_integers_towards_zero(tmp_path: Path) -> None:
    nodes = [n("Cast", ["x"], "i", to=I64), n("Mul", ["i", "i"], "j"), n("Cast", ["j"], to=F32)]
    proto = model(nodes, {"x": (F32, [2, 4])}, {"y": (F32, [2, 4])})
    check(tmp_path, proto, x=np.array([[-2.7, -0.2, 0.0, 0.9], [1.5, 2.0, 7.3, -9.9]], np.float32))


def test_inputs_without_elements_are_known(tmp_path: Path) -> None:
    kinds = {"x": (F32, [2, 4]), "like": (TensorProto.DOUBLE, [0])}
    proto = model([n("CastLike", ["x", "like"])], kinds, {"y": (TensorProto.DOUBLE, [2, 4])})
    program = load_program(save(tmp_path, proto))
    assert [node.attr("name") for node in program.graph.inputs] == ["x"]
    assert [*program.known] == ["like"]


def test_the_largest_of_equal_elements_is_one_of_them(tmp_path: Path) -> None:
    proto = model([n("Relu", ["x"], "r"), n("ReduceMax", ["r"])], {"x": (F32, [2, 4])}, {"y": (F32, [1, 1])})
    found = evaluate(load_program(save(tmp_path, proto)).graph, {"x": -np.ones((2, 4))}).gather()
    np.testing.assert_array_equal(next(iter(found.values())), [[0.0]])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_places_of_extremes_of_integers(tmp_path: Path, op: str, kind: str) -> None:
    """The ends of a type among them, of which the smallest has no opposite."""
    ends = np.iinfo(kind)
    x = np.array([[0, ends.min, ends.max, ends.max], [ends.min, 1, 0, ends.min]]).astype(kind)
    proto = model([n(op, ["x"], axis=1)], {"x": (KINDS.get(kind, I64), [2, 4])}, {"y": (I64, [2, 1])})
    check(tmp_path, proto, x=x)
