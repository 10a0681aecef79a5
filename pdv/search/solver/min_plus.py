"""Blocks one behind another: a min-plus product of their tables over boundary shardings.

Tables are [sources, sinks, tied…], of size one along what a block does not have or read. Values before and behind a
block are its *context*: what the rest of the program costs at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ir.sharding import Sharding
from pdv.search.solver.tables import Table, check_room

SMALL = 1 << 16  # elements
Choices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PathBlock:
    """One block of a path: its key, its table, and what the table's rows and columns stand for.

    Equal blocks, of one key, have the same sources and sinks.
    """

    block: str
    sources: tuple[Sharding, ...]
    sinks: tuple[Sharding, ...]
    table: Table


@dataclass(frozen=True)
class Path:
    """A chain of blocks. ``own`` is [tied…]: what the tied parameters' states cost by themselves."""

    entries: Sequence[PathBlock]
    own: Table

    @cached_property
    def _rows(self) -> list[list[int]]:
        """By block, its sources in the order of the sinks before."""
        sharding: tuple[Sharding, ...] = ((),)
        rows = []
        known: dict[tuple[str, str], list[int]] = {}
        block = ""
        for entry in self.entries:
            key = (block, entry.block)
            if key not in known:
                known[key] = [entry.sources.index(s) for s in sharding]
            rows.append(known[key])
            sharding, block = entry.sinks, entry.block
        return rows

    @cached_property
    def _forward(self) -> tuple[list[Table], list[Choices], list[list[int]]]:
        """By block: the least cost of all before it [rows, tied…]; the best row [sinks, tied…]; rows as sources."""
        value: Table = np.zeros((1,) * (1 + self.own.ndim))
        values, best = [], []
        for entry, rows in zip(self.entries, self._rows, strict=True):
            values.append(value)
            choice, value = _min_plus(value, entry.table[rows])
            best.append(choice)
        return [*values, value], best, self._rows

    @cached_property
    def total(self) -> Table:
        """[tied…] the least cost of the program."""
        total: Table = self._forward[0][-1][0] + self.own
        return total

    @property
    def steps(self) -> list[Table]:
        """By block [sinks of the one before, sinks]: what it costs at least, whatever tied parameters' states are."""
        found = []
        for entry, rows in zip(self.entries, self._rows, strict=True):
            table = entry.table[rows]
            found.append(table.min(axis=tuple(range(2, table.ndim))) if table.ndim > 2 else table)
        return found

    @property
    def value(self) -> float:
        """The least cost of the program over all states."""
        return float(self.total.min()) if self.total.size else float("inf")

    def best(self) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """(state of each tied parameter, (source, sink) of each block) of the cheapest path."""
        states = tuple(int(i) for i in np.unravel_index(int(self.total.argmin()), self.total.shape))
        _, best, rows = self._forward
        found: list[tuple[int, int]] = []
        sink = 0
        for choice, row_numbers in zip(reversed(best), reversed(rows), strict=True):
            row = int(choice[(sink, *at(states, choice.shape[1:]))])
            found.append((row_numbers[row], sink))
            sink = row
        return states, found[::-1]

    @cached_property
    def _backward(self) -> list[Table]:
        """By block: the least cost of all behind it and of the tied parameters themselves, [sinks, tied…]."""
        value: Table = self.own[None]
        values = []
        for entry, rows in zip(reversed(self.entries), reversed(self._forward[2]), strict=True):
            values.append(value)
            columns = [(entry.table[rows, sink] + value[sink]) for sink in range(entry.table.shape[1])]
            value = np.minimum.reduce(columns)
        return values[::-1]

    def context(self, number: int) -> Table:
        """[sources, sinks, tied…] what all but one block costs at least; tied states that it does not read are free."""
        entry, rows = self.entries[number], self._forward[2][number]
        before, behind = self._forward[0][number], self._backward[number]
        unread = [size == 1 for size in entry.table.shape[2:]]
        shape = np.broadcast_shapes(before.shape[1:], behind.shape[1:])
        kept = [1 if free else size for free, size in zip(unread, shape, strict=True)]
        axes = tuple(i + 1 for i, free in enumerate(unread) if free)
        found: Table = np.full((len(entry.sources) or 1, behind.shape[0], *kept), np.inf)
        for row, source in enumerate(rows):
            both = before[row][None] + behind
            found[source] = both.min(axis=axes, keepdims=True) if axes else both
        return found


def _min_plus(value: Table, table: Table) -> tuple[Choices, Table]:
    """(argmin, min) over s of value[s, tied…] + table[s, sink, tied…], as [sink, tied…]."""
    check_room((table.shape[1], *np.broadcast_shapes(value.shape[1:], table.shape[2:])))
    if value.size * table.shape[1] <= SMALL and table.size <= SMALL:
        both = value[:, None] + table
        row = both.argmin(axis=0)
        return row, np.take_along_axis(both, row[None], axis=0)[0]
    best, least = [], []  # sink by sink, so that no table has both boundaries and all tied states
    for sink in range(table.shape[1]):
        total = value + table[:, sink]
        best.append(total.argmin(axis=0))
        least.append(np.take_along_axis(total, best[-1][None], axis=0)[0])
    return np.stack(best), np.stack(least)


def at(states: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """The entry of a table over tied states, of size one along those that it does not read."""
    return tuple(int(state) if size > 1 else 0 for state, size in zip(states, shape, strict=True))
