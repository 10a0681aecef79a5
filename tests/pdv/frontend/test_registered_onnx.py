"""ONNX operators of a domain of somebody's own, by what their user says that they are in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import pdv
from ir.errors import UnsupportedOperatorsError, UsageError
from pdv.frontend import load_program
from tests.pdv.worlds import cluster

D = 8


@torch.library.custom_op("pdv_onnx_tests::damp", mutates_args=())
def damp(x: Tensor, weight: Tensor, by: float, powers: list[int]) -> Tensor:
    """x weight / (1 + by sum of x's powers along the last dim)."""
    total = torch.stack([x.pow(power).sum(-1, keepdim=True) for power in powers]).sum(0)
    return x * weight / (1 + by * total)


@damp.register_fake
def _(x: Tensor, weight: Tensor, by: float, powers: list[int]) -> Tensor:
    return torch.empty_like(x)


def _damped(x: Tensor, weight: Tensor, by: float, powers: list[int]) -> Tensor:
    return x * weight / (1 + by * sum(x.pow(power).sum(-1, keepdim=True) for power in powers))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rest = inputs[2:]


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        return *torch.autograd.grad(_damped(x, weight, *ctx.rest), (x, weight), g), None, None


damp.register_autograd(_backward, setup_context=_keep)


def file(folder: Path, op: str = "Damp", **attributes: Any) -> Path:
    """Two products, with the operator between them."""
    rng = np.random.default_rng(0)
    arrays = {"up": rng.normal(size=(D, 4 * D)), "scale": rng.normal(size=4 * D), "down": rng.normal(size=(4 * D, D))}
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"]),
        helper.make_node(op, ["h", "scale"], ["y"], domain="mine", **({"by": 0.5, "powers": [2, 4]} | attributes)),
        helper.make_node("MatMul", ["y", "down"], ["z"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, D)) for name in ("x", "z")]
    tensors = [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def register() -> None:
    pdv.register_operator(damp, "... d*, d* -> ... d*", onnx="mine::Damp")


def test_a_registered_operator_is_planned_and_cut(tmp_path: Path) -> None:
    register()
    path = file(tmp_path)
    pins = {"mesh": {"a": 2}, "techniques": {"a": "ddp"}}
    plan = pdv.optimize(path, cluster=cluster(2), pins=pins)
    assert [entry["loops"] for entry in plan.document["opaque_operators"]] == ["... d*, d* -> ... d*"]
    program: Any = plan.build("cpu")
    state = program.full_state_dict()
    x = torch.randn(4, D)
    expected = damp(x @ state["up"], state["scale"], 0.5, [2, 4]) @ state["down"]
    torch.testing.assert_close(program(x), expected)


def test_what_is_not_registered_or_does_not_fit_is_named(tmp_path: Path) -> None:
    register()
    with pytest.raises(UnsupportedOperatorsError, match=r"mine::Other at .*pdv\.register_operator"):
        load_program(file(tmp_path, "Other"))
    with pytest.raises(UnsupportedOperatorsError, match="mine::Damp at"):
        load_program(file(tmp_path, wrong=1.0))


@pytest.mark.parametrize("name", ["Damp", "ai.onnx::Softmax", "::Softmax", "mine::"])
def test_names_are_of_domains_of_ones_own(name: str) -> None:
    with pytest.raises(UsageError, match=r"no operator of a domain of your own"):
        pdv.register_operator(damp, "... d*, d* -> ... d*", onnx=name)
