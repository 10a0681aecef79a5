"""Parameters that several nodes read: one storage for all, and chains from it that are shared.

Each is a variable of the search that runs through all blocks that read it. Its states are a storage and one *named*
want, the way to which is paid once for all readers (``sharing``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.sharding import Invariant, Replicate, Shard, Sharding, State
from pdv.pcg.redistribute import all_shardings
from pdv.pcg.states import Indices
from pdv.problem import Pins, Storage
from pdv.search.solver.configs import ConfigTable
from pdv.search.solver.sharing import EXACT_WANTS, ReshardChains
from pdv.search.solver.tables import Table, check_room

MOST_STATES = 8192  # with a want named


@dataclass(frozen=True, slots=True)
class TiedState:
    """Where the parameter rests, and the want that is paid for by all."""

    storage: Storage
    named: Sharding


class TiedTable:
    """Prices of one tied parameter's states, and of its uses under each."""

    def __init__(self, configs: ConfigTable, param: Node, readers: Sequence[tuple[Node, int]]) -> None:
        self.param = param
        self._configs = configs
        self._wants = len(readers)
        self._keepers = sum(configs.keeps(node, operand) for node, operand in readers)
        self._nameless = False

    @cached_property
    def states(self) -> tuple[TiedState, ...]:
        """Naming where it rests is naming nothing, and comes first; what costs nothing to reach need not be named.

        Where these were too many, nothing is named: prices are but bounded then.
        """
        mesh = self._configs.problem.mesh
        wants: tuple[State, ...] = (Invariant(), Replicate(), *(Shard(dim) for dim in range(self.param.type.rank)))
        found = []
        for storage in self._configs.storages(self.param):
            nothing = TiedState(storage, storage.sharding)
            named = [TiedState(storage, want) for want in all_shardings(self.param.type, mesh, wants)]
            costs = self._rest_s(nothing, [state.named for state in named])
            units = self._units(storage, [state.named for state in named]) >= 0
            takes = ((costs > 0.0) | units) & (costs < np.inf)
            found += [nothing, *(state for state, is_named in zip(named, takes, strict=True) if is_named)]
        if len(found) > MOST_STATES:
            self._nameless = True
            found = [state for state in found if state.named == state.storage.sharding]
        return tuple(found)

    @property
    def exact(self) -> bool:
        """False if only ``optimistic`` prices bound the cost from below."""
        return self._wants <= EXACT_WANTS[1] and self._keepers <= 1 and not (self.states and self._nameless)

    def own(self, price: float) -> Table:
        """[states] what rests, and the way that is paid once."""
        seconds, held = self.own_costs
        costs: Table = seconds + price * held
        return costs

    def own_parts(self, number: int) -> tuple[float, float]:
        """(seconds, bytes) of one state."""
        seconds, held = self.own_costs
        return float(seconds[number]), float(held[number])

    @cached_property
    def own_costs(self) -> tuple[Table, Table]:
        """[states] seconds, and bytes."""
        found: list[tuple[float, float]] = []
        for storage, group in itertools.groupby(self.states, key=lambda state: state.storage):
            named = [state.named for state in group]
            seconds, memory = self._configs.resident(self.param, storage)
            ways, units = self._rest_s(TiedState(storage, storage.sharding), named), self._units(storage, named)
            for way, unit in zip(ways.tolist(), units.tolist(), strict=True):
                added_s, copied = self._kept(storage, unit)
                found.append((seconds + way + added_s, memory + copied))
        costs = np.array(found, dtype=np.float64).reshape(-1, 2)
        return costs[:, 0], costs[:, 1]

    def use(
        self, needs: Sequence[Sharding], *, keep: bool, optimistic: bool, states: Sequence[int] | None = None
    ) -> tuple[Table, Table | None]:
        """[states, needs] the seconds that one reader adds, and the bytes; of these ``states`` (default: all)."""
        columns = {need: number for number, need in enumerate(dict.fromkeys(needs))}
        chosen = self.states if states is None else [self.states[number] for number in states]
        sharers = max(1, self._wants - 1 + self._nameless) if optimistic and not self.exact else 1
        keepers = max(1, self._keepers) if optimistic else 1
        check_room((len(chosen), len(needs)))
        seconds, held = np.empty((2, len(chosen), len(columns)))
        row = 0
        for storage, group in itertools.groupby(chosen, key=lambda state: state.storage):
            named = [state.named for state in group]
            rows = slice(row, row + len(named))
            seconds[rows] = self._rests_s(storage, named, list(columns)) / sharers
            seconds[rows, ~self._allowed_needs(storage, list(columns))] = np.inf
            if not self._nameless:  # a copy for all of a step is one, and named
                units = self._units(storage, list(columns))
                seconds[rows][(units >= 0) & (units != self._units(storage, named)[:, None])] = np.inf
            held[rows] = 0.0 if storage.regather else self._copied_bytes(storage, list(columns)) / keepers
            row += len(named)
        spread = [columns[need] for need in needs]
        return seconds[:, spread], held[:, spread] if keep else None

    def exposed_s(self, needs: Sequence[Sharding], states: Sequence[int]) -> Table:
        """[states, needs] seconds of its gradient's sum at least, read as ``needs`` by the last to run backward."""
        exposed, rests = self._configs.exposed, [self.states[number].storage.sharding for number in states]
        each = {
            (before, need): exposed.seconds(self.param.type, before, need, last=True)
            for before in dict.fromkeys(rests)
            for need in dict.fromkeys(needs)
        }
        return np.array([[each[before, need] for need in needs] for before in rests])

    def _allowed_needs(self, storage: Storage, needs: Sequence[Sharding]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[needs] whether the pins let the parameter be gathered so far."""
        problem = self._configs.problem
        if problem.pins.gathers is Pins().gathers:
            return np.ones(len(needs), dtype=bool)
        move = self._configs.moves.chain
        chains = [move(self.param.type, storage.sharding, need, gradient=problem.train) for need in needs]
        return np.array([self._configs.may_gather(self.param, storage, chain) for chain in chains], dtype=bool)

    def _rest_s(self, state: TiedState, needs: Sequence[Sharding]) -> Table:
        """[needs] seconds beyond the way to the named want; forward twice if gathered again."""
        rest: Table = self._rests_s(state.storage, [state.named], needs)[0]
        return rest

    def _rests_s(self, storage: Storage, named: Sequence[Sharding], needs: Sequence[Sharding]) -> Table:
        """[named, needs] the same for several wants, each named alone."""
        ways = self._ways(storage)
        names, rows = ways.rows(named), ways.rows(needs)
        again = ways.rest(names, rows, forward=True) if storage.regather else 0.0
        rest: Table = ways.rest(names, rows) + again
        return rest

    def _copied_bytes(self, storage: Storage, needs: Sequence[Sharding]) -> Table:
        """[needs] bytes of gathered copies."""
        ways = self._ways(storage)
        rows = ways.rows(needs)
        copied = ways.gathered(rows) & (ways.copy(rows) != self._units(storage, needs))
        return np.where(copied, ways.bytes(rows), 0.0)

    def _units(self, storage: Storage, needs: Sequence[Sharding]) -> Indices:
        """[needs] the vertex of the copy that a step keeps on the way there; -1 where it keeps none."""
        if not self._configs.gathers_once(storage):
            return np.full(len(needs), -1)
        ways, routes = self._ways(storage), self._configs.param_routes(self.param.type, storage)
        found: Indices = routes.unit[ways.start, ways.rows(needs)]
        return found

    def _kept(self, storage: Storage, unit: int) -> tuple[float, float]:
        """(seconds, bytes) that such a copy takes."""
        if unit < 0:
            return 0.0, 0.0
        routes = self._configs.param_routes(self.param.type, storage)
        return self._configs.kept(self.param.type, routes, self._ways(storage).start, unit)

    def _ways(self, storage: Storage) -> ReshardChains:
        routes = self._configs.param_routes(self.param.type, storage)
        return ReshardChains(routes, storage.sharding)


def reads(nodes: Sequence[Node], param: Node) -> list[tuple[Node, int]]:
    """Who of ``nodes`` reads a parameter, and as which operand."""
    return [(node, i) for node in nodes for i, operand in enumerate(node.operands) if operand is param]
