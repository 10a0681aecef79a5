"""One value as tables: moving it from where it is made to those who read or return it, and keeping it for backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        is_view = self.configs.problem.hides and not value.op.kernel
        num_bytes = routes.bytes * self._written(value, routes) if is_view else routes.bytes
        index = routes.states.index
        starts = np.array([index[before] for before in dict.fromkeys(made)], dtype=np.int64)
        row_of = {start: row for row, start in enumerate(starts.tolist())}
        rows = np.array([row_of[index[before]] for before in made], dtype=np.int64)
        exits = [self._exits(value, before, leaves) for before in dict.fromkeys(made)]
        kept_where_made = gradient and "out" in value.op.saved
        moved = _ValueMoves(
            self, value, routes, num_bytes, source, starts, rows, tuple(readers), len(leaves), exits, kept_where_made
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

    ``starts`` are the vertices of these, each once, and ``rows`` says which of them each configuration of the value's
    node makes; ``exits``: by start, where it goes to leave the program, None if it cannot; ``num_bytes``: [vertices]
    that a device holds for sure. ``kept_where_made`` says that the value's own node holds it until backward, so that
    readers of that copy need not.
    """

    moving: Moving
    value: Node
    routes: Routes
    num_bytes: Table
    source: Variable
    starts: Indices
    rows: Indices
    readers: tuple[Reader, ...]
    leaves: int
    exits: list[list[Sharding] | None]
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
    def needs(self) -> list[tuple[Indices, Indices]]:
        """By reader: what its configurations need, each once, and which of these each configuration needs."""
        found = []
        for reader in self.readers:
            numbers = {need: number for number, need in enumerate(dict.fromkeys(reader.needs))}
            columns = np.array([numbers[need] for need in reader.needs], dtype=np.int64)
            found.append((self._vertices(list(numbers)), columns))
        return found

    def single(self) -> list[PricedFactor]:
        """At most one reader: all wants are known from two configurations."""
        if not self.readers:
            return [PricedFactor((self.source,), self._together_s([()])[self.rows, 0])]
        alone = self._alone(0, 1.0, 1.0)
        if not self.leaves:
            return [alone]
        wants, (_, columns) = dict.fromkeys(self.readers[0].needs), self.needs[0]
        seconds = self._together_s([(need,) for need in wants])
        return [PricedFactor(alone.variables, seconds[np.ix_(self.rows, columns)], alone.num_bytes)]

    def pair(self) -> list[PricedFactor]:
        """Two readers: the way to the first is paid, and what the second adds."""
        one, other = self.readers
        (needs, columns), (needs_too, columns_too) = self.needs
        if len(self.rows) * len(columns) * len(columns_too) > self.moving.entries:
            return self.apart()
        cost = self._seconds(needs)[:, :, None] + self.routes.rest(self.starts, needs, needs_too)
        scope: tuple[Variable, ...] = (self.source, one.variable, other.variable)
        spread = np.ix_(self.rows, columns, columns_too)
        seconds, held = cost[spread], None
        if self.keepers:
            same = self._copy(needs)[:, :, None] == self._copy(needs_too)[:, None, :]
            again = np.where(same & one.keeps, 0.0, self._held_bytes(needs_too)[:, None, :]) * other.keeps
            held = ((self._held_bytes(needs) * one.keeps)[:, :, None] + again)[spread]
        if one.variable == other.variable:  # one node reads it twice
            seconds = seconds.diagonal(axis1=1, axis2=2)
            held = None if held is None else held.diagonal(axis1=1, axis2=2)
            scope = scope[:2]
        return [PricedFactor(scope, seconds, held)]

    def apart(self) -> list[PricedFactor]:
        """Each reader alone, at its share of the cost: a lower bound, for all together cost the dearest at least."""
        self.moving.inexact.append(self.value)
        self.moving.relaxed.append(self.value)
        shares = 1.0 / self.wants, 1.0 / max(1, self.keepers)
        factors = [self._alone(number, *shares) for number in range(len(self.readers))]
        if self.leaves:
            leaving = np.array([self._leaving_s(row) / self.wants for row in range(len(self.starts))])
            factors.append(PricedFactor((self.source,), leaving[self.rows]))
        return factors

    def _alone(self, number: int, share: float, holding: float) -> PricedFactor:
        """[made, configurations] a share of the whole way to one reader, and of what it holds."""
        wants, columns = self.needs[number]
        cost = share * self._seconds(wants)
        cost[[leaving is None for leaving in self.exits]] = np.inf
        spread = np.ix_(self.rows, columns)
        held = (holding * self._held_bytes(wants))[spread] if self.readers[number].keeps else None
        return PricedFactor((self.source, self.readers[number].variable), cost[spread], held)

    def share(self, helper: Helper) -> list[PricedFactor]:
        """A helper names one want or two, the way to which is paid once, and says whose copy is held once for all."""
        distinct = np.array(list(dict.fromkeys(int(need) for needs, _ in self.needs for need in needs)), dtype=np.int64)
        largest = len(self.rows) * max(len(columns) for _, columns in self.needs)
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
        named = self._seconds(names[:, 0])
        if names.shape[1] > 1:
            named = named + self.routes.rest(self.starts, distinct, distinct)[:, at[:, 0], at[:, 1]]
        own = np.tile(named + self._leaving_too_s(names) / sharers, (1, len(once)))
        memory = None
        if any(map(any, once)):
            memory = np.concatenate([self._bytes_held_once(names, choice) for choice in once], axis=1)[self.rows]
        factors = [PricedFactor((self.source, variable), own[self.rows], memory)]
        for number, reader in enumerate(self.readers):
            needs, columns = self.needs[number]
            added = self._spread(self.routes.rest(self.starts, names, needs), columns) / sharers
            held = None
            if reader.keeps:
                again = [self._bytes_held_again(names, needs, choice) / holders for choice in once]
                held = self._spread(np.concatenate(again, axis=1), columns)
            scope = (self.source, variable, reader.variable)
            factors.append(PricedFactor(scope, np.tile(added, (1, len(once), 1)), held))
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

    def _bytes_held_once(self, names: Indices, choice: tuple[bool, ...]) -> Table:
        """[starts, names] bytes of the named copies that are held, each counted once."""
        held = self._held_bytes(names[:, 0]) * choice[0]
        if len(choice) > 1 and choice[1]:
            counted = (self._copy(names[:, 0]) == self._copy(names[:, 1])) & choice[0]
            held = held + np.where(counted, 0.0, self._held_bytes(names[:, 1]))
        return held

    def _bytes_held_again(self, names: Indices, needs: Indices, choice: tuple[bool, ...]) -> Table:
        """[starts, names, needs] bytes that a reader holds beyond the named copies."""
        shape = len(self.starts), len(names), len(needs)
        memory = np.broadcast_to(self._held_bytes(needs)[:, None, :], shape)
        for position, chosen in enumerate(choice):
            if chosen:
                same = self._copy(names[:, position])[:, :, None] == self._copy(needs)[:, None, :]
                memory = np.where(same, 0.0, memory)
        return memory

    def _leaving_s(self, row: int) -> float:
        leaving, way = self.exits[row], self._way(row)
        return math.inf if leaving is None else max(way.together_s([after]) for after in leaving)

    def _leaving_too_s(self, names: Indices) -> Table:
        """[starts, names] seconds of the ways out of the program that are not on the ways to what is named."""
        found = np.zeros((len(self.starts), len(names)))
        for row, leaving in enumerate(self.exits if self.leaves else ()):
            found[row] = np.inf
            if leaving is not None:
                found[row] = self._way(row).rest(names, self._vertices(leaving)).sum(axis=1)
        return found

    def _together_s(self, wants: Sequence[Sequence[Sharding]]) -> Table:
        """[starts, wants] seconds of all ways to each of some wants, and out of the program."""
        found = np.full((len(self.starts), len(wants)), np.inf)
        for row, leaving in enumerate(self.exits):
            if leaving is not None:
                found[row] = [self._way(row).together_s([*want, *leaving]) for want in wants]
        return found

    def _spread(self, table: Table, columns: Indices) -> Table:
        """[made, names, configurations] from [starts, names, needs]."""
        return table.take(self.rows, axis=0).take(columns, axis=2)

    def _way(self, row: int) -> ReshardChains:
        return ReshardChains(self.routes, self.routes.states.shardings[self.starts[row]])

    def _vertices(self, shardings: Sequence[Sharding]) -> Indices:
        return np.array([self.routes.states.index[sharding] for sharding in shardings], dtype=np.int64)

    def _seconds(self, needs: Indices) -> Table:
        """[starts, needs] of the whole way."""
        found: Table = self.routes.seconds[np.ix_(self.starts, needs)]
        return found

    def _copy(self, needs: Indices) -> Indices:
        """[starts, needs] what a reader holds: ``replicate`` names a state and makes no copy."""
        held = self.routes.rested if self.moving.configs.problem.lean else self.routes.copy
        found: Indices = held[np.ix_(self.starts, needs)]
        return found

    def _held_bytes(self, needs: Indices) -> Table:
        """[starts, needs] of what a keeping reader holds; nothing where the value's own node holds that copy."""
        copy = self._copy(needs)
        held = np.broadcast_to(self.num_bytes[needs], copy.shape)
        if self.moving.configs.problem.lean:  # of what is gathered again
            held = np.where(copy != self.routes.copy[np.ix_(self.starts, needs)], self.num_bytes[copy], held)
        own = self.kept_where_made or self.moving.configs.lets_go(self.value)
        return np.where(copy == self.starts[:, None], 0.0, held) if own else held
