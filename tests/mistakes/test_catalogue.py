"""A catalogue of mistakes that people and compilers make in parallel programs; each is caught, and we say by what.

*states*: the inference of shardings refuses the plan before anything is computed. *signature*: plan and source do not
store, take or give the same. *values*: outputs differ over Z_p. *gradients*: outputs agree, gradients differ over Z_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.mutation.edit import Change, attrs, declared, drop, other, parameter, reversed_ranks, twice
from ir.builder import Builder
from ir.errors import ShardingError, VerificationError
from ir.evaluation.collectives import MOVES
from ir.graph import Node
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.proof.exact import verify_equal
from ir.tape import Call, Tape
from ir.types import DType, TensorType
from tests.mistakes import plans
from tests.mistakes.edit import Mistake, edited, scaled

PLANS = {
    "transformer": (plans.transformer, plans.transformer_plan),
    "convnet": (plans.convnet, plans.convnet_plan),
}
Nodes = tuple[Node, ...]
IDENTITY = MOVES["replicate"][0]
ALL_REDUCE = MOVES["reduce"][0]
SLICE = MOVES["combine"][1]


def without_tie(k: Builder, node: Node, x: Nodes) -> Node:
    """The head reads a weight of its own."""
    return k.linear(x[0], k.replicate(k.param("head", node.operands[1].type, stored="I,S0"), axis="dp"))


def tie_stored_twice(k: Builder, node: Node, x: Nodes) -> Node:
    """The head reads the tied weight, but from a second copy cut along the other dim."""
    again = k.param("head", node.operands[1].type, source="wte", stored="I,S1")
    return k.linear(x[0], k.replicate(k.all_to_all(again, dim=1, to_dim=0, axis="tp"), axis="dp"))


def mean_of_local_count(t: Tape, x: Sequence[Any], call: Call) -> Any:
    count = call.loops.extents["d0"] * call.loops.extents["d1"]
    return t.scale(t.einsum("abc->c", x[0]), 1.0 / count)


def mean_of_local_batch(t: Tape, x: Sequence[Any], call: Call) -> Any:
    return t.scale(t.einsum("nchw->c", x[0]), 1.0 / (call.loops.points // call.loops.extents["c"]))


def with_early_bias(k: Builder, node: Node, x: Nodes, op: Operator = OPERATORS["add"]) -> Node:
    """A bias on every rank's term of a sum that is still to be taken."""
    bias = k.param("bo", TensorType((plans.D,), DType.F32))
    return k.apply(op, (k.copy(node, x), k.replicate(k.replicate(bias, axis="dp"), axis="tp")), {})


def with_local_mean(k: Builder, node: Node, x: Nodes) -> Node:
    """The running mean takes the mean of the batch before its reduces."""
    del node
    local = x[1].operands[0].operands[0].operands[0]
    return k.add(x[0], k.scale(local, factor=0.1))


def swapped(k: Builder, node: Node, x: Nodes) -> Node:
    return k.apply(node.op, (x[1], x[0], *x[2:]), dict(node.attrs))


def then(op: str, **given: Any) -> Change:
    """The node, and another operator after it."""
    return lambda k, node, x: k.apply(OPERATORS[op], (k.copy(node, x),), given)


MISTAKES = (
    # ---- States: caught before anything is computed ----
    Mistake("a reduce dropped", "states", ("mean.tp",), drop),
    Mistake("a reduce-scatter taken for a partition", "states", ("down.sum",), other("partition", dim=1, axis="tp")),
    Mistake("a reduce doubled", "states", ("mean.dp",), twice),
    Mistake("a replicate taken for invariant", "states", ("w1.used",), drop),
    Mistake("an all-gather taken for a combine", "states", ("mlp.whole",), other("combine", dim=1, axis="tp")),
    Mistake("the wrong dim partitioned", "states", ("ids.batch",), attrs(dim=1)),
    Mistake("an all-gather along the wrong dim", "states", ("norm.whole",), attrs(dim=0)),
    Mistake("an all-gather over the wrong axis", "states", ("kv.whole",), attrs(axis="dp")),
    Mistake("an axis that the mesh does not have", "states", ("mean.dp",), attrs(axis="pp")),
    Mistake("a sharded weight used without its gather", "states", ("wo.whole",), drop),
    Mistake("a bias per token replicated over one axis only", "states", ("bo.per_token",), drop),
    Mistake("an output left as a sum to be taken", "states", ("mean.tp", "mean.dp"), drop),
    Mistake("an output left replicated", "states", ("mean.dp",), then("replicate", axis="dp")),
    Mistake("a batch norm's statistics not summed over ranks", "states", ("mean.dp", "mean.tp"), drop, "convnet"),
    Mistake("two cuts of one dim undone in the wrong order", "states", ("y.tp",), attrs(axis="dp"), "convnet"),
    Mistake("a running mean updated with a local one", "states", ("momentum",), with_local_mean, "convnet"),
    Mistake("a bias added before the reduce", "states", ("out",), with_early_bias),
    # ---- Signature ----
    Mistake("tied weights split", "signature", ("head",), without_tie),
    Mistake("a tied weight stored two ways", "signature", ("head",), tie_stored_twice),
    Mistake("a weight frozen", "signature", ("w2",), parameter(trainable=False)),
    Mistake("a weight read under another's name", "signature", ("w2",), parameter(source="w1")),
    # ---- Values ----
    Mistake("a causal mask's offset not shifted", "values", ("context",), declared(offset_loop=None)),
    Mistake("a vocabulary shard's offset missing", "values", ("embed",), declared(offset_loop=None)),
    Mistake("a causal mask dropped", "values", ("attention",), attrs(causal=False)),
    Mistake("a mean divided by the local count", "values", ("mean",), declared(evaluate=mean_of_local_count)),
    Mistake(
        "a batch norm's mean divided by the local batch", "values", ("statistics",),
        declared(evaluate=mean_of_local_batch), "convnet",
    ),
    Mistake(
        "a bias added before the reduce, by an add that claims to let a sum wait", "values", ("out",),
        partial(with_early_bias, op=replace(OPERATORS["add"], linear=(frozenset({0}),))),
    ),
    Mistake("the wrong chunk of the fused q, k, v", "values", ("wk",), parameter(view=(("chunk", 0, 3, 2),))),
    Mistake("a weight read transposed", "values", ("wq",), parameter(view=(("chunk", 0, 3, 0), ("permute", (1, 0))))),
    Mistake("queries and keys swapped", "values", ("attention",), swapped),
    Mistake("the residual summed twice", "values", ("residual2",), lambda k, node, x: k.add(x[0], k.copy(node, x))),
    Mistake("a residual left out", "values", ("residual3",), drop),
    Mistake("the attention's scale of another head size", "values", ("attention",), attrs(scale=0.25)),
    Mistake("another gelu", "values", ("act",), attrs(approximate="tanh")),
    Mistake("another epsilon", "values", ("norm",), attrs(eps=1e-6)),
    Mistake("a momentum's terms swapped", "values", ("momentum",), lambda k, node, x: k.sub(*x), "convnet"),
    Mistake(
        "a reduce-scatter that averages", "values",
        moves={"reduce_scatter": (scaled(MOVES["reduce_scatter"][0]), MOVES["reduce_scatter"][1])},
    ),
    Mistake(
        "an all-gather in reverse rank order", "values",
        moves={"all_gather": (reversed_ranks(MOVES["all_gather"][0]), MOVES["all_gather"][1])},
    ),
    Mistake(
        "a combine in reverse rank order", "values", plan="convnet",
        moves={"combine": (reversed_ranks(MOVES["combine"][0]), MOVES["combine"][1])},
    ),
    # ---- Gradients: every output is right ----
    Mistake("a replicate whose backward does not sum", "gradients", moves={"replicate": (IDENTITY, IDENTITY)}),
    Mistake(
        "a reduce whose backward sums again", "gradients", moves={"reduce": (ALL_REDUCE, ALL_REDUCE)},
    ),
    Mistake(
        "a gradient averaged over data ranks", "gradients",
        moves={"replicate": (IDENTITY, scaled(MOVES["replicate"][1]))},
    ),
    Mistake(
        "a gradient scaled by the axis size", "gradients",
        moves={"reduce": (ALL_REDUCE, scaled(IDENTITY, divide=False))},
    ),
    Mistake(
        "an all-gather whose backward only slices", "gradients",
        moves={"all_gather": (MOVES["all_gather"][0], SLICE)},
    ),
    Mistake(
        "a reduce-scatter whose backward reverses the ranks", "gradients",
        moves={"reduce_scatter": (MOVES["reduce_scatter"][0], reversed_ranks(MOVES["reduce_scatter"][1]))},
    ),
    Mistake(
        "a combine whose backward sums and slices", "gradients", plan="convnet",
        moves={"combine": (MOVES["combine"][0], MOVES["all_gather"][1])},
    ),
    Mistake(
        "an all-to-all whose backward reverses the ranks", "gradients",
        moves={"all_to_all": (MOVES["all_to_all"][0], reversed_ranks(MOVES["all_to_all"][1]))},
    ),
)  # fmt: skip


def caught_by(mistake: Mistake) -> str:
    """Which check refuses the plan with the mistake in it."""
    source, plan = PLANS[mistake.plan]
    try:
        verify_equal(source(), edited(plan(), mistake), plans.MESH, moves=mistake.all_moves)
    except ShardingError:
        return "states"
    except VerificationError as error:
        return error.check
    return "nothing"


@pytest.mark.parametrize("name", PLANS)
def test_the_right_plan_is_proved(name: str) -> None:
    source, plan = PLANS[name]
    proof = verify_equal(source(), plan(), plans.MESH)
    assert proof.error_bound < 1e-9
    assert verify_equal(source(), plan(), plans.MESH, scale=False).scaled == "full size"


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake_is_caught(mistake: Mistake) -> None:
    assert caught_by(mistake) == mistake.caught_by


def test_there_are_enough_and_every_check_earns_its_place() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 20
    assert {mistake.caught_by for mistake in MISTAKES} == {"states", "signature", "values", "gradients"}
    assert set(OPERATORS) >= {name for mistake in MISTAKES for name in mistake.moves}
