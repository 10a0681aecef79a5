"""What it costs to bring one value to all who want it, where chains of parallel operators share their first steps.

The shortest chains from one sharding form a tree, and equal nodes of a program are one node, so several wants cost the
tree's edges above any of them. With one want *named*, the others add only what leaves its way; the least over names is
exact for up to three wants. For more, ``1 / (wants - 1)`` of what they add bounds the cost from below, for at most all
the others share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.sharding import Sharding, local_bytes
from ir.types import TensorType
from pdv.cost.comm import GATHERS
from pdv.pcg.redistribute import Chain, Redistribution

Table = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

EXACT_WANTS = 3


@dataclass(frozen=True)
class Ways:
    """All shortest chains from one sharding of a tensor; arrays are over the shardings reached, and one row for none.

    Attributes:
        index: the row of each sharding reached.
        rest_s: [named, want] seconds of the way to ``want`` that are not on the way to ``named``; ``forward_rest_s``
            of these, forward alone. The last row and column are those of shardings that are not reached: infinite.
        copy: the row of what a reader of each sharding holds (``replicate`` names a state and makes no copy).
        gathered: whether making that copy takes a gather.
        bytes: of each sharding.
    """

    index: dict[Sharding, int]
    rest_s: Table
    forward_rest_s: Table
    copy: Indices
    gathered: np.ndarray[Any, np.dtype[np.bool_]]
    bytes: Table

    def rows(self, shardings: Sequence[Sharding]) -> Indices:
        """The row of each."""
        return np.array([self.index.get(sharding, len(self.index)) for sharding in shardings], dtype=np.int64)

    def together_s(self, wants: Sequence[Sharding]) -> float:
        """Seconds of all ways to at most three wants, what they share counted once."""
        rows = self.rows(wants)
        start = 0  # the sharding that one comes from: naming it is naming nothing
        totals = [self.rest_s[start, row] + self.rest_s[row, rows].sum() for row in rows]
        return float(min(totals, default=0.0))


@dataclass
class Sharing:
    """Ways on one mesh, remembered by tensor type, gradient and sharding."""

    moves: Redistribution
    _ways: dict[tuple[TensorType, bool, Sharding], Ways] = field(default_factory=dict)

    def ways(self, tensor: TensorType, before: Sharding, *, gradient: bool) -> Ways:
        """All ways from ``before``."""
        key = (tensor, gradient, before)
        if key not in self._ways:
            self._ways[key] = self._found(tensor, before, self.moves.from_(tensor, before, gradient=gradient))
        return self._ways[key]

    def _found(self, tensor: TensorType, before: Sharding, chains: dict[Sharding, Chain]) -> Ways:
        order = sorted(chains, key=lambda after: len(chains[after].steps))
        assert order[0] == before, "nothing is nearer than where one is"
        by_steps = {chains[after].steps: row for row, after in enumerate(order)}
        count = len(order)
        above = np.zeros((count, count))  # [sharding, edge]: whether the edge into a sharding is on the way
        edge = np.zeros((2, count))
        copy = np.arange(count + 1)
        gathered = np.zeros(count + 1, dtype=bool)
        for row, after in enumerate(order):
            chain = chains[after]
            if not chain.steps:
                continue
            parent = by_steps[chain.steps[:-1]]  # the first steps of a shortest way are a shortest way
            above[row] = above[parent]
            above[row, row] = 1.0
            before_it = chains[order[parent]]
            edge[:, row] = chain.seconds - before_it.seconds, chain.forward_s - before_it.forward_s
            copy[row] = copy[parent] if chain.steps[-1].name == "replicate" else row
            gathered[row] = gathered[parent] or chain.steps[-1].name in GATHERS
        held = [float(local_bytes(tensor, after, self.moves.mesh)) for after in order]
        rests = [self._rests(above, edges) for edges in edge]
        index = {after: row for row, after in enumerate(order)}
        return Ways(index, rests[0], rests[1], copy, gathered, np.array([*held, 0.0]))

    @staticmethod
    def _rests(above: Table, edge: Table) -> Table:
        """[named, want] of the edges on the way to ``want`` alone, summed."""
        count = len(edge)
        rests = np.full((count + 1, count + 1), np.inf)
        rests[:count, :count] = (1.0 - above) @ (above * edge).T
        return rests
