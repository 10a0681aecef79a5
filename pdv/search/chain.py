"""Solve a whole graph: equal blocks once, chained by min-plus over boundary shardings, memory priced by a multiplier.

Memory is a hard limit. It enters as a price in seconds per byte (a Lagrange multiplier): at each price the chain is
solved exactly, and that value less price x limit is a lower bound on every plan that fits (weak duality; Everett,
Operations Research 1963). With room to spare the price is zero and the solution is optimal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ir.errors import NoPlanFitsError
from ir.graph import Graph, Node
from ir.sharding import Sharding
from pdv.cost.plan_cost import plan_cost
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution, Storage
from pdv.rewrite.derive import derive
from pdv.rewrite.redistribute import Redistribution, all_shardings
from pdv.search.assemble import Choice, assemble
from pdv.search.backtrack import Portfolio, explore, portfolio
from pdv.search.block_table import BlockSolver, NoAssignmentError
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.configs import Config, ConfigTable
from pdv.search.variants import Variant, apply_rules

BISECTIONS = 14


@dataclass(frozen=True)
class Priced:
    """The best derivation at one price, with its true seconds and bytes (``value = cost_s + price * memory_bytes``)."""

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
        self.blocks = split_blocks(problem.graph)
        self.configs = ConfigTable(problem, Redistribution(problem.mesh, problem.axes))
        self._tied = tied_params(problem.graph)
        self._portfolios: dict[tuple[str, float, tuple[Storage, ...]], Portfolio] = {}
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
        best: tuple[float, dict[Node, Storage], list[_Link]] | None = None
        stuck = "every operator has a split, but no two of them meet"
        for tied in self._tied_storages():
            try:
                value, path = self._chain(price, tied)
            except NoAssignmentError as error:
                stuck = str(error)
                continue
            resident = [self.configs.resident(param, storage) for param, storage in tied.items()]
            value += sum(seconds + price * memory for seconds, memory in resident)
            if best is None or value < best[0]:
                best = (value, tied, path)
        if best is None or not np.isfinite(best[0]):
            raise NoPlanFitsError(
                f"no legal plan of {self.problem.graph.name} on {self.problem.mesh} keeps the pins "
                f"({self.problem.pins.name}): {stuck}",
                mend="Loosen a pin, or change the mesh so that sizes divide",
            )
        return self._priced(price, *best)

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
        )

    def _tied_storages(self) -> Iterator[dict[Node, Storage]]:
        for storages in itertools.product(*(self.configs.storages(param) for param in self._tied)):
            yield dict(zip(self._tied, storages, strict=True))

    def _portfolio(self, block: Block, price: float, tied: Mapping[Node, Storage]) -> Portfolio:
        """Variants are explored once, free of memory's price and of tied storage, then priced each time."""
        operands = {operand for node in block.nodes for operand in node.operands}
        relevant = tuple(storage for param, storage in tied.items() if param in operands)
        key = (block.key, price, relevant)
        if key not in self._portfolios:
            self.configs.tied = tied
            sources = all_shardings(block.source.type, self.problem.mesh) if block.source is not None else ((),)
            solver = BlockSolver(self.configs, price, sources)
            if block.key not in self._explored:
                found = explore(block, self.problem.rules, self._tied, solver.solve)
                self._explored[block.key] = [variant for variant, _ in found]
                solved = [entry for _, entry in found]
            else:
                solved = [solver.solve(variant.block) for variant in self._explored[block.key]]
            rules = [variant.rules for variant in self._explored[block.key]]
            self._portfolios[key] = portfolio(list(zip(rules, solved, strict=True)))
        return self._portfolios[key]

    def _chain(self, price: float, tied: Mapping[Node, Storage]) -> tuple[float, list[_Link]]:
        """Min-plus product of block tables over boundary shardings, and the boundary that attains it."""
        portfolios = [self._portfolio(block, price, tied) for block in self.blocks]
        value = np.zeros(1)
        sharding: tuple[Sharding, ...] = ((),)
        back: list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[int]]] = []
        for entry in portfolios:
            rows = [entry.sources.index(s) for s in sharding]
            table = value[:, None] + entry.table[rows]
            best = table.argmin(axis=0)
            back.append((best, rows))
            value = table[best, np.arange(table.shape[1])]
            sharding = entry.sinks
        total = float(value[0]) if len(value) else 0.0
        path: list[_Link] = []
        sink = 0
        for block, entry, (best, rows) in zip(reversed(self.blocks), reversed(portfolios), reversed(back), strict=True):
            row = int(best[sink])
            path.append(_Link(block, entry, rows[row], sink))
            sink = row
        return total, path[::-1]

    def _priced(self, price: float, value: float, tied: Mapping[Node, Storage], path: list[_Link]) -> Priced:
        recovered: dict[tuple[int, int, int], tuple[int, list[Config]]] = {}
        choices = []
        by_name = {rule.name: rule for rule in self.problem.rules}
        for link in path:
            key = (id(link.portfolio), link.source, link.sink)
            if key not in recovered:
                recovered[key] = self._recover(link)
            number, configs = recovered[key]
            names = link.portfolio.variants[number]
            variant = apply_rules(link.block, tuple(by_name[name] for name in names), self._tied)
            choices.append(Choice(link.block, variant, configs))
        graph, assignment, steps = assemble(self.problem.graph, choices, tied, price)
        problem = replace(self.problem, graph=graph)
        cost = plan_cost(problem, derive(problem, assignment, self.configs.moves).pcg)
        return Priced(price, value, cost.seconds, cost.memory_bytes, graph, steps, assignment)

    @staticmethod
    def _recover(link: _Link) -> tuple[int, list[Config]]:
        """Which variant is best between two boundary shardings, and its nodes' configurations."""
        entry = link.portfolio
        number = int(entry.choice[link.source, link.sink])
        solved = entry.solved[number]
        sink = solved.sinks.index(entry.sinks[link.sink]) if entry.sinks else 0
        return number, solved.configs_for(link.source, sink)
