"""One block as a weighted constraint network: variables are what its nodes may do, factors what that costs.

Cost of a block = compute of its nodes + the chains that take each value from the sharding it is made in to those it is
read in (``moving``) + what tied parameters add (``tied``). A model is built once, and priced at any price of memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding, invariant
from pdv.search.blocks import Block
from pdv.search.solver.configs import Config, ConfigTable
from pdv.search.solver.elimination import BucketCache
from pdv.search.solver.reshard_cost import Moving, Reader
from pdv.search.solver.tables import Factor, PricedFactor, Variable
from pdv.search.solver.ties import Ties

Domain = Mapping[Node, Sequence[int]]
"""By node of a block: which of its configurations (as numbers) are left."""
NOBODY: Mapping[Node, Sequence[Sharding]] = {}
WHOLE: Mapping[Node, Sharding] = {}


@dataclass(frozen=True)
class Network:
    """A block as a sum of tables: what it costs is the sum of its factors' entries.

    Attributes:
        factors: seconds (and priced bytes) over variables; infinite where illegal.
        sizes: of each variable's domain. Variables that no node has are helpers (``moving``).
        variables: of the block's nodes, its source and the tied parameters that it reads (``Ties``).
        options: what the values of each node's variable mean, in order.
        tied: the tied parameters that it reads and does not decide; values are their ``TiedTable.states``.
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


@dataclass(frozen=True)
class MoveCost:
    """What moving one value costs, its variables numbered from zero: its own, its readers', then ``helpers``.

    ``helpers`` are (size, how many values differ where memory is free); the rest as ``Moving`` says.
    """

    factors: tuple[PricedFactor, ...]
    helpers: tuple[tuple[int, int], ...]
    inexact: bool
    relaxed: bool


class BlockModel:
    """The factors of one block, seconds and bytes apart."""

    def __init__(
        self,
        block: Block,
        configs: ConfigTable,
        ties: Ties,
        sources: Sequence[Sharding],
        *,
        optimistic: bool = False,
        limit: float = math.inf,
        domain: Domain | None = None,
        wanted: Mapping[Node, Sequence[Sharding]] = NOBODY,
        beside: Mapping[Node, Sharding] = WHOLE,
    ) -> None:
        """Tables of more than ``limit`` entries are bounded from below; ``domain`` leaves out what it does not name.

        wanted: how values are read by others.
        beside: in what shardings values come that are made elsewhere, beside the source (default: whole).
        """
        self.block = block
        self.sources = tuple(sources)
        self.domain = domain
        configs.ask(block.nodes)
        self.sizes_of_all = {node: len(configs.of(node)) for node in block.nodes}
        self._configs = configs
        self.ties = ties
        self.limit = limit
        self._optimistic = optimistic
        self._wanted = wanted
        self.options = {node: _remaining(configs.of(node), node, domain) for node in block.nodes}
        made = {node: tuple(config.result for config in self.options[node]) for node in block.nodes}
        if block.source is not None:
            made[block.source] = self.sources
        read = {operand for node in block.nodes for operand in node.operands}
        self.tied = tuple(param for param in ties.axes if param in read)
        self.inside = ties.inside(block.nodes)
        self.variables = {node: number for number, node in enumerate((*made, *self.tied, *self.inside))}
        self.sizes = {self.variables[node]: len(shardings) for node, shardings in made.items()}
        self.sizes |= {self.variables[param]: len(ties.states(param)) for param in (*self.tied, *self.inside)}
        self._freely: dict[Variable, int] = {}  # of each helper, how many values differ where memory is free
        self._inexact = self._relaxed = False
        self._factors = (*self._moves(made), *self._uses(), *self._shares(), *self._reads_beside(made, beside))
        self.whole = not self._relaxed
        self.exact = not self._inexact and all(ties.tables[param].exact for param in (*self.tied, *self.inside))

    @property
    def known(self) -> BucketCache:
        """Parts of blocks that were minimized before, for this problem."""
        return self._configs.known

    def at(self, price: float) -> Network:
        """The network at a price of memory (seconds per byte)."""
        own = [replace(self._unary(node, price), variables=(self.variables[node],)) for node in self.block.nodes]
        factors = (*own, *(self._differing(factor.at(price), price) for factor in self._factors))
        sizes = self.sizes if price else {**self.sizes, **self._freely}
        return Network(factors, sizes, self.variables, self.options, self.tied, self.exact, self.whole)

    def _differing(self, factor: Factor, price: float) -> Factor:
        """Where memory is free, the first values of a helper stand for all: they differ only in what is held."""
        for axis, variable in enumerate(factor.variables if price == 0.0 else ()):
            if variable in self._freely:
                key = factor.key, axis
                if key not in self._configs.free:
                    first = (slice(None),) * axis + (slice(self._freely[variable]),)
                    self._configs.free[key] = Factor(factor.variables, factor.table[first])
                factor = replace(self._configs.free[key], variables=factor.variables)
        return factor

    def bytes_of(self, values: Mapping[Variable, int], price: float) -> float:
        """Bytes of an assignment whose leaves are kept as is cheapest at ``price``."""
        total = 0.0
        for node in self.block.nodes:
            total += self.options[node][values[self.variables[node]]].totals(price)[1]
        for factor in self._factors:
            if factor.num_bytes is not None:
                total += float(factor.num_bytes[tuple(values[v] for v in factor.variables)])
        return total

    def _unary(self, node: Node, price: float) -> Factor:
        """Seconds of each configuration, leaves included, over variable 0."""
        key = self._kind(node), price
        if key not in self._configs.own:
            totals = np.array([config.totals(price) for config in self.options[node]], dtype=np.float64).reshape(-1, 2)
            self._configs.own[key] = Factor((0,), totals[:, 0] + price * totals[:, 1])
        return self._configs.own[key]

    def _moves(self, made: Mapping[Node, Sequence[Sharding]]) -> list[PricedFactor]:
        """Factors of every value that is read here, or leaves the program; those of alike values are the same."""
        readers: dict[Node, list[tuple[Node, int]]] = {value: [] for value in made}
        for node in self.block.nodes:
            for i, operand in enumerate(node.operands):
                if operand in readers:
                    readers[operand].append((node, i))
        kinds = {node: self._kind(node) for node in made}
        exits, whole = self._configs.problem.exits, (invariant(self._configs.problem.mesh),)
        factors: list[PricedFactor] = []
        for value, shardings in made.items():
            leaves = [exits] * (value in self.block.outputs) + [whole] * (value in self.block.updates)
            leaves += [(sharding,) for sharding in self._wanted.get(value, ())]
            if not readers[value] and not leaves:
                continue
            local = {
                node: number for number, node in enumerate(dict.fromkeys((value, *(n for n, _ in readers[value]))))
            }
            reads = tuple((local[node], kinds[node], i, self._configs.keeps(node, i)) for node, i in readers[value])
            saved = "out" in value.op.saved
            key = (
                value.type,
                value.needs_grad,
                saved or self._configs.lets_go(value),
                kinds[value],
                reads,
                tuple(leaves),
                self._optimistic,
                self.limit,
            )
            if key not in self._configs.moved:
                self._configs.moved[key] = self._move(value, shardings, readers[value], leaves, local)
            found = self._configs.moved[key]
            self._inexact |= found.inexact
            self._relaxed |= found.relaxed
            factors += self._rename(found, [self.variables[node] for node in local])
        return factors

    def _kind(self, node: Node) -> Hashable:
        """Equal for nodes whose values mean the same configurations (or shardings, of the source)."""
        if node is self.block.source:
            return self.sources
        left = None if self.domain is None else tuple(self.domain[node])
        return self._configs.kind(node), left

    def _move(
        self,
        value: Node,
        shardings: Sequence[Sharding],
        readers: Sequence[tuple[Node, int]],
        leaves: Sequence[Sequence[Sharding]],
        local: Mapping[Node, Variable],
    ) -> MoveCost:
        """The factors of a value, its variables numbered as ``local``, helpers behind them."""
        helpers: list[tuple[int, int]] = []

        def helper(size: int, freely: int) -> Variable:
            helpers.append((size, freely))
            return len(local) + len(helpers) - 1

        moving = Moving(self._configs, self._optimistic, self.limit)
        reading = [
            Reader(local[node], [config.needs[i] for config in self.options[node]], self._configs.keeps(node, i))
            for node, i in readers
        ]
        factors = moving.factors(value, local[value], shardings, reading, leaves, helper)
        return MoveCost(tuple(factors), tuple(helpers), bool(moving.inexact), bool(moving.relaxed))

    def _rename(self, moved: MoveCost, variables: list[Variable]) -> Iterator[PricedFactor]:
        for size, freely in moved.helpers:
            variable = max(self.sizes) + 1
            self.sizes[variable], self._freely[variable] = size, freely
            variables.append(variable)
        for factor in moved.factors:
            yield replace(factor, variables=tuple(variables[v] for v in factor.variables))

    def _uses(self) -> list[PricedFactor]:
        """Factors of every read of a tied parameter."""
        factors = []
        for param in (*self.tied, *self.inside):
            states = self.ties.states(param)
            for node, i in self._readers(param):
                needs = [config.needs[i] for config in self.options[node]]
                keep = self._configs.keeps(node, i)
                seconds, held = self.ties.tables[param].use(
                    needs, keep=keep, optimistic=self._optimistic, states=states
                )
                if node is self._configs.problem.last:
                    seconds = seconds + self.ties.tables[param].exposed_s(needs, states)
                factors.append(PricedFactor((self.variables[param], self.variables[node]), seconds, held))
        return factors

    def _shares(self) -> Iterator[PricedFactor]:
        """What the block pays of tied parameters that it decides itself."""
        for param in self.inside:
            share = self.ties.share(param)
            if share:
                seconds, held = self.ties.tables[param].own_costs
                yield PricedFactor((self.variables[param],), share * seconds, share * held)

    def _reads_beside(
        self, made: Mapping[Node, Sequence[Sharding]], beside: Mapping[Node, Sharding]
    ) -> Iterator[PricedFactor]:
        """Factors of reads of what is made elsewhere: from a whole copy every piece is had for nothing, but no term.

        What readers hold of it they hold together, so that no block can say what that is: a plan's own price says it.
        """
        mesh, moves = self._configs.problem.mesh, self._configs.moves
        for node in self.block.nodes:
            for i, operand in enumerate(node.operands):
                if operand.is_leaf or operand in made:
                    continue
                routes = moves.routes(operand.type, gradient=False, copied=False)  # which several blocks may share
                index = routes.states.index
                needs = [index[config.needs[i]] for config in self.options[node]]
                before = index[beside.get(operand, invariant(mesh))]
                yield PricedFactor((self.variables[node],), routes.seconds[before, needs])

    def _readers(self, value: Node) -> list[tuple[Node, int]]:
        return [(node, i) for node in self.block.nodes for i, operand in enumerate(node.operands) if operand is value]


def _remaining(options: tuple[Config, ...], node: Node, domain: Domain | None) -> tuple[Config, ...]:
    return options if domain is None else tuple(options[i] for i in domain[node])
