"""Tensors that a tool computed of one another are known by their values."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest

from pdv.frontend.onnx.origins.related import related
from pdv.passes.fold_constants import Array

_DRAW = np.random.default_rng(0)
W, OTHER = (_DRAW.normal(size=(96, 80)).astype(np.float32) for _ in range(2))
COMPUTED = {
    "overlapping": W[8:40, 4:70],
    "turned": W.T[:20],
    "scaled": W * np.float32(0.3535),
    "shifted": W[:30] * np.float32(-3) + np.float32(0.5),
    "rows scaled": W[:40] * OTHER[:40, :1],
    "rows chosen": W[_DRAW.permutation(96)[:16]],
    "in half precision": W[:50].astype(np.float16),
}


def graph(**tensors: Array) -> onnx_ir.Graph:
    """Stored tensors, each read once."""
    values = []
    for name, array in tensors.items():
        tensor = onnx_ir.Tensor(array, name=name)
        values.append(onnx_ir.Value(name=name, shape=onnx_ir.Shape(array.shape), const_value=tensor))
    nodes = [onnx_ir.Node("", "Identity", [value], num_outputs=1) for value in values]
    return onnx_ir.Graph([], [], nodes=nodes, initializers=values, opset_imports={"": 20})


@pytest.mark.parametrize("how", COMPUTED)
def test_what_was_computed_of_a_weight_is_told(how: str) -> None:
    found = related(graph(**{"a.weight": W, "b.weight": OTHER, "onnx::MatMul_7": COMPUTED[how]}))
    assert found == ["whether a.weight and onnx::MatMul_7, which have values in common, are one"]


def test_parts_that_do_not_overlap_are_apart() -> None:
    assert not related(graph(**{"onnx::MatMul_3": W[:48], "onnx::MatMul_7": W[48:], "onnx::MatMul_9": OTHER}))


def test_parameters_of_the_module_may_start_out_alike() -> None:
    assert not related(graph(**{"a.weight": W, "b.weight": W[:40], "onnx::MatMul_9": OTHER}))


def test_tensors_of_few_values_are_no_chance() -> None:
    few = [_DRAW.integers(-8, 8, size=(64, 64)).astype(np.float32) for _ in range(2)]
    assert not related(graph(**{"a.weight": few[0], "onnx::MatMul_9": few[1]}))
