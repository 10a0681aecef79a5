"""What the inside of a pipeline's stages takes at least, whatever it is. Entry point: ``LeastInside``.

The search of the inside, on what a simulated step cannot hide: kernels as they run within a step, collectives that are
waited for. Gradients of parameters are summed behind compute, and cost what that is slower by; the last are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ir.cost_model import CostModel
from ir.graph import Node
from ir.proof.repeats import Repeat
from pdv.cost.comm import AxisLink
from pdv.pipelines.bounding.floors import Rewrites
from pdv.pipelines.profile import Numbers
from pdv.problem import Problem
from pdv.search.priced_chain import PricedChain
from pdv.search.solver.configs import KnownConfigs
from pdv.search.solver.exposed import last_reader
from pdv.search.solver.tables import TooWideError
from pdv.search.variants.variants import SourceBlocks, Variant
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.links import at_reached_rate

LIMIT = 50_000  # entries of a table, beyond which it is bounded: half the time of the usual limit, bounds within 0.6 %


@dataclass(frozen=True, eq=False)
class LeastInside:
    """Seconds of one micro-batch on one device of a stage, all stages together.

    Attributes:
        problem: of one micro-batch on a stage's mesh; its limits of memory do not count.
        compute: what prices kernels as they run within a step.
        axes: the links of the mesh's axes, as they are.
        loss_s: of the loss of one micro-batch on one device, at least.
        floors: by block, those beside the way aside, what it computes at least.
        source: the program's blocks, long enough for the problem's rules.
        spans: by block, those beside the way aside, the pieces that it is in.
        rewrites: of a plan; each block may do as written, or so.
        slowed: of what collectives take beside compute, the share that they take of it.
        lean: whether what is light may be made again in backward.
        known: configurations of problems that differ from this one in their programs alone.
    """

    problem: Problem
    compute: CostModel
    axes: Sequence[AxisLink]
    loss_s: float
    floors: Numbers
    source: SourceBlocks
    spans: Sequence[range]
    rewrites: Rewrites
    slowed: float
    lean: bool
    known: KnownConfigs
    _runs: dict[float, Numbers] = field(default_factory=dict)

    def at(self, price: float) -> float:
        """The least of seconds + ``price`` x bytes; exact but for tied parameters, or less."""
        return float(self.runs(price)[0, -1])

    def roughly(self, count: int) -> float:
        """No more than ``at`` where memory is free: ``count`` kinds of blocks solved, of others what they compute.

        A chain is a sum of one entry of each block's table, and of what tied parameters cost, which is not negative. Of
        a block that is solved no entry is less than the least one, and of any none is less than its floor.
        """
        least = dict.fromkeys(self.kinds, 0.0)
        try:
            for key in self.kinds[:count]:
                least[key] = min(chain.least_of(key) for chain in self._chains)
        except TooWideError:  # of these and the rest what they compute
            pass
        keys = [block.key for block in self._chains[0].blocks]
        of_blocks = [max(own, least[key]) for key, own in zip(keys, self.floors.tolist(), strict=True)]
        return float(sum(of_blocks)) + self.loss_s

    @cached_property
    def kinds(self) -> list[str]:
        """Keys of blocks; those that compute most come first."""
        sums: dict[str, float] = {}
        for block, own in zip(self._chains[0].blocks, self.floors.tolist(), strict=True):
            sums[block.key] = sums.get(block.key, 0.0) + own
        return sorted(sums, key=lambda key: -sums[key])

    def runs(self, price: float) -> Numbers:
        """[start, stop] the least of seconds + ``price`` x bytes of a run of pieces, whatever comes before and behind.

        Of a block that is in several pieces, only of runs that have all of it; nothing where the program is too wide.
        """
        if price not in self._runs:
            self._runs[price] = self._find(price)
        return self._runs[price]

    def _find(self, price: float) -> Numbers:
        count = self.spans[-1].stop
        try:
            each = [sum_runs(chain.steps(price), self.spans, count, chain.repeats) for chain in self._chains]
            found: Numbers = np.minimum.reduce(each)
        except TooWideError:
            return np.zeros((count, count + 1))
        found[:, count] += self.loss_s
        return found

    @cached_property
    def _chains(self) -> list[PricedChain]:
        problem = replace(
            self.problem,
            axes=reached_links(self.axes),
            compute=self.compute,
            rules=(),
            memory_limit=float("inf"),
            hides=True,
            lean=self.lean,
            slowed=self.slowed,
            last=self._last,
        )
        ways = [replace(problem, leaving=way) for way in problem.exits] if problem.undecided else [problem]
        known, variants = self.known, self._variants
        return [PricedChain(way, source=self.source, known=known, variants=variants, limit=LIMIT) for way in ways]

    @cached_property
    def _last(self) -> Node | None:
        """Whose backward is the last, however the first block is written that has any."""
        trained = (block for block in self.source.blocks if any(node.needs_grad for node in block.nodes))
        first = next(trained, None)
        return None if first is None else last_reader([one.block.nodes for one in self._variants[first.key]])

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


def sum_runs(steps: Sequence[Numbers], spans: Sequence[range], count: int, repeats: Sequence[Repeat]) -> Numbers:
    """[start, stop] by min-plus products of blocks' tables, from each piece on, whatever state it begins in.

    In a stretch that repeats, what begins a period later takes the same a period later.
    """
    periods, kept = _periods(spans, repeats), 0
    found = np.zeros((count, count + 1))
    least, begun, filled = np.zeros(count), 0, 0
    values = [np.zeros((count, steps[0].shape[0]))]
    for at, (step, span) in enumerate(zip(steps, spans, strict=True)):
        found[:, filled : span.stop] = least[:, None]
        value, period = values[-1], periods.get(at, 0)
        kept = kept if period and at - 1 in periods else begun  # pieces before the stretch's second turn
        filled, value[begun:], begun = max(filled, span.stop), 0.0, max(begun, span.start + 1)
        new = kept if period else begun
        after = np.zeros((count, step.shape[1]))
        after[:new] = (value[:new, :, None] + step).min(axis=1)
        if period:
            shift = span.start - spans[at - period].start
            after[kept:begun] = values[at + 1 - period][kept - shift : begun - shift]
        values.append(after)
        least = after.min(axis=1)
        least[begun:] = 0.0
    found[:, filled:] = least[:, None]
    return found


def _periods(spans: Sequence[range], repeats: Sequence[Repeat]) -> dict[int, int]:
    """By block, how many before it one is that has an equal table and begins as many pieces before as all others do."""
    found: dict[int, int] = {}
    for one in repeats:
        behind = range(one.start + one.period, one.stop)
        shifts = {spans[at].start - spans[at - one.period].start for at in behind}
        if len(shifts) == 1:
            found |= dict.fromkeys(behind[1:], one.period)
    return found
