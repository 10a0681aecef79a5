"""Every operator's parallel rules are proven, for degrees 2, 3, 4 and 2 x 2, by the check that the product ships."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.mutation.of_rules import claiming
from ir.errors import VerificationError
from ir.operator import Split
from ir.ops import OPERATORS
from ir.sharding import Invariant, Partial, Replicate, Shard
from pdv.rewrite import check_parallel
from pdv.rewrite.check_parallel import Example, check_parallel_rules, examples, prove_rule, proved_rules, serial
from pdv.rewrite.parallel_rules import ParallelRule, parallel_rules


def test_every_operator_has_an_example() -> None:
    declared = {name for name, op in OPERATORS.items() if op.kind not in ("leaf", "parallel")}
    assert declared == {example.op for example in examples()}


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.op} {example.shapes}")
def test_the_rules_of_an_operator_are_proven(example: Example) -> None:
    names = {rule.name for rule in proved_rules(example, seed=0)}
    assert f"repeat-{example.op}" in names


def test_pending_sums_pass_what_is_linear() -> None:
    """And no other operator; that they may is proven above, with the other rules."""
    nodes = [serial(example).outputs[0][1] for example in examples()]
    passing = {rule.op for node in nodes for rule in parallel_rules(node) if rule.passes_sum}
    assert {"add", "linear", "matmul", "conv2d", "embedding", "reduce_sum", "scale", "avg_pool2d"} <= passing
    assert not passing & {"relu", "gelu", "softmax", "layer_norm", "max_pool2d", "shift"}


WRONG = {
    "relu of a pending sum": ("relu", Split(None, (Partial(),), Partial()), "values"),
    "an offset added on every device": ("shift", Split(None, (Partial(),), Partial()), "values"),
    "a sum forgotten": ("linear", Split("k", (Shard(2), Shard(1)), Invariant()), "values"),
    "a gradient's sum forgotten": ("linear", Split("n", (Invariant(), Shard(0)), Shard(2)), "gradients"),
    "a gradient summed twice": ("linear", Split(None, (Replicate(), Replicate()), Invariant()), "gradients"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_declared_and_false_is_refused(name: str) -> None:
    """The validator is told that the split is legal: what refuses it is the evaluation."""
    op, claim, check = WRONG[name]
    example = next(example for example in examples() if example.op == op)
    with pytest.raises(VerificationError, match="is false on") as caught:
        prove_rule(replace(example, declared=claiming(OPERATORS[op], claim)), ParallelRule(op, claim), seed=0)
    assert caught.value.check == check


def test_a_wrong_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """softmax, said to be cut along its row; linear, said to need no sum."""
    example = Example("linear", ((12, 12), (12, 12)))
    node = check_parallel.serial(example).outputs[0][1]
    split = next(split for split in node.op.splits(node.loops) if split.loop == "k")
    wrong = ParallelRule("linear", replace(split, result=Invariant()))
    monkeypatch.setattr(check_parallel, "parallel_rules", lambda node: (wrong,))
    monkeypatch.setattr(check_parallel, "examples", lambda: (example,))
    assert split.operands == (Shard(1), Shard(1))
    assert split.result == Partial()
    assert Replicate() not in split.operands
    with pytest.raises(VerificationError):
        check_parallel_rules()
