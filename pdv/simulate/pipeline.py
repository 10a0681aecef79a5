"""Passes of micro-batches through the stages of a pipeline, with sends between them.

Chunks are simulated once; here their durations are put together in the schedule's order. A chunk is taken to begin on
quiet streams. Durations are whole picoseconds, or arrays of them (one for each draw). Entry point: ``compose``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdv.schedule.order import Pass, Pipeline, orders
from pdv.simulate.task import BUBBLE, TRANSFER

Time = Any  # Any: int, or an array of int64


class Durations(NamedTuple):
    """Of one chunk: its passes, and how long its collectives run on behind the last backward pass."""

    forward: Time
    backward: Time
    last: Time
    behind: Time = 0


class Sends(NamedTuple):
    """By chunk, picoseconds to the next chunk and, of gradients, back from it."""

    forward: Sequence[int]
    backward: Sequence[int]


@dataclass
class Timeline:
    """What came of it, by stage: when it is done, when its collectives are, its passes, and what it waited for."""

    ends: list[Time]
    behind: list[Time]
    passes: list[list[tuple[Pass, Time, Time]]]
    waits: list[dict[str, int]] = field(default_factory=list)
    sends: list[tuple[Pass, Time, Time]] = field(default_factory=list)


def compose(
    pipeline: Pipeline,
    chunks: Sequence[Durations],
    sends: Sends,
    *,
    blocking: bool,
    later: Callable[[Time, Time], Time] = max,
    record: bool = True,
) -> Timeline:
    """Run every stage's passes as soon as what they need is there; ``blocking``: a stage waits for its own sends."""
    return _Composition(pipeline, chunks, sends, blocking, later, record).run()


class _Composition:
    def __init__(
        self,
        pipeline: Pipeline,
        chunks: Sequence[Durations],
        sends: Sends,
        blocking: bool,
        later: Callable[[Time, Time], Time],
        record: bool,
    ) -> None:
        self._pipeline, self._chunks, self._sends = pipeline, chunks, sends
        self._blocking, self._later, self._record = blocking, later, record
        count = pipeline.stages
        self._arrived: dict[Pass, Time] = {}
        self._links: dict[tuple[int, bool], Time] = {}
        self._last = len(chunks) - 1
        self.line = Timeline([0] * count, [0] * count, [[] for _ in range(count)], [{} for _ in range(count)])

    def run(self) -> Timeline:
        """Stage after stage, each as far as it gets, until all are done."""
        order = orders(self._pipeline)
        done = [0] * len(order)
        while any(at < len(passes) for at, passes in zip(done, order, strict=True)):
            before = list(done)
            for stage, passes in enumerate(order):
                while done[stage] < len(passes) and self._ready(passes[done[stage]]):
                    self._pass(stage, passes[done[stage]])
                    done[stage] += 1
            assert done != before, f"the schedule of {self._pipeline} waits for itself at {done}"
        return self.line

    def _needed(self, step: Pass) -> Pass | None:
        """The pass whose result this one takes."""
        if not step.backward:
            return step._replace(chunk=step.chunk - 1) if step.chunk > 0 else None
        if step.chunk < self._last:
            return step._replace(chunk=step.chunk + 1)
        return step._replace(backward=False)

    def _ready(self, step: Pass) -> bool:
        needed = self._needed(step)
        return needed is None or needed in self._arrived

    def _pass(self, stage: int, step: Pass) -> None:
        chunk = self._chunks[step.chunk]
        needed = self._needed(step)
        free = self.line.ends[stage]
        start = free if needed is None else self._later(free, self._arrived[needed])
        if self._record and start > free and needed is not None:
            sent = self._sent(needed) if needed.chunk != step.chunk else 0
            self._wait(stage, TRANSFER, min(sent, start - free))
            self._wait(stage, BUBBLE, start - free - min(sent, start - free))
        final = step.backward and step.micro_batch == self._pipeline.micro_batches - 1
        end = start + ((chunk.last if final else chunk.backward) if step.backward else chunk.forward)
        if final:
            self.line.behind[stage] = self._later(self.line.behind[stage], end + chunk.behind)
        arrival = self._send(stage, step, end)
        self._arrived[step] = arrival
        if self._record:
            self.line.passes[stage].append((step, start, end))
            if self._blocking:
                self._wait(stage, TRANSFER, arrival - end)
        self.line.ends[stage] = arrival if self._blocking else end

    def _send(self, stage: int, step: Pass, end: Time) -> Time:
        """When the next chunk has the result; sends of one stage in one direction take turns."""
        duration = self._sent(step)
        if not duration:
            return end
        link = (stage, step.backward)
        start = self._later(end, self._links.get(link, 0))
        self._links[link] = start + duration
        if self._record:
            self.line.sends.append((step, start, start + duration))
        return start + duration

    def _sent(self, step: Pass) -> int:
        """Picoseconds that a result is on its way."""
        if step.backward:
            return self._sends.backward[step.chunk - 1] if step.chunk > 0 else 0
        return self._sends.forward[step.chunk] if step.chunk < self._last else 0

    def _wait(self, stage: int, part: str, time: int) -> None:
        if time:
            self.line.waits[stage][part] = self.line.waits[stage].get(part, 0) + time
