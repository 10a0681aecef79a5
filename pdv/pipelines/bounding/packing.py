"""What a pipeline's step takes at least, given what runs of pieces take: each stage has to be in time, and in memory.

Of a step of T seconds each stage s has a capacity: by ``lines`` of an order of passes, T is no less than ``rest`` times
what the other stages take, and so many times what forward and backward take on s. A run of pieces that takes longer, or
that at some price of memory costs more than the capacity and the room of the stage allow, is no stage. The longest runs
that may be are taken one after the other; if these do not reach the end of the program, no step takes T or less.
Entry point: ``Packing``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pdv.pipelines.profile import Numbers
from pdv.problem.workload import ONE_EACH, Order
from pdv.schedule.order import Pipeline, orders

HALVINGS = 12  # of a step, between a lower and an upper bound: within 0.1 % of what lies between


class Line(NamedTuple):
    """A step takes ``rest`` x the other stages' seconds + ``forward`` x its + ``backward`` x its own at least."""

    rest: float
    forward: float
    backward: float


def lines(order: Order, stages: int, micro_batches: int, stage: int) -> tuple[Line, ...]:
    """Of a stage, in GPipe's order or in 1F1B's: paths of passes, each behind the one before.

    GPipe: the first micro-batch comes to the stage, all pass it forward, the last one goes on to the end, the first
    returns, all pass backward. 1F1B: the first micro-batch comes, and all pass; or it goes to the end and back first,
    and all follow but the forward passes that the stage had made ahead; or the same from the end, with backward passes.
    """
    if stages == 1:
        return (Line(0.0, micro_batches, micro_batches),)
    if order == "gpipe":
        return (Line(1.0, micro_batches, micro_batches),)
    ahead = min(stages - 1 - stage, micro_batches - 1)
    whole = float(micro_batches)
    return Line(0.0, whole, whole), Line(1.0, whole - ahead, whole), Line(1.0, whole, whole - ahead)


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
    if order != "1f1b":
        return m
    # before its own passes a stage waits for those of the stages before it, once each
    return p / (1.0 - (1.0 - 1.0 / m) ** p)


def held(pipeline: Pipeline, stage: int) -> float:
    """Micro-batches that a stage holds at once at least, once it has gradients of parameters.

    Of several stages on a rank, which hold them in turns, the mean over the times when most are held of the one that
    holds least.
    """
    m, order = pipeline.micro_batches, pipeline.order
    if order in ONE_EACH and pipeline.virtual == 1:
        return min(pipeline.stages - stage if order == "1f1b" else m, m - 1)
    return _in_turns(pipeline, stage) if order == "interleaved" else 1.0


@lru_cache(maxsize=256)
def _in_turns(pipeline: Pipeline, stage: int) -> float:
    here = pipeline.layout.chunks_on(stage)
    now, found, begun = np.zeros(len(here)), [np.zeros(len(here))], False
    for step in orders(pipeline)[stage]:
        begun = begun or step.backward
        now[here.index(step.chunk)] += -1 if step.backward else 1
        if begun:
            found.append(now.copy())
    most = max(one.sum() for one in found)
    return float(np.mean([one for one in found if one.sum() == most], axis=0).min())


@dataclass(frozen=True)
class Packing:
    """One way to run some stages.

    Attributes:
        runs: by price of memory, [start, stop] seconds of one micro-batch and bytes priced of runs of pieces, at least.
        forward, backward: [pieces] seconds at least.
        stages: by stage, its lines and the bytes that it has, counted as prices do.
    """

    runs: Mapping[float, Numbers]
    forward: Numbers
    backward: Numbers
    stages: Sequence[tuple[Sequence[Line], float]]

    @cached_property
    def _whole_s(self) -> float:
        """Of all stages together, one micro-batch."""
        return float(self.runs[0.0][0, -1])

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
        """Whether runs that may be stages of such a step reach the end of the program."""
        count, start = len(self.forward), 0
        for of_stage, room in self.stages:
            start = self._reach(start, step_s, of_stage, room)
            if start == count:
                return True
        return False

    def _reach(self, start: int, step_s: float, of_stage: Sequence[Line], room: float) -> int:
        """Where the longest run that may be a stage ends; every part of such a run may be one, too."""
        free = self.runs[0.0][start, start:]
        ways = self._sums[0][start:] - self._sums[0][start], self._sums[1][start:] - self._sums[1][start]
        capacity = math.inf
        may = np.ones(len(free), dtype=bool)
        for rest, forward, backward in of_stage:
            both = min(forward, backward) - rest
            left = step_s - rest * self._whole_s
            beside = (forward - both - rest) * ways[0] + (backward - both - rest) * ways[1]
            may &= both * free + beside <= left
            capacity = min(capacity, left / both) if both > 0 else capacity
        for price, runs in self.runs.items():
            if price and math.isfinite(room):
                may &= runs[start, start:] <= capacity + price * room
        return start + int(may.nonzero()[0].max(initial=0))

    @cached_property
    def _sums(self) -> tuple[Numbers, Numbers]:
        """Forward and backward of all pieces before each border."""
        return np.append(0.0, np.cumsum(self.forward)), np.append(0.0, np.cumsum(self.backward))
