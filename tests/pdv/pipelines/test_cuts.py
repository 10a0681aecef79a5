"""Cuts of pipelines: exact against all cuts there are, within memory."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from pdv.cluster import Link
from pdv.pipelines.cuts import cut_pieces, held_bytes, leaning_cuts, level, run_costs, sooner_cuts, within
from pdv.pipelines.profile import Numbers, Profile, run_sums


def stage_costs(
    own: Profile,
    *,
    micro_batches: int,
    in_flight: float,
    limit: float,
    recompute: bool,
    before: Link | None = None,
    behind: Link | None = None,
) -> Numbers:
    seconds = run_costs(own, micro_batches=micro_batches, recompute=recompute, before=before, behind=behind)
    return within(seconds, own, in_flight=in_flight, limit=limit, recompute=recompute)


def chain(count: int, seed: int) -> Profile:
    """Pieces of random costs; the last one passes nothing on."""
    draw = random.Random(seed)
    rows = [np.array([draw.choice((1.0, 2.0, 5.0, 9.0)) for _ in range(count)]) for _ in range(9)]
    rows[-1][-1] = 0.0
    return Profile(*rows)


def best_by_trying(costs: list[Numbers]) -> float:
    """The least slowest stage over all cuts."""
    count = costs[0].shape[0] - 1
    found = math.inf
    for inner in itertools.combinations(range(1, count), len(costs) - 1):
        runs = itertools.pairwise((0, *inner, count))
        found = min(found, max(float(one[run]) for one, run in zip(costs, runs, strict=True)))
    return found


def test_every_stage_has_parameters() -> None:
    """An optimizer of none is refused by torch."""
    own = chain(4, 0)
    own.optimizer_s[3] = 0.0
    cost = stage_costs(own, micro_batches=4, in_flight=1, limit=1e9, recompute=False)
    assert math.isinf(cost[3, 4])
    assert np.isfinite(cost[2, 4])
    assert cut_pieces([cost] * 4) is None


@pytest.mark.parametrize("seed", range(24))
def test_no_cut_has_a_faster_slowest_stage(seed: int) -> None:
    """Stages of different speeds and limits."""
    draw = random.Random(seed)
    stages, count = draw.randint(1, 4), draw.randint(4, 8)
    own, link = chain(count, seed), Link("l", draw.choice((0.3, 1.0, 1e9)), 0.0)
    slower = own.map(lambda numbers: numbers * 1.5)
    costs = [
        stage_costs(
            draw.choice((own, slower)),
            micro_batches=4,
            in_flight=stages - stage,
            limit=draw.choice((60.0, 90.0, 1e9)),
            recompute=draw.random() < 0.3,
            before=link if stage else None,
            behind=link if stage < stages - 1 else None,
        )
        for stage in range(stages)
    ]
    sizes, best = cut_pieces(costs), best_by_trying(costs)
    if sizes is None:
        assert math.isinf(best)
        return
    ends = [0, *itertools.accumulate(sizes)]
    assert ends[-1] == count
    assert min(sizes) > 0
    slowest = max(float(one[run]) for one, run in zip(costs, itertools.pairwise(ends), strict=True))
    assert slowest == pytest.approx(best)


@pytest.mark.parametrize("seed", range(12))
def test_cuts_that_fill_sooner_are_the_soonest_of_what_is_as_slow(seed: int) -> None:
    """Of unlike stages, against all cuts whose slowest stage takes no more."""
    draw = random.Random(seed)
    stages, count = draw.randint(2, 4), 7
    speeds = [draw.choice((0.2, 1.0, 3.0)) for _ in range(stages)]
    owns = [chain(count, seed).map(lambda numbers, times=speed: numbers * times) for speed in speeds]
    costs = [stage_costs(own, micro_batches=2, in_flight=1, limit=1e9, recompute=False) for own in owns]
    passes = [run_sums(own.forward_s + own.backward_s) for own in owns]
    every = [[*itertools.pairwise((0, *inner, count))] for inner in itertools.combinations(range(1, count), stages - 1)]

    def slowest(runs: list[tuple[int, int]]) -> float:
        return max(float(one[run]) for one, run in zip(costs, runs, strict=True))

    def passed(runs: list[tuple[int, int]]) -> float:
        return sum(float(one[run]) for one, run in zip(passes, runs, strict=True))

    for sizes in sooner_cuts(costs, passes, min(map(slowest, every))):
        own = [*itertools.pairwise([0, *itertools.accumulate(sizes)])]
        assert all(passed(own) <= passed(other) + 1e-9 for other in every if slowest(other) <= slowest(own))


def test_a_cut_keeps_every_stage_within_its_limit() -> None:
    """Where the fastest cut would not fit, another is taken; where none fits, none."""
    own, flight = chain(8, 1), (3, 2, 1)
    every = [(a, b - a, 8 - b) for a, b in itertools.combinations(range(1, 8), 2)]
    limit = min(max(_held(own, sizes, flight)) for sizes in every)
    fastest = cut_pieces(_costs(own, flight, 1e9))
    assert fastest is not None
    assert max(_held(own, fastest, flight)) > limit
    assert cut_pieces(_costs(own, flight, limit - 0.5)) is None
    fitting = cut_pieces(_costs(own, flight, limit))
    assert fitting is not None
    assert max(_held(own, fitting, flight)) <= limit


def _costs(own: Profile, flight: tuple[int, ...], limit: float) -> list[Numbers]:
    return [stage_costs(own, micro_batches=4, in_flight=n, limit=limit, recompute=False) for n in flight]


def _held(own: Profile, sizes: tuple[int, ...], flight: tuple[int, ...]) -> list[float]:
    runs = itertools.pairwise([0, *itertools.accumulate(sizes)])
    return [float(held_bytes(own, in_flight=n, recompute=False)[run]) for n, run in zip(flight, runs, strict=True)]


def test_equal_pieces_are_spread_evenly() -> None:
    """Of equally fast cuts the most even."""
    own = Profile(*[np.ones(8)] * 9)
    sizes = cut_pieces(_costs(own, (1, 1, 1), 1e9))
    assert sizes is not None
    assert sorted(sizes) == [2, 3, 3]


def spread(costs: list[Numbers], sizes: tuple[int, ...], place: list[int]) -> list[float]:
    """Seconds of each rank."""
    ends, totals = [0, *itertools.accumulate(sizes)], [0.0] * (max(place) + 1)
    for chunk, rank in enumerate(place):
        totals[rank] += float(costs[chunk][ends[chunk], ends[chunk + 1]])
    return totals


def test_equal_layers_beside_a_long_end_are_shared_by_ranks() -> None:
    """32 layers and a head that takes as long as two, on two ranks with eight chunks each."""
    each = np.array([0.1, *[1.0] * 32, 2.0])
    costs, place = [np.where(np.tri(35) > 0, np.inf, run_sums(each))] * 16, [0, 1] * 8
    even = (3, 2, 2, 2, 2, 3, *[2] * 10)
    assert spread(costs, even, place) == pytest.approx([16.1, 18.0])
    assert spread(costs, level(costs, even, place), place) == pytest.approx([17.1, 17.0])


@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_never_less_alike_when_level(seed: int) -> None:
    own, ranks = chain(14, seed), 3
    costs = [stage_costs(own, micro_batches=4, in_flight=1, limit=1e9, recompute=False)] * 6
    place = [chunk % ranks for chunk in range(6)]
    sizes = cut_pieces(costs)
    assert sizes is not None
    levelled = level(costs, sizes, place)
    assert sum(levelled) == 14
    assert min(levelled) >= 1
    assert max(spread(costs, levelled, place)) <= max(spread(costs, sizes, place)) * (1 + 1e-9)


def test_of_equally_even_cuts_the_later_or_the_earlier_stages_have_more() -> None:
    costs = [np.where(np.tri(11) > 0, np.inf, run_sums(np.ones(10)))] * 4
    assert [*leaning_cuts(costs, (1.0, -1.0))] == [(2, 2, 3, 3), (3, 3, 2, 2)]
