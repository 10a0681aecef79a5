"""Elimination against enumeration: tables, what it recovers, and marginals; split buckets bound from below."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pdv.search.solver import elimination, tables
from pdv.search.solver.elimination import eliminate
from pdv.search.solver.tables import Factor, Table

Assignment = tuple[int, ...]


def network(seed: int) -> tuple[list[Factor], dict[int, int]]:
    """A random sum of tables, some entries illegal."""
    rng = np.random.default_rng(seed)
    sizes = {variable: int(rng.integers(1, 5)) for variable in range(6)}
    factors = []
    for _ in range(9):
        scope = tuple(int(v) for v in rng.choice(6, size=int(rng.integers(1, 4)), replace=False))
        table = rng.random([sizes[v] for v in scope])
        factors.append(Factor(scope, np.where(rng.random(table.shape) < 0.1, np.inf, table)))
    return factors, sizes


def enumerated(factors: list[Factor], sizes: dict[int, int]) -> dict[Assignment, float]:
    """The sum at every assignment."""
    found = {}
    for values in itertools.product(*(range(size) for size in sizes.values())):
        found[values] = sum(float(f.table[tuple(values[v] for v in f.variables)]) for f in factors)
    return found


def least(costs: dict[Assignment, float], kept: dict[int, int]) -> float:
    """The minimum where some variables are fixed."""
    fitting = (cost for values, cost in costs.items() if all(values[v] == at for v, at in kept.items()))
    return min(fitting, default=math.inf)


@pytest.mark.parametrize("seed", range(30))
def test_elimination_is_the_minimum_over_all_assignments(seed: int) -> None:
    factors, sizes = network(seed)
    costs = enumerated(factors, sizes)
    found = eliminate(factors, sizes, (4, 1))
    assert found.exact
    for i, j in itertools.product(range(sizes[4]), range(sizes[1])):
        best = least(costs, {4: i, 1: j})
        assert found.table[i, j] == pytest.approx(best)
        if math.isfinite(best):
            values = found.recover({4: i, 1: j})
            assert costs[tuple(values[v] for v in range(6))] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("limit", [math.inf, 8.0])
def test_marginals_bound_every_value_and_are_exact_without_a_limit(seed: int, limit: float) -> None:
    factors, sizes = network(seed)
    context: Table = np.random.default_rng(seed).random((sizes[4], sizes[1]))
    costs = {values: cost + context[values[4], values[1]] for values, cost in enumerated(factors, sizes).items()}
    found = eliminate(factors, sizes, (4, 1), limit=limit)
    marginals = found.marginals(context)
    for variable, size in sizes.items():
        if variable in found.settled:
            continue
        for value in range(size):
            best = least(costs, {variable: value})
            assert marginals[variable][value] <= best + 1e-9
            if found.exact:
                assert marginals[variable][value] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("worth", [1, 8, 20])
def test_marginals_are_bounds_where_buckets_are_not_added_up(
    seed: int, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elimination, "WORTH_ADDING", worth)
    factors, sizes = network(seed)
    context: Table = np.random.default_rng(seed).random((sizes[4], sizes[1]))
    costs = {values: cost + context[values[4], values[1]] for values, cost in enumerated(factors, sizes).items()}
    marginals = eliminate(factors, sizes, (4, 1)).marginals(context)
    for variable, found in marginals.items():
        for value in range(sizes[variable]):
            assert found[value] <= least(costs, {variable: value}) + 1e-9


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    factors, sizes = network(1)
    plain = eliminate(factors, sizes, (4, 1))
    monkeypatch.setattr(elimination, "MOST_KNOWN_BYTES", 0)
    known = elimination.BucketCache()
    for _ in range(2):
        assert (eliminate(factors, sizes, (4, 1), known=known).table == plain.table).all()
    assert known.num_bytes == 0


def test_a_limit_splits_buckets() -> None:
    factors, sizes = (
        [Factor((0, v), np.random.default_rng(v).random((4, 4))) for v in range(1, 6)],
        dict.fromkeys(range(6), 4),
    )
    bound = eliminate(factors, sizes, (1, 2, 3, 4, 5), limit=64.0)
    exact = eliminate(factors, sizes, (1, 2, 3, 4, 5))
    assert exact.exact
    assert not bound.exact
    assert (bound.table <= exact.table + 1e-12).all()
    assert bound.table.min() > 0


def test_slices_give_the_same_minima(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sizes = {0: 5, 1: 7, 2: 3}
    factors = [Factor((0, 1), rng.random((5, 7))), Factor((2, 0), rng.random((3, 5))), Factor((0,), rng.random(5))]
    whole = eliminate(factors, sizes, (1, 2)).table
    for entries in (1, 21, 50):
        monkeypatch.setattr(tables, "SLICE_ENTRIES", entries)
        assert np.array_equal(eliminate(factors, sizes, (1, 2)).table, whole)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_illegal_for_certain_is_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    factors, sizes = network(seed)
    whole = eliminate(factors, sizes, (4, 1)).table
    monkeypatch.setattr(tables, "WORTH_LEAVING_OUT", 0)
    monkeypatch.setattr(tables, "SUMMANDS", 0)
    assert np.array_equal(eliminate(factors, sizes, (4, 1)).table, whole)


def test_without_values_of_a_neighbour_nothing_is_minimized() -> None:
    found = eliminate([Factor((0, 1), np.zeros((4, 0)))], {0: 4, 1: 0}, (1,))
    assert found.table.shape == (0,)


def test_choosing_what_is_next_takes_few_comparisons() -> None:
    class Counted(int):
        """A variable that counts how often it is compared with another."""

        asked = 0
        __hash__ = int.__hash__

        def __lt__(self, other: int) -> bool:
            Counted.asked += 1
            return int(self) < int(other)

    count = 500
    chain = [Counted(n) for n in range(count)]
    factors = [Factor(pair, np.eye(2)) for pair in itertools.pairwise(chain)]
    found = eliminate(factors, dict.fromkeys(chain, 2), (chain[0], chain[-1]))
    assert found.exact
    assert len(found.buckets) == count - 2
    assert Counted.asked < 50 * count
