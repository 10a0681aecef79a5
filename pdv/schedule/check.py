"""Whether the stages of a pipeline get through their passes. Entry points: ``stuck``, ``why_stuck``.

Ranks of one stage run one program in one order, so what they send, receive and sum among themselves is in one order
on all of them; what is left is that no stage waits for one that waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from pdv.schedule.order import Pipeline, orders
from pdv.schedule.passes import Pass


@lru_cache(maxsize=16)
def stuck(pipeline: Pipeline) -> str:
    """The same of the passes as they are planned."""
    return why_stuck(pipeline, orders(pipeline))


def why_stuck(pipeline: Pipeline, orders: Sequence[Sequence[Pass]]) -> str:
    """What keeps a step of training from its end, given the passes of each stage in order; "" if nothing does."""
    for stage, passes in enumerate(orders):
        if wrong := _wrong_passes(pipeline, stage, passes):
            return wrong
    last = pipeline.stages * pipeline.virtual - 1
    done: set[Pass] = {one for stage in range(pipeline.stages) for one in pipeline.ahead(stage)}
    at = [0] * pipeline.stages
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(orders):
            while at[stage] < len(passes) and _needs(pipeline, passes[at[stage]], last) <= done:
                taken = passes[at[stage]]
                done |= {taken, taken._replace(part="values")} if taken.backward else {taken}
                at[stage] += 1
                moved = True
    waiting = [(stage, passes[at[stage]]) for stage, passes in enumerate(orders) if at[stage] < len(passes)]
    return "; ".join(f"stage {stage} waits before {_spell(taken)}" for stage, taken in waiting)


def _wrong_passes(pipeline: Pipeline, stage: int, passes: Sequence[Pass]) -> str:
    """Whether a stage runs each micro-batch through each of its chunks once, there and back."""
    own, numbers = pipeline.layout.chunks_on(stage), range(pipeline.count)
    begun = len(pipeline.ahead(stage))  # by the step before; as many are of the next batch
    wanted = Counter(
        (chunk, number + (way == 0) * begun, way) for chunk in own for number in numbers for way in (0, 1, 2)
    )
    found: Counter[tuple[int, int, int]] = Counter()
    for chunk, number, backward, part in passes:
        ways = (0,) if not backward else {"all": (1, 2), "values": (1,), "weights": (2,)}[part]
        found.update((chunk, number, way) for way in ways)
    if found == wanted:
        return ""
    chunk, number, _ = min((wanted - found) + (found - wanted))
    return f"stage {stage} does not take micro-batch {number} once through chunk {chunk}, there and back"


def _needs(pipeline: Pipeline, taken: Pass, last: int) -> set[Pass]:
    """Passes that have to be behind a stage, or another, before this one; a slice reads those before it in time."""
    chunk, number, backward, part = taken
    place, moments = number % pipeline.moments, pipeline.moments
    if not backward:
        return ({Pass(chunk - 1, number)} if chunk else set()) | ({Pass(chunk, number - 1)} if place else set())
    if part == "weights":
        return {Pass(chunk, number, True, "values")}
    before = {Pass(chunk, number)} | ({Pass(chunk, number + 1, True, "values")} if place < moments - 1 else set())
    return before if chunk == last else before | {Pass(chunk + 1, number, True, "values")}


def _spell(taken: Pass) -> str:
    way = "forward" if not taken.backward else "backward" if taken.part == "all" else f"gradients of {taken.part}"
    return f"{way} of micro-batch {taken.micro_batch} through chunk {taken.chunk}"
