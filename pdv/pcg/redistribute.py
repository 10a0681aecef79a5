"""redistribute(x, before, after): the cheapest chain of parallel operators between two shardings.

Each step is one operator on one axis, or on several as one, each legal by the states it leaves; a chain of them is a
composition of the cancellation and fusion laws (docs/architecture.md, States), so its order never changes what it
computes, only what it costs. All chains of one tensor type are found together, as arrays over its shardings
(``Routes``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ir.mesh import Mesh
from ir.sharding import (
    Invariant,
    Partial,
    Shard,
    Sharding,
    State,
    fits,
)
from ir.types import TensorType
from pdv.cost.comm import AxisLink, joint_link, move_seconds
from pdv.pcg.states import Flags, Indices, MoveStep, Seconds, StateGraph, state_graph

# Large enough that a line through this point and zero gives a collective's rate to full precision.
MANY_BYTES = 2.0**40
# A chain of more steps has to be cheaper by more than sums of seconds are rounded.
ROUNDING = 1e-12
REST_ENTRIES = 1 << 19  # of a table over shardings before, after and named, which stays in cache


class Chain(NamedTuple):
    """A sequence of steps and what it costs (seconds; backward only where the tensor carries a gradient)."""

    forward_s: float
    backward_s: float
    steps: tuple[MoveStep, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Routes:
    """The cheapest chains between all shardings of one tensor; arrays are [before, after] unless said otherwise.

    Those from one sharding form a tree: the first steps of a cheapest chain are a cheapest chain.

    Attributes:
        states: the vertices.
        seconds: forward and backward; infinite where there is no chain. ``forward_s``: forward alone. ``named_s``:
            backward of the steps that only name a state, which sum a parameter's gradient (nothing without gradient).
            ``summed_s``: the same where gradients are summed in buckets.
        edge: the last step (an edge of ``states``); -1 where there is none.
        length: how many steps; -1 where there is no chain.
        copy: what a reader of ``after`` holds (``replicate`` names a state and makes no copy).
        rested: what is kept of that copy by a reader that has it gathered again.
        gathered: whether making that copy takes a gather.
        unit: the vertex behind the first step where that gathers a unit; -1 where it does not.
        held: [after] bytes of one device's piece; infinite where a dim does not divide.
    """

    states: StateGraph
    seconds: Seconds
    forward_s: Seconds
    named_s: Seconds
    summed_s: Seconds
    edge: Indices
    length: Indices
    copy: Indices
    rested: Indices
    gathered: Flags
    unit: Indices
    held: Seconds

    @cached_property
    def bytes(self) -> Seconds:
        """[after] that a device holds, zero where that cannot be."""
        return np.where(np.isfinite(self.held), self.held, 0.0)

    @cached_property
    def unit_s(self) -> Seconds:
        """[before, after] seconds of the first step where it gathers a unit; those of a chain without one are zero."""
        return self._to_unit(self.seconds)

    @cached_property
    def unit_forward_s(self) -> Seconds:
        """[before, after] of ``unit_s``, forward alone."""
        return self._to_unit(self.forward_s)

    def _to_unit(self, seconds: Seconds) -> Seconds:
        return np.where(self.unit >= 0, np.take_along_axis(seconds, np.maximum(self.unit, 0), axis=1), 0.0)

    def chain(self, before: int, after: int) -> Chain | None:
        """The chain between two vertices, or None."""
        if self.length[before, after] < 0:
            return None
        steps: list[MoveStep] = []
        at = after
        while at != before:
            edge = self.edge[before, at]
            steps.append(self.states.steps[edge])
            at = int(self.states.tails[edge])
        forward_s = float(self.forward_s[before, after])
        return Chain(forward_s, float(self.seconds[before, after]) - forward_s, tuple(reversed(steps)))

    def rest(self, befores: Indices, names: Indices, wants: Indices, *, forward: bool = False) -> Seconds:
        """[befores, names, wants] seconds of the way from each to each want that are not on the way to the name.

        Names: [names], or [names, several] where several are named together.
        """
        key = (befores.tobytes(), forward, names.shape, names.tobytes(), wants.tobytes())
        if key not in self._rests:
            each = max(1, REST_ENTRIES // max(1, len(names) * len(self.held)))
            parts = [befores[start : start + each] for start in range(0, len(befores), each)]
            found = np.concatenate([self._rest(part, names, wants, forward=forward) for part in parts])
            found.setflags(write=False)
            self._rests[key] = found
        return self._rests[key]

    def _rest(self, befores: Indices, names: Indices, wants: Indices, *, forward: bool) -> Seconds:
        total = (self.forward_s if forward else self.seconds)[befores]
        length, behind = self.length[befores], self._behind[befores]
        several = names.reshape(len(names), 1 if names.ndim == 1 else names.shape[1])
        at, rows = length[:, several], np.arange(len(befores))[:, None, None]
        reached, on_way = (at >= 0).all(axis=2), np.broadcast_to(several, at.shape)
        above = np.zeros((*length.shape, len(names)), dtype=bool)
        for _ in range(int(at.max(initial=0)) + 1):
            above[rows, on_way, np.arange(len(names))[:, None]] = True
            on_way = behind[rows, on_way]
        rest = np.full(above.shape, np.inf)
        rest[np.arange(len(befores)), befores] = 0.0
        for steps in range(1, int(length.max(initial=0)) + 1):
            starts, level = np.nonzero(length == steps)
            tails = behind[starts, level]
            further = rest[starts, tails] + (total[starts, level] - total[starts, tails])[:, None]
            rest[starts, level] = np.where(above[starts, level], 0.0, further)
        found: Seconds = rest[:, wants].transpose(0, 2, 1)
        found[~reached] = np.inf
        return found

    @cached_property
    def _behind(self) -> Indices:
        """[before, after] the vertex before the last step; after itself where there is none."""
        found = np.broadcast_to(np.arange(len(self.held)), self.edge.shape).copy()
        found[self.edge >= 0] = self.states.tails[self.edge[self.edge >= 0]]
        return found

    @cached_property
    def _rests(self) -> dict[tuple[Any, ...], Seconds]:  # Any: what ``rest`` was asked
        return {}


@dataclass
class Redistribution:
    """Cheapest chains on one mesh, remembered by tensor type and gradient.

    ``copying``: of an emitted program's copies beside collectives, seconds a byte, and by how much each takes less.
    """

    mesh: Mesh
    axes: tuple[AxisLink, ...]
    bucket_bytes: float = 0.0
    copying: tuple[float, float] | None = None
    _routes: dict[tuple[TensorType, bool, bool], Routes] = field(default_factory=dict)
    _alike: dict[tuple[int, bytes, bool, bool], Routes] = field(default_factory=dict)
    _known_moves: dict[tuple[tuple[str, str], float], tuple[float, float]] = field(default_factory=dict)
    _known_lines: dict[tuple[tuple[str, str], ...], tuple[list[AxisLink], Seconds]] = field(default_factory=dict)

    def chain(self, tensor: TensorType, before: Sharding, after: Sharding, *, gradient: bool) -> Chain | None:
        """The cheapest chain, or None if there is none: nothing enters Partial, and none starts from copies."""
        routes = self.routes(tensor, gradient=gradient)
        return routes.chain(routes.states.index[before], routes.states.index[after])

    def routes(self, tensor: TensorType, *, gradient: bool, copied: bool = True) -> Routes:
        """All chains of a tensor, with their copies where these are priced, or (not ``copied``) without."""
        copied = copied and self.copying is not None
        key = (tensor, gradient, copied)
        if key not in self._routes:
            held = self.held_bytes(tensor)  # all that chains depend on
            alike = (tensor.rank, held.tobytes(), gradient, copied)
            if alike not in self._alike:
                states = state_graph(self.mesh, tensor.rank)
                self._alike[alike] = self._find(held, states, gradient=gradient, copied=copied)
            self._routes[key] = self._alike[alike]
        return self._routes[key]

    def held_bytes(self, tensor: TensorType) -> Seconds:
        """[states] of one device's piece; infinite where the cut is not even."""
        degrees = state_graph(self.mesh, tensor.rank).degrees
        divides = (np.array(tensor.shape, dtype=np.int64) % degrees == 0).all(axis=1)
        return np.where(divides, float(tensor.num_bytes) / np.maximum(degrees.prod(axis=1), 1), np.inf)

    def _find(self, held: Seconds, states: StateGraph, *, gradient: bool, copied: bool) -> Routes:
        """Bellman and Ford from all shardings at once: after n rounds, the cheapest chains of at most n steps.

        Of equally cheap chains the one of fewer steps is kept, then the one through the first tail.
        """
        divides = np.isfinite(held)
        usable = np.flatnonzero(divides[states.tails] & divides[states.heads])
        tails, heads = states.tails[usable], states.heads[usable]
        forward, backward = self._edge_seconds(states, usable, held)
        if copied:
            ahead, behind = self._copied_s(states, usable, held)
            forward, backward = forward + ahead, backward + behind
        weights = forward + backward if gradient else forward
        count = len(states.shardings)
        starts = np.flatnonzero(divides & ~states.copies)  # no operator makes its result so
        seconds = np.full((len(starts), count), np.inf)
        seconds[np.arange(len(starts)), starts] = 0.0
        edge = np.full((len(starts), count), -1, dtype=np.int64)
        length = np.where(np.isfinite(seconds), 0, -1)
        targets, first = np.unique(heads, return_index=True)
        for steps in itertools.count(1):
            if not len(usable):
                break
            offers = seconds[:, tails] + weights
            least = np.minimum.reduceat(offers, first, axis=1)
            better = least < seconds[:, targets] * (1.0 - ROUNDING)
            if not better.any():
                break
            rows, columns = np.nonzero(better)
            seconds[rows, targets[columns]] = least[better]
            length[rows, targets[columns]] = steps
            edge[rows, targets[columns]] = usable[_first(offers, least, first)[better]]
        length = _count(length, edge, states.tails)
        staying = np.where(divides, 0.0, np.inf)
        seconds, edge, length = (
            _spread_rows(seconds, starts, np.inf),
            _spread_rows(edge, starts, -1),
            _spread_rows(length, starts, -1),
        )
        np.fill_diagonal(seconds, staying)
        np.fill_diagonal(length, np.where(divides, 0, -1))
        together = np.maximum(held, self.bucket_bytes or 1.0)
        share = np.divide(held, together, out=np.ones_like(held), where=np.isfinite(held))
        summed = self._edge_seconds(states, usable, together)[1] * share[tails] if self.bucket_bytes else backward
        named = states.names_only[usable] * gradient
        each = np.zeros((3, len(states.steps) + 1))
        each[:, usable] = forward, backward * named, summed * named
        return _routes(states, seconds, edge, length, each, held)

    def _lines(self, states: StateGraph) -> tuple[list[AxisLink], Seconds]:
        """By operator its links; [operators, 2, 2] seconds of no byte and of each more, forward and backward."""
        if states.operators not in self._known_lines:
            links = [joint_link(tuple(self.axes[p] for p in self.mesh.positions(axis))) for _, axis in states.operators]
            lines = np.empty((len(states.operators), 2, 2))
            for kind, ((name, _), link) in enumerate(zip(states.operators, links, strict=True)):
                base = np.array(move_seconds(name, link, 0.0))
                lines[kind, 0] = base
                lines[kind, 1] = (np.array(move_seconds(name, link, MANY_BYTES)) - base) / MANY_BYTES
            self._known_lines[states.operators] = links, lines
        return self._known_lines[states.operators]

    def _copied_s(self, states: StateGraph, edges: Indices, held: Seconds) -> Seconds:
        """[forward and backward, edges] seconds of copies beside collectives."""
        assert self.copying is not None, "asked where copies are priced"
        sizes = np.stack([held[states.tails[edges]], held[states.heads[edges]]], axis=-1)
        each = self.copying[0] * sizes - self.copying[1]
        found: Seconds = np.maximum(0.0, (states.copied[edges] * each[:, None, :]).sum(axis=2)).T
        return found

    def _edge_seconds(self, states: StateGraph, edges: Indices, held: Seconds) -> tuple[Seconds, Seconds]:
        """[edges] seconds forward and backward: a line over a collective's bytes, or what the axis's curve says."""
        links, lines = self._lines(states)
        kinds, sizes = states.kinds[edges], held[states.tails[edges]]
        found = lines[kinds]
        both: Seconds = found[:, 0] + found[:, 1] * sizes[:, None]
        if any(map(_is_curved, links)):
            _, first, alike = np.unique(states.alike[edges], return_index=True, return_inverse=True)
            each = both[first]
            for group, (kind, size) in enumerate(zip(kinds[first].tolist(), sizes[first].tolist(), strict=True)):
                if _is_curved(links[kind]):
                    key = states.operators[kind], size
                    if key not in self._known_moves:
                        self._known_moves[key] = move_seconds(key[0][0], links[kind], size)
                    each[group] = self._known_moves[key]
            both = each[alike]
        return both[:, 0], both[:, 1]


def _is_curved(link: AxisLink) -> bool:
    """Whether seconds are no line over bytes: measured or learned, or the cheapest of several algorithms."""
    return link.curves is not None


def _first(offers: Seconds, least: Seconds, starts: Indices) -> Indices:
    """[before, targets] the first edge into each target that offers the least; a target's edges begin at ``starts``."""
    count = offers.shape[1]
    every = np.repeat(least, np.diff(np.append(starts, count)), axis=1)
    found: Indices = np.minimum.reduceat(np.where(offers == every, np.arange(count), count), starts, axis=1)
    return found


def _count(length: Indices, edge: Indices, tails: Indices) -> Indices:
    """[starts, after] steps of the chains that last steps make.

    Where a chain to a tail became cheaper by less than the rounding of the whole, the whole still counts the old one.
    """
    found = np.where(edge >= 0, -2, length)
    while (left := np.argwhere(found == -2)).size:
        rows, columns = left.T
        before = found[rows, tails[edge[rows, columns]]]
        assert (before >= 0).any(), "last steps that lead in a circle"
        found[rows, columns] = np.where(before >= 0, before + 1, -2)
    return found


def _spread_rows(rows: Any, starts: Indices, fill: float) -> Any:  # Any: arrays of seconds, or of indices
    """[before, after] from the rows of some ``starts``."""
    found = np.full((rows.shape[1], rows.shape[1]), fill, dtype=rows.dtype)
    found[starts] = rows
    return found


def _routes(
    states: StateGraph, seconds: Seconds, edge: Indices, length: Indices, steps_s: Seconds, held: Seconds
) -> Routes:
    """What follows from the last steps, level by level; ``steps_s``: of each forward, and of what it names."""
    count = len(states.shardings)
    weight, named, summed = steps_s
    named_s, summed_s = np.zeros((2, count, count))
    forward_s = np.where(length == 0, 0.0, np.inf)
    copy, rested = (np.broadcast_to(np.arange(count), (count, count)).copy() for _ in range(2))
    gathered, behind = np.zeros((count, count), dtype=bool), np.full((count, count), -1)
    for steps in range(1, int(length.max(initial=0)) + 1):
        rows, columns = np.nonzero(length == steps)
        last = edge[rows, columns]
        tails = states.tails[last]
        for total, of_step in ((forward_s, weight), (named_s, named), (summed_s, summed)):
            total[rows, columns] = total[rows, tails] + of_step[last]
        behind[rows, columns] = np.where(states.of_units[last], columns, -1) if steps == 1 else behind[rows, tails]
        copy[rows, columns] = np.where(states.names_only[last], copy[rows, tails], columns)
        rested[rows, columns] = np.where(states.names_only[last] | states.joins[last], rested[rows, tails], columns)
        gathered[rows, columns] = gathered[rows, tails] | states.gathers[last]
    return Routes(states, seconds, forward_s, named_s, summed_s, edge, length, copy, rested, gathered, behind, held)


def all_shardings(tensor: TensorType, mesh: Mesh, states: tuple[State, ...] | None = None) -> tuple[Sharding, ...]:
    """Every sharding of a tensor that divides evenly (over ``states``, by default all but Replicate)."""
    options = states or (Invariant(), *(Shard(dim) for dim in range(tensor.rank)), Partial())
    found: list[Sharding] = [()]
    for _ in mesh.axes:
        found = [(*sharding, state) for sharding in found for state in options]
    return tuple(sharding for sharding in found if fits(tensor, sharding, mesh))


__all__ = ["Chain", "MoveStep", "Redistribution", "Routes", "StateGraph", "all_shardings"]
