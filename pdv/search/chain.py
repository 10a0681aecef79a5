"""Solve a whole graph: equal blocks once, chained by min-plus over boundary shardings, memory priced by a multiplier.

Memory is a hard limit. It enters as a price in seconds per byte (a Lagrange multiplier): at each price the chain is
solved exactly (``refine``), and that value less price x limit is a lower bound on every plan that fits (weak duality;
Everett, Operations Research 1963). With room to spare the price is zero and the solution is optimal; else plans of
several prices are joined (``memory``). Where more than five want one value, prices are but bounded (``sharing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.errors import NoPlanFitsError
from ir.graph import Graph, Node
from pdv.pcg.plan_cost import whole_bytes
from pdv.pcg.realize import Realized, realize
from pdv.pcg.redistribute import Redistribution
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution
from pdv.search.assemble import Choice, assemble
from pdv.search.backtrack import Deadline
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.configs import ConfigTable
from pdv.search.exact import TooWideError
from pdv.search.memory import fitting
from pdv.search.refine import Part, Tables
from pdv.search.stage import Stages
from pdv.search.tied import TiedTable
from pdv.search.variants import Variant, apply_rules


@dataclass(frozen=True)
class Priced:
    """The best derivation at one price, made into its PCG, with its true seconds and bytes.

    No derivation has less ``cost_s + price * memory_bytes`` than ``value``. ``parts`` are by block, ``states`` by tied
    parameter; ``tables`` are where they come from.
    """

    price: float
    value: float
    graph: Graph
    steps: tuple[AlgebraicStep, ...]
    assignment: Assignment
    realized: Realized
    parts: tuple[Part, ...]
    states: tuple[int, ...]
    tables: Tables

    @property
    def cost_s(self) -> float:
        """Seconds per step."""
        return self.realized.cost.seconds

    @property
    def memory_bytes(self) -> float:
        """Bytes per device that stay allocated."""
        return self.realized.cost.memory_bytes


class Noticed:
    """A deadline that remembers whether somebody met it."""

    def __init__(self, late: Deadline) -> None:
        self._late = late
        self.noticed = False

    def __call__(self) -> bool:
        """True once it is late."""
        self.noticed = self.noticed or self._late()
        return self.noticed


class ChainSolver:
    """Solves one problem; block tables are remembered across prices and across equal blocks."""

    def __init__(self, problem: Problem, late: Deadline = lambda: False) -> None:
        """When it is ``late``, no more rewrites and prices are tried; a plan is found nevertheless."""
        self.problem = problem
        self._late = Noticed(late)
        blocks = split_blocks(problem.graph, problem.rules)
        self.blocks = tuple(replace(block, key=block.key + problem.pins.mark(block.nodes)) for block in blocks)
        self._numbers = tied_params(problem.graph)
        self.configs = ConfigTable(problem, Redistribution(problem.mesh, problem.axes), self._numbers)
        self.tied = {param: TiedTable(self.configs, param, _reads(problem.graph, param)) for param in self._numbers}
        self.whole_bytes = whole_bytes(problem.graph)
        self._stages = Stages(problem, self.blocks, self.configs, self.tied, self._late)

    def solve(self) -> Solution:
        """The best assignment that fits.

        Raises:
            NoPlanFitsError: saying by how much the smallest plan is too large.
        """
        free = self.at_price(0.0)
        if free.memory_bytes <= self.problem.memory_limit:
            return self._solution(free, free.value)
        best, bound = fitting(self, free)
        return self._solution(best, bound)

    def at_price(self, price: float) -> Priced:
        """The exact optimum of seconds + price x bytes.

        Raises:
            NoPlanFitsError: if pins leave no legal assignment at all.
        """
        if not all(table.states for table in self.tied.values()):
            raise self._no_legal_plan()
        bound = self._stages.bounded(price)
        if not np.isfinite(bound.value):
            raise self._no_legal_plan()
        tables = Tables(self._stages, price, bound)
        settled = tables.settle()
        if settled is None:
            raise TooWideError("a block, close to its bound")
        states, parts = settled
        return self.assembled(parts, states, price, tables.value + price * self.whole_bytes, tables)

    def _no_legal_plan(self) -> NoPlanFitsError:
        return NoPlanFitsError(
            f"no legal plan of {self.problem.graph.name} on {self.problem.mesh} keeps the pins "
            f"({self.problem.pins.name})",
            mend="Loosen a pin, or change the mesh so that sizes divide",
        )

    @property
    def exact(self) -> bool:
        """True if no price so far was but a bound."""
        return self._stages.exact

    @property
    def late(self) -> bool:
        """True once no more should be tried."""
        return self._late()

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
            sum(len(variants) for variants in self._stages.variants.values()),
            complete=not self._late.noticed,
            realized=priced.realized,
        )

    def assembled(
        self, parts: Sequence[Part], states: tuple[int, ...], price: float, value: float, tables: Tables
    ) -> Priced:
        """The plan made of these parts, with its own price."""
        choices = [
            Choice(block, self._variant(block, part.number), part.configs, part.price)
            for block, part in zip(self.blocks, parts, strict=True)
        ]
        storage = {
            param: table.states[state].storage for (param, table), state in zip(self.tied.items(), states, strict=True)
        }
        graph, assignment, steps = assemble(self.problem.graph, choices, storage)
        realized = realize(replace(self.problem, graph=graph), assignment, self.configs.moves)
        return Priced(price, value, graph, steps, assignment, realized, tuple(parts), states, tables)

    def _variant(self, block: Block, number: int) -> Variant:
        """A variant of a block, which may have been found for an equal one."""
        rules = {rule.name: rule for rule in self.problem.rules}
        names = self._stages.variants[block.key][number].rules
        return apply_rules(block, tuple(rules[name] for name in names), self._numbers)


def _reads(graph: Graph, param: Node) -> list[tuple[Node, int]]:
    return [(node, i) for node in graph.nodes for i, operand in enumerate(node.operands) if operand is param]
