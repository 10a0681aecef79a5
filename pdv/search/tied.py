"""Parameters that several nodes read: one storage for all, and chains from it that are shared.

Each is a variable of the search that runs through all blocks that read it. Its states are a storage and one *named*
want, the way to which is paid once for all readers (``sharing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.sharding import Invariant, Replicate, Shard, Sharding, State
from pdv.pcg.redistribute import all_shardings
from pdv.problem import Pins, Storage
from pdv.search.configs import ConfigTable
from pdv.search.exact import Table
from pdv.search.sharing import EXACT_WANTS, Ways


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

    @cached_property
    def states(self) -> tuple[TiedState, ...]:
        """Naming where it rests is naming nothing, and comes first; what costs nothing to reach need not be named."""
        mesh = self._configs.problem.mesh
        wants: tuple[State, ...] = (Invariant(), Replicate(), *(Shard(dim) for dim in range(self.param.type.rank)))
        found = []
        for storage in self._configs.storages(self.param):
            nothing = TiedState(storage, storage.sharding)
            named = [TiedState(storage, want) for want in all_shardings(self.param.type, mesh, wants)]
            costs = self._rest_s(nothing, [state.named for state in named])
            found += [nothing, *(state for state, cost in zip(named, costs, strict=True) if 0.0 < cost < np.inf)]
        return tuple(found)

    @property
    def exact(self) -> bool:
        """False if only ``optimistic`` prices bound the cost from below."""
        return self._wants <= EXACT_WANTS[1] and self._keepers <= 1

    def own(self, price: float) -> Table:
        """[states] what rests, and the way that is paid once."""
        return np.array([seconds + price * held for seconds, held in map(self.own_parts, range(len(self.states)))])

    def own_parts(self, number: int) -> tuple[float, float]:
        """(seconds, bytes) of one state."""
        state = self.states[number]
        seconds, memory = self._configs.resident(self.param, state.storage)
        way = self._rest_s(TiedState(state.storage, state.storage.sharding), [state.named])
        return seconds + float(way[0]), memory

    def use(self, needs: Sequence[Sharding], *, keep: bool, optimistic: bool) -> tuple[Table, Table | None]:
        """[states, needs] the seconds that one reader adds, and the bytes."""
        columns = {need: number for number, need in enumerate(dict.fromkeys(needs))}
        sharers = max(1, self._wants - 1) if optimistic and not self.exact else 1
        keepers = max(1, self._keepers) if optimistic else 1
        seconds, held = np.empty((2, len(self.states), len(columns)))
        for row, state in enumerate(self.states):
            seconds[row] = self._rest_s(state, list(columns)) / sharers
            seconds[row, ~self._allowed(state.storage, list(columns))] = np.inf
            held[row] = 0.0 if state.storage.regather else self._copied(state.storage, list(columns)) / keepers
        spread = [columns[need] for need in needs]
        return seconds[:, spread], held[:, spread] if keep else None

    def _allowed(self, storage: Storage, needs: Sequence[Sharding]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[needs] whether the pins let the parameter be gathered so far."""
        problem = self._configs.problem
        if problem.pins.gathers is Pins().gathers:
            return np.ones(len(needs), dtype=bool)
        move = self._configs.moves.chain
        chains = [move(self.param.type, storage.sharding, need, gradient=problem.train) for need in needs]
        return np.array([self._configs.may_gather(self.param, storage, chain) for chain in chains], dtype=bool)

    def _rest_s(self, state: TiedState, needs: Sequence[Sharding]) -> Table:
        """[needs] seconds beyond the way to the named want; forward twice if gathered again."""
        ways = self._ways(state.storage)
        named, rows = ways.rows([state.named]), ways.rows(needs)
        again = ways.rest(named, rows, forward=True)[0] if state.storage.regather else 0.0
        rest: Table = ways.rest(named, rows)[0] + again
        return rest

    def _copied(self, storage: Storage, needs: Sequence[Sharding]) -> Table:
        """[needs] bytes of gathered copies."""
        ways = self._ways(storage)
        rows = ways.rows(needs)
        return np.where(ways.gathered(rows), ways.bytes(rows), 0.0)

    def _ways(self, storage: Storage) -> Ways:
        routes = self._configs.moves.routes(self.param.type, gradient=self._configs.problem.train)
        return Ways(routes, storage.sharding)


def reads(nodes: Sequence[Node], param: Node) -> list[tuple[Node, int]]:
    """Who of ``nodes`` reads a parameter, and as which operand."""
    return [(node, i) for node in nodes for i, operand in enumerate(node.operands) if operand is param]
