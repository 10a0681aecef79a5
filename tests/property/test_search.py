"""The search against every plan there is: exact where there is room, and a true bound where memory is short.

``random_graph`` makes chains, residual sums, values with several readers, tied weights and outputs that are read on.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.verify import check_returned, infer_shardings
from pdv.pcg.derive import derive
from pdv.pcg.plan_cost import plan_cost
from pdv.problem import Problem, Solution
from pdv.search import priced_blocks, refine
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution, search_mesh
from pdv.search.solver.tables import TooWideError
from pdv.search.strategies import Budget
from pdv.search.strategies.backtrack import backtrack
from tests.pdv.search.oracle import Oracle, TooManyPlansError, decided
from tests.pdv.worlds import f32, problem, random_graph

ONE_AXIS = (Mesh.of(a=2), Mesh.of(a=3))
TWO_AXES = (Mesh.of(a=2, b=2), Mesh.of(a=2, b=3))


def drawn(seed: int, meshes: tuple[Mesh, ...], most: int) -> Problem:
    rng = np.random.default_rng(seed)
    mesh = meshes[int(rng.integers(len(meshes)))]
    mode = "infer" if rng.random() < 0.2 else "train"
    return problem(random_graph(seed, int(rng.integers(2, most + 1))), mesh, mode=mode)  # type: ignore[arg-type]


def check_exact(of: Problem) -> None:
    """With room to spare, the plan found costs what the cheapest of all plans costs, and the certificate says so.

    Where more than five want one value, the certificate may leave a gap, but never claims too much.
    """
    bests = []
    for way in decided(of):
        bests.append(Oracle(way).fastest())
        solver = ChainSolver(way)
        check_solved(bests[-1], solver.solve(), exact=solver.exact)
    if len(bests) > 1:  # the outputs leave in the best of all ways
        check_solved(min(bests), backtrack(of, Budget()), exact=solver.exact)


def check_solved(best: float, solution: Solution, *, exact: bool) -> None:
    """Against the cheapest of all plans."""
    assert solution.lower_bound_s <= best * (1 + 1e-9) <= solution.cost_s * (1 + 2e-9)
    if exact:
        assert solution.cost_s == pytest.approx(best, rel=1e-9)
        assert solution.lower_bound_s == pytest.approx(best, rel=1e-9)
    assert plan_cost(solution.problem, realize_solution(solution).derived.pcg).seconds == solution.cost_s


def check_limits(of: Problem, shares: tuple[float, ...]) -> None:
    """Between the least memory and that of the fastest plan: what is found fits, and the bound bounds."""
    for way in decided(of):
        check_limits_of_way(way, shares)


def check_limits_of_way(of: Problem, shares: tuple[float, ...]) -> None:
    """The same, where it is decided how outputs leave."""
    oracle = Oracle(of)
    seconds, memory = oracle.joint(oracle.factors)
    memory = memory + oracle.whole_bytes
    least = float(memory[np.isfinite(seconds)].min())
    most = float(memory.reshape(-1)[seconds.argmin()])
    for share in shares:
        limit = least + share * (most - least)
        best = float(np.where(memory <= limit, seconds, np.inf).min())
        solution = ChainSolver(replace(of, memory_limit=limit)).solve()
        assert solution.memory_bytes <= limit
        assert solution.lower_bound_s <= best * (1 + 1e-9)
        assert solution.cost_s >= best * (1 - 1e-9)
        assert solution.gap * solution.cost_s == pytest.approx(solution.cost_s - solution.lower_bound_s, abs=1e-15)
    with pytest.raises(NoPlanFitsError) as refused:
        ChainSolver(replace(of, memory_limit=least - 1)).solve()
    assert refused.value.needed_bytes == pytest.approx(least)


def every_plan(of: Problem, most: int) -> list[tuple[float, float]]:
    """(seconds, peak bytes) of all plans that there are."""
    ways = decided(of)
    if len(ways) > 1:
        return [plan for way in ways for plan in every_plan(way, most)]
    oracle = Oracle(of)
    keys = list(oracle.sizes)
    if math.prod(oracle.sizes.values()) > most:
        raise TooManyPlansError
    found = []
    for index in itertools.product(*(range(oracle.sizes[key]) for key in keys)):
        chosen = dict(zip(keys, index, strict=True))
        if math.isfinite(oracle.price(chosen)[0]):
            cost = plan_cost(of, derive(of, oracle.assignment(chosen), oracle.moves).pcg)
            found.append((cost.seconds, cost.peak_bytes))
    return found


def within(of: Problem, limit: float) -> tuple[float, float]:
    """(bound, seconds of the plan found); no plan takes for ever."""
    try:
        found = search_mesh(replace(of, memory_limit=limit))
    except NoPlanFitsError as error:
        return error.bound_s, math.inf
    assert found.cost.peak_bytes <= limit
    return found.lower_bound_s, found.cost.seconds


def check_peaks(seeds: range) -> int:
    """Under limits of the peak, working sets included: what is found fits, the bound holds, none is missed."""
    checked = 0
    for seed in seeds:
        of = drawn(seed, ONE_AXIS, 2)
        try:
            plans = every_plan(of, 1000)
        except TooManyPlansError:
            continue
        checked += 1
        peaks = sorted({peak for _, peak in plans})
        for limit in peaks[:: max(1, len(peaks) // 4)]:
            best = min(seconds for seconds, peak in plans if peak <= limit)
            bound_s, seconds = within(of, limit)
            assert bound_s <= best * (1 + 1e-9) <= seconds * (1 + 2e-9)
    return checked


@pytest.mark.parametrize("start", [50_000, pytest.param(51_000, marks=pytest.mark.slow)])
def test_the_bound_holds_for_peaks(start: int) -> None:
    assert check_peaks(range(start, start + (8 if start == 50_000 else 200))) >= 4


@pytest.mark.parametrize(
    ("limit", "seeds"), [(1, 3), (60, 3), *(pytest.param(n, 30, marks=pytest.mark.slow) for n in (1, 60))]
)
def test_bounds_that_split_every_table_end_in_the_optimum(
    limit: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables so small that bounds are loose, what is left out is never what the cheapest plan is made of."""
    monkeypatch.setattr(priced_blocks, "LIMIT", limit)
    monkeypatch.setattr(refine, "LIMIT", limit)
    monkeypatch.setattr(refine, "LARGEST", 64 * limit)
    checked = 0
    for seed in range(40, 40 + seeds):
        of = drawn(seed, TWO_AXES, 5)
        of = decided(of)[seed % len(decided(of))]
        try:
            best = Oracle(of).fastest()
            solution = ChainSolver(of).solve()
        except (TooManyPlansError, TooWideError):
            continue
        checked += 1
        assert solution.lower_bound_s <= best * (1 + 1e-9) <= solution.cost_s * (1 + 2e-9)
        if solution.gap < 1e-9:
            assert solution.cost_s == pytest.approx(best, rel=1e-9)
    assert checked >= seeds / 3


def each(seeds: range, meshes: tuple[Mesh, ...], most: int, limited: tuple[float, ...] = ()) -> int:
    """How many problems were small enough to check."""
    checked = 0
    for seed in seeds:
        of = drawn(seed, meshes, most)
        try:
            if limited:
                check_limits(of, limited)
            else:
                check_exact(of)
        except TooManyPlansError:
            continue
        checked += 1
    return checked


@pytest.mark.parametrize("start", range(0, 160, 20))
def test_the_search_is_exact(start: int) -> None:
    assert each(range(start, start + 20), ONE_AXIS, most=4) >= 15


@pytest.mark.parametrize("start", range(1000, 1050, 5))
def test_the_search_is_exact_on_two_axes(start: int) -> None:
    each(range(start, start + 5), TWO_AXES, most=2)


@pytest.mark.parametrize("start", range(2000, 2040, 10))
def test_with_little_memory_the_plan_fits_and_the_bound_holds(start: int) -> None:
    assert each(range(start, start + 10), ONE_AXIS, most=3, limited=(0.3,)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 11_000, 100))
def test_the_search_is_exact_on_many(start: int) -> None:
    assert each(range(start, start + 100), ONE_AXIS, most=5) >= 70


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20_000, 20_300, 50))
def test_the_search_is_exact_on_two_axes_on_many(start: int) -> None:
    each(range(start, start + 50), TWO_AXES, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(30_000, 30_300, 50))
def test_the_bound_holds_on_many(start: int) -> None:
    each(range(start, start + 50), ONE_AXIS, most=3, limited=(0.0, 0.2, 0.5, 0.9))


def fan(readers: int) -> Graph:
    """One value that many read: beyond five, prices are bounds."""
    k = Builder()
    h = k.linear(k.input("x", f32(6, 12)), k.param("w", f32(6, 12)))
    ends = [k.permute(h, perm=(1, 0)), k.relu(h), k.tanh(h), k.exp(h), k.sigmoid(h), k.silu(h)]
    return k.graph({f"y{i}": end for i, end in enumerate(ends[:readers])})


@pytest.mark.parametrize("mesh", [Mesh.of(a=2), Mesh.of(a=3)], ids=str)
def test_a_value_with_many_readers_has_a_true_bound(mesh: Mesh) -> None:
    of = problem(fan(6), mesh)
    best = Oracle(of).fastest()
    solution = ChainSolver(of).solve()
    assert solution.lower_bound_s <= best * (1 + 1e-9) <= solution.cost_s * (1 + 2e-9)
    check_limits(problem(fan(5), mesh), (0.5,))


@pytest.mark.parametrize(("readers", "mesh"), [(4, Mesh.of(a=2)), (4, Mesh.of(a=3)), (5, Mesh.of(a=3))], ids=str)
def test_a_value_with_four_or_five_readers_is_priced_exactly(readers: int, mesh: Mesh) -> None:
    of = problem(fan(readers), mesh)
    solver = ChainSolver(of)
    solution = solver.solve()
    best = Oracle(of).fastest()
    assert solver.exact
    assert solution.cost_s == pytest.approx(best, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(best, rel=1e-9)


def test_readers_that_can_do_nothing_are_no_plan() -> None:
    with pytest.raises(NoPlanFitsError):
        ChainSolver(replace(problem(fan(5), Mesh.of(a=2)), working_limit=1.0)).solve()


def test_what_is_found_is_equal_to_its_source() -> None:
    for seed in range(8):
        of = drawn(seed, (*ONE_AXIS, *TWO_AXES), most=5)
        pcg = realize_solution(backtrack(of, Budget())).derived.pcg
        check_returned(pcg, infer_shardings(pcg, of.mesh))
        verify_equal(of.graph, pcg, of.mesh, gradients=of.train)
