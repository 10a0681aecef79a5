"""What a pipeline's step takes at least, given what runs of pieces take: each stage has to be in time, and in memory.

By ``lines`` of an order of passes, a step is no less than ``rest`` times what the other stages take, and so many times
what forward and backward take on a stage; a run of pieces that costs more at some price of memory than the stage has
room for takes the longer for it. Of all cuts the one counts whose slowest stage is fastest. A step of interleaved ones
is one in which the ranks may have as many pieces as there are. Entry points: ``Packing`` and ``Turns``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pdv.pipelines.cuts import least_over_cuts
from pdv.pipelines.profile import Numbers, run_sums
from pdv.problem.workload import AHEAD, SEARCHED
from pdv.schedule.lines import Line
from pdv.schedule.order import Pipeline, orders

ROUNDING = 1e-9
SETTLED = 3  # times the stages, micro-batches: interleaved, each group of as many as there are stages does alike
HALVINGS = 12  # of a step, between a lower and an upper bound: within 0.1 % of what lies between


def rounds(pipeline: Pipeline) -> float:
    """How often a stage runs forward and backward in the time of a step at least, were all stages equally long.

    In GPipe's order, and 1F1B's where m > p, m + p - 1: there are paths of passes, each behind the one before, that go
    once through every stage and spend m - 1 rounds more on stages at will; their mean has (m + p - 1) / p of each.
    Interleaved, v on each rank: for each rank and turn k there is a path that comes with the first micro-batch to the
    rank's k-th stage, has all of the rank's passes from there on but for the first of each p in the turns before, and
    leaves alike; over ranks and turns its mean is (m + (p - 1 - j) / v) / p of what rank j has. As no rank has more
    than a step's m-th part, the step is least where the last ranks have that.
    """
    p, m, order = pipeline.stages, pipeline.micro_batches, pipeline.order
    if order == "gpipe" or (order == "1f1b" and m > p) or p == 1:
        return m + p - 1
    if order == "interleaved" and m % p == 0:
        return (m + (p - 1) / pipeline.virtual) / (1.0 + (p - 1) / (2 * pipeline.virtual * m))
    if order not in AHEAD:
        return m
    # before its own passes a stage waits for those of the stages before it, once each
    return p / (1.0 - (1.0 - 1.0 / m) ** p)


def held(pipeline: Pipeline, stage: int) -> float:
    """Micro-batches that a stage holds at once at least, once it has gradients of parameters.

    Of several stages on a rank, which hold them in turns, what the one that holds least holds at the time when that is
    most.
    """
    m, order = pipeline.micro_batches, pipeline.order
    if order in SEARCHED and pipeline.virtual == 1:
        return min(AHEAD[order] * (pipeline.stages - 1 - stage) + 1 if order in AHEAD else m, m - 1)
    if order != "interleaved":
        return 1.0
    return max(float(min(each)) for each in _in_turns(_settled(pipeline), stage))


class Heights(NamedTuple):
    """Of what stages of a rank hold at one time, as shares of ``flight`` micro-batches: the least, and all beyond it.

    A stage has a piece at least, so a rank holds ``least`` of each piece that it has, and of one a stage the rest.
    """

    least: float
    beyond: float


def heights(pipeline: Pipeline, stage: int, flight: float) -> list[Heights]:
    """At times when the stage of a rank that holds least holds most, and when all of them do."""
    found = [[min(1.0, count / flight) for count in each] for each in _in_turns(_settled(pipeline), stage)]
    return [Heights(min(each), sum(each) - len(each) * min(each)) for each in found]


def _settled(pipeline: Pipeline) -> Pipeline:
    """With fewer micro-batches, of which no stage holds more, nor at any time less."""
    m = pipeline.micro_batches
    return replace(pipeline, micro_batches=m if m % pipeline.stages else min(m, SETTLED * pipeline.stages))


@lru_cache(maxsize=1 << 12)
def _in_turns(pipeline: Pipeline, stage: int) -> tuple[tuple[int, ...], ...]:
    """By stage of a rank, micro-batches held: when the least of these is most, and when their sum is."""
    here = pipeline.layout.chunks_on(stage)
    now, begun = [0] * len(here), False
    least = most = tuple(now)
    for step in orders(pipeline)[stage]:
        begun = begun or step.backward
        now[here.index(step.chunk)] += -1 if step.backward else 1
        if begun:
            least, most = max(least, tuple(now), key=min), max(most, tuple(now), key=sum)
    return least, most


@dataclass(frozen=True, eq=False)
class Pieces:
    """What pieces take at least on the devices of a stage.

    Attributes:
        runs: by price of memory, [start, stop] seconds of one micro-batch and bytes priced of runs of pieces.
        forward, backward: [pieces] seconds.
    """

    runs: Mapping[float, Numbers]
    forward: Numbers
    backward: Numbers

    def again(self, forward: Numbers) -> Pieces:
        """With so much of forward once more in backward."""
        runs = {price: each + sum_pieces(forward) for price, each in self.runs.items()}
        return Pieces(runs, self.forward, self.backward + forward)

    @cached_property
    def each(self) -> dict[float, Numbers]:
        """By price, [pieces] each by itself."""
        return {price: np.diagonal(runs[:, 1:]) for price, runs in self.runs.items()}

    @cached_property
    def passes(self) -> tuple[Numbers, Numbers]:
        """[start, stop] forward and backward of runs, each piece by itself."""
        return sum_pieces(self.forward), sum_pieces(self.backward)

    @cached_property
    def least(self) -> dict[float, Numbers]:
        """By price, the least of 1, 2, … of the pieces between the first and the last."""
        return {price: np.cumsum(np.sort(own[1:-1])) for price, own in self.each.items()}


def sum_pieces(each: Numbers) -> Numbers:
    """[start, stop] sums over runs of pieces; nothing of what stops before it starts."""
    return np.asarray(np.maximum(run_sums(each)[:-1], 0.0))


def slowest_s(runs: Sequence[Numbers]) -> float:
    """Seconds of the slowest stage, cut so that it is fastest; by stage, [start, stop] of runs of pieces."""
    return least_over_cuts([_of_some(one) for one in runs], np.maximum)


def _of_some(runs: Numbers) -> Numbers:
    """The same, of which none is empty: each stage has a piece at least."""
    return np.where(np.tri(*runs.shape) > 0, np.inf, runs)


@dataclass(frozen=True)
class Packing:
    """One way to run some stages.

    Attributes:
        stages: of each what pieces take, its lines, and the bytes that it has, as prices count.
        sends_s: seconds of all sends of one micro-batch, there and back, which who waits for all stages waits for, too.
    """

    stages: Sequence[tuple[Pieces, Sequence[Line], float]]
    sends_s: float = 0.0

    @cached_property
    def whole_s(self) -> float:
        """Of all stages together, one micro-batch, and its sends."""
        return self._stages_s + self.sends_s

    @cached_property
    def _stages_s(self) -> float:
        kinds = dict.fromkeys(pieces for pieces, *_ in self.stages)
        if len(kinds) == 1:
            return float(self.stages[0][0].runs[0.0][0, -1])
        return least_over_cuts([_of_some(pieces.runs[0.0]) for pieces, *_ in self.stages], np.add)

    @cached_property
    def least_s(self) -> float:
        """Seconds of a step: of its slowest stage, cut so that this is fastest."""
        return slowest_s([self._need_s(stage) for stage in range(len(self.stages))])

    def _need_s(self, stage: int) -> Numbers:
        """[start, stop] seconds of a step in which this stage is a run of pieces."""
        pieces, of_stage, room = self.stages[stage]
        within = [runs - price * room for price, runs in pieces.runs.items() if price and math.isfinite(room)]
        taken, found = np.maximum.reduce([pieces.runs[0.0], *within]), np.zeros_like(pieces.runs[0.0])
        for rest, forward, backward, behind in of_stage:
            both = min(forward, backward) - rest
            beside = (forward - both - rest) * pieces.passes[0] + (backward - both - rest) * pieces.passes[1]
            beside = beside + rest * self.whole_s + behind * self._behind_s[stage]
            found = np.maximum(found, both * (taken if both > 0 else pieces.runs[0.0]) + beside)
        return found

    @cached_property
    def _behind_s(self) -> list[Numbers]:
        """By stage, of all pieces behind each border, each by itself, on whichever stage takes least from there on."""
        least = np.full(len(self.stages[0][0].forward), math.inf)
        found = []
        for pieces, *_ in reversed(self.stages):
            least = np.minimum(least, pieces.each[0.0])
            found.append(np.append(np.cumsum(least[::-1])[::-1], 0.0))
        return found[::-1]


@dataclass(frozen=True)
class Turns:
    """Interleaved stages: a rank has several runs of pieces, the first rank the first piece, the last one the last.

    Whatever runs a rank has, its micro-batches take what its pieces take each for itself, and wait until the first one
    has come through the ranks before, each of which has one piece at least there. How many pieces a rank may have is
    counted; if all ranks together have fewer than there are, no step takes so long.

    A piece of which a share h of ``room`` is held takes no less than h of what it costs at a price of memory, and the
    rest of what it takes where memory is free: costs are concave in prices.

    Attributes:
        ranks: of each what pieces take, and how much of them it holds at some times.
        room: the bytes that a rank has for all that it holds, as prices count.
        micro_batches: of a step.
    """

    ranks: Sequence[tuple[Pieces, Sequence[Heights]]]
    room: float
    micro_batches: int

    def least_s(self, least_s: float, most_s: float) -> float:
        """Seconds of a step at least, between the two; at most ``most_s``."""
        if not self.fits(most_s):
            return most_s
        if self.fits(least_s):
            return least_s
        for _ in range(HALVINGS):
            middle = (least_s + most_s) / 2
            least_s, most_s = (least_s, middle) if self.fits(middle) else (middle, most_s)
        return least_s

    def fits(self, step_s: float) -> bool:
        """Whether the ranks may have all pieces between the first and the last; if so, within a longer step, too."""
        wanted, found = len(self.ranks[0][0].forward) - 2, 0
        for come_s, ways in self._left:
            seconds = (step_s - come_s) / self.micro_batches
            found += min(_counted(least, seconds + more) for least, more in ways)
        return found >= wanted

    @cached_property
    def _left(self) -> list[tuple[float, list[tuple[Numbers, float]]]]:
        """By rank, when it begins; by price, what 1, 2, … pieces cost, and what it has beside a micro-batch's time."""
        last = len(self.ranks) - 1
        return [
            (self._come_s[rank], self._ways(pieces, held, [0] * (rank == 0) + [-1] * (rank == last)))
            for rank, (pieces, held) in enumerate(self.ranks)
        ]

    def _ways(self, pieces: Pieces, held: Sequence[Heights], ends: Sequence[int]) -> list[tuple[Numbers, float]]:
        """Of one rank, which surely has the pieces at ``ends``."""
        free = pieces.each[0.0]
        found = [(pieces.least[0.0], -sum(float(free[end]) for end in ends))]
        for price, each in pieces.each.items():
            added = each - free
            for one in held if price and math.isfinite(self.room) else ():
                costs = free + one.least * added
                beyond = one.beyond * min([*added[1:-1].tolist(), *(float(added[end]) for end in ends)], default=0.0)
                more = price * self.room - beyond - sum(float(costs[end]) for end in ends)
                found.append((np.cumsum(np.sort(costs[1:-1])), more))
        return found

    @cached_property
    def _come_s(self) -> list[float]:
        """By rank, what the first micro-batch takes of the ranks before, to come and to leave."""
        found = [0.0]
        for rank, (pieces, _) in enumerate(self.ranks[:-1]):
            own = pieces.each[0.0]
            least = float(own[0]) if rank == 0 else float(own[1:-1].min(initial=math.inf)) if len(own) > 2 else 0.0
            found.append(found[-1] + least)
        return found


def _counted(least: Numbers, left: float) -> int:
    """How many pieces a rank may have; negative where it may not even have the piece that it surely has."""
    return int(np.searchsorted(least, left * (1 + ROUNDING), side="right")) - (left < 0.0)
