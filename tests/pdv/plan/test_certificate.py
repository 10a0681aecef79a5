"""The certificate: a sentence that says what the bound is worth, and null where nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ir.errors import NoPlanFitsError
from ir.mesh import Mesh
from pdv.plan.certificate import certificate_document
from pdv.problem import Problem, Solution
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_meshes
from pdv.search.strategies import Budget
from pdv.search.strategies.backtrack import backtrack
from tests.pdv import worlds

PROBLEMS = tuple(worlds.problem(worlds.mlp(), mesh, rules=RULES) for mesh in (Mesh.of(a=2), Mesh.of(a=2, b=2)))


def test_a_bound_is_of_a_space() -> None:
    found = search_meshes(PROBLEMS)
    document = certificate_document(found, PROBLEMS)
    assert document["lower_bound"] <= found.cost.seconds
    assert document["complete"]
    assert document["space"]["meshes"] == ["a=2", "a=2xb=2"]
    assert document["space"]["meshes_left_out"] == []
    assert document["space"]["rules"]["count"] == len(RULES)
    assert document["space"]["variants"] >= 1
    assert document["space"]["memory_limit_bytes"] is None
    assert "over 2 meshes" in document["statement"]
    assert "gap 0.00%" in document["statement"]


def test_a_budget_leaves_meshes_out_and_says_so() -> None:
    found = search_meshes(PROBLEMS, budget_s=1e-9)
    document = certificate_document(found, PROBLEMS)
    assert not document["complete"]
    assert document["space"]["meshes_left_out"] == ["a=2xb=2"]
    assert "over 1 mesh (of 2)" in document["statement"]
    assert "stopped before its end" in document["statement"]


def test_no_bound_is_no_number() -> None:
    found = replace(search_meshes(PROBLEMS), lower_bound_s=0.0)
    document = certificate_document(found, PROBLEMS, pins="{}")
    assert (document["lower_bound"], document["gap"]) == (None, None)
    assert "no bound is known" in document["statement"]
    assert "keep the pins" in document["statement"]


def test_without_rules_nothing_is_said_of_rewrites() -> None:
    plain = tuple(replace(problem, rules=()) for problem in PROBLEMS)
    assert "of the graph as it was written" in certificate_document(search_meshes(plain), plain)["statement"]
    found = search_meshes(PROBLEMS)
    if found.solution.variants > 1:
        assert f"by {len(RULES)} algebraic rules" in certificate_document(found, PROBLEMS)["statement"]


def test_what_limits_memory_is_said() -> None:
    limited = tuple(replace(problem, memory_limit=2.0**30) for problem in PROBLEMS)
    found = search_meshes(limited)
    assert ", that fit in 1 GiB" in certificate_document(found, limited)["statement"]
    assert "that fit in 1 GiB and keep the pins" in certificate_document(found, limited, "{}")["statement"]


@pytest.mark.parametrize(
    ("bound_s", "told"), [(math.inf, "gap 0.00%"), (1e-9, "gap 100.00%"), (0.0, "no bound is known")]
)
def test_a_mesh_that_was_left_undecided_lowers_the_bound(bound_s: float, told: str) -> None:
    def only_first(problem: Problem, budget: Budget) -> Solution:
        if problem is PROBLEMS[1]:
            raise NoPlanFitsError("none was met", bound_s=bound_s)
        return backtrack(problem, budget)

    found = search_meshes(PROBLEMS, strategy=only_first)
    assert found.complete  # there was time for more
    assert found.lower_bound_s == min(bound_s, search_meshes(PROBLEMS[:1]).lower_bound_s)
    assert told in certificate_document(found, PROBLEMS)["statement"]


def test_a_mesh_undecided_for_want_of_time_is_said() -> None:
    def slow(problem: Problem, budget: Budget) -> Solution:
        if problem is PROBLEMS[1]:
            raise NoPlanFitsError("none was met", bound_s=0.0)
        return backtrack(problem, Budget())

    assert not search_meshes(PROBLEMS[::-1], strategy=slow, budget_s=1e-9).complete
