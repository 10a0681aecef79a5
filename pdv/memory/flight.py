"""In which order a stage runs micro-batches, as far as memory cares: what is in flight when.

Sources: GPipe (Huang et al., NeurIPS'19); 1F1B and its interleaved form (Narayanan et al., SC'21, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pdv.simulate.setup import Execution, Stages

Way = Literal["forward", "backward"]


class Turn(NamedTuple):
    """One micro-batch through one chunk, one way."""

    way: Way
    micro_batch: int
    chunk: int


def turns(stage: int, stages: Stages, execution: Execution) -> Iterator[Turn]:
    """What a stage runs in a step, in order."""
    count, virtual, batches = stages.count, stages.virtual, execution.micro_batches
    total = batches * virtual
    if execution.order == "gpipe":
        ahead = total
    elif virtual == 1:
        ahead = min(total, count - stage - 1)
    else:
        ahead = min(total, 2 * (count - stage - 1) + (virtual - 1) * count)
    forward = list(_passes("forward", stage, stages, batches))
    backward = list(_passes("backward", stage, stages, batches))
    yield from forward[:ahead]
    for number in range(total - ahead):
        yield forward[ahead + number]
        yield backward[number]
    yield from backward[total - ahead :]


def _passes(way: Way, stage: int, stages: Stages, batches: int) -> Iterator[Turn]:
    """All turns one way: as many micro-batches as there are stages through a chunk, then through the next one."""
    chunks = range(stages.virtual) if way == "forward" else reversed(range(stages.virtual))
    places = [place * stages.count + stage for place in chunks]
    group = stages.count if stages.virtual > 1 else batches
    for first in range(0, batches, max(1, group)):
        for chunk in places:
            for batch in range(first, min(first + group, batches)):
                yield Turn(way, batch, chunk)
