"""One value as tables: moving it from where it is made to those who read or return it, and keeping it for backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding, fits
from pdv.pcg.derive import exit_sharding
from pdv.pcg.plan_cost import written_share
from pdv.pcg.redistribute import Routes
from pdv.pcg.states import Indices
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.sharing import EXACT_WANTS, ReshardChains
from pdv.search.solver.tables import PricedFactor, Table, Variable

Helper = Callable[[int, int], Variable]


@dataclass(frozen=True)
class Reader:
    """An operand position: what each configuration of its node needs, and whether it is kept for backward."""

    variable: Variable
    needs: Sequence[Sharding]
    keeps: bool


@dataclass(frozen=True)
class Moving:
    """Builds the factors of values.

    ``optimistic`` factors bound the cost from below where more than five want a value; elsewhere they are the same.
    With ``entries``, tables larger than that are replaced by sums of smaller ones that bound them from below.
    ``inexact`` lists the values whose cost is but bounded, ``relaxed`` those that were split for their size.
    """

    configs: ConfigTable
    optimistic: bool = False
    entries: float = math.inf
    inexact: list[Node] = field(default_factory=list)
    relaxed: list[Node] = field(default_factory=list)

    def factors(
        self,
        value: Node,
        source: Variable,
        made: Sequence[Sharding],
        readers: Sequence[Reader],
        leaves: Sequence[Sequence[Sharding]],
        helper: Helper,
    ) -> list[PricedFactor]:
        """Factors over ``source`` (its domain is ``made``), the readers' variables and a helper's.

        Args:
            value: what is moved.
            source: the variable of the node that makes it.
            made: the sharding that each of its configurations gives.
            readers: who reads it in this block.
            leaves: for each time that it leaves the program, the shardings in which it may.
            helper: makes a variable of a given size, and how many of its values differ where memory is free.
        """
        if not made:
            return []  # nothing makes it: the plan is impossible, whatever moves cost
        gradient = self.configs.problem.train and value.needs_grad
        routes = self.configs.moves.routes(value.type, gradient=gradient)
        if self.configs.problem.hides and not value.op.kernel:
            routes = replace(routes, held=routes.bytes * self._written(value, routes))
        ways = {before: ReshardChains(routes, before) for before in dict.fromkeys(made)}
        exits = {before: self._exits(value, before, leaves) for before in ways}
        kept_where_made = gradient and "out" in value.op.saved
        moved = _ValueMoves(
            self, value, routes, source, tuple(made), tuple(readers), len(leaves), ways, exits, kept_where_made
        )
        if len(readers) < 2:
            return moved.single()
        return moved.pair() if moved.wants == 2 else moved.share(helper)

    def _written(self, value: Node, routes: Routes) -> Table:
        """[states] 1 where a view is a value of its own for sure."""
        mesh = self.configs.problem.mesh
        return np.array(
            [
                written_share(value, state, mesh) if fits(value.type, state, mesh) else 0.0
                for state in routes.states.shardings
            ]
        )

    def _exits(self, value: Node, before: Sharding, leaves: Sequence[Sequence[Sharding]]) -> list[Sharding] | None:
        """Where the value goes to leave the program; None if it cannot."""
        found = []
        for allowed in leaves:
            train = self.configs.problem.train
            after = exit_sharding(self.configs.moves, [(value, before)], allowed, train=train)
            if after is None:
                return None
            found.append(after)
        return found


@dataclass(frozen=True)
class _ValueMoves:
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
    ways: dict[Sharding, ReshardChains]
    exits: dict[Sharding, list[Sharding] | None]
    kept_where_made: bool

    @property
    def wants(self) -> int:
        """How many it is moved to."""
        return len(self.readers) + self.leaves

    @property
    def keepers(self) -> int:
        """How many readers hold it until backward."""
        return sum(reader.keeps for reader in self.readers)

    @cached_property
    def needs(self) -> list[tuple[Indices, list[int]]]:
        """By reader: what its configurations need, each once, and which of these each configuration needs."""
        found = []
        for reader in self.readers:
            numbers = {need: number for number, need in enumerate(dict.fromkeys(reader.needs))}
            vertices = np.array([self.routes.states.index[need] for need in numbers], dtype=np.int64)
            found.append((vertices, [numbers[need] for need in reader.needs]))
        return found

    def single(self) -> list[PricedFactor]:
        """At most one reader: all wants are known from two configurations."""
        if not self.readers:
            costs = {before: way.together_s(self.exits[before] or ()) for before, way in self.ways.items()}
            stuck = {before for before, leaving in self.exits.items() if leaving is None}
            return [PricedFactor((self.source,), np.array([np.inf if m in stuck else costs[m] for m in self.made]))]
        alone = self._alone(0, 1.0, 1.0)
        if not self.leaves:
            return [alone]
        _, columns = self.needs[0]
        small = {}
        for before, way in self.ways.items():
            leaving = self.exits[before]
            wants = dict.fromkeys(self.readers[0].needs)
            if leaving is None:
                row = np.full(len(wants), np.inf)
            else:
                row = np.array([way.together_s([need, *leaving]) for need in wants])
            small[before] = row[columns]
        return [PricedFactor(alone.variables, self._stack(small), alone.num_bytes)]

    def pair(self) -> list[PricedFactor]:
        """Two readers: the way to the first is paid, and what the second adds."""
        one, other = self.readers
        (needs, columns), (needs_too, columns_too) = self.needs
        if len(self.made) * len(columns) * len(columns_too) > self.moving.entries:
            return self.apart()
        seconds, held = {}, {}
        for before, way in self.ways.items():
            cost = way.seconds(needs)[:, None] + way.rest(needs, needs_too)
            same = way.copy(needs)[:, None] == way.copy(needs_too)[None, :]
            again = np.where(same & one.keeps, 0.0, self._held_bytes(way, needs_too)[None, :]) * other.keeps
            kept = (self._held_bytes(way, needs) * one.keeps)[:, None] + again
            seconds[before], held[before] = (table[np.ix_(columns, columns_too)] for table in (cost, kept))
        scope: tuple[Variable, ...] = (self.source, one.variable, other.variable)
        if one.variable == other.variable:  # one node reads it twice
            seconds, held = ({m: t.diagonal() for m, t in tables.items()} for tables in (seconds, held))
            scope = scope[:2]
        return [PricedFactor(scope, self._stack(seconds), self._stack(held) if self.keepers else None)]

    def apart(self) -> list[PricedFactor]:
        """Each reader alone, at its share of the cost: a lower bound, for all together cost the dearest at least."""
        self.moving.inexact.append(self.value)
        self.moving.relaxed.append(self.value)
        shares = 1.0 / self.wants, 1.0 / max(1, self.keepers)
        factors = [self._alone(number, *shares) for number in range(len(self.readers))]
        if self.leaves:
            leaving = [self._leaving_s(before) / self.wants for before in self.made]
            factors.append(PricedFactor((self.source,), np.array(leaving)))
        return factors

    def _alone(self, number: int, share: float, holding: float) -> PricedFactor:
        """[made, configurations] a share of the whole way to one reader, and of what it holds."""
        starts = np.array([way.start for way in self.ways.values()])
        wants, columns = self.needs[number]
        cost = share * self.routes.seconds[np.ix_(starts, wants)]
        cost[[self.exits[before] is None for before in self.ways]] = np.inf
        rows = {before: row for row, before in enumerate(self.ways)}
        spread = np.ix_([rows[before] for before in self.made], columns)
        held = None
        if self.readers[number].keeps:
            held = np.broadcast_to(holding * self.routes.bytes[wants], cost.shape)
            if self.kept_where_made:
                held = np.where(self.routes.copy[np.ix_(starts, wants)] == starts[:, None], 0.0, held)
            held = held[spread]
        return PricedFactor((self.source, self.readers[number].variable), cost[spread], held)

    def share(self, helper: Helper) -> list[PricedFactor]:
        """A helper names one want or two, the way to which is paid once, and says whose copy is held once for all."""
        distinct = np.array(list(dict.fromkeys(int(need) for needs, _ in self.needs for need in needs)), dtype=np.int64)
        largest = len(self.made) * max(len(columns) for _, columns in self.needs)
        at, once, loose = self._name(len(distinct))
        if at.shape[1] > 1 and largest * len(at) * len(once) > self.moving.entries:
            at, once, loose = self._name(len(distinct), most=1)
        if largest * len(at) * len(once) > self.moving.entries:
            return self.apart()
        if self.wants > EXACT_WANTS[at.shape[1]]:
            self.moving.inexact.append(self.value)
        variable, names = helper(len(at) * len(once), len(at)), distinct[at]
        sharers = self.wants - 1 if loose else 1
        holders = 1 if any(map(any, once)) else max(1, self.keepers)  # of one copy, where none is named
        own, kept = {}, {}
        for before, way in self.ways.items():
            leaving = self.exits[before]
            rest = np.inf if leaving is None else way.rest(names, way.rows(leaving)).sum(axis=1) / sharers
            named = way.seconds(names[:, 0])
            if names.shape[1] > 1:
                named = named + way.rest(distinct, distinct)[at[:, 0], at[:, 1]]
            own[before] = np.tile(named + rest, len(once))
            kept[before] = np.concatenate([self._bytes_held_once(way, names, choice) for choice in once])
        memory = self._stack(kept) if any(map(any, once)) else None
        factors = [PricedFactor((self.source, variable), self._stack(own), memory)]
        for number, reader in enumerate(self.readers):
            added, held = {}, {}
            needs, columns = self.needs[number]
            for before, way in self.ways.items():
                added[before] = np.tile(way.rest(names, needs)[:, columns] / sharers, (len(once), 1))
                if reader.keeps:
                    again = [self._bytes_held_again(way, names, needs, choice) / holders for choice in once]
                    held[before] = np.concatenate(again)[:, columns]
            scope = (self.source, variable, reader.variable)
            factors.append(PricedFactor(scope, self._stack(added), self._stack(held) if reader.keeps else None))
        return factors

    def _name(self, count: int, most: int = 2) -> tuple[Indices, Sequence[tuple[bool, ...]], bool]:
        """What a helper may name: [names, one or two] of ``count`` wants, which copies are held, whether it bounds."""
        two = most > 1 and EXACT_WANTS[1] < self.wants <= EXACT_WANTS[2]
        at = np.array(list(itertools.combinations_with_replacement(range(count), 1 + two)), dtype=np.int64)
        at = at.reshape(-1, 1 + two)  # none, if a reader can do nothing
        loose = self.moving.optimistic and self.wants > EXACT_WANTS[1 + two]
        return at, tuple(itertools.product(self._choices(loose=loose), repeat=1 + two)), loose

    def _choices(self, *, loose: bool) -> tuple[bool, ...]:
        """Whether a named copy is held at the helper's expense; no question where memory is no matter."""
        if self.keepers == 0 or loose or math.isinf(self.moving.configs.problem.memory_limit):
            return (False,)
        return (True,) if self.keepers == self.wants else (False, True)

    def _bytes_held_once(self, way: ReshardChains, names: Indices, choice: tuple[bool, ...]) -> Table:
        """[names] bytes of the named copies that are held, each counted once."""
        held = self._held_bytes(way, names[:, 0]) * choice[0]
        if len(choice) > 1 and choice[1]:
            counted = (way.copy(names[:, 0]) == way.copy(names[:, 1])) & choice[0]
            held = held + np.where(counted, 0.0, self._held_bytes(way, names[:, 1]))
        return held

    def _bytes_held_again(self, way: ReshardChains, names: Indices, needs: Indices, choice: tuple[bool, ...]) -> Table:
        """[names, needs] bytes that a reader holds beyond the named copies."""
        memory = np.broadcast_to(self._held_bytes(way, needs)[None, :], (len(names), len(needs)))
        for position, chosen in enumerate(choice):
            if chosen:
                same = way.copy(names[:, position])[:, None] == way.copy(needs)[None, :]
                memory = np.where(same, 0.0, memory)
        return memory

    def _leaving_s(self, before: Sharding) -> float:
        leaving = self.exits[before]
        return math.inf if leaving is None else max(self.ways[before].together_s([after]) for after in leaving)

    def _held_bytes(self, way: ReshardChains, needs: Indices) -> Table:
        """[needs] bytes of what a keeping reader holds; nothing where the value's own node holds that copy."""
        held = way.bytes(needs)
        return np.where(way.copy(needs) == way.start, 0.0, held) if self.kept_where_made else held

    def _stack(self, small: dict[Sharding, Table]) -> Table:
        """[made, …] from one table per sharding."""
        return np.stack([small[before] for before in self.made])
