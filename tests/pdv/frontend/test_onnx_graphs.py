"""Graphs within nodes, functions and sequences of ONNX files, and weights that a file has twice."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from benchmarks.coverage_runs.running import Case, run_case
from ir.errors import ModelError
from pdv.check.file.reading import check_file
from pdv.frontend import load_program

node = helper.make_node


def _value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape or None)


def _array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _model(
    nodes: list[onnx.NodeProto],
    stored: dict[str, np.ndarray],
    batch: int | str = 4,
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> onnx.ModelProto:
    """Of x [batch, 6], giving y."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", [_value("x", batch, 6)], [_value("y")], tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def _branch(op: str, name: str, stored: np.ndarray) -> onnx.GraphProto:
    tensor = numpy_helper.from_array(stored, "k")
    return helper.make_graph([node(op, ["x", "k"], [name])], name, [], [_value(name)], [tensor])


def _passes(model: onnx.ModelProto, wanted: np.ndarray) -> None:
    case = Case("case", model, [([_array(4, 6)], [wanted])], 1e-4, 1e-5)
    found = run_case(case, 2)
    assert (found.what, found.why) == ("passed", "")


def test_tensors_of_two_branches_with_one_name_are_two(tmp_path: Path) -> None:
    k, l = _array(6), np.zeros(6, np.float32)
    branches = [(_branch("Mul", "a", k), _branch("Add", "b", k)), (_branch("Add", "c", l), _branch("Mul", "d", l))]
    nodes = [
        node("If", ["yes"], [f"y{i}"], then_branch=taken, else_branch=other)
        for i, (taken, other) in enumerate(branches)
    ]
    model = _model([*nodes, node("Mul", ["y0", "y1"], ["y"])], {"yes": np.array(True)})
    x = _array(4, 6)
    _passes(model, x * k * (x + l))
    onnx.save(model, tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx")
    assert len(program.graph.params) == 2
    assert "the same" in check_file(program, tmp_path / "m.onnx")


def test_what_sizes_decide_keeps_them(tmp_path: Path) -> None:
    """More than two rows and fewer are two programs, though twice as many rows would be the same."""
    rows = [node("Shape", ["x"], ["s"], end=1), node("Squeeze", ["s"], ["n"]), node("Greater", ["n", "two"], ["c"])]
    decided = node(
        "If", ["c"], ["y"], then_branch=_branch("Mul", "a", _array(6)), else_branch=_branch("Add", "b", _array(6))
    )
    onnx.save(_model([*rows, decided], {"two": np.array(2)}, "b"), tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx", batch=4)
    assert program.again is not None
    assert "the same" in check_file(program, tmp_path / "m.onnx")
    for rows_there in (2, 8):
        with pytest.raises(ModelError, match="decides by its sizes"):
            program.again({"x": (rows_there, 6)})


@pytest.mark.parametrize("op", ["Mod", "Div", "Min"])
def test_what_is_left_of_sizes_keeps_them(op: str, tmp_path: Path) -> None:
    """Rows in whole fours, and rows but for a bound, are all rows of four and of eight."""
    bound = {"Mod": 4, "Div": 4, "Min": 9}[op]
    nodes = [node("Shape", ["x"], ["s"], end=1), node(op, ["s", "k"], ["part"])]
    nodes += {
        "Mod": [node("Sub", ["s", "part"], ["n"])],
        "Div": [node("Mul", ["part", "k"], ["n"])],
        "Min": [node("Identity", ["part"], ["n"])],
    }[op]
    nodes += [node("Slice", ["x", "zero", "n"], ["head"]), node("Mul", ["head", "w"], ["y"])]
    stored = {"k": np.array([bound]), "zero": np.array([0]), "w": _array(6)}
    onnx.save(_model(nodes, stored, "b"), tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx", batch=4)
    assert program.again is not None
    with pytest.raises(ModelError, match="decides by its sizes"):
        program.again({"x": (8, 6)})


def test_sizes_that_are_equal_decide_nothing(tmp_path: Path) -> None:
    """Shapes that are broadcast to each other, as tf2onnx writes them for products of batches."""
    nodes = [node("MatMul", ["x", "v"], ["h"]), node("Shape", ["x"], ["s"], end=1), node("Shape", ["h"], ["t"], end=1)]
    nodes += [node("Max", ["s", "t"], ["n"]), node("Equal", ["s", "t"], ["as"]), node("Where", ["as", "n", "s"], ["m"])]
    nodes += [node("Concat", ["m", "six"], ["shape"], axis=0), node("Reshape", ["h", "shape"], ["y"])]
    onnx.save(_model(nodes, {"v": _array(6, 6), "six": np.array([6])}, "b"), tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx", batch=4)
    assert program.again is not None
    assert program.again({"x": (8, 6)}).outputs[0][1].type.shape == (8, 6)


def test_an_attribute_without_a_part_says_nothing() -> None:
    """Axes that are there, beside what would hold without; the factor of a bias that is not there."""
    x, w = _array(4, 6), _array(6, 6)
    nodes = [
        node("Gemm", ["x", "w"], ["h"], beta=2.0),
        node("ReduceL2", ["h", "last"], ["l"], noop_with_empty_axes=1),
        node("ReduceMax", ["h", "last"], ["m"], noop_with_empty_axes=1),
        node("Add", ["l", "m"], ["y"]),
    ]
    h = x @ w
    wanted = np.sqrt((h**2).sum(1, keepdims=True)) + h.max(1, keepdims=True)
    _passes(_model(nodes, {"w": w, "last": np.array([-1])}), wanted)


def test_functions_of_another_opset_are_read_where_their_operators_are_the_same(tmp_path: Path) -> None:
    def calling(op: str) -> onnx.ModelProto:
        function = helper.make_function(
            "my", "F", ["a"], ["b"], [node(op, ["a"], ["b"])], [helper.make_opsetid("", 11)]
        )
        return _model([node("F", ["x"], ["h"], domain="my"), node("Mul", ["h", "k"], ["y"])], {"k": k}, 4, (function,))

    k, x = _array(6), _array(4, 6)
    _passes(calling("Elu"), np.where(x > 0, x, np.expm1(x)) * k)
    _passes(calling("Relu"), np.maximum(x, 0) * k)  # of opset 14 in the file, which takes integers, too
    onnx.save(calling("Softmax"), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="function my::F has Softmax of opset 11"):
        load_program(tmp_path / "m.onnx")


def test_a_function_that_is_called_like_an_operator_is_refused(tmp_path: Path) -> None:
    function = helper.make_function(
        "", "Relu", ["x"], ["y"], [helper.make_node("Tanh", ["x"], ["y"])], [helper.make_opsetid("", 17)]
    )
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="'Relu' has the name and the domain of an operator of ONNX"):
        load_program(tmp_path / "m.onnx")


def test_loops_carry_sequences() -> None:
    """As torch's newer exporter writes bags of embeddings."""
    kind, carried = helper.make_tensor_sequence_value_info("l", TensorProto.FLOAT, None), _value("h")
    inner = [
        node("Mul", ["h", "k"], ["h2"]),
        node("SequenceInsert", ["l", "h2"], ["l2"]),
        node("Identity", ["c"], ["d"]),
    ]
    sequence = helper.make_tensor_sequence_value_info("l2", TensorProto.FLOAT, None)
    condition = [_value("c", kind=TensorProto.BOOL), _value("d", kind=TensorProto.BOOL)]
    body = helper.make_graph(
        inner,
        "body",
        [_value("i", kind=TensorProto.INT64), condition[0], carried, kind],
        [condition[1], _value("h2"), sequence],
    )
    nodes = [
        node("SequenceEmpty", [], ["none"]),
        node("Loop", ["n", "", "x", "none"], ["last", "all"], body=body),
        node("SequenceErase", ["all", "first"], ["some"]),
        node("ConcatFromSequence", ["some"], ["joined"], axis=1, new_axis=1),
        node("SequenceLength", ["some"], ["count"]),
        node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
        node("Mul", ["joined", "number"], ["y"]),
    ]
    k, x = _array(6), _array(4, 6)
    model = _model(nodes, {"k": k, "n": np.array(3), "first": np.array(0)})
    _passes(model, np.stack([x * k**2, x * k**3], 1) * 2)


class Tied(nn.Module):
    """One small weight, looked up in and multiplied by."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.embed, self.out, self.turned = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), turned
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        found: Tensor = x @ self.embed.weight.t() if self.turned else self.out(x)
        return found


@pytest.mark.parametrize(("newer", "turned"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_weight_that_is_read_turned_too_is_one(newer: bool, turned: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Tied(turned=turned)
        torch.onnx.export(
            module, (torch.zeros(2, 3, dtype=torch.long),), tmp_path / "m.onnx", dynamo=newer, verbose=False
        )
    program = load_program(tmp_path / "m.onnx")
    assert [param.type.shape for param in program.graph.params] == [(8, 4)]
    assert "the same" in check_file(program, tmp_path / "m.onnx")
