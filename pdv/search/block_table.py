"""One block as tables over its nodes' configurations; solved once per boundary state, for every equal block.

Cost of a block = compute of its nodes + the chains that take each value from the sharding it is made in to those it is
read in (``moving``) + what tied parameters add (``tied``). What a tied parameter's state is, the chain decides: it is
kept as an axis of the block's table, like the boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.search.blocks import Block
from pdv.search.configs import Config, ConfigTable
from pdv.search.exact import Elimination, Factor, Table, Variable, eliminate
from pdv.search.moving import Moving, Reader
from pdv.search.tied import TiedTable

Choices = np.ndarray[Any, np.dtype[np.int64]]
Domain = Mapping[Node, Sequence[int]]
"""By node of a block: which of its configurations (as numbers) are left."""


@dataclass(frozen=True)
class Network:
    """A block as a sum of tables (a weighted constraint network): what it costs is the sum of its factors' entries.

    Attributes:
        factors: seconds (and priced bytes) over variables; infinite where illegal.
        sizes: of each variable's domain. Variables that no node has are helpers (``moving``).
        variables: of the block's nodes, its source and the tied parameters that it reads.
        options: what the values of each node's variable mean, in order.
        tied: the tied parameters that it reads; values are their ``TiedTable.states``.
        relaxed: whether some factors are lower bounds, made so for their size.
    """

    factors: tuple[Factor, ...]
    sizes: dict[Variable, int]
    variables: dict[Node, Variable]
    options: dict[Node, tuple[Config, ...]]
    tied: tuple[Node, ...]
    relaxed: bool = False


@dataclass(frozen=True)
class Solved:
    """A block's cost for every pair of boundary shardings and every state of the tied parameters that it reads.

    ``table`` is [sources, sinks, tied…] (size one where the block has no source, no sink, or does not read that
    parameter); ``sink_configs`` is the sink's configuration in each entry. It bounds from below where not ``exact``.
    """

    block: Block
    sources: tuple[Sharding, ...]
    sinks: tuple[Sharding, ...]
    table: Table
    elimination: Elimination
    variables: dict[Node, Variable]
    configs: dict[Node, tuple[Config, ...]]
    sink_configs: Choices | None
    exact: bool = True

    def configs_for(self, source: int, sink: int, tied: Mapping[Node, int]) -> list[Config]:
        """The best configuration of each node of the block, in order, given its boundary and the tied states."""
        at = (source, sink, *(state if param in self.variables else 0 for param, state in tied.items()))
        values = {self.variables[param]: state for param, state in tied.items() if param in self.variables}
        if self.block.source is not None:
            values[self.variables[self.block.source]] = source
        if self.block.sink is not None:
            assert self.sink_configs is not None
            values[self.variables[self.block.sink]] = int(self.sink_configs[at])
        chosen = self.elimination.recover(values)
        return [self.configs[node][chosen[self.variables[node]]] for node in self.block.nodes]


class BlockSolver:
    """Builds a block's factors at one price of memory (seconds per byte)."""

    def __init__(
        self,
        configs: ConfigTable,
        tied: Mapping[Node, TiedTable],
        price: float,
        sources: Sequence[Sharding],
        *,
        optimistic: bool = False,
        limit: float = math.inf,
        domain: Domain | None = None,
    ) -> None:
        """``limit`` entries per table make the result a lower bound; a ``domain`` leaves out what it does not name."""
        self._configs = configs
        self._tied = tied
        self._price = price
        self._sources = tuple(sources)
        self._optimistic = optimistic
        self._limit = limit
        self._domain = domain

    def solve(self, block: Block) -> Solved:
        """Eliminate everything but the boundary and the tied parameters.

        Raises:
            TooWideError: if the block is too wide for elimination.
        """
        network = self.network(block)
        boundary = [node for node in (block.source, block.sink) if node is not None]
        kept = [network.variables[node] for node in (*boundary, *network.tied)]
        elimination = eliminate(network.factors, network.sizes, kept, limit=self._limit)
        table = self._aligned(block, elimination.table, network.tied)
        sinks, table, sink_configs = _project(table, network.options[block.sink] if block.sink is not None else None)
        return Solved(block, self._sources, sinks, table, elimination, network.variables, network.options, sink_configs)

    def network(self, block: Block) -> Network:
        """The block as variables with finite domains and tables over them, whose sum is its cost."""
        options = {node: self._options(node) for node in block.nodes}
        made: dict[Node, tuple[Sharding, ...]] = {node: tuple(c.result for c in options[node]) for node in block.nodes}
        if block.source is not None:
            made[block.source] = self._sources
        read = {operand for node in block.nodes for operand in node.operands}
        tied = [param for param in self._tied if param in read]
        variables: dict[Node, Variable] = {node: number for number, node in enumerate((*made, *tied))}
        sizes: dict[Variable, int] = {variables[node]: len(shardings) for node, shardings in made.items()}
        sizes |= {variables[param]: len(self._tied[param].states) for param in tied}
        factors = [Factor((variables[node],), self._unary(options[node])) for node in block.nodes]
        moving = Moving(self._configs, self._price, self._optimistic, self._limit)
        factors += self._moves(block, moving, made, options, variables, sizes)
        factors += self._uses(block, tied, options, variables)
        return Network(tuple(factors), sizes, variables, options, tuple(tied), bool(moving.relaxed))

    def _options(self, node: Node) -> tuple[Config, ...]:
        options = self._configs.of(node)
        return options if self._domain is None else tuple(options[i] for i in self._domain[node])

    def _unary(self, options: Sequence[Config]) -> Table:
        """Seconds of each configuration, leaves included."""
        totals = np.array([config.totals(self._price) for config in options], dtype=np.float64).reshape(-1, 2)
        costs: Table = totals[:, 0] + self._price * totals[:, 1]
        return costs

    def _moves(
        self,
        block: Block,
        moving: Moving,
        made: Mapping[Node, Sequence[Sharding]],
        options: Mapping[Node, Sequence[Config]],
        variables: Mapping[Node, Variable],
        sizes: dict[Variable, int],
    ) -> list[Factor]:
        """Factors of every value that is read here, or leaves the program."""

        def helper(size: int) -> Variable:
            sizes[max(sizes) + 1] = size
            return max(sizes)

        whole = not self._configs.problem.train
        factors: list[Factor] = []
        for value, shardings in made.items():
            readers = [
                Reader(variables[node], [config.needs[i] for config in options[node]], self._configs.keeps(node, i))
                for node, i in _readers(block, value)
            ]
            leaves = [whole] * (value in block.outputs) + [True] * (value in block.updates)
            if readers or leaves:
                factors += moving.factors(value, variables[value], shardings, readers, leaves, helper)
        return factors

    def _uses(
        self,
        block: Block,
        tied: Sequence[Node],
        options: Mapping[Node, Sequence[Config]],
        variables: Mapping[Node, Variable],
    ) -> list[Factor]:
        """Factors of every read of a tied parameter."""
        factors = []
        for param in tied:
            for node, i in _readers(block, param):
                needs = [config.needs[i] for config in options[node]]
                keep = self._configs.keeps(node, i)
                table = self._tied[param].use(needs, self._price, keep=keep, optimistic=self._optimistic)
                factors.append(Factor((variables[param], variables[node]), table))
        return factors

    def _aligned(self, block: Block, table: Table, tied: Sequence[Node]) -> Table:
        """[source, sink, every tied parameter], size one for what is missing."""
        present = [block.source is not None, block.sink is not None, *(param in tied for param in self._tied)]
        sizes = iter(table.shape)
        return table.reshape([next(sizes) if here else 1 for here in present])


def _project(table: Table, options: Sequence[Config] | None) -> tuple[tuple[Sharding, ...], Table, Choices | None]:
    """From the sink's configurations to its shardings: the cheapest configuration of each."""
    if options is None:
        return (), table, None
    results = [config.result for config in options]
    sinks = tuple(dict.fromkeys(results))
    shape = (table.shape[0], len(sinks), *table.shape[2:])
    projected = np.full(shape, np.inf)
    chosen = np.zeros(shape, dtype=np.int64)
    for j, sharding in enumerate(sinks):
        columns = np.array([k for k, result in enumerate(results) if result == sharding])
        part = table[:, columns]
        best = part.argmin(axis=1)
        projected[:, j] = np.take_along_axis(part, best[:, None], axis=1)[:, 0]
        chosen[:, j] = columns[best]
    return sinks, projected, chosen


def _readers(block: Block, value: Node) -> list[tuple[Node, int]]:
    return [(node, i) for node in block.nodes for i, operand in enumerate(node.operands) if operand is value]
