"""Events of a device class in time: streams in the order of issue, the host that issues, collectives that couple.

A task starts when everything before it on its streams is done, when what it waits for is done, and when the host of
each device has issued it; hosts run ahead of their devices. Nothing starts on a communication stream before the compute
that was issued ahead of it is done, as libraries order them. Tasks that share a stream take turns in the order of
issue. On a link that several axes share, what compute waits for goes before what runs behind compute and is still to
be sent, which ends by so much later. With processor sharing instead, the sum of their times would be the same, but a
faster device could make a step longer (Graham's anomalies); so, every time is a maximum of sums of durations, and grows
with each of them. For the same reason a collective takes what it slows compute by (``Task.slows``) once, from the
compute issued behind it.

Entry point: ``Engine.run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdv.simulate.engine.task import HOST, WAITING, Placed, Segment, Task

Parts = dict[str, int]
Watch = Callable[[Task, int, int], None]
"""Told of each task with its start and end."""
Timed = tuple[Task, int, int]
"""A task with its start and end, relative to where its segment begins."""


@dataclass
class Clocks:
    """Where the streams of a stage stand, in picoseconds.

    Attributes:
        compute: by class, when its compute stream is free.
        host: by class, when its host is.
        streams: when other streams and links are free.
        ready: by number, when a task that others wait for is done, and what waiting for it counts as.
        parts: by class, what the time of its compute stream went into; they add up to its clock.
    """

    compute: list[int]
    host: list[int]
    streams: list[int]
    ready: dict[int, tuple[int, str]] = field(default_factory=dict)
    parts: list[Parts] = field(default_factory=list)

    @classmethod
    def quiet(cls, classes: int, streams: int) -> Clocks:
        """Nothing has run."""
        return cls([0] * classes, [0] * classes, [0] * streams, {}, [{} for _ in range(classes)])


class _Effect(NamedTuple):
    """What a segment did, relative to the clock of class 0; valid for hosts that are no later than ``margin`` more."""

    host: tuple[int, ...]
    margin: tuple[int, ...]
    bound: bool
    compute: tuple[int, ...]
    streams: tuple[int, ...]
    ready: tuple[tuple[int, str], ...]
    parts: tuple[tuple[tuple[str, int], ...], ...]
    number: int


class Engine:
    """Runs segments, and remembers what they do from which state. ``runs`` counts those that were simulated.

    With ``record`` it keeps their tasks too: ``recorded``, which ``draw`` names by number.
    """

    def __init__(self, *, record: bool = False) -> None:
        self._known: dict[tuple[Segment, tuple[object, ...]], list[_Effect]] = {}
        self._record = record
        self.recorded: list[tuple[Timed, ...]] = []
        self.runs = 0

    def run(self, program: Iterable[Placed], clocks: Clocks) -> None:
        """Advance ``clocks`` over segments one after the other."""
        for placed in program:
            self._step(placed, clocks)

    def draw(self, program: Iterable[Placed], clocks: Clocks) -> Iterator[tuple[int, int]]:
        """The same, giving where each segment begins, and the number of its tasks in ``recorded``."""
        assert self._record, "an engine that keeps no tasks draws none"
        for placed in program:
            base = clocks.compute[0]
            yield base, self._step(placed, clocks).number

    def _step(self, placed: Placed, clocks: Clocks) -> _Effect:
        segment, offset = placed
        base, floor = clocks.compute[0], min(clocks.compute)
        state = (
            tuple([at - base for at in clocks.compute]),
            tuple([max(at, floor) - base for at in clocks.streams]),
            tuple([_relative(clocks, offset + number, floor, base) for number in segment.awaited]),
        )
        host = tuple([at - base for at in clocks.host])
        known = self._known.setdefault((segment, state), [])
        effect = next((effect for effect in known if _holds(effect, host)), None)
        if effect is None:
            tasks: list[Timed] = []
            effect = _simulate(segment, offset, clocks, tasks if self._record else None, len(self.recorded))
            self.recorded.append(tuple(tasks))
            self.runs += 1
            known.append(effect)
        _apply(effect, segment, offset, clocks, base)
        return effect


def _relative(clocks: Clocks, number: int, floor: int, base: int) -> tuple[int, str]:
    """A value that is long there does not matter, whenever it came."""
    at, part = clocks.ready.get(number, (floor, ""))
    return (at - base, part) if at > floor else (floor - base, "")


def _holds(effect: _Effect, host: tuple[int, ...]) -> bool:
    """Whether hosts standing so change nothing but themselves."""
    if effect.host == host:
        return True
    if effect.bound:
        return False
    return all(now <= then + more for now, then, more in zip(host, effect.host, effect.margin, strict=True))


def _simulate(segment: Segment, offset: int, before: Clocks, tasks: list[Timed] | None, number: int) -> _Effect:
    """What it does, known by a number; its tasks are added to ``tasks``."""
    base = before.compute[0]
    clocks = Clocks(
        list(before.compute), list(before.host), list(before.streams), before.ready.copy(), [{} for _ in before.compute]
    )

    def keep(task: Task, start: int, end: int) -> None:
        if tasks is not None:
            tasks.append((task, start - base, end - base))

    margin, bound = simulate_tasks(segment, offset, clocks, None if tasks is None else keep)
    return _Effect(
        tuple(at - base for at in before.host),
        tuple(margin),
        bound,
        tuple(at - base for at in clocks.compute),
        tuple(at - base for at in clocks.streams),
        tuple((clocks.ready[offset + number][0] - base, clocks.ready[offset + number][1]) for number in segment.made),
        tuple(tuple(parts.items()) for parts in clocks.parts),
        number,
    )


def _apply(effect: _Effect, segment: Segment, offset: int, clocks: Clocks, base: int) -> None:
    clocks.compute[:] = [base + at for at in effect.compute]
    clocks.streams[:] = [base + at for at in effect.streams]
    for number, issue in segment.issue.items():
        clocks.host[number] += issue
    for number, (at, part) in zip(segment.made, effect.ready, strict=True):
        clocks.ready[offset + number] = (base + at, part)
    for parts, more in zip(clocks.parts, effect.parts, strict=True):
        for part, time in more:
            parts[part] = parts.get(part, 0) + time


def simulate_tasks(segment: Segment, offset: int, clocks: Clocks, watch: Watch | None = None) -> tuple[list[int], bool]:
    """Advance ``clocks`` task by task; by class how much later its host might be, and whether any task waited for one.

    ``watch`` is told of each task's start and end, in order.
    """
    compute, host, parts = clocks.compute, clocks.host, clocks.parts
    margin, bound = [1 << 62] * len(host), False
    for task in segment.tasks:
        _, part, classes, duration, issue, streams, blocks, makes, after, slows, _ = task
        free = max([compute[number] for number in classes]) if len(classes) > 1 else compute[classes[0]]
        start, cause = _await(task, offset, clocks, free) if streams or after else (free, "")
        awaited = start
        for number in classes:
            host[number] = issued = host[number] + issue
            if issued > start:
                start, bound = issued, True
        for number in classes:
            margin[number] = min(margin[number], start - host[number])
        end = start + duration
        for place, stream in enumerate(streams):
            beside = place and blocks and clocks.streams[stream] > start
            clocks.streams[stream] = clocks.streams[stream] + duration if beside else end
        for number in classes:
            own = parts[number]
            if not blocks:
                compute[number] += slows
                own[part] = own.get(part, 0) + slows
                continue
            if compute[number] != start:
                _wait(own, (compute[number], free, awaited, start), cause)
            own[part] = own.get(part, 0) + duration
            compute[number] = end
        if not blocks:
            clocks.ready[offset + makes] = (end, part)
        if watch is not None:
            watch(task, start, end)
    return margin, bound


def _await(task: Task, offset: int, clocks: Clocks, free: int) -> tuple[int, str]:
    """When what a task needs is there, and what its compute streams wait for until then."""
    start, cause = free, ""
    for stream in task.streams[:1] if task.blocks and task.duration else task.streams:
        if clocks.streams[stream] > start:
            start, cause = clocks.streams[stream], task.part
    for number in task.after:
        at, part = clocks.ready.get(offset + number, (0, ""))
        if at > start:
            start, cause = at, part
    return start, cause


def _wait(parts: Parts, times: tuple[int, int, int, int], cause: str) -> None:
    """Book a class's time from its clock to a task's start: for other classes, for communication, for the host."""
    clock, free, awaited, start = times
    for name, time in ((WAITING, free - clock), (cause, awaited - free), (HOST, start - awaited)):
        if time:
            parts[name] = parts.get(name, 0) + time
