"""Every operator's parallel rules are proven, for degrees 2, 3, 4 and 2 x 2, by the check that the product ships."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import VerificationError
from ir.ops import OPERATORS
from ir.sharding import Invariant, Partial, Replicate, Shard
from pdv.rewrite import check_parallel
from pdv.rewrite.check_parallel import Example, check_parallel_rules, examples, proved_rules
from pdv.rewrite.parallel_rules import ParallelRule


def test_every_operator_has_an_example() -> None:
    declared = {name for name, op in OPERATORS.items() if op.kind not in ("leaf", "parallel")}
    assert declared == {example.op for example in examples()}


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.op} {example.shapes}")
def test_the_rules_of_an_operator_are_proven(example: Example) -> None:
    names = {rule.name for rule in proved_rules(example, seed=0)}
    assert f"repeat-{example.op}" in names


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
