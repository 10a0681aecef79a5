"""Passes through a pipeline whose processes share cores: what a waiting stage leaves, the others take.

As ``pipeline.compose``, but in the order of time: how fast a pass runs depends on those beside it. Every process gets
its share of a core while all compute, and more, up to a whole one, while some wait, as operating systems' schedulers
have it. Entry point: ``compose_shared``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdv.cluster import Cluster
from pdv.schedule.order import Pipeline
from pdv.simulate.engine.pipeline import STEADY, Durations, OrderedPass, Sends, Timeline, by_way, end_pass, sequence

HALVINGS = 16  # of the range in which the common factor of all speeds is looked for


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
    """By stage, the share of a core that each of its processes has while all compute; stages have equally many."""

    shares: tuple[float, ...]

    @classmethod
    def of(cls, cluster: Cluster, stages: int) -> Cores | None:
        """None if every process has a device of its own, or may have no more than its share."""
        if stages == 1 or not cluster.shares_cores:
            return None
        size = cluster.num_devices // stages
        of_stage = (range(stage * size, (stage + 1) * size) for stage in range(stages))
        return cls(tuple(min(cluster.device_of(rank).share for rank in ranks) for ranks in of_stage))

    def speeds(self, busy: Mapping[int, float]) -> dict[int, float]:
        """By stage that runs, how much faster its kernels are than while all compute.

        busy: by stage that runs, the part of its time on a core.
        """
        room = sum(self.shares)
        low, high = 1.0, max(1.0 / share for share in self.shares)
        if self._taken(busy, high) > room:
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if self._taken(busy, middle) > room else (middle, high)
            high = low
        return {stage: min(high, 1.0 / self.shares[stage]) for stage in busy}

    def _taken(self, busy: Mapping[int, float], factor: float) -> float:
        """Cores that a process of each stage that runs would take together, were kernels so much faster."""
        taken = 0.0
        for stage, part in busy.items():
            own = min(factor, 1.0 / self.shares[stage])
            taken += self.shares[stage] * part / (part / own + 1.0 - part)
        return taken


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
        speeds = cores.speeds({stage: one.busy for stage, one in clock.running.items()})
        for stage, one in clock.running.items():
            one.whole = one.nominal * (one.busy / speeds[stage] + 1.0 - one.busy)
        ends = {stage: clock.now + max(1, round(one.left * one.whole)) for stage, one in clock.running.items()}
        then = min([*ends.values(), *later])
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
