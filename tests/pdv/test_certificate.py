"""The certificate: a sentence that says what the bound is worth, and null where nothing is known."""

from __future__ import annotations

from dataclasses import replace

from ir.mesh import Mesh
from pdv.certificate import certificate_document
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_meshes
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
    assert "stopped by its budget" in document["statement"]


def test_no_bound_is_no_number() -> None:
    found = replace(search_meshes(PROBLEMS), lower_bound_s=0.0)
    document = certificate_document(found, PROBLEMS, pins="{}")
    assert (document["lower_bound"], document["gap"]) == (None, None)
    assert "no bound is known" in document["statement"]
    assert "keep the pins" in document["statement"]
