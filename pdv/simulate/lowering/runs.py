"""Which chunk runs each node of a PCG, in which order, in which runs of one layer, and what crosses between chunks.

Entry point: ``Chunks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ir.graph import Node
from ir.sharding import Invariant
from pdv.problem.workload import Stages
from pdv.simulate.lowering.entries import Entry, Nodes

EACH = 8  # operators of a run where the layers are not known


@dataclass(frozen=True, slots=True, eq=False)
class NodeRun:
    """Nodes of one layer, in order; ``start`` is the place of the first in its chunk; -1: of no layer."""

    nodes: tuple[Node, ...]
    start: int
    layer: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes that a device sends to the next chunk, and that come back as gradients.

    Attributes:
        whole: of each way, bytes of what arrives in slices, once they are put together (``Execution.slices``).
    """

    forward: float = 0.0
    backward: float = 0.0
    whole: tuple[float, float] = (0.0, 0.0)


class Chunks:
    """A pipeline's chunks."""

    def __init__(self, nodes: Nodes, stages: Stages, slices: int | None = None) -> None:
        self._nodes, self._stages, self._slices = nodes, stages, slices
        self.homes = self._homes()

    def _homes(self) -> dict[Node, frozenset[int]]:
        """The chunks that run each node: its own, or those of its readers; what nobody reads runs in the last one."""
        pcg, named = self._nodes.pcg, self._stages.chunk_of
        if self._stages.chunks == 1:
            return dict.fromkeys(pcg.nodes, frozenset({0}))
        each = [frozenset({chunk}) for chunk in range(self._stages.chunks)]
        homes: dict[Node, frozenset[int]] = {}
        users = pcg.users
        for node in reversed(pcg.nodes):
            if node in named:
                homes[node] = each[named[node]]
            else:
                found = {homes[user] for user in users[node]}
                homes[node] = next(iter(found)) if len(found) == 1 else frozenset().union(*found) or each[-1]
        return homes

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """By chunk, what it runs, in order; leaves too."""
        found: list[list[Node]] = [[] for _ in range(self._stages.chunks)]
        for node in self._nodes.pcg.nodes:
            for chunk in self.homes[node]:
                found[chunk].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def runs(self) -> tuple[tuple[NodeRun, ...], ...]:
        """By chunk, its operators in runs of one layer each."""
        return tuple(self._cut(nodes) for nodes in self.nodes)

    def _cut(self, nodes: Sequence[Node]) -> tuple[NodeRun, ...]:
        operators = [node for node in nodes if not node.is_leaf]
        if not operators:
            return ()
        if self._stages.layer_of:
            layers = _fill([self._stages.layer_of.get(node, -1) for node in operators])
        else:  # so many operators each, the moves before one with it
            before = accumulate((node.op.kind != "parallel" for node in operators), initial=0)
            layers = [count // EACH for count in before]
        ends = [at for at in range(len(operators) - 1) if layers[at] != layers[at + 1]]
        return _runs(operators, ends, [layers[end] for end in [*ends, len(operators) - 1]])

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Behind each chunk but the last."""
        found = [Crossing() for _ in range(self._stages.chunks)]
        if self._stages.chunks > 1:
            for node, users in self._nodes.pcg.users.items():
                if node.is_leaf or len(self.homes[node]) > 1:
                    continue
                (home,) = self.homes[node]
                furthest = max((max(self.homes[user]) for user in users), default=home)
                for chunk in range(home, furthest):
                    found[chunk] = self._with(found[chunk], self._nodes.of[node])
        return tuple(found[:-1])

    def _with(self, before: Crossing, entry: Entry) -> Crossing:
        """What crosses as well; each rank of the axis that slices what all its ranks hold alike sends its slice."""
        back = entry.bytes if entry.backward else 0.0
        if self._slices is None or not isinstance(entry.sharding[self._slices], Invariant):
            return replace(before, forward=before.forward + entry.bytes, backward=before.backward + back)
        size, whole = self._nodes.problem.mesh.axes[self._slices].size, before.whole
        forward, backward = before.forward + entry.bytes / size, before.backward + back / size
        return Crossing(forward, backward, (whole[0] + entry.bytes, whole[1] + back))


def _fill(layers: list[int]) -> list[int]:
    """Nodes without a layer that stand inside of one belong to it."""
    labelled = [at for at, layer in enumerate(layers) if layer >= 0]
    for before, after in pairwise(labelled):
        if layers[before] == layers[after]:
            layers[before:after] = [layers[before]] * (after - before)
    return layers


def _runs(operators: Sequence[Node], ends: Sequence[int], layers: Sequence[int]) -> tuple[NodeRun, ...]:
    starts = [0, *(end + 1 for end in ends)]
    stops = [*(end + 1 for end in ends), len(operators)]
    return tuple(
        NodeRun(tuple(operators[start:stop]), start, layer)
        for start, stop, layer in zip(starts, stops, layers, strict=True)
        if stop > start
    )
