"""What lectures show is in the library: laws found by the generator, or written and proven alike; Megatron's MLP."""

from __future__ import annotations

import pytest

from benchmarks.mutation.lectures import FUSIONS, LECTURES, is_fusion, megatron
from pdv.rewrite.check import check_law
from pdv.rewrite.generate.select import is_implied
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.library import laws


@pytest.mark.parametrize("law", LECTURES, ids=lambda law: law.name)
def test_a_law_of_the_lectures_is_a_case_of_one_in_the_library(law: Law) -> None:
    check_law(law, seed=2)
    assert is_implied(law, [law for law in laws() if len(law.left) == 1], 2)


FALSE = (
    "lost: matmul(x, add(y, z)) == add(matmul(x, y), matmul(x, y)) for x[m, k] y[k, n] z[k, n]",
    "turned: permute(matmul(x, y), perm=(1, 0)) == matmul(x, permute(y, perm=(1, 0))) for x[k, k] y[k, k]",
)


@pytest.mark.parametrize("text", FALSE)
def test_what_is_false_follows_from_no_law(text: str) -> None:
    assert not is_implied(parse_law(text), [law for law in laws() if len(law.left) == 1], 2)


@pytest.mark.parametrize("name", FUSIONS)
def test_two_products_of_one_input_are_fused_by_joining_weights_and_cutting_the_result(name: str) -> None:
    assert any(is_fusion(law, name) for law in laws())


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_megatron_is_found_by_a_search_that_is_told_nothing(degree: int) -> None:
    """A column of up, a row of down, gelu between them as it is; one replicate (f) and one reduce (g)."""
    plan = megatron(degree)
    assert plan.moves == ("replicate", "reduce")
    assert plan.rules[:4] == ("split-linear-n", "split-add-_0", "split-gelu-_0", "split-linear-k")
    assert plan.proof.error_bound < 1e-9
