"""What is run is what the row says: operators as ir defines them, gradients as autograd finds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ir.builder import Builder
from ir.evaluation.interpret import evaluate
from ir.ops import OPERATORS
from ir.types import DType, TensorType
from learned_cost.profile.programs.library import call_of, can_call
from learned_cost.profile.programs.pieces import Piece, jobs, operands
from learned_cost.profile.programs.shapes import TYPICAL, is_sampled, sample_piece

CPU = torch.device("cpu")
F32, BOOL, I64 = DType.F32, DType.BOOL, DType.I64
IMAGE = ("kernel", (2, 2)), ("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (1, 1))
CONV = ("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (1, 1)), ("groups", 1)


def t(*shape: int, dtype: DType = F32) -> TensorType:
    return TensorType(shape, dtype)


X, ROW = t(3, 8), t(8)
# of operators whose small piece does not follow from what they declare
SMALL = {
    "linear": Piece("linear", (t(2, 3, 8), t(5, 8)), (), (True, True)),
    "matmul": Piece("matmul", (t(2, 3, 8), t(2, 8, 5)), (), (True, True)),
    "attention": Piece("attention", (t(1, 2, 5, 4),) * 3, (("causal", True), ("scale", 0.5)), (True,) * 3),
    "conv2d": Piece("conv2d", (t(2, 3, 6, 6), t(4, 3, 3, 3)), CONV, (True, True)),
    "max_pool2d": Piece("max_pool2d", (t(2, 3, 6, 6),), IMAGE, (True,)),
    "avg_pool2d": Piece("avg_pool2d", (t(2, 3, 6, 6),), IMAGE, (True,)),
    "layer_norm": Piece("layer_norm", (X, ROW, ROW), (("eps", 1e-5),), (True,) * 3),
    "rms_norm": Piece("rms_norm", (X, ROW), (("eps", 1e-5),), (True,) * 2),
    "channel_mean": Piece("channel_mean", (t(2, 3, 4, 4),), (), (True,)),
    "channel_variance": Piece("channel_variance", (t(2, 3, 4, 4), t(3)), (), (True, True)),
    "batch_norm": Piece("batch_norm", (t(2, 3, 4, 4), *(t(3),) * 4), (("eps", 1e-5),), (True,) * 5),
    "reduce_sum": Piece("reduce_sum", (X,), (("dims", (0,)), ("keepdim", True)), (True,)),
    "reduce_mean": Piece("reduce_mean", (X,), (("dims", (1,)), ("keepdim", False)), (True,)),
    "reduce_max": Piece("reduce_max", (X,), (("dim", 0), ("keepdim", True)), (True,)),
    "cumsum": Piece("cumsum", (X,), (("dim", 0),), (True,)),
    "pad": Piece("pad", (X,), (("dim", 1), ("after", 3)), (True,)),
    "concat": Piece("concat", (X, X), (("dim", 1),), (True, True)),
    "embedding": Piece("embedding", (t(7, 8), t(5, dtype=I64)), (), (True, False)),
    "padded_embedding": Piece("padded_embedding", (t(7, 8), t(5, dtype=I64)), (("padding_idx", 1),), (True, False)),
    "index_select": Piece("index_select", (t(3, 7, 2), t(5, dtype=I64)), (("dim", 1),), (True, False)),
    "gather": Piece("gather", (t(3, 7, 2), t(3, 5, 2, dtype=I64)), (("dim", 1),), (True, False)),
    "pick": Piece("pick", (t(2, 3, 8), t(2, 3, dtype=I64)), (), (True, False)),
    "bag_numbers": Piece("bag_numbers", (t(8, dtype=I64), t(5, dtype=I64)), (), (False, False)),
    "grouped_linear": Piece("grouped_linear", (t(7, 8), t(3, 8, 4), t(3, dtype=I64)), (), (True, True, False)),
    "routed_linear": Piece("routed_linear", (t(7, 8), t(3, 8, 4), t(7, dtype=I64)), (), (True, True, False)),
    "segment_sum": Piece("segment_sum", (t(7, 8), t(7, dtype=I64), t(5, dtype=I64)), (), (True, False, False)),
    "where": Piece("where", (t(3, 8, dtype=BOOL), X, X), (), (False, True, True)),
    "cast": Piece("cast", (X,), (("dtype", "f64"),), (True,)),
    "to_integer": Piece("to_integer", (X,), (("dtype", "i64"),), (False,)),
    "compare": Piece("compare", (X, X), (("relation", "<"),), (False, False)),
    "compare_number": Piece("compare_number", (X,), (("relation", "<"), ("number", 0.5)), (False,)),
    "divide_by": Piece("divide_by", (X,), (("number", 41.0),), (True,)),
    "logical_and": Piece("logical_and", (t(3, 8, dtype=BOOL),) * 2, (), (False, False)),
    "logical_or": Piece("logical_or", (t(3, 8, dtype=BOOL),) * 2, (), (False, False)),
    "logical_not": Piece("logical_not", (t(3, 8, dtype=BOOL),), (), (False,)),
}
CALLS = [name for name, op in OPERATORS.items() if op.kernel and can_call(op)]
# why shapes of an operator are not drawn, though it is a call: only those of plans are measured
UNSAMPLED = {
    "compare": "truth values",
    "compare_number": "truth values",
    "logical_and": "truth values",
    "logical_or": "truth values",
    "logical_not": "truth values",
    "quotient": "whole numbers",
    "to_integer": "whole numbers",
    "pad": "what copies of its size take",
    "channel_mean": "nobody draws its image",
    "channel_variance": "nobody draws its image",
    "index_select": "nobody draws its ids",
    "pick": "nobody draws its ids",
    "gather": "nobody draws its ids",
    "bag_numbers": "whole numbers",
    "segment_sum": "nobody draws its ids",
    "grouped_linear": "nobody draws where its groups end",
    "routed_linear": "nobody draws whose its rows are",
}


def small(op: str) -> Piece:
    """A piece of an operator: of matrices of floats and typical attributes, where SMALL has no other."""
    if op in SMALL:
        return SMALL[op]
    declared = OPERATORS[op]
    given = {**declared.defaults, **TYPICAL}
    unknown = [attr for attr in declared.attrs if attr not in given]
    assert isinstance(declared.loops, str) or declared.kind == "row", f"which operands {op} takes: say it in SMALL"
    assert not unknown, f"which {unknown} {op} takes: say it in SMALL, or in TYPICAL"
    count = declared.loops.count(",") + 1 if isinstance(declared.loops, str) else 1
    wanted = tuple(declared.differentiates(place) for place in range(count))
    return Piece(op, (X,) * count, tuple((attr, given[attr]) for attr in declared.attrs), wanted)


@pytest.mark.parametrize("op", CALLS)
def test_calls_compute_what_ir_says(op: str) -> None:
    torch.manual_seed(0)
    piece = small(op)
    x = operands(piece, CPU)
    if piece.operator.statistics:  # a call of torch's takes them itself
        x = [x[0], *torch.var_mean(x[0], (0, 2, 3), correction=0)[::-1], *x[3:]]
    k = Builder()
    node = k.apply(piece.operator, tuple(k.input(f"x{i}", t) for i, t in enumerate(piece.operands)), dict(piece.attrs))
    wanted = evaluate(k.graph({"out": node}), {f"x{i}": value.numpy() for i, value in enumerate(x)}).outputs["out"]
    found = call_of(piece.node)(*x)
    assert found.shape == piece.node.type.shape
    np.testing.assert_allclose(found.double().numpy(), np.asarray(wanted)[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("op", CALLS)
def test_every_job_runs(op: str) -> None:
    piece = small(op)
    made = list(jobs(piece))
    assert made[0].kernel == piece.forward
    assert [job.kernel for job in made[1:]] == list(piece.backward)
    for job in made:
        job.prepare(CPU)()


@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_gradients_are_autograds_products(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from learned_cost.profile.programs import pieces

    piece = Piece(op, small(op).operands, (), (True, True))
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
    _, ids = operands(small("embedding"), CPU)
    assert int(ids.max()) < 7


def test_ids_name_elements_of_the_dim_that_they_pick_from() -> None:
    _, ids = operands(Piece("pick", (t(50, 4), t(50, dtype=I64))), CPU)
    assert int(ids.max()) < 4


def test_what_is_sampled_is_measured() -> None:
    assert set(filter(is_sampled, OPERATORS)) <= set(CALLS)


@pytest.mark.parametrize("op", CALLS)
def test_operators_are_sampled_or_said_not_to_be(op: str) -> None:
    assert is_sampled(op) is not (op in UNSAMPLED), (
        f"{is_sampled(op)=}: learned_cost/profile/programs/shapes.py draws shapes of {op}, or UNSAMPLED says why not"
    )
    for seed in range(2 * is_sampled(op)):
        piece = sample_piece(op, seed, (F32,))
        assert math.prod(piece.node.type.shape) > 0, f"{op} does not take what is drawn of it: {piece}"
