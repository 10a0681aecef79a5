"""Pins under algebraic rewrites: they bind what operators and parameters become, and every plan found is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ir.builder import Builder
from ir.cost_model import NodeEstimate, Query
from ir.errors import PinsError
from ir.graph import Graph, Node, param_view
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Shard
from ir.views import readings
from pdv.cluster import Link, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.pins import RoleOf, load_pins
from pdv.pins.kept import check_kept
from pdv.planning.problems import plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.problem import Pins, Problem, Solution
from pdv.rewrite.algebra import RULES
from pdv.rewrite.library import all_rules
from pdv.rewrite.rule import Rule
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from pdv.search.strategies import STRATEGIES
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget
from tests.pdv import worlds

MESH = Mesh.of(tp=2)
FAR = {"tp": Link("far", 1e8, 1e-4)}  # so far that every plan that is free does the same work on both devices


DEAR = {"linear", "conv2d", "embedding", "attention"}


@dataclass(frozen=True)
class Dear(ComputeModel):
    """Prices by which rewrites pay that take away linears, convolutions, lookups and attention."""

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """Three times as long for what is named so."""
        times = [3.0 if query.op.name in DEAR else 1.0 for query in queries]
        answers = zip(super().nodes(queries), times, strict=True)
        return [NodeEstimate(one.forward.times(more), one.backward.times(more)) for one, more in answers]


Content = Mapping[str, Any]  # Any: plain data


def mlp() -> Graph:
    """16-64-64-10 with biases: small enough that cutting a product costs more than it saves."""
    k = Builder()
    x = k.input("x", worlds.f32(8, 16))
    for number, (width, read) in enumerate(((64, 16), (64, 64), (10, 64))):
        weight, bias = (
            k.param(f"{number}.weight", worlds.f32(width, read)),
            k.param(f"{number}.bias", worlds.f32(width)),
        )
        x = k.add(k.linear(x, weight, name=f"{number}.product"), bias, name=f"{number}.out")
        x = k.tanh(x, name=f"{number}.act") if number < 2 else x
    return k.graph({"y": x}, name="mlp")


def heads() -> Graph:
    """Two products of one input, which the search joins."""
    k = Builder()
    x = k.relu(k.linear(k.input("x", worlds.f32(8, 16)), k.param("up", worlds.f32(32, 16))))
    a, b = (k.linear(x, k.param(name, worlds.f32(4, 32)), name=f"{name}.out") for name in ("a", "b"))
    return k.graph({"y": k.mul(k.tanh(a), b)}, name="heads")


def plan_of(graph: Graph, pins: Content, rules: tuple[Rule, ...] = RULES, mesh: Mesh = MESH) -> BestPlan:
    bound = load_pins(pins).on(graph, mesh)
    return check_kept(search_mesh(problem_of(graph, bound, rules, mesh)))


def problem_of(graph: Graph, pins: Pins, rules: tuple[Rule, ...] = RULES, mesh: Mesh = MESH) -> Problem:
    of = worlds.problem(graph, mesh, rules=rules, pins=pins, links=FAR)
    return replace(of, compute=Dear((worlds.DEVICE,)))


def products(plan: BestPlan) -> Iterator[tuple[Node, Split]]:
    """Products with a matrix of weights, and their splits."""
    for node, (split,) in plan.solution.assignment.splits.items():
        if node.op.kind == "contraction" and any(operand.is_param for operand in node.operands):
            yield node, split


@pytest.mark.parametrize("rules", [(), RULES], ids=["none", "shipped"])
@pytest.mark.parametrize("name", ["tensor", "megatron", "tensor+sequence"])
def test_products_are_cut_by_column_or_row_whatever_they_become(name: str, rules: tuple[Rule, ...]) -> None:
    plan = plan_of(mlp(), {"techniques": {"tp": name}}, rules)
    labels = [split.label for _, split in products(plan)]
    assert len(labels) == 3
    assert set(labels) <= {"n", "k"}


@pytest.mark.parametrize(
    "pin",
    [
        {"op": "linear", "param": "0.weight", "loop": "n"},
        {"param": "0.weight", "role": "tensor"},
        {"name": "0.product", "loop": "n"},
        {"op": "linear", "role": "tensor"},
        {"op": "linear", "loop": "k"},
    ],
)
def test_a_pinned_operator_is_cut_whatever_it_becomes(pin: Content) -> None:
    plan = plan_of(mlp(), {"operators": [{**pin, "axis": "tp"}]})
    sources = {one.source: split for node, split in products(plan) for one in readings(node.operands[1])}
    assert sources["0.weight"].label == pin.get("loop", sources["0.weight"].label) != "none"


def test_a_product_with_a_matrix_is_one_as_it_was_written() -> None:
    k = Builder()
    h = k.relu(k.matmul(k.input("x", worlds.f32(8, 16)), k.param("up", worlds.f32(16, 64))))
    graph = k.graph({"y": k.matmul(h, k.param("down", worlds.f32(64, 8)))})
    assert {split.label for _, split in products(plan_of(graph, {"techniques": {"tp": "tensor"}}))} <= {"n", "k"}


@pytest.mark.parametrize("text", ["whole", "cut", "shard 0", "shard 1"])
def test_a_parameter_that_is_joined_to_another_rests_as_pinned(text: str) -> None:
    assert any(len(readings(param)) > 1 for param in plan_of(heads(), {}).solution.graph.params)
    plan = plan_of(heads(), {"tensors": {"a": {"tp": text}}})
    (param,) = [one for one in plan.solution.graph.params if "a" in {part.source for part in readings(one)}]
    (state,) = plan.solution.assignment.storage[param].sharding
    if text == "whole":
        assert not isinstance(state, Shard)
        return
    (part,) = [part for part in readings(param) if part.source == "a"]
    joins = [step[1] for step in param_view(param) if step[0] == "concat"]
    dims = (1, 0) if ("permute", (1, 0)) in (*part.view, *param_view(param)) else (0, 1)
    assert isinstance(state, Shard)
    assert state.dim not in joins
    assert text in ("cut", f"shard {dims[state.dim]}")


def test_what_is_forbidden_of_an_operator_is_forbidden_whatever_it_becomes() -> None:
    near = {"tp": Link("near", 1e12, 1e-9)}
    bound = load_pins({"forbid": [{"op": "linear", "axis": "tp"}]}).on(mlp(), MESH)
    free = worlds.problem(mlp(), MESH, rules=RULES, links=near)
    of = replace(free, compute=Dear((worlds.DEVICE,)))
    assert any(split.loop is not None for _, split in products(search_mesh(of)))
    assert all(split.loop is None for _, split in products(check_kept(search_mesh(replace(of, pins=bound)))))


def test_experts_are_told_from_their_weights_however_these_are_read() -> None:
    k, role = Builder(), RoleOf()
    x, weight = k.input("x", worlds.f32(12, 4, 16)), k.param("w", worlds.f32(4, 16, 8))
    by_expert = k.permute(k.reshape(x, shape=(3, 16, 16)), perm=(1, 0, 2))
    rows = k.reshape(by_expert, shape=(4, 12, 16))
    for read in (weight, k.scale(weight, factor=2.0)):
        node = k.matmul(rows, read)
        (outer,) = [split for split in node.op.splits(node.loops) if split.result == split.operands[1] == Shard(0)]
        assert role(node, outer) == "expert"


@pytest.mark.parametrize(
    "pins", [{"techniques": {"tp": "tensor"}}, {"axes": {"tp": "sequence"}}, {"forbid": [{"technique": "context"}]}]
)
def test_attention_that_is_told_from_other_operators_is_not_unfolded(pins: Content) -> None:
    k = Builder()
    q, key, v = (k.input(name, worlds.f32(2, 4, 8, 8)) for name in ("q", "k", "v"))
    y = k.attention(q, key, v, scale=8**-0.5, name="scores")
    out = k.param("out", worlds.f32(8, 32))
    graph = k.graph({"y": k.linear(k.reshape(k.permute(y, perm=(0, 2, 1, 3)), shape=(2, 8, 32)), out)})
    unfold = tuple(rule for rule in all_rules() if rule.name == "unfold-attention")  # by default searches leave it out
    assert not any(node.op.has_scores for node in plan_of(graph, {}, unfold).solution.graph.nodes)
    assert any(node.op.has_scores for node in plan_of(graph, {}).solution.graph.nodes)
    kept = [node for node in plan_of(graph, pins, unfold).solution.graph.nodes if node.op.has_scores]
    assert len(kept) == 1


def test_a_technique_that_nothing_can_follow_is_an_error() -> None:
    k = Builder()
    graph = k.graph({"y": k.add(k.relu(k.input("x", worlds.f32(8, 16))), k.param("b", worlds.f32(16)))})
    with pytest.raises(PinsError, match=r"techniques\.tp: tensor cuts nothing here"):
        load_pins({"techniques": {"tp": "tensor"}}).on(graph, MESH)


def test_convolutions_are_cut_where_there_is_nothing_else() -> None:
    k = Builder()
    h = k.relu(k.conv2d(k.input("x", worlds.f32(4, 8, 8, 8)), k.param("a", worlds.f32(16, 8, 3, 3)), padding=(1, 1)))
    graph = k.graph({"y": k.conv2d(h, k.param("b", worlds.f32(16, 16, 1, 1)))})
    plan = plan_of(graph, {"techniques": {"tp": "tensor"}})
    cuts = [splits[0] for node, splits in plan.solution.assignment.splits.items() if node.op.name == "conv2d"]
    assert cuts
    assert all(split.loop not in (None, "n") for split in cuts)


BROKEN: Mapping[str, Content] = {
    "techniques.tp (tensor)": {"techniques": {"tp": "tensor"}},
    "techniques.tp (ddp)": {"techniques": {"tp": "ddp"}},
    "operators[0]": {"operators": [{"op": "linear", "param": "0.weight", "axis": "tp", "loop": "n"}]},
    "tensors.'0.weight' (tp: cut)": {"tensors": {"0.weight": {"tp": "cut"}}},
    "tensors.'0.out' (tp: shard 0)": {"tensors": {"0.out": {"tp": "shard 0"}}},
    "forbid[0]": {"forbid": [{"op": "linear", "loop": "none"}]},
}


@pytest.mark.parametrize("label", BROKEN)
def test_a_plan_that_keeps_no_pins_is_refused_and_the_pin_named(label: str) -> None:
    plan = search_mesh(problem_of(mlp(), Pins()))
    pins = load_pins(BROKEN[label]).on(plan.solution.problem.graph, MESH)
    problem = replace(plan.solution.problem, pins=pins)
    with pytest.raises(PinsError) as caught:
        check_kept(replace(plan, solution=replace(plan.solution, problem=problem)))
    assert label in caught.value.what
    assert "is not kept by the plan found" in caught.value.what


def test_gathers_that_are_forbidden_are_found_in_a_plan() -> None:
    plan = plan_of(mlp(), {"techniques": {"tp": "zero-3"}}, rules=())
    pins = load_pins({"forbid": [{"technique": "zero", "param": "0.weight"}]}).on(plan.solution.problem.graph, MESH)
    problem = replace(plan.solution.problem, pins=pins)
    with pytest.raises(PinsError, match=r"0\.weight is gathered along tp"):
        check_kept(replace(plan, solution=replace(plan.solution, problem=problem)))


def test_what_any_search_finds_is_held_to_its_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(problem: Problem, budget: Budget) -> Solution:
        return replace(backtrack(replace(problem, pins=Pins()), budget), problem=problem)

    monkeypatch.setitem(STRATEGIES, "backtrack", forgets)
    cluster, pins = load_cluster(worlds.cluster(2)).with_mesh({"tp": 2}), load_pins({"techniques": {"tp": "tensor"}})
    device = replace(cluster.classes[0].device, launch_latency_s=1.0)  # cutting never pays
    problems = [
        replace(problem, compute=Dear((device,))) for problem in plan_problems(mlp(), cluster, mode="train", pins=pins)
    ]
    with pytest.raises(PinsError, match=r"techniques\.tp \(tensor\) is not kept by the plan found"):
        search_problems(problems, cluster, Effort("backtrack", 60.0), pins.content, lambda stage, part: None, None)
