"""A few dozen mutants of right programs, of their texts and of laws: none that is wrong survives.

``benchmarks/mutation_score.py`` judges thousands of them.
"""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.mutation.edit import Edit, constant, drop, edited, then
from benchmarks.mutation.judge import brute_force, judged
from benchmarks.mutation.kinds import KINDS
from benchmarks.mutation.laws import false_laws, verdict
from benchmarks.mutation.models import MODELS
from benchmarks.mutation.plans import Right, right_program
from benchmarks.mutation.texts import TEXT_KINDS
from benchmarks.mutation_score import mutated_graphs, mutated_texts
from ir.errors import VerificationError
from ir.proof.exact import verify_equal
from pdv.rewrite.library import laws as library_laws


@pytest.fixture(scope="module")
def rights() -> list[Right]:
    return [right_program("tied", (2, 3), 1), right_program("means", (2, 4), 1), right_program("layers", (3, 2), 1)]


def test_right_programs_pass_the_proof_and_brute_force(rights: list[Right]) -> None:
    for right in rights:
        assert verify_equal(right.source, right.pcg, right.mesh).error_bound < 1e-6
        assert brute_force(right.source, right.pcg, right.mesh)


def test_no_wrong_graph_survives(rights: list[Right]) -> None:
    found = list(islice(mutated_graphs(rights, seed=3), 30))
    assert not [kind for kind, verdict in found if verdict.survives]
    assert {"validator", "values", "gradients"} <= {layer for _, verdict in found for layer in verdict.refused}
    assert sum(verdict.first != "nothing" for _, verdict in found) >= 24


def test_no_wrong_text_survives(rights: list[Right]) -> None:
    found = list(islice(mutated_texts(rights[:1], seed=3), 8))
    assert not [kind for kind, verdict in found if verdict.survives]
    assert sum(verdict.first == "text" for _, verdict in found) >= 6


def test_no_false_law_is_proven() -> None:
    said = [verdict(false) for false in islice(false_laws(list(library_laws()), seed=5), 40)]
    assert "ACCEPTED WRONGLY" not in said
    assert said.count("refused") >= 20


def test_brute_force_sees_what_is_wrong_and_only_that(rights: list[Right]) -> None:
    right = rights[0]
    node = next(node for node in right.pcg.nodes if node.op.name == "gelu")
    for change, equal in ((drop, False), (then("scale", factor=1 + 1e-7), False), (then("scale", factor=1.0), True)):
        wrong = edited(right.pcg, Edit("", {node: change}))
        assert brute_force(right.source, wrong, right.mesh) is equal
    doubled = judged(right, Edit("", {node: then("scale", factor=2.0)}), text=True)
    assert doubled is not None
    assert doubled.refused == {"values", "gradients", "text"}


@pytest.mark.parametrize("by", [48, 96, -48])
def test_positions_beyond_their_table_are_refused(by: int) -> None:
    """Also where they are right modulo its rows."""
    right = right_program("windows", (2, 3), 1)
    node = next(node for node in right.pcg.nodes if node.name == "places1")
    mutant = edited(right.pcg, Edit("", {node: constant(node.attr("value").array + by)}))
    with pytest.raises(VerificationError, match="reads rows"):
        verify_equal(right.source, mutant, right.mesh)


def test_there_are_enough_kinds_and_models() -> None:
    assert len(KINDS) >= 30
    assert len(TEXT_KINDS) >= 15
    assert len(MODELS) >= 12
