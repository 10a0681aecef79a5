"""What is run is what the row says: operators as ir defines them, gradients as autograd finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ir.builder import Builder
from ir.evaluation.interpret import evaluate
from ir.ops import OPERATORS
from ir.types import DType, TensorType
from learned_cost.profile.programs.library import call_of, can_call
from learned_cost.profile.programs.pieces import Piece, jobs, operands
from learned_cost.profile.programs.shapes import TYPICAL, is_sampled

CPU = torch.device("cpu")
F32, BOOL = DType.F32, DType.BOOL
IMAGE = ("kernel", (2, 2)), ("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (1, 1))
CONV = ("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (1, 1)), ("groups", 1)


def t(*shape: int, dtype: DType = F32) -> TensorType:
    return TensorType(shape, dtype)


X, ROW = t(3, 8), t(8)
SMALL = {
    "linear": Piece("linear", (t(2, 3, 8), t(5, 8)), (), (True, True)),
    "matmul": Piece("matmul", (t(2, 3, 8), t(2, 8, 5)), (), (True, True)),
    "attention": Piece("attention", (t(1, 2, 5, 4),) * 3, (("causal", True), ("scale", 0.5)), (True,) * 3),
    "conv2d": Piece("conv2d", (t(2, 3, 6, 6), t(4, 3, 3, 3)), CONV, (True, True)),
    "max_pool2d": Piece("max_pool2d", (t(2, 3, 6, 6),), IMAGE, (True,)),
    "avg_pool2d": Piece("avg_pool2d", (t(2, 3, 6, 6),), IMAGE, (True,)),
    "layer_norm": Piece("layer_norm", (X, ROW, ROW), (("eps", 1e-5),), (True,) * 3),
    "rms_norm": Piece("rms_norm", (X, ROW), (("eps", 1e-5),), (True,) * 2),
    "top_k": Piece("top_k", (X,), (("k", 3),), (True,)),
    "channel_mean": Piece("channel_mean", (t(2, 3, 4, 4),), (), (True,)),
    "channel_variance": Piece("channel_variance", (t(2, 3, 4, 4), t(3)), (), (True, True)),
    "batch_norm": Piece("batch_norm", (t(2, 3, 4, 4), *(t(3),) * 4), (("eps", 1e-5),), (True,) * 5),
    "reduce_sum": Piece("reduce_sum", (X,), (("dims", (0,)), ("keepdim", True)), (True,)),
    "reduce_mean": Piece("reduce_mean", (X,), (("dims", (1,)), ("keepdim", False)), (True,)),
    "concat": Piece("concat", (X, X), (("dim", 1),), (True, True)),
    "embedding": Piece("embedding", (t(7, 8), t(5, dtype=DType.I64)), (), (True, False)),
    "index_select": Piece("index_select", (t(3, 7, 2), t(5, dtype=DType.I64)), (("dim", 1),), (True, False)),
    "where": Piece("where", (t(3, 8, dtype=BOOL), X, X), (), (False, True, True)),
    "cast": Piece("cast", (X,), (("dtype", "f64"),), (True,)),
    "scale": Piece("scale", (X,), (("factor", 0.125),), (True,)),
    "unbiased": Piece("unbiased", (X,), (("points", 7),), (True,)),
    "shift": Piece("shift", (X,), (("offset_by", 0.5),), (True,)),
    "pow": Piece("pow", (X,), (("exponent", 2.0),), (True,)),
    "gelu": Piece("gelu", (X,), (("approximate", "tanh"),), (True,)),
    **{op: Piece(op, (X, X), (), (True, True)) for op in ("add", "sub", "mul", "div")},
}


def typical(op: str) -> tuple[tuple[str, Any], ...]:
    """Attributes of an operator of one operand, as profiles sample it."""
    return tuple((name, TYPICAL.get(name)) for name in OPERATORS[op].attrs)


CALLS = [name for name, op in OPERATORS.items() if op.kernel and can_call(op)]
ONE = {op: SMALL.get(op, Piece(op, (X,), typical(op), (True,))) for op in CALLS}


@pytest.mark.parametrize("op", CALLS)
def test_calls_compute_what_ir_says(op: str) -> None:
    torch.manual_seed(0)
    piece = ONE[op]
    x = operands(piece, CPU)
    k = Builder()
    node = k.apply(piece.operator, tuple(k.input(f"x{i}", t) for i, t in enumerate(piece.operands)), dict(piece.attrs))
    wanted = evaluate(k.graph({"out": node}), {f"x{i}": value.numpy() for i, value in enumerate(x)}).outputs["out"]
    found = call_of(piece.node)(*x)
    assert found.shape == piece.node.type.shape
    np.testing.assert_allclose(found.double().numpy(), np.asarray(wanted)[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("op", CALLS)
def test_every_job_runs(op: str) -> None:
    made = list(jobs(ONE[op]))
    assert made[0].kernel == ONE[op].forward
    assert [job.kernel for job in made[1:]] == list(ONE[op].backward)
    for job in made:
        job.prepare(CPU)()


@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_gradients_are_autograds_products(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from learned_cost.profile.programs import pieces

    piece = Piece(op, ONE[op].operands[:1] + ONE[op].operands[1:], (), (True, True))
    x = [value.requires_grad_() for value in operands(piece, CPU)]
    dy = torch.randn(piece.node.type.shape)
    wanted = torch.autograd.grad(call_of(piece.node)(*x), x, dy)
    monkeypatch.setattr(pieces, "operands", lambda piece, device: [value.detach() for value in x])
    monkeypatch.setattr(pieces, "noise", lambda shape, dtype, device: dy)
    _, *backward = jobs(piece)
    for job, gradient in zip(backward, wanted, strict=True):
        found = job.prepare(CPU)()
        torch.testing.assert_close(found.reshape(gradient.shape), gradient)
        sizes = job.kernel.dims
        assert found.shape[-2:] == (sizes["m"], sizes["n"])


def test_ids_are_below_the_table() -> None:
    _, ids = operands(ONE["embedding"], CPU)
    assert int(ids.max()) < 7


def test_what_is_sampled_is_measured() -> None:
    assert set(filter(is_sampled, OPERATORS)) <= set(CALLS)
