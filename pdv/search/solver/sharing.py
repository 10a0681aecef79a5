"""What it costs to bring one value to all who want it, where chains of parallel operators share their first steps.

The shortest chains from one sharding form a tree, and equal nodes of a program are one node, so several wants cost the
tree's edges above any of them. With one want *named*, the others add only what leaves its way; the least over names is
exact for up to three wants, and with two named, for up to five: of the tree's lowest forks, each has a want named. For
more, ``1 / (wants - 1)`` of what they add bounds the cost from below, for at most all the others share a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ir.sharding import Sharding
from pdv.pcg.redistribute import Routes
from pdv.pcg.states import Flags, Indices, Seconds

EXACT_WANTS = {1: 3, 2: 5}  # by how many are named


class ReshardChains:
    """All shortest chains from one sharding of a tensor."""

    def __init__(self, routes: Routes, before: Sharding) -> None:
        self._routes = routes
        self.start = routes.states.index[before]

    def rows(self, shardings: Sequence[Sharding]) -> Indices:
        """The vertex of each."""
        index = self._routes.states.index
        return np.array([index[sharding] for sharding in shardings], dtype=np.int64)

    def seconds(self, wants: Indices) -> Seconds:
        """[wants] of the whole way."""
        found: Seconds = self._routes.seconds[self.start, wants]
        return found

    def rest(self, names: Indices, wants: Indices, *, forward: bool = False) -> Seconds:
        """[names, wants] of the way to each want what is not on the way to the name (``forward``: forward alone).

        ``names`` may be [names, more than one], each row of them named together.
        """
        found: Seconds = self._routes.rest(np.array([self.start]), names, wants, forward=forward)[0]
        return found

    def copy(self, wants: Indices) -> Indices:
        """[wants] what a reader holds: ``replicate`` names a state and makes no copy."""
        found: Indices = self._routes.copy[self.start, wants]
        return found

    def gathered(self, wants: Indices) -> Flags:
        """[wants] whether making that copy takes a gather."""
        found: Flags = self._routes.gathered[self.start, wants]
        return found

    def bytes(self, wants: Indices) -> Seconds:
        """[wants] that a device holds."""
        found: Seconds = self._routes.bytes[wants]
        return found

    def together_s(self, wants: Sequence[Sharding]) -> float:
        """Seconds of all ways to at most three wants, what they share counted once."""
        if not wants:
            return 0.0
        rows = self.rows(wants)
        if len(rows) == 1:
            return float(self.seconds(rows)[0])
        return float((self.seconds(rows) + self.rest(rows, rows).sum(axis=1)).min())
