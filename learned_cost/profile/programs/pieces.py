"""Pieces of work to measure: an operator of ir over local shapes, as a plan leaves it on one device.

A piece knows the kernels that it starts (``learned_cost.describe``, which the search asks too) and how to run each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ir.builder import Builder
from ir.cost_model import Query
from ir.graph import Node
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType, TensorType
from learned_cost.data.kernel import Kernel
from learned_cost.describe import backward_kernels, forward_kernels, is_transposed
from learned_cost.profile.programs.library import call_of, can_call, without_gradient

BLOCK = 1 << 16  # normal numbers that are drawn; larger tensors repeat them
# what prepares a measurement: operands are made, and a call is returned that runs on them
Prepare = Callable[[torch.device], Callable[[], Any]]  # Any: results are dropped


@dataclass(frozen=True)
class Piece:
    """An operator over operands of one device.

    Attributes:
        wanted: which operands get a gradient; none in inference.
        plan: where the shape is from: a model, with its mesh; empty for sampled shapes.
    """

    op: str
    operands: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Hashable], ...] = ()
    wanted: tuple[bool, ...] = ()
    plan: str = ""

    @classmethod
    def of_query(cls, query: Query, plan: str = "") -> Piece | None:
        """What a cost model was asked about; None of views and of operators that no library call runs alone."""
        if not (can_call(query.op) and query.op.kernel):
            return None
        shapes = [query.loops.shape_of(dims) for dims in query.loops.operands]
        types = tuple(TensorType(shape, t.dtype) for shape, t in zip(shapes, query.operands, strict=True))
        return cls(query.op.name, types, tuple(query.attrs.items()), query.wanted or (), plan)

    def of_dtype(self, dtype: DType) -> Piece:
        """The same in another floating type, where it computes in float32."""
        types = tuple(TensorType(t.shape, dtype) if t.dtype is DType.F32 else t for t in self.operands)
        return replace(self, operands=types)

    @cached_property
    def node(self) -> Node:
        """The operator in a graph of its own.

        Raises:
            ShapeError: if the operands do not fit it.
        """
        k = Builder()
        operands = tuple(k.input(f"x{i}", t) for i, t in enumerate(self.operands))
        return k.apply(self.operator, operands, dict(self.attrs))

    @property
    def operator(self) -> Operator:
        """Its declaration."""
        return OPERATORS[self.op]

    @cached_property
    def forward(self) -> Kernel:
        """Forward as a kernel."""
        node = self.node
        return forward_kernels(node.op, node.loops, self.operands, node.type, node.attrs)[0]

    @cached_property
    def backward(self) -> tuple[Kernel, ...]:
        """Backward as kernels: one, or of a contraction a product for each wanted gradient."""
        node = self.node
        wanted = self.wanted or (False,) * len(self.operands)
        return backward_kernels(node.op, node.loops, self.operands, node.type, node.attrs, wanted)


@dataclass(frozen=True)
class Job:
    """One row to measure: the kernel that it describes and how to run it."""

    kernel: Kernel
    prepare: Prepare
    layout: str = ""
    plan: str = ""


def jobs(piece: Piece) -> Iterator[Job]:
    """Forward, then each kernel of backward."""
    contraction = piece.operator.kind == "contraction" and len(piece.operands) == 2
    layout = ("nt" if is_transposed(piece.node.loops) else "nn") if contraction else ""
    yield Job(piece.forward, lambda device: _forward(piece, device), layout, piece.plan)
    if contraction:
        sides = [side for side, want in enumerate(piece.wanted) if want]
        for side, kernel in zip(sides, piece.backward, strict=True):
            layout, prepare = _gradient(piece, side)
            yield Job(kernel, prepare, layout, piece.plan)
    else:
        for kernel in piece.backward:
            yield Job(kernel, lambda device: _backward(piece, device), "", piece.plan)


def operands(piece: Piece, device: torch.device) -> list[Tensor]:
    """Random operands: normal ones, positive where roots and logarithms are taken, ids below the table's length."""
    made: list[Tensor] = []
    for i, t in enumerate(piece.operands):
        if t.dtype.is_floating:
            value = noise(t.shape, getattr(torch, t.dtype.torch_name), device)
            made.append(value.abs_().add_(0.1) if piece.operator.takes_positive else value)
        elif t.dtype.value == "bool":
            made.append(torch.rand(t.shape, device=device) < 0.5)
        else:
            length = piece.operands[0].shape[_chosen_dim(piece)] if i else 2
            made.append(torch.randint(max(1, length), t.shape, device=device))
    return made


def _chosen_dim(piece: Piece) -> int:
    """The dim of the first operand whose elements ids name."""
    attrs = dict(piece.attrs)
    if "dim" in attrs:
        return int(attrs["dim"])  # type: ignore[call-overload, no-any-return]
    loop = piece.operator.offset_loop
    return next((i for i, group in enumerate(piece.node.loops.operands[0]) if loop in group), 0)


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, those beyond the first block repeated: drawing many would take the time.

    Zeros would draw less power, so that clocks rise.
    """
    count = math.prod(shape)
    block = torch.randn(min(max(count, 1), BLOCK), device=device).to(dtype)
    return block.repeat(-(-count // BLOCK))[:count].reshape(tuple(shape))


def _forward(piece: Piece, device: torch.device) -> Callable[[], Any]:
    return without_gradient(call_of(piece.node), operands(piece, device))


def _backward(piece: Piece, device: torch.device) -> Callable[[], Any]:
    """Autograd's backward of one call, whose graph is kept; the result serves as its own incoming gradient."""
    x = operands(piece, device)
    wanted = [tensor.requires_grad_() for tensor, want in zip(x, piece.wanted, strict=True) if want]
    result = call_of(piece.node)(*x)
    arriving = result.detach().clone()
    return lambda: torch.autograd.grad(result, wanted, arriving, retain_graph=True, allow_unused=True)


def _gradient(piece: Piece, side: int) -> tuple[str, Prepare]:
    """The product that is the gradient of operand ``side`` of a product, and its operands' layout."""
    by_weight = is_transposed(piece.node.loops)

    def prepare(device: torch.device) -> Callable[[], Any]:
        x, w = operands(piece, device)
        dy = noise(piece.node.type.shape, x.dtype, device)
        if by_weight:
            flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            first, second = (flat_dy, w) if side == 0 else (flat_dy.mT, flat_x)
        else:
            first, second = (dy, w.mT) if side == 0 else (x.mT, dy)
        return lambda: torch.matmul(first, second)

    return ("nn" if side == 0 else "tn") if by_weight else ("nt" if side == 0 else "tn"), prepare
