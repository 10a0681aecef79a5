"""Variants of blocks: what is merged for them, which are found, and that a search stops when told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ir.builder import Builder
from ir.cost_model import NodeEstimate, Query
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.ops import OPERATORS
from ir.proof.exact import verify_equal
from ir.views import read_twice, sources_of
from pdv.config import REWRITE_GAIN
from pdv.cost.compute import ComputeModel
from pdv.rewrite.algebra import RULES
from pdv.rewrite.rewriter import RewriteBuilder
from pdv.rewrite.rule import Rule
from pdv.search.blocks import split_blocks, tied_params
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution
from pdv.search.variants import variants
from pdv.search.variants.backtrack import explore
from pdv.search.variants.survey import Survey
from pdv.search.variants.variants import SourceBlocks, Variant, apply_rule
from tests.pdv.worlds import attention_block, f32, mlp, problem


def convolutions(layers: int = 3) -> Graph:
    """relu(norm(conv x)), again and again: every value is a bottleneck."""
    k = Builder()
    x: Node = k.input("x", f32(2, 4, 6, 6))
    for i in range(layers):
        y = k.conv2d(x, k.param(f"{i}.weight", f32(4, 4, 3, 3)), padding=(1, 1))
        statistics = (k.param(f"{i}.{name}", f32(4), trainable=False) for name in ("mean", "var"))
        affine = (k.param(f"{i}.{name}", f32(4)) for name in ("scale", "shift"))
        x = k.relu(k.batch_norm(y, *statistics, *affine, eps=1e-5))
    return k.graph({"y": x})


def test_a_block_holds_what_a_rule_spans() -> None:
    blocks = split_blocks(convolutions(), RULES)
    assert [[node.op.name for node in block.nodes] for block in blocks] == [["conv2d", "batch_norm"], ["relu"]] * 3
    assert len({block.key for block in blocks}) == 4, "layers alike but for the first, which has no source"
    assert len(split_blocks(convolutions())) == 9, "without rules every value ends a block"


@pytest.mark.parametrize("graph", [attention_block(), attention_block(fused=False)], ids=["fused", "three"])
def test_blocks_of_transformers_stay(graph: Graph) -> None:
    assert [block.key for block in split_blocks(graph, RULES)] == [block.key for block in split_blocks(graph)]


def test_layers_alike_stay_alike() -> None:
    """x + down(relu(up x)): only the first, whose input is a product, is merged with what comes before."""
    blocks = split_blocks(mlp(layers=5), RULES)
    assert [len(block.nodes) for block in blocks] == [5, 4, 4, 4, 4]
    assert len({block.key for block in blocks[1:-1]}) == 1


@pytest.mark.parametrize(
    ("mesh", "taken"),
    [(Mesh.of(a=2, b=3), {"move-chunk-into-biased-linear"}), (Mesh.of(a=5), set()), (Mesh(()), set())],
    ids=str,
)
def test_a_fused_product_is_taken_apart_where_heads_can_be_cut(mesh: Mesh, taken: set[str]) -> None:
    of = problem(attention_block(batch=1), mesh, rules=RULES)
    solution = ChainSolver(of).solve()
    assert {step.rule for step in solution.steps} == taken
    verify_equal(of.graph, realize_solution(solution).derived.pcg, mesh, trials=1)


def test_rewrites_never_cost() -> None:
    for seed, mesh in enumerate((Mesh(()), Mesh.of(a=2), Mesh.of(a=2, b=2))):
        graph = attention_block(batch=1 + seed, fused=False)
        plain, joint = (ChainSolver(problem(graph, mesh, rules=rules)).solve() for rules in ((), RULES))
        assert joint.cost_s <= plain.cost_s * (1 + 1e-9)


def test_exploration_stops_when_told_and_keeps_the_block_itself() -> None:
    graph = attention_block(fused=False)
    of = problem(graph, Mesh.of(a=2, b=2), rules=RULES)
    survey, solver = Survey(of), ChainSolver(of)
    (block,) = [
        block for block in split_blocks(graph, RULES) if any(node.op.name == "attention" for node in block.nodes)
    ]
    asked = []

    def deadline() -> bool:
        asked.append(True)
        return True

    found = explore(block, RULES, tied_params(graph), lambda block: None, survey, deadline)  # type: ignore[arg-type, return-value]
    assert [variant for variant, _ in found] == [Variant(block)]
    assert asked
    assert solver.blocks


def test_no_rule_is_applied_once_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = attention_block(fused=False)
    block = max(split_blocks(graph, RULES), key=lambda block: len(block.nodes))
    monkeypatch.setattr(variants, "apply_rule", lambda *_: pytest.fail("it is late"))
    solved: Any = object()  # Any: nobody looks into it
    found = explore(block, RULES, tied_params(graph), lambda _: solved, None, lambda: True)
    assert [variant for variant, _ in found] == [Variant(block)]


def test_rules_are_applied_once_on_all_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, made = attention_block(), []

    def apply(variant: Variant, rule: Rule, *rest: Any) -> Variant | None:  # Any: as it is
        made.append((variant.block.nodes, variant.rules, rule.name))
        return apply_rule(variant, rule, *rest)

    monkeypatch.setattr(variants, "apply_rule", apply)
    source = SourceBlocks(graph, RULES)
    meshes = [Mesh.of(a=2), Mesh.of(a=2, b=3)]
    costs = [ChainSolver(problem(graph, mesh, rules=RULES), source=source).solve().cost_s for mesh in meshes]
    assert made
    assert len(made) == len(set(made))
    assert costs == [ChainSolver(problem(graph, mesh, rules=RULES)).solve().cost_s for mesh in meshes]


def test_variants_that_differ_in_the_order_of_a_sum_are_one() -> None:
    k = Builder()
    x, u, v = k.input("x", f32(4, 8)), k.param("u", f32(6, 8)), k.param("v", f32(6, 8))
    graph = k.graph({"y": k.tanh(k.add(k.linear(x, u), k.linear(x, v)))})
    of = problem(graph, Mesh(()), rules=RULES)
    (block,) = split_blocks(graph, RULES)[:1]
    survey = Survey(of)
    tables = []

    def count(variant: object) -> None:
        tables.append(variant)

    found = explore(block, RULES, tied_params(graph), count, survey)  # type: ignore[arg-type]
    keys = [tuple(sorted(node.op.name for node in variant.block.nodes)) for variant, _ in found]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("apart", [True, False])
def test_heads_of_several_outputs_stay_apart(apart: bool) -> None:
    """Their losses may be taken one by one: a joined parameter has a gradient then, where one of its parts has none."""
    k = Builder()
    h = k.tanh(k.linear(k.input("x", f32(8, 16)), k.param("body", f32(32, 16))))
    heads = [
        k.add(k.linear(h, k.param(f"{name}.weight", f32(8, 32))), k.param(f"{name}.bias", f32(8))) for name in "ab"
    ]
    graph = k.graph({"a": heads[0], "b": heads[1]} if apart else {"y": k.concat(*heads, dim=1)})
    tied, joined = tied_params(graph), set()
    for block in split_blocks(graph, RULES):
        for first in (apply_rule(Variant(block), rule, tied) for rule in RULES):
            behind = [] if first is None else [apply_rule(first, rule, tied) for rule in RULES]
            for variant in (each for each in (first, *behind) if each is not None):
                reads = (operand for node in variant.block.nodes for operand in node.operands if operand.is_param)
                joined |= {sources_of(param) for param in reads if len(sources_of(param)) > 1}
    assert bool(joined) is not apart


@pytest.mark.parametrize("widths", [(8, 8), (6, 2)])
def test_a_parameter_serves_the_outputs_that_it_served(widths: tuple[int, int]) -> None:
    """Products of joined values read weights of both heads: behind them these would serve both, and then be joined."""
    k = Builder()
    h = k.tanh(k.linear(k.input("x", f32(8, 16)), k.param("body", f32(32, 16))))
    heads = {
        name: k.add(k.linear(h, k.param(f"{name}.weight", f32(n, 32))), k.param(f"{name}.bias", f32(n)))
        for name, n in zip("ab", widths, strict=True)
    }
    graph = k.graph(heads)
    unread: Any = None  # Any: nobody looks into it
    for train in (True, False):
        found = []
        for block in split_blocks(graph, RULES):
            survey = Survey(problem(graph, Mesh.of(a=2), rules=RULES))
            made = explore(block, RULES, tied_params(graph), lambda _: unread, survey, train=train)
            found += [variant.serves == Variant(block).serves for variant, _ in made]
        assert all(found) is train


def test_a_weight_whose_product_is_read_again_is_not_joined_to_another() -> None:
    """h + down(relu(up h)) with h = in x: a product of (in, down) leaves h to be computed, of the weight by itself."""
    graph = mlp()
    (block,) = split_blocks(graph, RULES)
    tied = tied_params(graph)
    joining = [rule for rule in RULES if rule.needs.get("linear", 0) >= 2]
    made = [apply_rule(Variant(block), rule, tied) for rule in joining]
    for variant in filter(None, made):
        read = [operand for node in variant.block.nodes for operand in node.operands if operand.is_param]
        assert not any(read_twice(read)), variant.rules
    k = RewriteBuilder()
    first, *_, last = graph.params
    joined = k.apply(OPERATORS["concat"], (first, last), {"dim": 1})
    assert joined.is_param
    assert any(read_twice([first, joined]))


@pytest.mark.parametrize(("share", "is_taken"), [(1.0, False), (0.998, False), (0.98, True)])
def test_a_rewrite_has_to_save_more_than_prices_err_by(share: float, is_taken: bool) -> None:
    class Cheaper(ComputeModel):
        """Products of matrices that are no linear take a share of their time."""

        def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
            parts = [share if query.op.name == "matmul" else 1.0 for query in queries]
            found = zip(super().nodes(queries), parts, strict=True)
            return [NodeEstimate(*(one.times(part) for one in each)) for each, part in found]

    k = Builder()
    graph = k.graph({"y": k.linear(k.input("x", f32(512, 512)), k.param("w", f32(512, 512)))})
    rule = next(rule for rule in RULES if rule.name == "linear-as-matmul")
    of = problem(graph, Mesh.of(a=2), rules=(rule,))
    assert isinstance(of.compute, ComputeModel)
    found = ChainSolver(replace(of, compute=Cheaper(of.compute.devices))).solve()
    assert any(node.op.name == "matmul" for node in found.graph.nodes) == is_taken
    assert found.lower_bound_s <= found.cost_s <= found.lower_bound_s * (1 + REWRITE_GAIN)
