"""Why a plan is so: shares add up, alternatives are what a search without the split finds, rewrites have prices."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache

import pytest

from ir.errors import NoPlanFitsError, UsageError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from pdv.cluster import load_cluster
from pdv.pins import load_pins
from pdv.plan.document import plan_document
from pdv.problem import Pins, Problem
from pdv.problem.workload import BUCKET_BYTES
from pdv.report.alternatives import Weighing
from pdv.report.axes import IDLE, UNNAMED, axis_uses
from pdv.report.explain import explain_document, explain_operators
from pdv.report.loaded import Loaded, load_document
from pdv.report.reasons import operator_classes, operators_called, reasons
from pdv.report.shares import shares
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_mesh
from tests.pdv import worlds
from tests.pdv.pins.graphs import gpt

CLUSTER = load_cluster("examples/clusters/laptop-4.yaml")


def summed_together(problem: Problem) -> Problem:
    """The problem as it is read back: gradients are summed as the emitted program does."""
    return replace(problem, bucket_bytes=BUCKET_BYTES)


def told(problem: Problem, pins: str | None = None) -> Loaded:
    """The plan of a problem, written and read back; the links and devices are those of the problem."""
    found = search_mesh(summed_together(problem))
    document = plan_document(found, cluster=CLUSTER, strategy="backtrack", seconds=0.0, pins=pins)
    device = {field.name: getattr(worlds.DEVICE, field.name) for field in fields(worlds.DEVICE)}
    device["peak_flops"] = dict(worlds.DEVICE.peak_flops)
    document["cluster"] = {"name": "toys", "classes": [{"device": device, "count": 1}]}
    plan = load_document(json.loads(json.dumps(document)), problem.graph)
    assert plan.cost.seconds == pytest.approx(found.cost.seconds)
    return plan


@cache
def small() -> Loaded:
    return told(worlds.problem(gpt(2), Mesh.of(dp=2, tp=2), rules=RULES))


@cache
def attention() -> Loaded:
    """Megatron's plan, pinned, for which the fused product has to be taken apart."""
    graph, mesh = worlds.attention_block(), Mesh.of(a=3)
    pins = load_pins({"techniques": {"a": "tensor"}})
    return told(worlds.problem(graph, mesh, rules=RULES, pins=pins.on(graph, mesh)), pins.content)


@pytest.mark.parametrize("seed", range(6))
def test_shares_add_up_to_the_plan(seed: int) -> None:
    plan = told(worlds.problem(worlds.random_graph(seed, 6), Mesh.of(a=2, b=3)))
    parts = shares(plan).values()
    assert sum(part.compute_s for part in parts) == pytest.approx(plan.cost.compute_s)
    moved = sum(part.forward_s + part.backward_s for part in parts)
    assert moved == pytest.approx(plan.cost.communication_s, abs=1e-12)


def without(problem: Problem, graph: Graph, place: int, label: str) -> float:
    """Seconds of the best plan in which one operator is not cut so."""
    node = [node for node in graph.nodes if not node.is_leaf][place]

    def allowed(other: Node, axis: str, split: Split) -> bool:
        return other is not node or split.label != label

    try:
        return search_mesh(
            replace(problem, pins=Pins(split=allowed, mark=lambda nodes: str(node in nodes)))
        ).cost.seconds
    except NoPlanFitsError:
        return float("inf")


@pytest.mark.parametrize("seed", range(8))
def test_alternatives_are_what_is_found_without_the_split(seed: int) -> None:
    problem = summed_together(worlds.problem(worlds.random_graph(seed, 5), Mesh.of(a=2)))
    plan = told(problem)
    weighing = Weighing(plan)
    weighed = weighing.all()
    exact = len(weighing.blocks) == 1
    for place, node in enumerate(plan.operators):
        (label,) = plan.splits(node).values()
        extra = without(problem, problem.graph, place, label) - plan.cost.seconds
        best = weighed[node].best
        found = float("inf") if best is None else best.extra.seconds
        assert found >= -1e-12
        assert found >= extra - 1e-12
        if exact:
            assert found == pytest.approx(extra, abs=1e-12)


def test_parts_of_an_alternative_are_the_whole() -> None:
    for node, weighed in Weighing(small(), lambda node: node.op.name in {"linear", "add"}).all().items():
        if weighed.best is not None and node.op.name in {"linear", "add"}:
            assert weighed.best.compute_s is not None
            assert weighed.best.communication_s == pytest.approx(weighed.best.extra.seconds - weighed.best.compute_s)
            extras = [extra.seconds for axis in weighed.by_axis for extra in axis.values() if extra is not None]
            assert min(extras, default=0.0) >= -1e-12


def test_equal_operators_are_one_entry() -> None:
    entries = operator_classes(small())
    assert sorted(number for entry in entries for number in entry["numbers"]) == list(range(len(small().operators)))
    assert sum(entry["time_s"] for entry in entries) == pytest.approx(
        small().cost.compute_s + small().cost.communication_s
    )
    assert len(entries) < len(small().operators)
    assert [entry["time_s"] for entry in entries] == sorted((entry["time_s"] for entry in entries), reverse=True)


def test_a_rewrite_has_brought_something() -> None:
    rewrites = reasons(attention())["rewrites"]
    assert rewrites
    for entry in rewrites:
        assert entry["without_s"] is None or entry["without_s"] >= attention().cost.seconds * (1 - 1e-12)
    assert any(entry["without_s"] > attention().cost.seconds * (1 + 1e-6) for entry in rewrites)
    assert any(entry["alone_s"] > 0 for entry in rewrites)  # it costs time on one device, and lets the heads be cut


@pytest.mark.parametrize(("complete", "limit"), [(True, None), (True, 1 << 30), (False, None)])
def test_what_may_have_decided_is_said(complete: bool, limit: int | None) -> None:
    search = attention().document["search"]
    certificate = search["certificate"]
    space = {**certificate["space"], "memory_limit_bytes": limit}
    changed = {**search, "certificate": {**certificate, "complete": complete, "space": space}}
    plan = replace(attention(), document={**attention().document, "search": changed})
    cheaper = reasons(plan)["cheaper"]
    assert ("stopped before its end" in cheaper) == (not complete)
    assert ("memory decided" in cheaper) == (limit is not None)


def test_it_reads_as_text() -> None:
    document = {**attention().document, "proof": {"statement": "equal to its source"}}
    text = explain_document(document, reasons(attention()))
    for heading in ("Mesh axes, slow to fast", "Memory: at most ", "Algebraic rewrites, in the order taken"):
        assert any(line.startswith(heading) for line in text.splitlines())
    assert all(line == line.rstrip() for line in text.splitlines())
    laws = text[text.index("best plan takes that uses") : text.index("Predicted step")].splitlines()
    assert len(laws) > 2
    assert all(len(line) <= 116 for line in laws)
    assert "0.000" not in text[text.index("Memory: at most") : text.index("Operators by time")]


def test_one_device_reads_as_text() -> None:
    plan = told(worlds.problem(worlds.mlp(), Mesh(())))
    document = {**plan.document, "proof": {"statement": "equal to its source"}}
    text = explain_document(document, reasons(plan))
    assert "One device: nothing is cut." in text.splitlines()
    assert "axis  size" not in text


def test_an_axis_is_idle_where_nothing_is_cut_along_it() -> None:
    document = {**small().document, "techniques": {axis.name: [] for axis in small().problem.mesh.axes}}
    assert set(axis_uses(document).values()) == {UNNAMED}
    whole = [{**entry, "splits": dict.fromkeys(entry["splits"], "none")} for entry in document["operators"]]
    assert set(axis_uses({**document, "operators": whole, "derivation": []}).values()) == {IDLE}
    assert axis_uses({**document, "techniques": {"dp": ["data parallel"]}}) == {"dp": "data parallel"}


def test_one_operator_in_detail() -> None:
    entry = operators_called(small(), "attention")[0]
    text = explain_operators([entry])
    assert text.startswith("attention -> f32[4,4,8,6], ")
    assert "best rejected" in text
    assert "(compute " in text
    assert "along tp, instead of" in text
    assert f"number {entry['numbers'][0]}" in text
    loops = {name: loop["extent"] for name, loop in entry["loops"].items()}
    assert loops["_1"] == 4
    assert "_1=4 (data)" in text
    assert {loop["role"] for loop in entry["loops"].values()} >= {"data", "tensor", "context"}
    assert operators_called(small(), "h.0.mlp.act")[0]["op"] == "gelu"
    assert entry in operators_called(small(), str(entry["numbers"][0]))
    with pytest.raises(UsageError, match="Did you mean 'attention'"):
        operators_called(small(), "atention")


def test_what_pins_leave_no_choice_has_no_alternative() -> None:
    (entry,) = operators_called(attention(), "attention")
    assert entry["rejected"] is None
    assert "no other cut is possible" in explain_operators([entry])


def test_wide_blocks_are_bounded_then_solved_among_what_costs_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Weighing(small()).all()
    monkeypatch.setattr("pdv.report.alternatives.LIMIT", 60)
    bounds = 0
    for node, weighed in Weighing(small()).all().items():
        exact = known[node].best
        assert (weighed.best is None) == (exact is None)
        if weighed.best is None or exact is None:
            continue
        bounds += not weighed.best.extra.exact
        if weighed.best.extra.exact:
            assert weighed.best.extra.seconds == pytest.approx(exact.extra.seconds, abs=1e-12)
        assert weighed.best.extra.seconds <= exact.extra.seconds + 1e-12
    assert bounds > 0
