"""Passes of micro-batches through the stages of a pipeline, with sends between them.

Chunks are simulated once; here their durations are put together in the schedule's order. A chunk is taken to begin on
quiet streams. Durations are whole picoseconds, or arrays of them (one for each draw). Entry point: ``compose``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from pdv.problem.workload import STALE
from pdv.schedule.order import Pipeline, orders
from pdv.schedule.passes import Pass
from pdv.simulate.engine.task import BUBBLE, TRANSFER

LAST, INPUT, LAST_WEIGHT = 2, 3, 5  # see OrderedPass.way
WAYS = {"all": (1, LAST), "values": (INPUT, INPUT), "weights": (4, LAST_WEIGHT)}  # of backward, and of the last one
STEADY = 3  # steps behind each other, of which the last is taken where no step empties the pipeline
Time = Any  # Any: int, or an array of int64
Sent = tuple[Sequence[int], ...]


class Durations(NamedTuple):
    """Of one chunk: its passes, and how long its collectives run on behind the last backward pass.

    ``weight`` is the part of backward that may wait, as it gives gradients of weights alone; ``tail`` is what a stage
    does behind its last backward pass before it begins the next step, where it does not wait for other stages.
    """

    forward: Time
    backward: Time
    last: Time
    behind: Time = 0
    weight: Time = 0
    tail: Time = 0

    def of(self, way: int) -> Time:
        """Of a pass, by ``OrderedPass.way``."""
        if way <= LAST:
            return self[way]
        apart = self.backward - self.weight, self.weight, self.last - self.backward + self.weight
        return apart[way - INPUT]


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
    arrived: list[Time]  # by place in the sequence: when what the pass gives is there; one more for who needs nothing
    links: list[list[Time]]  # until when it sends: forward, backward
    gained: list[int]  # by passes that were faster than said, on cores that other stages left
    waits: list[dict[str, int]] = field(default_factory=list)
    sends: list[tuple[Pass, Time, Time]] = field(default_factory=list)
    steps: list[list[tuple[Time, dict[str, int], int]]] = field(default_factory=list)  # ends, waits and gained so far

    @classmethod
    def empty(cls, stages: int, passes: int) -> Timeline:
        """Before the first pass."""
        links: list[list[Time]] = [[0, 0] for _ in range(stages)]
        nothing: list[Time] = [0] * stages
        arrived: list[Time] = [0] * (passes + 1)
        waits: list[dict[str, int]] = [{} for _ in nothing]
        steps: list[list[tuple[Time, dict[str, int], int]]] = [[(0, {}, 0)] for _ in nothing]
        return cls([*nothing], [*nothing], [[] for _ in nothing], arrived, links, [0] * stages, waits, steps=steps)

    @property
    def period(self) -> Time:
        """From the end of a step to that of the next, of the slowest stage."""
        return max(ends[-1][0] - ends[-2][0] for ends in self.steps)

    def last_step(self, pipeline: Pipeline, tails: Sequence[int]) -> Timeline:
        """The last of several steps, up to the tails of its stages."""
        m, ended = pipeline.micro_batches, [(steps[-2], steps[-1]) for steps in self.steps]
        own = [passes[-2 * m :] for passes in self.passes]
        start, kept = min(passes[0][1] for passes in own), {one[0] for passes in own for one in passes}

        def shifted(found: Sequence[tuple[Pass, Time, Time]]) -> list[tuple[Pass, Time, Time]]:
            numbered = ((one._replace(micro_batch=one.micro_batch - (STEADY - 1) * m), *at) for one, *at in found)
            return [(one, begun - start, end - start) for one, begun, end in numbered]

        return replace(
            self,
            ends=[end[0] - before[0] - tail for (before, end), tail in zip(ended, tails, strict=True)],
            behind=[0] * len(tails),
            passes=[shifted(passes) for passes in own],
            waits=[{kind: end[1][kind] - before[1].get(kind, 0) for kind in end[1]} for before, end in ended],
            gained=[end[2] - before[2] for before, end in ended],
            sends=shifted([one for one in self.sends if one[0] in kept]),
        )


class OrderedPass(NamedTuple):
    """A pass in an order in which all can be worked out; ``needed`` is the place of the one whose result it takes."""

    taken: Pass
    stage: int
    way: int  # 0 forward, 1 backward, 2 the last backward; 3 gradients of values, 4 of weights, 5 the last of these
    needed: int


def compose(
    pipeline: Pipeline,
    chunks: Sequence[Durations],
    sends: Sends,
    *,
    blocking: bool,
    later: Callable[[Time, Time], Time] = max,
    record: bool = True,
    several: int = STEADY,
) -> Timeline:
    """Run every stage's passes as soon as what they need is there; ``blocking``: a stage waits for its own sends.

    Sends of one stage in one direction take turns. ``several``: steps, as of ``sequence``.
    """
    steps = sequence(pipeline, several)
    line = Timeline.empty(pipeline.stages, len(steps))
    sent = by_way(sends)
    if not (record or blocking) and later is max:
        _compose_ends(line, steps, chunks, sent)
        return line
    for place, step in enumerate(steps):
        start = later(line.ends[step.stage], line.arrived[step.needed])
        end = start + chunks[step.taken.chunk].of(step.way)
        times, own = (start, end), chunks[step.taken.chunk]
        end_pass(line, place, steps, times, own, sent, blocking=blocking, later=later, record=record)
    return line


def _compose_ends(line: Timeline, steps: Sequence[OrderedPass], chunks: Sequence[Durations], sent: Sent) -> None:
    """When passes end, and nothing else of them: as ``end_pass`` has it, without its calls."""
    took = [[chunk.of(way) for chunk in chunks] for way in range(len(sent))]
    ends, arrived, links = line.ends, line.arrived, line.links
    for place, (taken, stage, way, needed) in enumerate(steps):
        number = taken[0]
        end = max(ends[stage], arrived[needed]) + took[way][number]
        arrival, duration = end, sent[way][number]
        if duration:
            arrival = links[stage][way > 0] = max(end, links[stage][way > 0]) + duration
        arrived[place] = arrival
        ends[stage] = end
        if way in (LAST, LAST_WEIGHT):
            line.behind[stage] = max(line.behind[stage], end + chunks[number].behind)
            ends[stage] = end + chunks[number].tail
            line.steps[stage].append((ends[stage], {}, 0))


def by_way(sends: Sends) -> Sent:
    """Picoseconds that the result of a pass is on its way: by way, then by chunk."""
    back = (0, *sends.backward)
    nothing = (0,) * len(back)
    return (*sends.forward, 0), back, back, back, nothing, nothing


def end_pass(
    line: Timeline,
    place: int,
    steps: Sequence[OrderedPass],
    times: tuple[Time, Time],
    own: Durations,
    sent: Sent,
    *,
    blocking: bool,
    later: Callable[[Time, Time], Time] = max,
    record: bool = True,
) -> None:
    """What follows a pass that took from and until ``times``: its send, and that its stage is free.

    own: of its chunk.
    """
    taken, stage, way, needed = steps[place]
    start, end = times
    free, arrival, duration = line.ends[stage], end, sent[way][taken.chunk]
    if duration:
        begun = later(end, line.links[stage][way > 0])
        arrival = line.links[stage][way > 0] = begun + duration
        if record:
            line.sends.append((taken, begun, arrival))
    if way in (LAST, LAST_WEIGHT):
        line.behind[stage] = later(line.behind[stage], end + own.behind)
    line.arrived[place] = arrival
    free_again = line.ends[stage] = arrival if blocking else end
    if way in (LAST, LAST_WEIGHT):
        line.ends[stage] = free_again + own.tail
        line.steps[stage].append((line.ends[stage], dict(line.waits[stage]), line.gained[stage]))
    if record:
        line.passes[stage].append((taken, start, end))
        before = sent[steps[needed].way][steps[needed].taken.chunk] if needed >= 0 else 0
        exposed = min(before, start - free)
        _wait(line.waits[stage], start - free - exposed, exposed + free_again - end)


def _wait(waits: dict[str, int], waited: int, sending: int) -> None:
    """Of the time that a stage waited before a pass, and for its own send behind it."""
    if sending:
        waits[TRANSFER] = waits.get(TRANSFER, 0) + sending
    if waited:
        waits[BUBBLE] = waits.get(BUBBLE, 0) + waited


@lru_cache(maxsize=16)
def sequence(pipeline: Pipeline, several: int = STEADY) -> tuple[OrderedPass, ...]:
    """All passes of all stages, each behind those that it needs: stage after stage, each as far as it gets.

    several: where no step empties the pipeline, how many steps, behind the passes that fill it; 0: one, of stages that
    begin together.
    """
    repeats = pipeline.order in STALE and several > 0
    order = _repeated(pipeline, several) if repeats else orders(pipeline)
    begun = {one[:3] for stage in range(pipeline.stages) for one in pipeline.ahead(stage)} if not several else set()
    count, final, last = pipeline.count, pipeline.final, pipeline.stages * pipeline.virtual - 1
    places: dict[tuple[int, int, bool], int] = {}
    steps: list[OrderedPass] = []
    done = [0] * len(order)
    while True:
        before = len(steps)
        for stage, passes in enumerate(order):
            for number in range(done[stage], len(passes)):
                taken = passes[number]
                needed = _pass_before(taken, last)
                needed = None if needed in begun else needed
                if needed is not None and needed not in places:
                    break
                if taken.part != "weights":  # nobody waits for those
                    places[taken[:3]] = len(steps)
                in_step = taken._replace(micro_batch=taken.micro_batch % count) if repeats else taken
                way = way_of(in_step, final)
                steps.append(OrderedPass(taken, stage, way, -1 if needed is None else places[needed]))
                done[stage] += 1
        if len(steps) == before:
            break
    assert done == [len(passes) for passes in order], f"the schedule of {pipeline} waits for itself at {done}"
    return tuple(steps)


def _repeated(pipeline: Pipeline, several: int) -> tuple[tuple[Pass, ...], ...]:
    """By stage, the passes of several steps; micro-batches are numbered on."""
    m = pipeline.micro_batches

    def all_of(stage: int, passes: Sequence[Pass]) -> Iterator[Pass]:
        yield from pipeline.ahead(stage)
        for step in range(several):
            yield from (one._replace(micro_batch=one.micro_batch + step * m) for one in passes)

    return tuple(tuple(all_of(stage, passes)) for stage, passes in enumerate(orders(pipeline)))


def way_of(taken: Pass, final: int) -> int:
    """As ``OrderedPass.way``; ``final``: the number of the last pass backward."""
    if not taken.backward:
        return 0
    first, last = WAYS[taken.part]
    return last if taken.micro_batch == final else first


def _pass_before(taken: Pass, last: int) -> tuple[int, int, bool] | None:
    """Chunk, micro-batch and direction of the pass whose result this one takes, if it is another stage's or comes late.

    Of a weight's it is behind us.
    """
    chunk, micro_batch, backward, part = taken
    if part == "weights":
        return None
    if not backward:
        return (chunk - 1, micro_batch, False) if chunk > 0 else None
    return (chunk + 1, micro_batch, True) if chunk < last else (chunk, micro_batch, False)
