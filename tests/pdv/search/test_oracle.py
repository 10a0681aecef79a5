"""What the oracle says of a plan is what the derived graph costs, and every plan computes what its source computes."""

from __future__ import annotations

import numpy as np
import pytest

from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.verify import check_returned, infer_shardings
from pdv.pcg.derive import derive
from pdv.pcg.plan_cost import plan_cost
from pdv.problem import Problem
from tests.pdv.search.oracle import Oracle, decided
from tests.pdv.worlds import problem, random_graph

MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3))


def drawn(seed: int) -> tuple[Problem, np.random.Generator]:
    """A small problem, with what is random about it."""
    rng = np.random.default_rng(seed)
    mesh = MESHES[int(rng.integers(len(MESHES)))]
    operators = int(rng.integers(2, 6))
    of = problem(random_graph(seed, operators), mesh, mode="infer" if rng.random() < 0.2 else "train")
    ways = decided(of)
    return ways[int(rng.integers(len(ways)))], rng


def check(seed: int, plans: int) -> None:
    """Random legal plans, not only good ones."""
    of, rng = drawn(seed)
    oracle = Oracle(of)
    for _ in range(plans):
        chosen = oracle.legal(rng)
        if chosen is None:
            continue
        pcg = derive(of, oracle.assignment(chosen), oracle.moves).pcg
        check_returned(pcg, infer_shardings(pcg, of.mesh))
        cost = plan_cost(of, pcg)
        seconds, memory = oracle.price(chosen)
        assert cost.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-15)
        assert cost.memory_bytes == pytest.approx(memory)
        verify_equal(of.graph, pcg, of.mesh, gradients=of.train, trials=1)


@pytest.mark.parametrize("tens", range(6))
def test_any_plan_is_equal_to_its_source_and_costs_what_the_oracle_says(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        check(seed, plans=1)


@pytest.mark.slow
@pytest.mark.parametrize("hundreds", range(1, 11))
def test_many_plans(hundreds: int) -> None:
    for seed in range(100 * hundreds, 100 * hundreds + 100):
        check(seed, plans=3)
