"""One block as a weighted constraint network: variables are what its nodes may do, factors what that costs.

Cost of a block = compute of its nodes + the chains that take each value from the sharding it is made in to those it is
read in (``moving``) + what tied parameters add (``tied``). A model is built once, and priced at any price of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.search.blocks import Block
from pdv.search.configs import Config, ConfigTable
from pdv.search.exact import Factor, PricedFactor, Variable
from pdv.search.moving import Moving, Reader
from pdv.search.tied import TiedTable

Domain = Mapping[Node, Sequence[int]]
"""By node of a block: which of its configurations (as numbers) are left."""


@dataclass(frozen=True)
class Network:
    """A block as a sum of tables: what it costs is the sum of its factors' entries.

    Attributes:
        factors: seconds (and priced bytes) over variables; infinite where illegal.
        sizes: of each variable's domain. Variables that no node has are helpers (``moving``).
        variables: of the block's nodes, its source and the tied parameters that it reads.
        options: what the values of each node's variable mean, in order.
        tied: the tied parameters that it reads; values are their ``TiedTable.states``.
        exact: False if some factors only bound what they stand for (``moving``).
        whole: False if some were split for their size: what the network costs least is then no plan's cost.
    """

    factors: tuple[Factor, ...]
    sizes: dict[Variable, int]
    variables: dict[Node, Variable]
    options: dict[Node, tuple[Config, ...]]
    tied: tuple[Node, ...]
    exact: bool = True
    whole: bool = True


class BlockModel:
    """The factors of one block, seconds and bytes apart."""

    def __init__(
        self,
        block: Block,
        configs: ConfigTable,
        tied: Mapping[Node, TiedTable],
        sources: Sequence[Sharding],
        *,
        optimistic: bool = False,
        limit: float = math.inf,
        domain: Domain | None = None,
    ) -> None:
        """Tables of more than ``limit`` entries are bounded from below; ``domain`` leaves out what it does not name."""
        self.block = block
        self.sources = tuple(sources)
        self.domain = domain
        self.sizes_of_all = {node: len(configs.of(node)) for node in block.nodes}
        self._configs = configs
        self._tables = tied
        self._optimistic = optimistic
        self.options = {node: _left(configs.of(node), node, domain) for node in block.nodes}
        made = {node: tuple(config.result for config in self.options[node]) for node in block.nodes}
        if block.source is not None:
            made[block.source] = self.sources
        read = {operand for node in block.nodes for operand in node.operands}
        self.tied = tuple(param for param in tied if param in read)
        self.variables = {node: number for number, node in enumerate((*made, *self.tied))}
        self.sizes = {self.variables[node]: len(shardings) for node, shardings in made.items()}
        self.sizes |= {self.variables[param]: len(tied[param].states) for param in self.tied}
        self._freely: dict[Variable, int] = {}  # of each helper, how many values differ where memory is free
        moving = Moving(configs, optimistic, limit)
        self._factors = (*self._moves(moving, made), *self._uses())
        self.whole = not moving.relaxed
        self.exact = not moving.inexact and all(tied[param].exact for param in self.tied)

    def at(self, price: float) -> Network:
        """The network at a price of memory (seconds per byte)."""
        own = [Factor((self.variables[node],), self._unary(node, price)) for node in self.block.nodes]
        factors = (*own, *(self._differing(factor.at(price), price) for factor in self._factors))
        sizes = self.sizes if price else {**self.sizes, **self._freely}
        return Network(factors, sizes, self.variables, self.options, self.tied, self.exact, self.whole)

    def _differing(self, factor: Factor, price: float) -> Factor:
        """Where memory is free, the first values of a helper stand for all: they differ only in what is held."""
        table = factor.table
        for axis, variable in enumerate(factor.variables if price == 0.0 else ()):
            if variable in self._freely:
                table = table[(slice(None),) * axis + (slice(self._freely[variable]),)]
        return Factor(factor.variables, table)

    def bytes_of(self, values: Mapping[Variable, int], price: float) -> float:
        """Bytes of an assignment whose leaves are kept as is cheapest at ``price``."""
        total = 0.0
        for node in self.block.nodes:
            total += self.options[node][values[self.variables[node]]].totals(price)[1]
        for factor in self._factors:
            if factor.num_bytes is not None:
                total += float(factor.num_bytes[tuple(values[v] for v in factor.variables)])
        return total

    def _unary(self, node: Node, price: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Seconds of each configuration, leaves included."""
        totals = np.array([config.totals(price) for config in self.options[node]], dtype=np.float64).reshape(-1, 2)
        costs: np.ndarray[tuple[int], np.dtype[np.float64]] = totals[:, 0] + price * totals[:, 1]
        return costs

    def _moves(self, moving: Moving, made: Mapping[Node, Sequence[Sharding]]) -> list[PricedFactor]:
        """Factors of every value that is read here, or leaves the program."""

        def helper(size: int, freely: int) -> Variable:
            variable = max(self.sizes) + 1
            self.sizes[variable], self._freely[variable] = size, freely
            return variable

        whole = not self._configs.problem.train
        factors: list[PricedFactor] = []
        for value, shardings in made.items():
            readers = [self._reader(node, i) for node, i in self._readers(value)]
            leaves = [whole] * (value in self.block.outputs) + [True] * (value in self.block.updates)
            if readers or leaves:
                factors += moving.factors(value, self.variables[value], shardings, readers, leaves, helper)
        return factors

    def _reader(self, node: Node, operand: int) -> Reader:
        needs = [config.needs[operand] for config in self.options[node]]
        return Reader(self.variables[node], needs, self._configs.keeps(node, operand))

    def _uses(self) -> list[PricedFactor]:
        """Factors of every read of a tied parameter."""
        factors = []
        for param in self.tied:
            for node, i in self._readers(param):
                needs = [config.needs[i] for config in self.options[node]]
                keep = self._configs.keeps(node, i)
                seconds, held = self._tables[param].use(needs, keep=keep, optimistic=self._optimistic)
                factors.append(PricedFactor((self.variables[param], self.variables[node]), seconds, held))
        return factors

    def _readers(self, value: Node) -> list[tuple[Node, int]]:
        return [(node, i) for node in self.block.nodes for i, operand in enumerate(node.operands) if operand is value]


def _left(options: tuple[Config, ...], node: Node, domain: Domain | None) -> tuple[Config, ...]:
    return options if domain is None else tuple(options[i] for i in domain[node])
