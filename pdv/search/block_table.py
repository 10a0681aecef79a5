"""One block as tables over its nodes' configurations; solved once per boundary state, for every equal block.

Cost of a block = compute of its nodes + the chains that take each value from the sharding it is made in to those it is
read in. A value read by several nodes may be moved once for all that want the same sharding: a helper variable names
that sharding. (Two different shared targets for one value would need four readers; the second is then priced once per
reader, and a certificate speaks of that model.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding, local_bytes
from pdv.rewrite.derive import exit_sharding
from pdv.search.blocks import Block
from pdv.search.configs import Config, ConfigTable
from pdv.search.exact import Elimination, Factor, Table, Variable, eliminate

INFINITE = float("inf")


@dataclass(frozen=True)
class Solved:
    """A block's cost for every pair of boundary shardings.

    ``table`` is [sources, sinks] (size one where the block has no source or no sink).
    """

    block: Block
    sources: tuple[Sharding, ...]
    sinks: tuple[Sharding, ...]
    table: Table
    elimination: Elimination
    variables: dict[Node, Variable]
    configs: dict[Node, tuple[Config, ...]]
    sink_configs: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None

    def configs_for(self, source: int, sink: int) -> list[Config]:
        """The best configuration of each node of the block, in order, given its boundary shardings."""
        values: dict[Variable, int] = {}
        if self.block.source is not None:
            values[0] = source
        if self.block.sink is not None:
            assert self.sink_configs is not None
            values[self.variables[self.block.sink]] = int(self.sink_configs[source, sink])
        chosen = self.elimination.recover(values)
        return [self.configs[node][chosen[self.variables[node]]] for node in self.block.nodes]


class NoAssignmentError(Exception):
    """Pins, or storages of tied parameters, leave a node nothing that it may do."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.op.name} {node.name} of type {node.type}")


class BlockSolver:
    """Builds a block's factors at one price of memory (seconds per byte)."""

    def __init__(self, configs: ConfigTable, price: float, sources: Sequence[Sharding]) -> None:
        self._configs = configs
        self._problem = configs.problem
        self._price = price
        self._sources = tuple(sources)

    def solve(self, block: Block) -> Solved:
        """Eliminate everything but the boundary.

        Raises:
            TooWideError: if the block is too wide for elimination.
            NoAssignmentError: if a node has no legal configuration.
        """
        options = {node: self._configs.of(node) for node in block.nodes}
        stuck = next((node for node, configs in options.items() if not configs), None)
        if stuck is not None:
            raise NoAssignmentError(stuck)
        variables: dict[Node, Variable] = {node: number for number, node in enumerate(block.nodes, start=1)}
        sizes: dict[Variable, int] = {number: len(options[node]) for node, number in variables.items()}
        made: dict[Node, tuple[Sharding, ...]] = {n: tuple(c.result for c in options[n]) for n in block.nodes}
        keep: list[Variable] = []
        if block.source is not None:
            variables = {block.source: 0, **variables}
            sizes[0] = len(self._sources)
            made[block.source] = self._sources
            keep.append(0)
        if block.sink is not None:
            keep.append(variables[block.sink])
        factors = [Factor((variables[node],), self._unary(block, node, options[node])) for node in block.nodes]
        for value in variables:
            readers = _readers(block, value)
            if readers:
                factors += self._value(value, made[value], readers, options, variables, sizes)
        elimination = eliminate(factors, sizes, keep)
        sinks, table, sink_configs = self._project(block, elimination, options)
        return Solved(block, self._sources, sinks, table, elimination, variables, options, sink_configs)

    def _unary(self, block: Block, node: Node, options: Sequence[Config]) -> Table:
        """Seconds of each configuration, leaves included, and of bringing an output to where it may leave."""
        costs = []
        for config in options:
            seconds, memory = config.totals(self._price)
            cost = seconds + self._price * memory
            if node in block.outputs:
                cost += self._leave(node, config.result, whole=not self._problem.train)
            if node in block.updates:
                cost += self._leave(node, config.result, whole=True)
            costs.append(cost)
        return np.array(costs, dtype=np.float64)

    def _leave(self, node: Node, made: Sharding, *, whole: bool) -> float:
        gradient = self._backward(node)
        target = exit_sharding(self._configs.moves, node, made, whole=whole, gradient=gradient)
        if target is None:
            return INFINITE
        chain = self._configs.moves.chain(node.type, made, target, gradient=gradient)
        assert chain is not None
        return chain.seconds

    def _backward(self, node: Node) -> bool:
        return self._problem.train and node.needs_grad

    def _value(
        self,
        value: Node,
        made: Sequence[Sharding],
        readers: Sequence[tuple[Node, int]],
        options: dict[Node, tuple[Config, ...]],
        variables: dict[Node, Variable],
        sizes: dict[Variable, int],
    ) -> list[Factor]:
        """Factors of moving one value to its readers, and of keeping it for backward."""
        needs = {(reader, i): [config.needs[i] for config in options[reader]] for reader, i in readers}
        keeps = {(reader, i): self._keeps(reader, i, value) for reader, i in readers}
        source = variables[value]
        own = np.zeros(len(made))
        if any(keeps.values()):
            own += self._price * np.array([local_bytes(value.type, s, self._problem.mesh) for s in made], dtype=float)
        factors = [Factor((source,), own)]
        if len(readers) == 1:
            (reader, i), wanted = next(iter(needs.items()))
            table = self._moves(value, made, wanted, keep=keeps[reader, i])
            if variables[reader] != source:
                factors.append(Factor((source, variables[reader]), table))
            return factors
        targets = tuple(dict.fromkeys(need for wanted in needs.values() for need in wanted))
        helper = max(sizes) + 1
        sizes[helper] = len(targets)
        factors.append(Factor((source, helper), self._moves(value, made, targets, keep=any(keeps.values()))))
        for (reader, i), wanted in needs.items():
            alone = self._moves(value, made, wanted, keep=keeps[reader, i])
            table = np.repeat(alone[:, None, :], len(targets), axis=1)
            number = {target: k for k, target in enumerate(targets)}
            for column, need in enumerate(wanted):
                table[:, number[need], column] = 0.0  # the shared copy is already paid for
            factors.append(Factor((source, helper, variables[reader]), table))
        return factors

    def _keeps(self, reader: Node, operand: int, value: Node) -> bool:
        return self._problem.train and reader.needs_grad and operand in reader.op.saved and value.type.rank > 0

    def _moves(self, value: Node, made: Sequence[Sharding], wanted: Sequence[Sharding], *, keep: bool) -> Table:
        """[made, wanted] seconds; a moved copy that backward needs is also paid for in memory."""
        rows = tuple(dict.fromkeys(made))
        columns = tuple(dict.fromkeys(wanted))
        small = np.full((len(rows), len(columns)), INFINITE)
        for i, before in enumerate(rows):
            chains = self._configs.moves.from_(value.type, before, gradient=self._backward(value))
            for j, after in enumerate(columns):
                chain = chains.get(after)
                if chain is None:
                    continue
                small[i, j] = chain.seconds
                moved = any(step.name not in ("replicate",) for step in chain.steps)
                if keep and moved:
                    small[i, j] += self._price * local_bytes(value.type, after, self._problem.mesh)
        row = {sharding: i for i, sharding in enumerate(rows)}
        column = {sharding: j for j, sharding in enumerate(columns)}
        return small[np.ix_([row[s] for s in made], [column[s] for s in wanted])]

    def _project(
        self, block: Block, elimination: Elimination, options: dict[Node, tuple[Config, ...]]
    ) -> tuple[tuple[Sharding, ...], Table, np.ndarray[tuple[int, int], np.dtype[np.int64]] | None]:
        """From the sink's configurations to its shardings: the cheapest configuration of each."""
        table = elimination.table if block.source is not None else elimination.table[None]
        if block.sink is None:
            return (), table.reshape(-1, 1), None
        results = [config.result for config in options[block.sink]]
        sinks = tuple(dict.fromkeys(results))
        projected = np.full((table.shape[0], len(sinks)), INFINITE)
        chosen = np.zeros((table.shape[0], len(sinks)), dtype=np.int64)
        for j, sharding in enumerate(sinks):
            columns = np.array([k for k, result in enumerate(results) if result == sharding])
            part = table[:, columns]
            best = part.argmin(axis=1)
            projected[:, j] = part[np.arange(len(part)), best]
            chosen[:, j] = columns[best]
        return sinks, projected, chosen


def _readers(block: Block, value: Node) -> list[tuple[Node, int]]:
    return [(node, i) for node in block.nodes for i, operand in enumerate(node.operands) if operand is value]
