"""A search that is cut short gives a plan nevertheless, the same or a dearer one, and says that it was stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ir.builder import Builder
from ir.graph import Node
from ir.mesh import Mesh
from pdv.plan.certificate import certificate_document
from pdv.problem import Problem, Solution
from pdv.rewrite.algebra import RULES
from pdv.search import priced_blocks, timed
from pdv.search.blocks import Block
from pdv.search.meshes import search_mesh, search_meshes
from pdv.search.strategies import Budget
from pdv.search.strategies.backtrack import backtrack
from pdv.search.variants import backtrack as backtracking
from tests.pdv import worlds
from tests.pdv.pins.graphs import gpt

PROBLEM = worlds.problem(gpt(1), Mesh.of(a=2), rules=RULES)


def test_no_time_is_a_plan_without_rewrites() -> None:
    hurried, patient = search_mesh(PROBLEM, backtrack, Budget(0.0)), search_mesh(PROBLEM)
    assert not hurried.complete
    assert patient.complete
    assert hurried.solution.variants < patient.solution.variants
    assert hurried.cost.seconds >= patient.cost.seconds * (1 - 1e-12)
    assert hurried.lower_bound_s <= hurried.cost.seconds


def test_rewrites_left_out_leave_no_bound() -> None:
    """What they save is 8 % here: a bound over what was looked at would be false."""
    problems = [worlds.problem(worlds.attention_block(batch=2), Mesh.of(a=2, b=3), rules=RULES)]
    hurried, patient = search_mesh(problems[0], backtrack, Budget(0.0)), search_mesh(problems[0])
    assert hurried.cost.seconds > 1.05 * patient.cost.seconds
    assert hurried.lower_bound_s <= patient.cost.seconds
    document = certificate_document(hurried, problems)
    assert (document["lower_bound"], document["gap"]) == (None, None)
    assert "stopped before its end" in document["statement"]


def test_memory_is_kept_in_no_time() -> None:
    free = search_mesh(PROBLEM)
    tight = worlds.problem(gpt(1), Mesh.of(a=2), rules=RULES, memory_limit=0.97 * free.cost.peak_bytes)
    hurried = search_mesh(tight, backtrack, Budget(0.0))
    assert hurried.cost.peak_bytes <= tight.memory_limit
    assert not hurried.complete


def test_time_for_more_is_time_for_all() -> None:
    assert search_mesh(PROBLEM, backtrack, Budget(1e-9, most_s=1e9)).complete


@pytest.mark.parametrize("budget_s", [1e-9, 1e9])
def test_over_several_meshes(budget_s: float) -> None:
    problems = [worlds.problem(gpt(1), mesh, rules=RULES) for mesh in (Mesh.of(a=2), Mesh.of(a=4))]
    found = search_meshes(problems, budget_s=budget_s)
    assert found.complete == (budget_s > 1)
    assert found.meshes == (2 if budget_s > 1 else 1)


def test_nothing_more_is_searched_once_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the best plan is one that keeps weights whole, where there is time for it."""
    asked: list[Problem] = []

    def strategy(problem: Problem, budget: Budget) -> Solution:
        asked.append(problem)
        return backtrack(problem, budget)

    monkeypatch.setattr(timed, "gathers_weights", lambda pcg: True)
    for budget_s, searches in ((1e-9, 1), (1e9, 2)):
        asked.clear()
        found = search_meshes([PROBLEM], budget_s=budget_s, strategy=strategy, step_s=lambda plan: plan.cost.seconds)
        assert len(asked) == searches
        assert found.complete == (budget_s > 1)


def test_blocks_that_nothing_leaves_are_solved_once_for_all_ways_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    k = Builder()
    x: Node = k.input("x", worlds.f32(8, 16))
    for layer in range(3):
        x = k.relu(k.linear(x, k.param(f"{layer}", worlds.f32(16, 16)), name=f"{layer}"))
    heads = {name: k.linear(x, k.param(name, worlds.f32(4, 16))) for name in ("one", "other")}
    asked = worlds.problem(k.graph(heads), Mesh.of(a=2))
    asked = replace(asked, rows=True)
    assert len(asked.exits) == 2
    each = [backtrack(replace(asked, leaving=way), Budget()).cost_s for way in asked.exits]
    explored: list[Block] = []

    def explore(block: Block, *rest: Any, **named: Any) -> Any:  # Any: as it is
        explored.append(block)
        return backtracking.explore(block, *rest, **named)

    monkeypatch.setattr(priced_blocks, "explore", explore)
    found = search_mesh(asked)
    inner = [block.nodes for block in explored if not block.outputs]
    assert inner
    assert len(inner) == len(set(inner))
    assert found.cost.seconds == min(each)
