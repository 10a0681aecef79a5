"""Passes through a pipeline whose processes share cores: what a waiting stage leaves, the others take.

As ``pipeline.compose``, but in the order of time: how fast a pass runs depends on those beside it. Every process gets
its share of a core while all compute, and more, up to a whole one, while some wait, as operating systems' schedulers
have it. A process with a quota has that much more only as long as what it left of its share before lasts (a token
bucket; Linux counts anew every 100 ms, cgroup v2's ``cpu.max``). Entry point: ``compose_shared``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdv.cluster import Cluster
from pdv.schedule.order import Pipeline
from pdv.simulate.engine.pipeline import STEADY, Durations, OrderedPass, Sends, Timeline, by_way, end_pass, sequence
from pdv.simulate.engine.task import picoseconds

HALVINGS = 16  # of the range in which the common factor of all speeds is looked for
PERIOD = picoseconds(0.1)  # in which a quota is used up or lost: the kernel's own choice, and containers'


class Busy(NamedTuple):
    """Of a chunk's passes: the part of each one's time that is spent on a core."""

    forward: float
    backward: float
    last: float

    def of(self, way: int) -> float:
        """Of a pass, by ``OrderedPass.way``: either half of backward as all of it."""
        return self[(0, 1, 2, 1, 1, 2)[way]]


@dataclass(frozen=True)
class Cores:
    """By stage, the share of a core that each of its processes has while all compute; stages have equally many.

    quota: whether a process has more only for what it left before.
    """

    shares: tuple[float, ...]
    quota: bool = False

    @classmethod
    def of(cls, cluster: Cluster, stages: int) -> Cores | None:
        """None if every process has a device of its own, or keeps what it leaves of one from the others."""
        quota = cluster.has_quotas
        if stages == 1 or not (quota or cluster.shares_cores):
            return None
        size = cluster.num_devices // stages
        of_stage = (range(stage * size, (stage + 1) * size) for stage in range(stages))
        return cls(tuple(min(cluster.device_of(rank).share for rank in ranks) for ranks in of_stage), quota)

    def speeds(self, busy: Mapping[int, float], spent: Collection[int] = ()) -> dict[int, float]:
        """By stage that runs, how much faster its kernels are than while all compute.

        busy: by stage that runs, the part of its time on a core. spent: stages that have no more than their shares.
        """
        room = sum(self.shares)
        most = {stage: 1.0 if stage in spent else 1.0 / self.shares[stage] for stage in busy}
        low, high = 1.0, max(most.values(), default=1.0)
        if self._taken(busy, most, high) > room:
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if self._taken(busy, most, middle) > room else (middle, high)
            high = low
        return {stage: min(high, own) for stage, own in most.items()}

    def _taken(self, busy: Mapping[int, float], most: Mapping[int, float], factor: float) -> float:
        """Cores that a process of each stage that runs would take together, were kernels so much faster."""
        return sum(self.taken(stage, part, min(factor, most[stage])) for stage, part in busy.items())

    def taken(self, stage: int, part: float, factor: float) -> float:
        """Of a core, by a process of one stage, the part of whose time is on it while all compute."""
        return self.shares[stage] * part / (part / factor + 1.0 - part)


@dataclass
class _Running:
    """A pass under way: ``left`` of it, and what all of it takes at the speed it has now."""

    place: int
    start: int
    nominal: int
    busy: float
    left: float = 1.0
    whole: float = 0.0


@dataclass
class _Clock:
    """Which passes run, and which wait for what."""

    steps: Sequence[OrderedPass]
    line: Timeline
    waiting: Sequence[deque[int]]
    now: int = 0
    running: dict[int, _Running] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    saved: dict[int, float] = field(default_factory=dict)  # by stage, picoseconds of a core
    spent: set[int] = field(default_factory=set)  # stages that have saved nothing more for the pass that they run

    def save(self, shares: Sequence[float], taken: Mapping[int, float], then: int) -> None:
        """Count what stages leave of their quotas until a time, or spend, that take so much of a core."""
        for stage, share in enumerate(shares):
            saved = self.saved.get(stage, 0.0) + (share - taken.get(stage, 0.0)) * (then - self.now)
            self.saved[stage] = min(max(saved, 0.0), share * PERIOD)
            if taken.get(stage, 0.0) > share and saved <= 1.0:
                self.spent.add(stage)

    def spends(self, shares: Sequence[float], taken: Mapping[int, float]) -> list[int]:
        """When stages that take more than their shares have spent what they saved."""
        over = [(self.saved.get(stage, 0.0), own - shares[stage]) for stage, own in taken.items()]
        return [self.now + math.ceil(saved / rate) for saved, rate in over if rate > 0.0]

    def start(self, chunks: Sequence[Durations], busy: Sequence[Busy]) -> list[int]:
        """Start what can; when what has to wait for a send alone could."""
        later = []
        for stage, own in enumerate(self.waiting):
            needed = self.steps[own[0]].needed if own else -1
            if stage in self.running or not own or (needed >= 0 and needed not in self.done):
                continue
            start = max(self.line.ends[stage], self.line.arrived[needed])
            if start > self.now:
                later.append(start)
                continue
            taken, _, way, _ = self.steps[own[0]]
            nominal, part = chunks[taken.chunk].of(way), busy[taken.chunk].of(way)
            self.spent.discard(stage)
            self.running[stage] = _Running(own.popleft(), start, nominal, part)
        return later


def compose_shared(
    pipeline: Pipeline,
    chunks: Sequence[Durations],
    busy: Sequence[Busy],
    sends: Sends,
    cores: Cores,
    *,
    blocking: bool,
    several: int = STEADY,
) -> Timeline:
    """Run every stage's passes as soon as what they need is there; ``chunks`` are durations while all compute."""
    steps, sent = sequence(pipeline, several), by_way(sends)
    line = Timeline.empty(pipeline.stages, len(steps))
    waiting: list[deque[int]] = [deque() for _ in range(pipeline.stages)]
    for place, step in enumerate(steps):
        waiting[step.stage].append(place)
    clock = _Clock(steps, line, waiting)
    while any(waiting) or clock.running:
        later = clock.start(chunks, busy)
        speeds = cores.speeds({stage: one.busy for stage, one in clock.running.items()}, clock.spent)
        for stage, one in clock.running.items():
            one.whole = one.nominal * (one.busy / speeds[stage] + 1.0 - one.busy)
        ends = {stage: clock.now + max(1, round(one.left * one.whole)) for stage, one in clock.running.items()}
        then = min([*ends.values(), *later])
        if cores.quota:
            taken = {stage: cores.taken(stage, one.busy, speeds[stage]) for stage, one in clock.running.items()}
            then = min([then, *clock.spends(cores.shares, taken)])
            clock.save(cores.shares, taken, then)
        for stage, one in list(clock.running.items()):
            one.left -= (then - clock.now) / max(one.whole, 1.0)
            if ends[stage] <= then:
                own = chunks[steps[one.place].taken.chunk]
                line.gained[stage] += one.nominal - (then - one.start)
                end_pass(line, one.place, steps, (one.start, then), own, sent, blocking=blocking)
                clock.done.add(one.place)
                del clock.running[stage]
        clock.now = then
    return line
