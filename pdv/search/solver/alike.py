"""The cheapest path on which stretches that repeat end in the same shardings each time.

Such a stretch becomes one entry of a shorter path: from each sharding back to itself, as often as it repeats. The first
time it may be entered from another sharding: values move to where they are read as the first thing that a block does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.proof.repeats import Repeat
from pdv.search.solver.min_plus import Path, PathBlock, at
from pdv.search.solver.tables import Table

Steps = list[tuple[int, int]]
"""(source, sink) of each block."""


def cheapest_alike(
    path: Path, states: Sequence[int], repeats: Sequence[Repeat], *, entered: bool
) -> tuple[float, Steps]:
    """(least cost, its steps); the cost is infinite if there is no such path.

    Args:
        path: all blocks.
        states: of the tied axes.
        repeats: in order; blocks at the same place of a stretch are equal.
        entered: whether a stretch may be entered from another sharding than it ends in.
    """
    entries = [replace(entry, table=_at_states(entry.table, states)) for entry in path.entries]
    own = np.asarray(path.own[at(states, path.own.shape)])
    cycles = [_Cycles.of(entries[repeat.start : repeat.start + repeat.period], repeat.count) for repeat in repeats]
    shorter = list(entries)
    for repeat, cycle in zip(reversed(repeats), reversed(cycles), strict=True):
        shorter[repeat.start : repeat.stop] = [cycle.entry(entered=entered)]
    short = Path(shorter, own)
    if not np.isfinite(short.value):
        return short.value, []
    steps = short.best()[1]
    for repeat, cycle in zip(repeats, cycles, strict=True):
        source, sink = steps[repeat.start]
        around = cycle.steps[sink]
        steps[repeat.start : repeat.start + 1] = [(source, around[0][1]), *around[1:], *around * (repeat.count - 1)]
    return short.value, steps


def _at_states(table: Table, states: Sequence[int]) -> Table:
    """[sources, sinks] of a table over tied states too."""
    where: tuple[int | slice, ...] = (slice(None), slice(None), *at(states, table.shape[2:]))
    found: Table = table[where]
    return found


@dataclass(frozen=True)
class _Cycles:
    """A stretch of blocks that repeats: of each of its sources, the cost and the steps back to the same."""

    first: PathBlock
    count: int
    costs: Table
    steps: Sequence[Steps]

    @classmethod
    def of(cls, stretch: Sequence[PathBlock], count: int) -> _Cycles:
        """The cycles of a stretch that repeats so often."""
        paths = [_around(stretch, source) for source in range(len(stretch[0].sources))]
        costs = np.array([path.value for path in paths])
        return cls(stretch[0], count, costs, [_inside(stretch, at, path) for at, path in enumerate(paths)])

    def entry(self, *, entered: bool) -> PathBlock:
        """All of it from each source to the sharding in which it ends."""
        number = len(self.costs)
        table: Table = np.full((number, number), np.inf)
        np.fill_diagonal(table, self.costs * self.count)
        for sink, steps in enumerate(self.steps):
            if steps and entered:
                column = self.first.table[:, steps[0][1]]
                table[:, sink] = column + (self.costs[sink] * self.count - column[sink])
        return replace(self.first, block=f"{self.count} x {self.first.block}", sinks=self.first.sources, table=table)


def _inside(stretch: Sequence[PathBlock], source: int, around: Path) -> Steps:
    """The cheapest steps from a source back to the same; none if there are none."""
    if not np.isfinite(around.value):
        return []
    steps = around.best()[1]
    sources = [source, *(step[0] for step in steps[1:])]
    sinks = [*(step[1] for step in steps[:-1]), stretch[-1].sinks.index(stretch[0].sources[source])]
    return list(zip(sources, sinks, strict=True))


def _around(stretch: Sequence[PathBlock], source: int) -> Path:
    """The stretch from one source back to the same; the cost is infinite where its last block cannot end there."""
    sharding = stretch[0].sources[source]
    entries = [replace(stretch[0], sources=((),), table=stretch[0].table[[source]]), *stretch[1:]]
    last = entries[-1]
    columns = [column for column, sink in enumerate(last.sinks) if sink == sharding]
    table = last.table[:, columns] if columns else np.full((len(last.table), 1), np.inf)
    return Path([*entries[:-1], replace(last, sinks=(sharding,), table=table)], np.zeros(()))
