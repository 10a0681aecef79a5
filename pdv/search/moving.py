"""One value as tables: moving it from where it is made to those who read or return it, and keeping it for backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.pcg.derive import exit_sharding
from pdv.pcg.redistribute import Indices, Routes
from pdv.search.configs import ConfigTable
from pdv.search.exact import Factor, Table, Variable
from pdv.search.sharing import EXACT_WANTS, Ways

Helper = Callable[[int], Variable]


@dataclass(frozen=True)
class Reader:
    """An operand position: what each configuration of its node needs, and whether it is kept for backward."""

    variable: Variable
    needs: Sequence[Sharding]
    keeps: bool


@dataclass(frozen=True)
class Moving:
    """Builds the factors of values at one price of memory (seconds per byte).

    ``optimistic`` factors bound the cost from below where more than three want a value; elsewhere they are the same.
    With ``entries``, tables larger than that are replaced by sums of smaller ones that bound them from below, and their
    values listed as ``relaxed``.
    """

    configs: ConfigTable
    price: float
    optimistic: bool = False
    entries: float = math.inf
    relaxed: list[Node] = field(default_factory=list)

    def factors(
        self,
        value: Node,
        source: Variable,
        made: Sequence[Sharding],
        readers: Sequence[Reader],
        leaves: Sequence[bool],
        helper: Helper,
    ) -> list[Factor]:
        """Factors over ``source`` (its domain is ``made``), the readers' variables and a helper's.

        Args:
            value: what is moved.
            source: the variable of the node that makes it.
            made: the sharding that each of its configurations gives.
            readers: who reads it in this block.
            leaves: for each way that it leaves the program, whether it has to leave whole.
            helper: makes a variable of a given size.
        """
        if not made:
            return []  # nothing makes it: the plan is impossible, whatever moves cost
        gradient = self.configs.problem.train and value.needs_grad
        routes = self.configs.moves.routes(value.type, gradient=gradient)
        ways = {before: Ways(routes, before) for before in dict.fromkeys(made)}
        exits = {before: self._exits(value, before, leaves, gradient=gradient) for before in ways}
        kept_where_made = gradient and "out" in value.op.saved
        moved = _Moved(
            self, value, routes, source, tuple(made), tuple(readers), len(leaves), ways, exits, kept_where_made
        )
        if len(readers) < 2:
            return moved.single()
        return moved.pair() if moved.wants == 2 else moved.shared(helper)

    def _exits(self, value: Node, before: Sharding, leaves: Sequence[bool], *, gradient: bool) -> list[Sharding] | None:
        """Where the value goes to leave the program; None if it cannot."""
        found = []
        for whole in leaves:
            after = exit_sharding(self.configs.moves, value, before, whole=whole, gradient=gradient)
            if after is None:
                return None
            found.append(after)
        return found


@dataclass(frozen=True)
class _Moved:
    """One value, its readers, and the ways from every sharding in which it may be made.

    ``kept_where_made`` says that the value's own node holds it until backward, so that readers of that copy need not.
    """

    moving: Moving
    value: Node
    routes: Routes
    source: Variable
    made: tuple[Sharding, ...]
    readers: tuple[Reader, ...]
    leaves: int
    ways: dict[Sharding, Ways]
    exits: dict[Sharding, list[Sharding] | None]
    kept_where_made: bool

    @property
    def wants(self) -> int:
        """How many it is moved to."""
        return len(self.readers) + self.leaves

    @cached_property
    def needs(self) -> list[tuple[Indices, list[int]]]:
        """By reader: what its configurations need, each once, and which of these each configuration needs."""
        found = []
        for reader in self.readers:
            numbers = {need: number for number, need in enumerate(dict.fromkeys(reader.needs))}
            vertices = np.array([self.routes.states.index[need] for need in numbers], dtype=np.int64)
            found.append((vertices, [numbers[need] for need in reader.needs]))
        return found

    def single(self) -> list[Factor]:
        """At most one reader: all wants are known from two configurations."""
        if not self.readers:
            costs = {before: way.together_s(self.exits[before] or ()) for before, way in self.ways.items()}
            stuck = {before for before, leaving in self.exits.items() if leaving is None}
            return [Factor((self.source,), np.array([np.inf if m in stuck else costs[m] for m in self.made]))]
        reader = self.readers[0]
        if not self.leaves:
            return [Factor((self.source, reader.variable), self._alone(0, 1.0, 1.0))]
        needs, columns = self.needs[0]
        small = {}
        for before, way in self.ways.items():
            leaving = self.exits[before]
            if leaving is None:
                row = np.full(len(needs), np.inf)
            else:
                row = np.array([way.together_s([need, *leaving]) for need in dict.fromkeys(reader.needs)])
            small[before] = (row + self._held_s(way, needs) * reader.keeps)[columns]
        return [Factor((self.source, reader.variable), self._stacked(small))]

    def pair(self) -> list[Factor]:
        """Two readers: the way to the first is paid, and what the second adds."""
        one, other = self.readers
        (needs, columns), (needs_too, columns_too) = self.needs
        if len(self.made) * len(columns) * len(columns_too) > self.moving.entries:
            return self.apart()
        small = {}
        for before, way in self.ways.items():
            cost = way.seconds(needs)[:, None] + way.rest(needs, needs_too)
            cost += (self._held_s(way, needs) * one.keeps)[:, None]
            if other.keeps:
                same = way.copy(needs)[:, None] == way.copy(needs_too)[None, :]
                cost += np.where(same & one.keeps, 0.0, self._held_s(way, needs_too)[None, :])
            small[before] = cost[np.ix_(columns, columns_too)]
        if one.variable == other.variable:  # one node reads it twice
            small = {before: cost.diagonal() for before, cost in small.items()}
            return [Factor((self.source, one.variable), self._stacked(small))]
        return [Factor((self.source, one.variable, other.variable), self._stacked(small))]

    def apart(self) -> list[Factor]:
        """Each reader alone, at its share of the cost: a lower bound, for all together cost the dearest at least."""
        self.moving.relaxed.append(self.value)
        keepers = max(1, sum(reader.keeps for reader in self.readers))
        factors = []
        for number, reader in enumerate(self.readers):
            table = self._alone(number, 1.0 / self.wants, 1.0 / keepers)
            factors.append(Factor((self.source, reader.variable), table))
        if self.leaves:
            leaving = [self._leaving_s(before) / self.wants for before in self.made]
            factors.append(Factor((self.source,), np.array(leaving)))
        return factors

    def _alone(self, number: int, share: float, holding: float) -> Table:
        """[made, configurations] of the whole way to one reader, and what it holds."""
        starts = np.array([way.start for way in self.ways.values()])
        wants, columns = self.needs[number]
        cost = share * self.routes.seconds[np.ix_(starts, wants)]
        if self.readers[number].keeps and self.moving.price:
            held = np.broadcast_to(self.routes.bytes[wants], cost.shape)
            if self.kept_where_made:
                held = np.where(self.routes.copy[np.ix_(starts, wants)] == starts[:, None], 0.0, held)
            cost = cost + self.moving.price * holding * held
        cost[[self.exits[before] is None for before in self.ways]] = np.inf
        rows = {before: row for row, before in enumerate(self.ways)}
        found: Table = cost[np.ix_([rows[before] for before in self.made], columns)]
        return found

    def shared(self, helper: Helper) -> list[Factor]:
        """A helper names a want, the way to which is paid once, and says whether its copy is held once for all."""
        names = np.array(list(dict.fromkeys(int(need) for needs, _ in self.needs for need in needs)), dtype=np.int64)
        largest = max(len(columns) for _, columns in self.needs)
        keepers = sum(reader.keeps for reader in self.readers)
        loose = self.moving.optimistic and self.wants > EXACT_WANTS
        held = self._choices(keepers, loose=loose)
        if len(self.made) * len(names) * len(held) * largest > self.moving.entries:
            return self.apart()
        sharers, holders = (self.wants - 1, max(1, keepers)) if loose else (1, 1)
        variable = helper(len(names) * len(held))
        own: dict[Sharding, Table] = {}
        reading: list[dict[Sharding, Table]] = [{} for _ in self.readers]
        for before, way in self.ways.items():
            leaving = self.exits[before]
            rest = np.inf if leaving is None else way.rest(names, way.rows(leaving)).sum(axis=1) / sharers
            copies = self._held_s(way, names)
            own[before] = np.concatenate([way.seconds(names) + rest + copies * once for once in held])
            for number, (reader, (needs, columns)) in enumerate(zip(self.readers, self.needs, strict=True)):
                added = way.rest(names, needs) / sharers
                memory = self._held_s(way, needs)[None, :] * reader.keeps / holders
                same = way.copy(names)[:, None] == way.copy(needs)[None, :]
                parts = [added + np.where(same & once, 0.0, memory) for once in held]
                reading[number][before] = np.concatenate(parts)[:, columns]
        factors = [Factor((self.source, variable), self._stacked(own))]
        for reader, small in zip(self.readers, reading, strict=True):
            factors.append(Factor((self.source, variable, reader.variable), self._stacked(small)))
        return factors

    def _choices(self, keepers: int, *, loose: bool) -> tuple[bool, ...]:
        """Whether the named copy is held at the helper's expense."""
        if keepers == 0 or self.moving.price == 0.0 or loose:
            return (False,)
        return (True,) if keepers == self.wants else (False, True)

    def _leaving_s(self, before: Sharding) -> float:
        leaving = self.exits[before]
        return math.inf if leaving is None else max(self.ways[before].together_s([after]) for after in leaving)

    def _held_s(self, way: Ways, needs: Indices) -> Table:
        """[needs] price of what a keeping reader holds; nothing where the value's own node holds that copy."""
        held = self.moving.price * way.bytes(needs)
        return np.where(way.copy(needs) == way.start, 0.0, held) if self.kept_where_made else held

    def _stacked(self, small: dict[Sharding, Table]) -> Table:
        """[made, …] from one table per sharding."""
        return np.stack([small[before] for before in self.made])
