"""One block as a table over boundary states; solved once for every equal block.

What a tied parameter's state is, the chain decides: it is kept as an axis of the block's table, like the boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.search.blocks import Block
from pdv.search.solver.configs import Config
from pdv.search.solver.elimination import Elimination, eliminate
from pdv.search.solver.network import BlockModel
from pdv.search.solver.tables import Table, Variable, table_of

Choices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Solved:
    """A block's cost for every pair of boundary shardings and every state of the tied parameters that it reads.

    ``table`` is [sources, sinks, tied…] (size one where the block has no source, no sink, or does not read that
    parameter); ``sink_configs`` is the sink's configuration in each entry. Where not ``exact`` the table is a bound,
    and where not ``whole`` what it recovers is a guess.
    """

    block: Block
    model: BlockModel
    sources: tuple[Sharding, ...]
    sinks: tuple[Sharding, ...]
    table: Table
    elimination: Elimination
    variables: dict[Node, Variable]
    configs: dict[Node, tuple[Config, ...]]
    sink_configs: Choices | None
    exact: bool = True
    whole: bool = True

    def values_for(self, source: int, sink: int, tied: Mapping[Node, int]) -> dict[Variable, int]:
        """The best value of every variable, given the boundary and the tied states."""
        at = (source, sink, *(state if param in self.variables else 0 for param, state in tied.items()))
        values = {self.variables[param]: state for param, state in tied.items() if param in self.variables}
        if self.block.source is not None:
            values[self.variables[self.block.source]] = source
        if self.block.sink is not None:
            assert self.sink_configs is not None
            index = tuple(i if size > 1 else 0 for i, size in zip(at, self.sink_configs.shape, strict=True))
            values[self.variables[self.block.sink]] = int(self.sink_configs[index])
        return self.elimination.recover(values)

    def marginals(self, where: tuple[int, ...] | None) -> dict[Node, Table]:
        """By node, what the block costs at least with each of its configurations (by number in the table of all).

        Args:
            where: the entry of the table between whose boundaries; None: between none.
        """
        context = np.full(self.table.shape, np.inf)
        if where is not None:
            context[where] = 0.0
        if self.block.sink is not None:
            columns = [self.sinks.index(config.result) for config in self.configs[self.block.sink]]
            context = context[:, columns]
        found = self.elimination.marginals(context.reshape(self.elimination.table.shape))
        least = min((float(table.min()) for table in found.values() if table.size), default=0.0)
        return {node: self._spread_over(node, found, least) for node in self.block.nodes}

    def _spread_over(self, node: Node, found: Mapping[Variable, Table], least: float) -> Table:
        variable = self.variables[node]
        own = found.get(variable, np.full(len(self.configs[node]), least))  # of one value, if it has no marginal
        if self.model.domain is None:
            return own
        table = np.full(self.model.sizes_of_all[node], np.inf)
        table[list(self.model.domain[node])] = own
        return table


def solve_model(model: BlockModel, price: float) -> Solved:
    """Eliminate everything but the boundary and the tied parameters that are axes, at a price of memory.

    Raises:
        TooWideError: if what is left, or without a limit a table on the way, is too large.
    """
    block, network = model.block, model.at(price)
    boundary = [node for node in (block.source, block.sink) if node is not None]
    kept = [network.variables[node] for node in (*boundary, *network.tied)]
    elimination = eliminate(network.factors, network.sizes, kept, limit=model.limit, known=model.known)
    present = [block.source is not None, block.sink is not None, *(param in network.tied for param in model.ties.axes)]
    sizes = iter(elimination.table.shape)
    table = elimination.table.reshape([next(sizes) if here else 1 for here in present])
    sinks, table, sink_configs = _project(table, network.options[block.sink] if block.sink is not None else None)
    exact = elimination.exact and network.exact
    variables, options = network.variables, network.options
    whole = elimination.exact and network.whole
    return Solved(
        block, model, model.sources, sinks, table, elimination, variables, options, sink_configs, exact, whole
    )


def _project(table: Table, options: Sequence[Config] | None) -> tuple[tuple[Sharding, ...], Table, Choices | None]:
    """From the sink's configurations to its shardings: the cheapest configuration of each."""
    if options is None:
        return (), table, None
    results = [config.result for config in options]
    sinks = tuple(dict.fromkeys(results))
    shape = (table.shape[0], len(sinks), *table.shape[2:])
    projected = table_of(shape, np.inf)
    chosen = np.zeros(shape, dtype=np.int64)
    for j, sharding in enumerate(sinks):
        columns = np.array([k for k, result in enumerate(results) if result == sharding])
        part = table[:, columns]
        best = part.argmin(axis=1)
        projected[:, j] = np.take_along_axis(part, best[:, None], axis=1)[:, 0]
        chosen[:, j] = columns[best]
    return sinks, projected, chosen
