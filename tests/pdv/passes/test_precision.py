"""Types of elements: converted as a module is, promoted as torch does, and never mixed silently."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ir.builder import Builder
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from pdv.frontend import load_program
from pdv.passes.precision import with_dtype

F32, BF16, F16 = DType.F32, DType.BF16, DType.F16
HALVES = [(torch.bfloat16, BF16), (torch.float16, F16)]


def types(graph: Graph) -> set[DType]:
    return {node.type.dtype for node in graph.nodes if node.type.dtype.is_floating}


class Upcast(nn.Module):
    """Computes a part in float32, whatever its own type, with a table that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        angles = torch.outer(torch.arange(4.0), torch.ones(8)).cos()
        wide = torch.exp(h.float()) * angles
        return x + (h * angles.to(x.dtype)[None].reshape(1, 4, 8)) + wide.to(x.dtype)


def test_what_a_module_computes_in_float32_stays() -> None:
    half = load_program(Upcast().to(torch.bfloat16), (torch.randn(2, 4, 8, dtype=torch.bfloat16),)).graph
    assert types(half) == {BF16, F32}
    (exponent,) = (node for node in half.nodes if node.op.name == "exp")
    assert exponent.type.dtype is F32
    assert with_dtype(half, BF16).digest == half.digest
    assert types(with_dtype(half, F16)) == {F16, F32}
    assert types(with_dtype(half, F32)) == {F32}
    assert "cast" not in {node.op.name for node in with_dtype(half, F32).nodes}


@pytest.mark.parametrize(("torch_type", "dtype"), HALVES)
def test_a_moved_constant_keeps_its_type(torch_type: torch.dtype, dtype: DType) -> None:
    graph = load_program(Upcast().to(torch_type), (torch.randn(2, 4, 8, dtype=torch_type),)).graph
    tables = {node.type.dtype for node in graph.nodes if node.is_const and node.type.rank}
    assert tables == {dtype, F32}


class Mixed(nn.Module):
    """Operands of two types, in every operator that torch gives them to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.norm, self.batch = nn.LayerNorm(8), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        mask = torch.ones(8, dtype=torch.bool)
        h = h + torch.where(mask, x, self.scale) + torch.cat([x, self.scale.expand_as(x)], 0)[:4]
        return self.norm(x) + h - torch.stack([x, h])[0]


def test_operands_are_promoted_as_torch_does() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    module = Mixed()
    graph = load_program(module, (x,)).graph
    assert graph.outputs[0][1].type.dtype.torch_name == str(module(x).dtype).removeprefix("torch.")
    for node in graph.nodes:
        floating = {operand.type.dtype for operand in node.operands if operand.type.dtype.is_floating}
        assert len(floating) <= 1, node


OPERATIONS: dict[str, Callable[[Builder, Node, Node], Node]] = {
    "concat": lambda k, x, y: k.concat(x, y, dim=0),
    "where": lambda k, x, y: k.where(k.const(np.ones((4, 4), bool)), x, y),
    "attention": lambda k, x, y: k.attention(x, x, y, causal=False, scale=1.0),
    "layer_norm": lambda k, x, y: k.layer_norm(x, k.param("w", TensorType((4,), BF16)), eps=1e-5),
    **{op: lambda k, x, y, op=op: getattr(k, op)(x, y) for op in ("add", "mul", "matmul", "linear")},
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_types_are_never_mixed_in_the_graph(op: str) -> None:
    k = Builder()
    x, y = k.input("x", TensorType((4, 4), F32)), k.input("y", TensorType((4, 4), BF16))
    with pytest.raises(ShapeError, match="f32, bf16"):
        OPERATIONS[op](k, x, y)
