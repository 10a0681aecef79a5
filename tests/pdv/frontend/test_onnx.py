"""ONNX models made by hand: what is read, and what is refused with one error that says where and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError, UnsupportedOperatorsError, UsageError
from ir.evaluation.interpret import evaluate
from pdv.frontend import Program, load_program

F32 = TensorProto.FLOAT
rng = np.random.default_rng(0)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str | None]],
    stored: dict[str, Any],
    *,
    output: str = "y",
    opset: int = 23,
    types: dict[str, int] | None = None,
) -> Path:
    """A model file whose output has no declared shape."""
    values = [helper.make_tensor_value_info(n, (types or {}).get(n, F32), shape) for n, shape in inputs.items()]
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info(output, F32, None)], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def run(program: Program, **inputs: Any) -> Any:
    values = {name: program.weights.load(name) for name in program.weights.names}
    return evaluate(program.graph, values | inputs).gather()["output"]


def node(op: str, inputs: Sequence[str], output: str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=f"n_{output}", **attrs)


def test_gemm_with_all_its_attributes(tmp_path: Path) -> None:
    w, b = rng.standard_normal((4, 6)).astype("f"), rng.standard_normal(6).astype("f")
    gemm = node("Gemm", ["x", "w", "b"], alpha=0.5, beta=2.0)
    program = load_program(save(tmp_path / "m.onnx", [gemm], {"x": [3, 4]}, {"w": w, "b": b}))
    x = rng.standard_normal((3, 4)).astype("f")
    assert np.allclose(run(program, x=x), 0.5 * x @ w + 2 * b, atol=1e-6)
    assert [p.attr("source") for p in program.graph.params] == ["w", "b"]


def test_attention_with_heads_in_the_last_dim_and_groups(tmp_path: Path) -> None:
    attention = node("Attention", ["q", "k", "v"], q_num_heads=4, kv_num_heads=2, is_causal=1)
    shapes = {"q": [2, 5, 12], "k": [2, 5, 6], "v": [2, 5, 6]}
    path = save(tmp_path / "m.onnx", [attention], shapes, {})
    inputs = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    from onnx.reference import ReferenceEvaluator

    (expected,) = ReferenceEvaluator(onnx.load(path)).run(None, inputs)
    assert np.allclose(run(load_program(path), **inputs), expected, atol=1e-5)


def test_batch_binds_the_dynamic_dim(tmp_path: Path) -> None:
    stored = {"w": np.ones((4, 4), "f"), "shape": np.array([-1, 2, 2])}
    nodes = [node("MatMul", ["x", "w"], "h"), node("Reshape", ["h", "shape"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": ["batch", 4]}, stored)
    assert load_program(path, batch=6).graph.outputs[0][1].type.shape == (6, 2, 2)
    with pytest.raises(ModelError, match=r"no number for batch \(dim 0 of x\).*--batch"):
        load_program(path)


def test_other_batch_than_exported_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", ["x"])], {"x": [2, 4]}, {})
    with pytest.raises(ModelError, match="batch 2, not 6"):
        load_program(path, batch=6)


@pytest.mark.parametrize(("shape", "message"), [([0, 4], "without elements"), ([2, -4], "size -4 in dim 1")])
def test_dims_that_are_not_positive_are_refused(tmp_path: Path, shape: list[int], message: str) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", ["x"])], {"x": shape}, {})
    with pytest.raises(ModelError, match=message):
        load_program(path)


def test_every_unsupported_operator_is_listed_at_once(tmp_path: Path) -> None:
    nodes = [
        node("Multinomial", ["x"], "a"),
        node("Relu", ["a"], "b"),
        node("Unique", ["b"], "c"),
        helper.make_node("Smooth", ["x"], ["d"], name="n_d", domain="my.own"),
        node("Add", ["c", "d"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [4, 4]}, {})
    with pytest.raises(UnsupportedOperatorsError) as caught:
        load_program(path)
    assert caught.value.operators == (
        "Multinomial at node 'n_a'",
        "Unique at node 'n_c'",
        "my.own::Smooth at node 'n_d' (pdv.register_operator(..., onnx=...) says what it is in torch)",
    )
    assert caught.value.exit_code == 4


def test_dropout_in_training_draws_masks(tmp_path: Path) -> None:
    stored = {"ratio": np.float32(0.1), "training": np.array(True)}
    path = save(tmp_path / "m.onnx", [node("Dropout", ["x", "ratio", "training"])], {"x": [4]}, stored)
    assert [(n.op.name, n.attr("p")) for n in load_program(path).graph.nodes if not n.is_leaf] == [("dropout", 0.1)]


def test_random_numbers_are_never_folded(tmp_path: Path) -> None:
    nodes = [node("RandomNormal", [], "r", shape=[4]), node("Add", ["x", "r"])]
    program = load_program(save(tmp_path / "m.onnx", nodes, {"x": [4]}, {}))
    assert [n.op.name for n in program.graph.nodes if n.op.draws] == ["noise"]


def test_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "b"], "a"), node("Relu", ["a"], "b"), node("Relu", ["b"])]
    with pytest.raises(ModelError, match=r"m\.onnx has a cycle"):
        load_program(save(tmp_path / "m.onnx", nodes, {"x": [4]}, {}))


def test_an_output_may_be_a_stored_tensor(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [node("Relu", ["x"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size]) for name, size in (("y", 4), ("w", 3))],
        [onnx.numpy_helper.from_array(np.ones(3, "f"), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    _, (_, stored) = load_program(tmp_path / "m.onnx").graph.outputs
    assert (stored.op.name, stored.attr("source")) == ("param", "w")


def test_undefined_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'ghost', which nothing defines"):
        load_program(save(tmp_path / "m.onnx", [node("Add", ["x", "ghost"])], {"x": [4]}, {}))


@pytest.mark.parametrize(
    "broken",
    [
        node("Reshape", ["x", "shape"]),  # to a shape of another size
        node("Concat", ["x", "x"]),  # without its axis
        node("Transpose", ["x"], perm=[0, 0]),
        node("MatMul", ["x", "shape"]),  # floats by integers of a wrong size
        node("Gather", ["x", "shape"], axis=7),
        node("Cast", ["x"], to=999),
        node("Relu", []),
    ],
    ids=lambda n: n.op_type,
)
def test_malformed_nodes_are_model_errors(tmp_path: Path, broken: onnx.NodeProto) -> None:
    path = save(tmp_path / "m.onnx", [broken], {"x": [4, 4]}, {"shape": np.array([3, 5])})
    with pytest.raises((ModelError, UnsupportedOperatorsError), match="n_y"):
        load_program(path)


def test_constant_bomb_is_refused_before_it_is_made(tmp_path: Path) -> None:
    stored = {"one": np.array(1, "f"), "shape": np.array([1 << 20, 1 << 20])}
    nodes = [node("Expand", ["one", "shape"], "big"), node("ReduceSum", ["big"], "s"), node("Add", ["x", "s"])]
    with pytest.raises(ModelError, match="takes 4398046511104 bytes"):
        load_program(save(tmp_path / "m.onnx", nodes, {"x": [4]}, stored))


def test_old_opset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="opset 6"):
        load_program(save(tmp_path / "m.onnx", [node("Relu", ["x"])], {"x": [4]}, {}, opset=6))


def test_hostile_names_pass_unharmed(tmp_path: Path) -> None:
    name = "a'\"\n/../${HOME}; import os"
    program = load_program(save(tmp_path / "m.onnx", [node("Add", ["x", name])], {"x": [4]}, {name: np.ones(4, "f")}))
    assert program.weights.names == (name,)


def test_pickles_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a pickle"):
        load_program(tmp_path / "m.pt2")
    with pytest.raises(UsageError, match=r"\.txt"):
        load_program(tmp_path / "m.txt")
