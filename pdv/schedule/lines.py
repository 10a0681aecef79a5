"""What a step takes at least, given what one stage of a pipeline takes, and the others. Entry point: ``lines``."""

from __future__ import annotations

from typing import NamedTuple

from pdv.problem.workload import AHEAD, STALE, Order


class Line(NamedTuple):
    """A step takes ``rest`` x the other stages' seconds + ``forward`` x its + ``backward`` x its own at least.

    And ``behind`` x those of the stages behind it once more.
    """

    rest: float
    forward: float
    backward: float
    behind: float = 0.0


def lines(order: Order, stages: int, micro_batches: int, stage: int) -> tuple[Line, ...]:
    """Of a stage, in GPipe's order or in one of 1F1B's: paths of passes, each behind the one before.

    GPipe: the first micro-batch comes to the stage, all pass it forward, the last one goes on to the end, the first
    returns, all pass backward. 1F1B: the first micro-batch comes, and all pass; or it goes to the end and back first,
    and all follow but the forward passes that the stage had made ahead; or the same from the end, with backward passes.
    Or the first goes to the end and back, then so do those that are not ahead of others, and the last goes there again.
    """
    if stages == 1 or order in STALE:  # of which a step waits for no other stage
        return (Line(0.0, micro_batches, micro_batches),)
    if order == "gpipe":
        return (Line(1.0, micro_batches, micro_batches),)
    ahead = min(AHEAD[order] * (stages - 1 - stage), micro_batches - 1)
    whole = float(micro_batches)
    found = Line(0.0, whole, whole), Line(1.0, whole - ahead, whole), Line(1.0, whole, whole - ahead)
    return (*found, Line(1.0, whole - ahead, whole - ahead, 1.0)) if 0 < ahead < micro_batches - 1 else found
