"""When stages are done with a step of many micro-batches, worked out from some of them. Entry point: ``done``.

What a stage does with a micro-batch takes as long for each of them, and so passes come to follow each other in a period
(Baccelli et al., "Synchronization and Linearity", 1992, section 3.7): the rounds left out take that each. All forward
passes before all backward ones (GPipe) are worked out at once, stage by stage. Durations and sends are any numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pdv.schedule.order import Pipeline
from pdv.simulate.engine.pipeline import Durations, Sends, Timeline, compose, sequence

ROUNDS = 6  # of as many micro-batches as there are stages, that are composed: most pipelines have their period then
SHORTER = 2  # times fewer micro-batches, or all are composed
STEADY = 1e-4  # of a period, by which two behind each other differ at most
Times = Any  # Any: an array of numbers, one for each micro-batch


def done(pipeline: Pipeline, chunks: Sequence[Durations], sends: Sends) -> Timeline:
    """The ends and collectives of ``compose``, without passes, in stages that begin together."""
    if pipeline.order == "gpipe" and pipeline.moments == pipeline.virtual == 1 and pipeline.train:
        return _all_forward_first(pipeline, chunks, sends)
    few = pipeline.shortened(ROUNDS)
    if pipeline.micro_batches >= SHORTER * few.micro_batches:
        line = compose(few, chunks, sends, blocking=False, record=False, several=0)
        now, before = _rounds(few, line)
        if abs(now - before) <= STEADY * now:
            busiest = max(
                sum(chunks[chunk].forward + chunks[chunk].backward for chunk in pipeline.layout.chunks_on(stage))
                for stage in range(pipeline.stages)
            )  # may show late, where stages before it fill what is between
            left = (pipeline.micro_batches - few.micro_batches) // pipeline.stages
            later = left * max(now, pipeline.stages * busiest)
            line.ends, line.behind = [end + later for end in line.ends], [end + later for end in line.behind]
            return line
    return compose(pipeline, chunks, sends, blocking=False, record=False, several=0)


def _rounds(few: Pipeline, line: Timeline) -> tuple[Any, Any]:  # Any: Time
    """How long the last two rounds of the last chunk took: it goes on as before while others come to their end."""
    last, before, first = (line.arrived[place] for place in _backward(few))
    return last - before, before - first


@lru_cache(maxsize=64)
def _backward(few: Pipeline) -> tuple[int, ...]:
    """Places in the sequence: of the last chunk's backward passes a round apart, up to the one before the last."""
    chunk = few.stages * few.virtual - 1
    at = {
        one.taken.micro_batch: place
        for place, one in enumerate(sequence(few, 0))
        if one.taken.chunk == chunk and one.taken.backward and one.taken.part != "weights"
    }
    return tuple(at[few.final - 1 - few.stages * back] for back in range(3))


def _all_forward_first(pipeline: Pipeline, chunks: Sequence[Durations], sends: Sends) -> Timeline:
    """GPipe's step."""
    m, line = pipeline.micro_batches, Timeline.empty(pipeline.stages, 0)
    arrived: Times = np.zeros(m)
    for stage, own in enumerate(chunks):
        ends = _in_turn(arrived, np.full(m, own.forward), 0)
        line.ends[stage] = ends[-1]
        arrived = _sent(ends, sends.forward[stage]) if stage < len(sends.forward) else ends
    for stage, own in reversed([*enumerate(chunks)]):
        ends = _in_turn(arrived, np.append(np.full(m - 1, own.backward), own.last), line.ends[stage])
        line.behind[stage], line.ends[stage] = ends[-1] + own.behind, ends[-1] + own.tail
        arrived = _sent(ends, sends.backward[stage - 1]) if stage else ends
    return line


def _in_turn(arrived: Times, took: Times, free: Any) -> Times:  # Any: Time
    """When passes end, each begun when its input is there, and a stage that is free then is done with those before."""
    through = np.cumsum(took)
    return np.maximum.accumulate(np.maximum(arrived, free) - through + took) + through


def _sent(ends: Times, took: Any) -> Times:  # Any: Time
    """When results are there, on a link on which they take turns."""
    return _in_turn(ends, np.full(len(ends), took), 0) if took else ends
