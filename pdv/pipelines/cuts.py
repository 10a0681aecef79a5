"""Where a pipeline is cut: runs of pieces whose slowest stage is as fast as can be, within every stage's memory.

An exact dynamic program over (stages, pieces). Entry points: ``run_costs``, ``within`` and ``cut_pieces``; where stages
differ, ``sooner_cuts``, too, and where ranks have several, ``leaning_cuts`` and ``level``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from pdv.cluster import Link
from pdv.pipelines.profile import Numbers, Profile

ROUNDING = 1e-9
# Times the fastest slowest stage, that one may take to fill a pipeline sooner.
SLOWER = (1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)
LEANING = 1e-3  # of a stage's time squared, by which the last is preferred to the first
LEVELLED = 16  # the power of what ranks take, whose sum is made less: near the most of them, but it tells all apart

Starts = np.ndarray[tuple[int], np.dtype[np.int64]]


def run_costs(
    profile: Profile, *, micro_batches: int, recompute: bool, before: Link | None = None, behind: Link | None = None
) -> Numbers:
    """[start, stop] seconds of a step that a stage takes for a run of pieces, whatever it holds.

    Infinite for none, and for a run without parameters (its rank's optimizer would have none).

    Args:
        profile: of the stage's devices.
        micro_batches: of a step.
        recompute: whether only the pieces' inputs are kept, and forward runs again in backward.
        before: the link from the stage before; sends over one link take turns.
        behind: the link to the next stage.
    """
    runs, passed = profile.runs, np.append(0.0, profile.sent_bytes)
    each = runs.forward_s * (1 + recompute) + runs.backward_s
    slower = np.maximum(each, np.maximum(_send_s(before, passed)[:, None], _send_s(behind, passed)[None, :]))
    seconds = micro_batches * slower + once_seconds(profile)
    starts, stops = np.indices(seconds.shape)
    return np.where((starts < stops) & (runs.optimizer_s > 0.0), seconds, np.inf)


def within(seconds: Numbers, profile: Profile, *, in_flight: float, limit: float, recompute: bool) -> Numbers:
    """[start, stop] the same, infinite for what holds more than ``limit`` bytes on one of the stage's devices.

    ``in_flight``: micro-batches whose activations the stage holds at once.
    """
    if math.isinf(limit):
        return seconds
    return np.where(held_bytes(profile, in_flight=in_flight, recompute=recompute) <= limit, seconds, np.inf)


def held_bytes(profile: Profile, *, in_flight: float, recompute: bool) -> Numbers:
    """[start, stop] bytes that a device of a stage holds at most, as far as values alone say."""
    resting = profile.runs.resting_bytes
    if not recompute:
        return np.asarray(resting + in_flight * profile.runs.kept_bytes)
    return np.asarray(resting + in_flight * profile.entering_runs + profile.largest_kept)


def cut_pieces(costs: Sequence[Numbers]) -> tuple[int, ...] | None:
    """How many pieces each stage has, so that the slowest is fastest, of equals the most even; None if nothing fits.

    ``costs``: by stage, [start, stop] seconds of a run of pieces.
    """
    return next(leaning_cuts(costs, (0.0,)), None)


def leaning_cuts(costs: Sequence[Numbers], leanings: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """The same, of equally even ones that whose later stages (of a negative leaning: earlier ones) have more."""
    slowest = least_over_cuts(costs, np.maximum)
    if not np.isfinite(slowest):
        return
    squares: list[Numbers] = []
    for before, one in zip((None, *costs), costs, strict=False):  # most are as the one before
        again = np.where(one <= slowest * (1 + ROUNDING), one, np.inf) ** 2 if one is not before else squares[-1]
        squares.append(again)
    for leaning in leanings:
        weights = np.linspace(1.0, 1.0 - leaning * LEANING, len(costs))
        leant = [one * weight for one, weight in zip(squares, weights, strict=True)] if leaning else squares
        yield _sizes(_best(leant, np.add)[1])


def sooner_cuts(costs: Sequence[Numbers], passes: Sequence[Numbers], slowest: float) -> Iterator[tuple[int, ...]]:
    """Cuts that one micro-batch passes soonest, of those whose slowest stage takes so many times what it must.

    Stages that are alike take the same in all, however they are cut; of unlike ones a step of few micro-batches may be
    faster with a slower stage. ``costs`` as of ``cut_pieces``; ``passes``: by stage, [start, stop] seconds of one
    micro-batch, and of what is sent behind it; ``slowest``: what the slowest stage must take.
    """
    for times in SLOWER:
        within = [np.where(one <= times * slowest, each, np.inf) for one, each in zip(costs, passes, strict=True)]
        yield _sizes(_best(within, np.add)[1])


def level(costs: Sequence[Numbers], sizes: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """A cut in which ranks that have several chunks are more alike in all: pieces go over borders while that helps.

    A step takes no less than the rank that takes most, whatever its single chunks do. ``place``: by chunk, its rank.
    """
    ends, totals = [0, *accumulate(sizes)], [0.0] * (max(place) + 1)
    for chunk, rank in enumerate(place):
        totals[rank] += float(costs[chunk][ends[chunk], ends[chunk + 1]])
    fair_s = sum(totals) / len(totals)

    def gained(border: int, to: int) -> float:
        """By how much ranks are more alike once a border lies elsewhere; negative if less."""
        one, other = place[border - 1], place[border]
        first, start, end, last = costs[border - 1], ends[border - 1], ends[border], ends[border + 1]
        if one == other or not start < to < last:
            return 0.0
        more = float(first[start, to] - first[start, end]), float(costs[border][to, last] - costs[border][end, last])
        before, after = (totals[one], totals[other]), (totals[one] + more[0], totals[other] + more[1])
        return sum((x / fair_s) ** LEVELLED for x in before) - sum((x / fair_s) ** LEVELLED for x in after)

    moves = [(border, by) for border in range(1, len(sizes)) for by in (-1, 1)]
    while moves:
        most, (border, by) = max((gained(border, ends[border] + by), (border, by)) for border, by in moves)
        if not most > ROUNDING:
            break
        for chunk, run in (
            (border - 1, (ends[border - 1], ends[border] + by)),
            (border, (ends[border] + by, ends[border + 1])),
        ):
            totals[place[chunk]] += float(costs[chunk][run] - costs[chunk][ends[chunk], ends[chunk + 1]])
        ends[border] += by
    return tuple(stop - start for start, stop in pairwise(ends))


def slowest_of(costs: Sequence[Numbers], sizes: Sequence[int]) -> float:
    """Seconds of the slowest stage of a cut."""
    runs = pairwise([0, *accumulate(sizes)])
    return max(float(one[run]) for one, run in zip(costs, runs, strict=True))


def _sizes(starts_of: Sequence[Starts]) -> tuple[int, ...]:
    """How many pieces each stage has, given where each starts if it stops before a piece."""
    ends = [len(starts_of[0]) - 1]
    for starts in reversed(starts_of):
        ends.append(int(starts[ends[-1]]))
    return tuple(stop - start for start, stop in pairwise(reversed(ends)))


def least_over_cuts(costs: Sequence[Numbers], join: np.ufunc) -> float:
    """The least of all pieces over all stages, by their ``join``, of [start, stop] costs of each stage."""
    return _best(costs, join)[0]


def _best(costs: Sequence[Numbers], join: np.ufunc) -> tuple[float, list[Starts]]:
    """The least of all pieces over all stages; by stage, where it starts if it stops before a piece."""
    before = np.full(costs[0].shape[1], np.inf)
    before[0] = 0.0
    starts = []
    for one in costs:
        offers = join(before[: len(one), None], one)  # no run starts at the end
        starts.append(offers.argmin(axis=0))
        before = offers.min(axis=0)
    return float(before[-1]), starts


def _send_s(link: Link | None, passed: Numbers) -> Numbers:
    """[borders] of what passes there."""
    return np.zeros_like(passed) if link is None else passed / link.bandwidth_bytes_per_s


def once_seconds(profile: Profile) -> Numbers:
    """[start, stop] what follows the last backward pass: the optimizer, and sums that it could not hide."""
    runs = profile.runs
    return np.asarray(runs.optimizer_s + np.maximum(0.0, runs.sums_s - runs.backward_s))
