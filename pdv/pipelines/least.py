"""What the inside of a pipeline's stages takes at least, whatever it is. Entry point: ``LeastInside``.

The search of the inside, on what a simulated step cannot hide: kernels as they run within a step, collectives that are
waited for. Gradients of parameters are summed behind compute, and cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ir.cost_model import CostModel
from pdv.cluster import Device
from pdv.cost.comm import AxisLink
from pdv.pipelines.floors import Rewrites
from pdv.problem import Problem
from pdv.schedule.pieces import pieces
from pdv.search.blocks import Block
from pdv.search.priced_chain import PricedChain
from pdv.search.solver.configs import KnownConfigs
from pdv.search.solver.tables import TooWideError
from pdv.search.variants.variants import SourceBlocks, Variant
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.in_step import InStep
from pdv.simulate.lowering.links import at_reached_rate

HALVINGS = 40  # of what the slowest stage takes, between a lower and an upper bound
LIMIT = 50_000  # entries of a table, beyond which it is bounded: half the time of the usual limit, bounds within 0.6 %


@dataclass(frozen=True)
class LeastInside:
    """Seconds of one micro-batch on one device of a stage, all stages together.

    Attributes:
        problem: of one micro-batch on a stage's mesh; its limits of memory do not count.
        device, compute: what runs it, and prices that.
        axes: the links of the mesh's axes, as they are.
        loss_s: of the loss of one micro-batch on one device, at least.
        source: the program's blocks, long enough for the problem's rules.
        rewrites: of a plan; each block may do as written, or so.
        known: configurations of problems that differ from this one in their programs alone.
    """

    problem: Problem
    device: Device
    compute: CostModel
    axes: Sequence[AxisLink]
    loss_s: float
    source: SourceBlocks
    rewrites: Rewrites
    known: KnownConfigs

    def at(self, price: float) -> float:
        """The least of seconds + ``price`` x bytes; exact, or less; nothing where the program is too wide."""
        try:
            return min(chain.least(price) for chain in self._chains) + self.loss_s
        except TooWideError:
            return 0.0

    def slowest_of(self, stages: int) -> float:
        """Seconds of the slowest of so many stages at least, which end behind pieces of the program alone."""
        try:
            return least_slowest(self._piece_floors, stages)
        except TooWideError:
            return 0.0

    @cached_property
    def _piece_floors(self) -> list[float]:
        """By piece, seconds at least; of a block that is in several pieces nothing is known of any."""
        of, found = pieces(self.source.graph).of, [0.0]
        before: list[Block] = []
        for block, *each in zip(self._chains[0].blocks, *(chain.floors for chain in self._chains), strict=True):
            here = {of[node] for node in block.nodes}
            if block in before or (before and of[before[-1].nodes[-1]] not in here):  # the same piece over again
                found.append(0.0)
                before = []
            if len(here) > 1:
                found.append(0.0)
            else:
                found[-1] += min(each)
            before.append(block)
        return found

    @cached_property
    def _chains(self) -> list[PricedChain]:
        problem = replace(
            self.problem,
            axes=reached_links(self.axes),
            compute=InStep(self.compute, self.device),
            rules=(),
            memory_limit=float("inf"),
            hides=True,
        )
        ways = [replace(problem, leaving=way) for way in problem.exits] if problem.undecided else [problem]
        known, variants = self.known, self._variants
        return [PricedChain(way, source=self.source, known=known, variants=variants, limit=LIMIT) for way in ways]

    @cached_property
    def _variants(self) -> dict[str, list[Variant]]:
        """By key of a block, as it is written and as it is rewritten."""
        found: dict[str, list[Variant]] = {}
        for number, block in enumerate(self.source.blocks):
            known = found.setdefault(block.key, [Variant(block)])
            names = self.rewrites.get(number, ())
            if names and all(one.rules != names for one in known):
                known.append(self.source.variant(number, names))
        return found


def reached_links(axes: Sequence[AxisLink]) -> tuple[AxisLink, ...]:
    """Links as fast as they are within a step."""
    return tuple(at_reached_rate(axis, CALIBRATION) for axis in axes)


def least_slowest(seconds: Sequence[float], stages: int) -> float:
    """What the slowest of so many runs of pieces takes at least, however the pieces are cut into runs."""
    most = sum(seconds)
    least = max(seconds, default=0.0)
    if not math.isfinite(most):
        return most
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if _runs(seconds, middle) <= stages else (middle, most)
    return least


def _runs(seconds: Sequence[float], limit: float) -> int:
    """How many runs pieces make that take no longer than the limit, each as many as can be; each piece is within."""
    count, room = 0, 0.0
    for one in seconds:
        if not count or one > room:
            count, room = count + 1, limit
        room -= one
    return count
