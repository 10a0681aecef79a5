"""Operators of ir as kernels: products by their sizes, gradients as products, everything else by its loops."""

from __future__ import annotations

import math

import pytest

from ir.builder import Builder
from ir.ops import OPERATORS
from ir.types import DType, TensorType
from learned_cost.data.kernel import ROLES, Kernel, Subgraph
from learned_cost.describe import backward_kernels, forward_kernels
from learned_cost.profile.programs.library import can_call
from learned_cost.profile.programs.pieces import Piece
from learned_cost.profile.programs.planned import read_shipped
from learned_cost.profile.programs.shapes import is_sampled, sample_piece

F32 = DType.F32


def linear(m: int, n: int, k: int, lead: tuple[int, ...] = ()) -> Piece:
    return Piece("linear", (TensorType((*lead, m, k), F32), TensorType((n, k), F32)), (), (True, True))


def test_backward_of_linear_is_two_products() -> None:
    piece = linear(6, 10, 4, (2,))
    forward, (of_x, of_w) = piece.forward, piece.backward
    assert (forward.op, forward.dims) == ("linear", {"b": 1, "m": 12, "n": 10, "k": 4})
    assert of_x.dims == {"b": 1, "m": 12, "n": 4, "k": 10}
    assert of_w.dims == {"b": 1, "m": 10, "n": 4, "k": 12}
    assert of_x.flops == of_w.flops == forward.flops == 2 * 12 * 10 * 4


def test_backward_of_matmul_is_two_products() -> None:
    piece = Piece("matmul", (TensorType((3, 6, 4), F32), TensorType((3, 4, 10), F32)), (), (True, True))
    of_x, of_w = piece.backward
    assert (piece.forward.op, piece.forward.dims) == ("bmm", {"b": 3, "m": 6, "n": 10, "k": 4})
    assert of_x.dims == {"b": 3, "m": 6, "n": 4, "k": 10}
    assert of_w.dims == {"b": 3, "m": 4, "n": 10, "k": 6}


def test_only_wanted_gradients_are_computed() -> None:
    assert len(Piece("linear", linear(2, 3, 4).operands, (), (False, True)).backward) == 1
    assert Piece("linear", linear(2, 3, 4).operands).backward == ()


@pytest.mark.parametrize("op", [*filter(is_sampled, OPERATORS)])
def test_every_operator_gives_a_sensible_kernel(op: str) -> None:
    for seed in range(3):
        piece = sample_piece(op, seed, (F32, DType.BF16))
        for kernel in (piece.forward, *piece.backward):
            assert kernel.bytes > 0 or (kernel.direction == "backward" and OPERATORS[op].hands_on_gradient)
            assert kernel.flops >= 0
            assert len(kernel.extents) == len(ROLES)
            assert all(extent >= 1 for extent in kernel.extents)
            assert Kernel.from_dict(kernel.as_dict()) == kernel
            assert hash(kernel.key)
        largest = max(math.prod(t.shape) for t in (*piece.operands, piece.node.type))
        points = math.prod(piece.forward.extents)
        assert piece.operator.kind in ("index", "stencil") or points >= largest / 2


def test_a_gradient_that_is_handed_on_moves_nothing_and_one_that_is_summed_does() -> None:
    same, row = TensorType((4, 6), F32), TensorType((1, 6), F32)
    assert Piece("add", (same, same), (), (True, True)).backward[0].bytes == 0
    assert Piece("add", (same, row), (), (True, True)).backward[0].bytes > 0


def test_an_embeddings_gradient_is_written_whole() -> None:
    table, ids = TensorType((1000, 8), F32), TensorType((5,), DType.I64)
    (kernel,) = Piece("embedding", (table, ids), (), (True, False)).backward
    assert kernel.bytes >= table.num_bytes


def test_views_start_nothing() -> None:
    k = Builder()
    node = k.permute(k.input("x", TensorType((2, 3), F32)), perm=(1, 0))
    operands = [node.operands[0].type]
    assert forward_kernels(node.op, node.loops, operands, node.type, node.attrs) == ()
    assert backward_kernels(node.op, node.loops, operands, node.type, node.attrs, (True,)) == ()


def test_what_is_measured_are_operators_that_run() -> None:
    """An operator without a call is priced by its loops until somebody writes one."""
    priced = [op for op in OPERATORS.values() if not op.only_written]
    runs = {op.name for op in priced if op.kernel and op.kind not in ("leaf", "parallel")}
    calls = {name for name in runs if can_call(OPERATORS[name])}
    assert len(calls) > 0.9 * len(runs)
    pieces, graphs = read_shipped()
    assert {piece.op for piece in pieces} <= calls
    assert len(graphs) > 50


def test_subgraphs_are_text() -> None:
    first, second = linear(2, 3, 4).forward, sample_piece("gelu", 0, (F32,)).forward
    graph = Subgraph((first, second), ((0, 1),), fused=True, bytes=100.0)
    assert Subgraph.from_json(graph.to_json()) == graph
    assert graph.traffic == 100.0
    with pytest.raises(ValueError, match="names a node"):
        Subgraph.from_json(Subgraph((first,), ((0, 3),)).to_json())
