"""Searches that are stopped anywhere: what they state as a bound never exceeds the best plan there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ir.errors import NoPlanFitsError
from ir.mesh import Mesh
from pdv.plan.certificate import certificate_document
from pdv.problem import Problem, Solution
from pdv.rewrite.algebra import RULES
from pdv.search import meshes
from pdv.search.best import BestPlan
from pdv.search.chain import ChainSolver
from pdv.search.meshes import search_mesh, search_meshes
from pdv.search.strategies import STRATEGIES
from pdv.search.strategies.budget import Budget, Strategy
from pdv.search.strategies.together import together
from tests.pdv.search.oracle import Oracle, TooManyPlansError, decided
from tests.pdv.worlds import problem, random_graph

MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=2))


def after(questions: int) -> Callable[[], bool]:
    """A deadline that is over once it was asked so often."""
    asked = 0

    def late() -> bool:
        nonlocal asked
        asked += 1
        return asked > questions

    return late


def hurried(questions: int) -> Strategy:
    """The default strategy, stopped at a place that no clock decides."""

    def solve(of: Problem, budget: Budget) -> Solution:
        return ChainSolver(of, after(questions)).solve()

    return together(solve)


def drawn(seed: int) -> tuple[list[Problem], np.random.Generator]:
    """One graph on two meshes, with rules."""
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, int(rng.integers(2, 4)))
    chosen = rng.permutation(len(MESHES))[:2]
    return [problem(graph, MESHES[i], rules=RULES) for i in chosen], rng


def seconds(found: BestPlan | None) -> float:
    return math.inf if found is None else found.cost.seconds


def searched(problems: list[Problem], strategy: Strategy, budget_s: float = math.inf) -> tuple[BestPlan | None, float]:
    """What was found, and the bound stated for all plans."""
    try:
        found = search_meshes(problems, strategy=strategy, budget_s=budget_s)
    except NoPlanFitsError as error:
        return None, error.bound_s
    document = certificate_document(found, problems)
    assert (document["lower_bound"] is None) == (found.lower_bound_s == 0.0)
    if found.lower_bound_s == 0.0:
        assert document["gap"] is None
        assert document["statement"].startswith("no bound is known")
    return found, found.lower_bound_s


@pytest.mark.parametrize("start", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 400, 20))])
def test_no_stop_makes_a_bound_false(start: int) -> None:
    stopped = 0
    for seed in range(start, start + (2 if start < 100 else 20)):
        problems, rng = drawn(seed)
        best, bound = searched(problems, hurried(10**9))
        assert best is not None
        assert bound <= best.cost.seconds
        for questions in rng.integers(0, 30, size=3):
            found, stated = searched(problems, hurried(int(questions)), budget_s=float(rng.choice([1e-9, math.inf])))
            assert stated <= best.cost.seconds * (1 + 1e-9)
            stopped += found is not None and not found.complete
        limit = float(rng.uniform(0.5, 1.0)) * best.cost.peak_bytes
        tight = [replace(of, memory_limit=limit) for of in problems]
        least = min(best.cost.seconds, seconds(searched(tight, hurried(10**9))[0]))
        fitting = seconds(searched(tight, hurried(10**9))[0])
        assert least <= fitting
        for questions in rng.integers(0, 30, size=2):
            assert searched(tight, hurried(int(questions)))[1] <= fitting * (1 + 1e-9)
    assert stopped


@pytest.mark.parametrize("seed", range(500, 504))
def test_no_stop_makes_a_bound_exceed_the_enumerated_optimum(seed: int) -> None:
    problems, rng = drawn(seed)
    of = decided(replace(problems[0], rules=()))[0]
    try:
        best = min(Oracle(way).fastest() for way in decided(of))
    except TooManyPlansError:
        return
    assert search_mesh(of, hurried(int(rng.integers(0, 5)))).lower_bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "gradient"])
def test_no_strategy_claims_what_it_did_not_search(name: str) -> None:
    for seed in range(3):
        problems, _ = drawn(seed)
        plain = [replace(of, rules=()) for of in problems]
        best = min(search_mesh(of).cost.seconds for of in plain)
        _, stated = searched(plain, STRATEGIES[name], budget_s=1e-3)
        assert stated <= best * (1 + 1e-9)


def test_a_refusal_in_a_hurry_decides_nothing() -> None:
    """A search that left rewrites out does not know that nothing fits."""
    problems, _ = drawn(3)
    tight = replace(problems[0], memory_limit=1.0)
    with pytest.raises(NoPlanFitsError) as refused:
        meshes.search_mesh(tight, hurried(0))
    assert refused.value.cut
    assert refused.value.bound_s == 0.0
