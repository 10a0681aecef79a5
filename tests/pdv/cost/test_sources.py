"""Where seconds come from, over a whole plan: shares, fallbacks, and how deviations add up."""

from __future__ import annotations

import math

import pytest

from ir.cost_model import Estimate, Source
from ir.graph import Node
from pdv.cost.breakdown import NodeCost, PlanCost
from pdv.cost.compute import ROOFLINE_RELATIVE_STD
from pdv.cost.sources import ROOFLINE, cost_document, node_source, source_shares
from tests.pdv import worlds


def relus(count: int) -> list[Node]:
    k = worlds.Builder()
    h = k.input("x", worlds.f32(4, 4))
    found = []
    for _ in range(count):
        h = k.relu(h)
        found.append(h)
    return found


def cost(*estimates: Estimate, correlation: float = 1.0, communication_s: float = 0.0) -> PlanCost:
    nodes = {
        node: NodeCost(estimate.mean_s, 0.0, (estimate,))
        for node, estimate in zip(relus(len(estimates)), estimates, strict=True)
    }
    seconds = sum(estimate.mean_s for estimate in estimates)
    return PlanCost(seconds, communication_s, 0.0, {}, nodes, correlation=correlation)


def learned(seconds: float, std_s: float = 0.0, source: Source = "learned") -> Estimate:
    return Estimate(seconds, std_s, source)


def test_an_analytic_plan_has_the_rooflines_deviation() -> None:
    plan = cost(Estimate(0.3), Estimate(0.1), communication_s=0.7)
    assert plan.std_s == ROOFLINE_RELATIVE_STD * plan.seconds
    assert plan.seconds_by_source == {"analytic": pytest.approx(0.4)}


@pytest.mark.parametrize(("correlation", "std_s"), [(0.0, 0.2), (1.0, 0.4), (0.25, math.hypot(0.2, math.sqrt(0.03)))])
def test_errors_share_their_sign_as_far_as_they_correlate(correlation: float, std_s: float) -> None:
    plan = cost(*[learned(1.0, 0.1)] * 4, correlation=correlation)
    assert plan.std_s == pytest.approx(std_s)


def test_seconds_add_up_by_source() -> None:
    plan = cost(learned(1.0), learned(2.0, source="measured"), Estimate(0.5), Estimate(0.5))
    assert plan.seconds_by_source == {"measured": 2.0, "learned": 1.0, "analytic": 1.0}
    assert source_shares(plan.seconds_by_source) == "measured 50%, learned 25%, analytic 25%"


def test_fallbacks_are_told_with_their_reason() -> None:
    unknown = Estimate(0.5, 0.3, "analytic", "out of range")
    told = cost_document(
        cost(learned(1.0), unknown, unknown), {"name": "learned", "weights": {"name": "w", "hash": "ab"}}
    )
    assert told["fallbacks"] == [{"op": "relu", "why": "out of range", "count": 2, "seconds": 1.0}]
    assert told["source"] == "learned 50%, analytic 50% (w ab)"


def test_the_analytic_model_is_named_in_words() -> None:
    told = cost_document(cost(Estimate(1.0)), {"name": "analytic"})
    assert told == {"source": ROOFLINE, "sources": {"analytic": 1.0}, "fallbacks": []}


def test_a_node_has_its_least_trusted_source() -> None:
    assert node_source(NodeCost(1.0, 1.0, (learned(1.0, source="measured"), learned(1.0)))) == "learned"
    assert node_source(NodeCost(1.0, 1.0, (learned(1.0), Estimate(1.0)))) == "analytic"
    assert node_source(NodeCost(1.0, 0.0, (learned(1.0), Estimate(0.0)))) == "learned"  # no backward
