"""Every strategy against every plan there is: two are exact, none is better than the best or over a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ir.errors import NoPlanFitsError
from ir.graph import Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.proof.exact import verify_equal
from pdv.emit.program import header
from pdv.pcg.plan_cost import plan_cost
from pdv.problem import Pins, Problem, Solution
from pdv.search.meshes import realize_solution, search_meshes
from pdv.search.strategies import STRATEGIES, Budget
from pdv.search.strategies.network import Flattened
from tests.pdv.search.oracle import Oracle, TooManyPlansError, decided
from tests.pdv.search.test_limits import SAMPLES
from tests.pdv.worlds import attention_block, mlp, problem, random_graph

EXACT = ("ilp", "dp")
SAMPLING = ("mcmc", "gradient", "reinforce", "bayes")
LITTLE = Budget(effort=0.03)
MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=2))


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    """Imports and oracles, so that no test is charged for them."""
    import torch
    from scipy.optimize import milp

    small(12)
    milp([1.0])
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).zero_grad()  # loads the compiler


@cache
def small(count: int) -> tuple[tuple[Problem, float], ...]:
    """Problems that can be enumerated, and what the best plan costs."""

    def draw() -> Iterator[tuple[Problem, float]]:
        for seed in range(1000):
            rng = np.random.default_rng(seed)
            mesh = MESHES[int(rng.integers(len(MESHES)))]
            of = problem(random_graph(seed, int(rng.integers(2, 5))), mesh, mode="infer" if seed % 5 == 0 else "train")
            try:
                yield of, min(Oracle(way, limit=50_000).fastest() for way in decided(of))
            except TooManyPlansError:
                continue

    return tuple(pair for pair, _ in zip(draw(), range(count), strict=False))


def legal(solution: Solution) -> Solution:
    """What is said of it is true: it computes what its source computes, at the price stated."""
    of = solution.problem
    pcg = realize_solution(solution).derived.pcg
    verify_equal(of.graph, pcg, of.mesh, gradients=of.train, trials=1)
    cost = plan_cost(replace(of, graph=solution.graph), pcg)
    assert (cost.seconds, cost.memory_bytes) == (solution.cost_s, solution.memory_bytes)
    assert solution.memory_bytes <= of.memory_limit
    assert 0.0 <= solution.lower_bound_s <= solution.cost_s * (1 + 1e-12)
    return solution


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("number", range(12))
def test_exact_ones_find_the_least_of_all_plans(name: str, number: int) -> None:
    of, best = small(12)[number]
    solution = legal(STRATEGIES[name](of, Budget()))
    assert solution.lower_bound_s <= best * (1 + 1e-9)
    if Flattened(decided(of)[0]).exact:
        assert solution.cost_s == pytest.approx(best, rel=1e-6 if name == "ilp" else 1e-9)
        assert solution.lower_bound_s == pytest.approx(best, rel=1e-6 if name == "ilp" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_ones_find_the_least_on_many(name: str) -> None:
    for of, best in small(300):
        if Flattened(decided(of)[0]).exact:
            assert STRATEGIES[name](of, Budget()).cost_s == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("number", range(4))
def test_others_find_legal_plans_step_by_step(name: str, number: int) -> None:
    of, best = small(12)[number]
    trace: list[tuple[float, float]] = []
    solution = legal(STRATEGIES[name](of, replace(LITTLE, on_best=lambda cpu_s, cost_s: trace.append((cpu_s, cost_s)))))
    assert solution.cost_s >= best * (1 - 1e-9)
    assert solution.lower_bound_s == 0.0, "it can certify nothing"
    times, costs = zip(*trace, strict=True)
    assert list(times) == sorted(times)
    assert list(costs) == sorted(set(costs), reverse=True)
    assert costs[-1] == solution.cost_s


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_seeds_give_equal_plans(name: str) -> None:
    of = problem(mlp(), Mesh.of(a=2, b=2))
    first, again = (STRATEGIES[name](of, replace(LITTLE, seed=7)) for _ in range(2))
    assert [*first.assignment.splits.values()] == [*again.assignment.splits.values()]
    assert [*first.assignment.storage.values()] == [*again.assignment.storage.values()]
    assert first.cost_s == again.cost_s


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_limits_are_kept(name: str) -> None:
    of = problem(mlp(batch=8, width=24, hidden=48), Mesh.of(a=2), pins=SAMPLES)
    free = STRATEGIES["dp"](of, Budget())
    solution = legal(STRATEGIES[name](replace(of, memory_limit=0.8 * free.memory_bytes), LITTLE))
    assert solution.cost_s > free.cost_s
    with pytest.raises(NoPlanFitsError) as refused:
        STRATEGIES[name](replace(of, memory_limit=0.01 * free.memory_bytes), LITTLE)
    assert refused.value.needed_bytes > 0.01 * free.memory_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_pins_are_kept(name: str) -> None:
    def cut(node: Node, axis: str, split: Split) -> bool:
        return split.loop is not None or node.op.name not in ("linear", "attention")

    of = problem(attention_block(batch=2, fused=False), Mesh.of(a=2), pins=Pins(split=cut, name="cut"))
    solution = legal(STRATEGIES[name](of, LITTLE))
    for node, splits in solution.assignment.splits.items():
        assert node.op.name not in ("linear", "attention") or splits[0].loop is not None


@pytest.mark.parametrize("name", STRATEGIES)
def test_pins_that_leave_nothing_are_an_error(name: str) -> None:
    pins = Pins(split=lambda node, axis, split: node.op.name != "add", name="nothing")
    with pytest.raises(NoPlanFitsError, match="nothing"):
        STRATEGIES[name](problem(mlp(), Mesh.of(a=2), pins=pins), LITTLE)


@pytest.mark.parametrize("name", SAMPLING)
def test_what_samples_reads_the_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def remembered(seed: int) -> np.random.Generator:
        seeds.append(seed)
        return np.random.Generator(np.random.PCG64(seed))

    monkeypatch.setattr("pdv.search.strategies.pricing.np.random.default_rng", remembered)
    search_meshes([problem(mlp(), Mesh.of(a=2))], budget_s=0.01, strategy=STRATEGIES[name], seed=7)
    assert seeds == [7]


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_time_gives_the_first_plan_met(name: str) -> None:
    of = problem(mlp(), Mesh.of(a=2))
    legal(STRATEGIES[name](of, Budget(seconds=0.0)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_meshes_are_searched_with_each(name: str) -> None:
    problems = [problem(mlp(), mesh) for mesh in (Mesh.of(a=2), Mesh.of(a=4))]
    found = search_meshes(problems, strategy=lambda of, budget: STRATEGIES[name](of, LITTLE))
    assert found.meshes == 2
    assert (found.lower_bound_s > 0) == (name not in SAMPLING)


@pytest.mark.parametrize("gap", [None, 0.1])
def test_the_emitted_header_says_what_is_known(gap: float | None) -> None:
    said = header._search({"gap": gap, "strategy": "mcmc"})
    assert "mcmc" in said
    assert ("no lower bound" in said) == (gap is None)
