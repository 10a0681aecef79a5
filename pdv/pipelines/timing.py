"""Simulated seconds of a micro-batch in each piece of a plan, and what pieces save that run behind one another.

Entry point: ``measure``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdv.pipelines.profile import Numbers
from pdv.problem.workload import Stages, Workload
from pdv.schedule.pieces import Pieces
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.pipeline import Durations
from pdv.simulate.engine.shared import Busy
from pdv.simulate.engine.task import PICO
from pdv.simulate.stage import Lowered
from pdv.simulate.step import chunk_busy, chunk_durations


@dataclass(frozen=True)
class Timing:
    """What one device takes; arrays are [pieces].

    Attributes:
        forward_s, backward_s: of one micro-batch, of a piece behind another one of the same stage.
        last_s: backward of the last micro-batch, whose gradients are summed beside it.
        begun_s: what a stage takes beyond the sum of its pieces: forward, backward, last backward.
        behind_s: what sums of gradients take behind the last backward pass.
        busy: of each pass, the part in which the device computes.
        later: of backward, the part that gives gradients of weights, and may wait.
    """

    forward_s: Numbers
    backward_s: Numbers
    last_s: Numbers
    begun_s: tuple[float, float, float]
    behind_s: float
    busy: Busy
    later: float

    def map(self, change: Callable[[Numbers], Numbers]) -> Timing:
        """The same of other pieces."""
        forward, backward, last = map(change, (self.forward_s, self.backward_s, self.last_s))
        return Timing(forward, backward, last, self.begun_s, self.behind_s, self.busy, self.later)


def measure(in_chunks: Callable[[Stages], Workload], pieces: Pieces, middle: range) -> Timing:
    """Of a plan run as ``in_chunks`` says; ``middle``: the pieces whose saving is that of all, behind others like them.

    Each chunk is simulated from quiet streams. What pieces save behind one another is what a chunk that ends (in
    backward: begins) behind the middle takes less than the same without the middle and that by itself.
    """

    def lowered(*starts: int, like: Lowered | None = None) -> Lowered:
        chunk_of = {node: bisect_right(starts, piece) - 1 for node, piece in pieces.of.items()}
        return Lowered(in_chunks(Stages(1, len(starts), chunk_of)), CALIBRATION, like)

    def durations(*starts: int) -> list[Durations]:
        return chunk_durations(lowered(*starts, like=together))

    together = lowered(0)
    each, (one,), (busy,) = durations(*range(pieces.count)), chunk_durations(together), chunk_busy(together)
    if 0 < middle.start < middle.stop < pieces.count:
        without, with_it = durations(0, middle.start), durations(0, middle.stop)
        added = with_it[0].forward - without[0].forward, *(without[1][way] - with_it[1][way] for way in (1, 2))
        saved = [float(sum(each[piece][way] for piece in middle) - added[way]) / PICO / len(middle) for way in range(3)]
    else:
        borders = max(1, pieces.count - 1)
        saved = [float(sum(found[way] for found in each) - one[way]) / PICO / borders for way in range(3)]
    forward, backward, last = (np.array([found[way] for found in each]) / PICO - saved[way] for way in range(3))
    begun, later = (saved[0], saved[1], saved[2]), one.weight / max(one.backward, 1)
    return Timing(forward, backward, last, begun, one.behind / PICO, busy, later)
