"""Solve a whole graph: equal blocks once, chained by min-plus over boundary shardings, memory priced by a multiplier.

Memory is a hard limit. It enters as a price in seconds per byte (a Lagrange multiplier): at each price the chain is
solved exactly, and that value less price x limit is a lower bound on every plan that fits (weak duality; Everett,
Operations Research 1963). With room to spare the price is zero and the solution is optimal. Where more than three want
one value, prices are no longer exact (``sharing``), and the bound is that of the optimistic ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ir.errors import NoPlanFitsError
from ir.graph import Graph, Node
from ir.sharding import Sharding
from pdv.pcg.derive import derive
from pdv.pcg.plan_cost import plan_cost, whole_bytes
from pdv.pcg.redistribute import Redistribution, all_shardings
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution
from pdv.search.assemble import Choice, assemble
from pdv.search.backtrack import Portfolio, explore, portfolio
from pdv.search.block_table import BlockSolver, Choices
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.configs import Config, ConfigTable
from pdv.search.exact import Table
from pdv.search.sharing import EXACT_WANTS
from pdv.search.tied import TiedTable
from pdv.search.variants import Variant, apply_rules

BISECTIONS = 14


@dataclass(frozen=True)
class Priced:
    """The best derivation at one price, with its true seconds and bytes.

    No derivation has less ``cost_s + price * memory_bytes`` than ``value``.
    """

    price: float
    value: float
    cost_s: float
    memory_bytes: float
    graph: Graph
    steps: tuple[AlgebraicStep, ...]
    assignment: Assignment


@dataclass(frozen=True)
class _Link:
    """One block on the best path: its portfolio, and the boundary shardings (as indices) on either side."""

    block: Block
    portfolio: Portfolio
    source: int
    sink: int


class ChainSolver:
    """Solves one problem; block tables are remembered across prices and across equal blocks."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = tuple(
            replace(block, key=block.key + problem.pins.mark(block.nodes)) for block in split_blocks(problem.graph)
        )
        self._numbers = tied_params(problem.graph)
        self.configs = ConfigTable(problem, Redistribution(problem.mesh, problem.axes), self._numbers)
        self._tied = {param: TiedTable(self.configs, param, _reads(problem.graph, param)) for param in self._numbers}
        self._whole_bytes = whole_bytes(problem.graph)
        self._portfolios: dict[tuple[str, float, bool], Portfolio] = {}
        self._explored: dict[str, list[Variant]] = {}

    def solve(self) -> Solution:
        """The best assignment that fits.

        Raises:
            NoPlanFitsError: saying by how much the smallest plan is too large.
        """
        free = self.at_price(0.0)
        if free.memory_bytes <= self.problem.memory_limit:
            return self._solution(free, free.value)
        return self._priced_solution(free)

    def at_price(self, price: float) -> Priced:
        """The exact optimum of seconds + price x bytes.

        Raises:
            NoPlanFitsError: if pins leave no legal assignment at all.
        """
        value, tied, path = self._chain(price, optimistic=False)
        if not np.isfinite(value):
            raise NoPlanFitsError(
                f"no legal plan of {self.problem.graph.name} on {self.problem.mesh} keeps the pins "
                f"({self.problem.pins.name})",
                mend="Loosen a pin, or change the mesh so that sizes divide",
            )
        if not self.exact:
            value = self._chain(price, optimistic=True)[0]
        return self._priced(price, value + price * self._whole_bytes, tied, path)

    @property
    def exact(self) -> bool:
        """True if no value has so many wants that its price is a bound."""
        graph = self.problem.graph
        roots = Counter(graph.roots)
        values = [node for node in graph.nodes if not node.is_leaf]
        narrow = all(len(graph.users[node]) + roots[node] <= EXACT_WANTS for node in values)
        return narrow and all(table.exact for table in self._tied.values())

    def _priced_solution(self, free: Priced) -> Solution:
        limit = self.problem.memory_limit
        bound = free.value
        low, high = 0.0, free.cost_s / max(free.memory_bytes, 1.0)
        found = self.at_price(high)
        while found.memory_bytes > limit and high < 1e3 * max(free.cost_s, 1e-9):
            bound = max(bound, found.value - high * limit)
            low, high = high, high * 16
            found = self.at_price(high)
        if found.memory_bytes > limit:
            self._refuse(found)
        best = found
        for _ in range(BISECTIONS):
            bound = max(bound, found.value - found.price * limit)
            if best.cost_s - bound <= 1e-3 * best.cost_s:
                break
            middle = (low * high) ** 0.5 if low > 0 else high / 16
            found = self.at_price(middle)
            if found.memory_bytes > limit:
                low = middle
            else:
                high = middle
                best = min(best, found, key=lambda p: p.cost_s)
        bound = max(bound, found.value - found.price * limit)
        return self._solution(best, min(bound, best.cost_s))

    def _refuse(self, smallest: Priced) -> None:
        limit, needed = self.problem.memory_limit, smallest.memory_bytes
        gib = 2.0**30
        raise NoPlanFitsError(
            f"the smallest plan on {self.problem.mesh} needs {needed / gib:.3g} GiB per device, the limit is "
            f"{limit / gib:.3g} GiB ({(needed - limit) / gib:.3g} GiB too much)",
            mend=f"Use about {needed / limit:.1f} times as many devices, a smaller batch, or a narrower type",
            needed_bytes=needed,
        )

    def _solution(self, priced: Priced, bound: float) -> Solution:
        return Solution(
            self.problem,
            priced.graph,
            priced.steps,
            priced.assignment,
            priced.cost_s,
            priced.memory_bytes,
            bound,
            self.configs.states,
            sum(len(variants) for variants in self._explored.values()),
        )

    def _portfolio(self, block: Block, price: float, *, optimistic: bool) -> Portfolio:
        """Variants are explored once, free of memory's price, then priced each time."""
        key = (block.key, price, optimistic)
        if key not in self._portfolios:
            sources = all_shardings(block.source.type, self.problem.mesh) if block.source is not None else ((),)
            solver = BlockSolver(self.configs, self._tied, price, sources, optimistic=optimistic)
            if block.key not in self._explored:
                explored = explore(block, self.problem.rules, self._numbers, solver.solve)
                loses = self.problem.pins.loses
                found = [entry for entry in explored if not loses(block.nodes, entry[0].block.nodes)]
                self._explored[block.key] = [variant for variant, _ in found]
                solved = [entry for _, entry in found]
            else:
                solved = [solver.solve(variant.block) for variant in self._explored[block.key]]
            rules = [variant.rules for variant in self._explored[block.key]]
            self._portfolios[key] = portfolio(list(zip(rules, solved, strict=True)))
        return self._portfolios[key]

    def _chain(self, price: float, *, optimistic: bool) -> tuple[float, dict[Node, int], list[_Link]]:
        """Min-plus product of block tables over boundary shardings: its value, the tied states, and the boundaries."""
        portfolios = [self._portfolio(block, price, optimistic=optimistic) for block in self.blocks]
        if not all(np.isfinite(entry.table).any() for entry in portfolios):
            return float("inf"), {}, []
        value: Table = np.zeros((1,) * (1 + len(self._tied)))
        sharding: tuple[Sharding, ...] = ((),)
        back: list[tuple[Choices, list[int]]] = []
        for entry in portfolios:
            rows = [entry.sources.index(s) for s in sharding]
            best, value = _min_plus(value, entry.table[rows])
            back.append((best, rows))
            sharding = entry.sinks
        total = value[0] if portfolios else value.reshape(value.shape[1:])
        for position, table in enumerate(self._tied.values()):
            own = table.own(price)
            total = total + own.reshape([-1 if i == position else 1 for i in range(len(self._tied))])
        states = np.unravel_index(int(total.argmin()), total.shape)
        path: list[_Link] = []
        sink = 0
        for block, entry, (best, rows) in zip(reversed(self.blocks), reversed(portfolios), reversed(back), strict=True):
            row = int(best[(sink, *_at(states, best.shape[1:]))])
            path.append(_Link(block, entry, rows[row], sink))
            sink = row
        tied = {param: int(state) for param, state in zip(self._tied, states, strict=True)}
        return float(total[states]), tied, path[::-1]

    def _priced(self, price: float, value: float, tied: Mapping[Node, int], path: list[_Link]) -> Priced:
        recovered: dict[tuple[int, int, int], tuple[int, list[Config]]] = {}
        choices = []
        by_name = {rule.name: rule for rule in self.problem.rules}
        for link in path:
            key = (id(link.portfolio), link.source, link.sink)
            if key not in recovered:
                recovered[key] = self._recover(link, tied)
            number, configs = recovered[key]
            names = link.portfolio.variants[number]
            variant = apply_rules(link.block, tuple(by_name[name] for name in names), self._numbers)
            choices.append(Choice(link.block, variant, configs))
        storage = {param: self._tied[param].states[state].storage for param, state in tied.items()}
        graph, assignment, steps = assemble(self.problem.graph, choices, storage, price)
        problem = replace(self.problem, graph=graph)
        cost = plan_cost(problem, derive(problem, assignment, self.configs.moves).pcg)
        return Priced(price, value, cost.seconds, cost.memory_bytes, graph, steps, assignment)

    @staticmethod
    def _recover(link: _Link, tied: Mapping[Node, int]) -> tuple[int, list[Config]]:
        """Which variant is best between two boundary shardings, and its nodes' configurations."""
        entry = link.portfolio
        number = int(entry.choice[(link.source, link.sink, *_at(tuple(tied.values()), entry.choice.shape[2:]))])
        solved = entry.solved[number]
        sink = solved.sinks.index(entry.sinks[link.sink]) if entry.sinks else 0
        return number, solved.configs_for(link.source, sink, tied)


def _min_plus(value: Table, table: Table) -> tuple[Choices, Table]:
    """(argmin, min) over s of value[s, tied…] + table[s, sink, tied…], as [sink, tied…]."""
    best, least = [], []  # sink by sink, so that no table has both boundaries and all tied states
    for sink in range(table.shape[1]):
        total = value + table[:, sink]
        best.append(total.argmin(axis=0))
        least.append(np.take_along_axis(total, best[-1][None], axis=0)[0])
    return np.stack(best), np.stack(least)


def _at(states: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """The entry of a table over tied states, of size one along those that it does not read."""
    return tuple(int(state) if size > 1 else 0 for state, size in zip(states, shape, strict=True))


def _reads(graph: Graph, param: Node) -> list[tuple[Node, int]]:
    return [(node, i) for node in graph.nodes for i, operand in enumerate(node.operands) if operand is param]
