"""What the inside of a pipeline's stages takes at least, whatever it is. Entry point: ``LeastInside``.

The search of the inside, on what a simulated step cannot hide: kernels as they run within a step, collectives that are
waited for. Gradients of parameters are summed behind compute, and cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ir.cost_model import CostModel
from ir.sharding import shard_degrees
from pdv.cluster import Device
from pdv.cost.comm import AxisLink
from pdv.problem import Problem
from pdv.search.priced_chain import PricedChain
from pdv.search.solver.tables import TooWideError
from pdv.search.variants.variants import SourceBlocks, Variant
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.in_step import InStep
from pdv.simulate.lowering.links import at_reached_rate

LIMIT = 50_000  # entries of a table, beyond which it is bounded: half the time of the usual limit, bounds within 0.6 %

Rewrites = Mapping[int, tuple[str, ...]]
"""By block, the rules that a plan applies to it, in order."""


@dataclass(frozen=True)
class LeastInside:
    """Seconds of one micro-batch on one device of a stage, all stages together.

    Attributes:
        problem: of one micro-batch on a stage's mesh; its limits of memory do not count.
        device, compute: what runs it, and prices that.
        axes: the links of the mesh's axes, as they are.
        loss_s: of the loss of one micro-batch on one device.
        source: the program's blocks, long enough for the problem's rules.
        rewrites: of a plan; each block may do as written, or so.
    """

    problem: Problem
    device: Device
    compute: CostModel
    axes: Sequence[AxisLink]
    loss_s: float
    source: SourceBlocks
    rewrites: Rewrites

    def at(self, price: float) -> float:
        """The least of seconds + ``price`` x bytes; exact, or less; nothing where the program is too wide."""
        try:
            return min(chain.least(price) for chain in self._chains) + self._least_loss_s
        except TooWideError:
            return 0.0

    @cached_property
    def _least_loss_s(self) -> float:
        """Of the rows that outputs may leave a device with."""
        cut = [math.prod(shard_degrees(way, self.problem.mesh, 1)) for way in self.problem.exits]
        return self.loss_s / max(cut)

    @cached_property
    def _chains(self) -> list[PricedChain]:
        problem = replace(
            self.problem,
            axes=tuple(at_reached_rate(axis, CALIBRATION) for axis in self.axes),
            compute=InStep(self.compute, self.device),
            rules=(),
            memory_limit=float("inf"),
            hides=True,
        )
        ways = [replace(problem, leaving=way) for way in problem.exits] if problem.undecided else [problem]
        return [PricedChain(way, source=self.source, variants=self._variants, limit=LIMIT) for way in ways]

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
