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

from ir.graph import Graph
from pdv.pcg.plan_cost import whole_bytes
from pdv.pcg.realize import Realized, realize
from pdv.pcg.redistribute import Redistribution
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution
from pdv.search.assemble import Choice, assemble
from pdv.search.backtrack import Deadline, Noticed
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.configs import ConfigTable
from pdv.search.exact import TooWideError
from pdv.search.memory import fitting
from pdv.search.refine import Part, Tables
from pdv.search.refusals import no_legal_plan
from pdv.search.stage import Stages
from pdv.search.tied import TiedTable, reads
from pdv.search.variants import Variant, apply_rules


@dataclass(frozen=True)
class Made:
    """The rewritten graph of a plan, what its nodes do, and both made into a PCG."""

    graph: Graph
    steps: tuple[AlgebraicStep, ...]
    assignment: Assignment
    realized: Realized


@dataclass(frozen=True)
class Priced:
    """The best derivation at one price, with its seconds and bytes.

    No derivation has less ``cost_s + price * memory_bytes`` than ``value``. ``parts`` are by block, ``states`` by tied
    parameter; ``tables`` are where they come from. ``made`` is there where it had to be made to know what it costs.
    """

    price: float
    value: float
    cost_s: float
    memory_bytes: float
    parts: tuple[Part, ...]
    states: tuple[int, ...]
    tables: Tables
    made: Made | None = None


class ChainSolver:
    """Solves one problem; block tables are remembered across prices and across equal blocks."""

    def __init__(self, problem: Problem, late: Deadline = lambda: False) -> None:
        """When it is ``late``, no more rewrites and prices are tried; a plan is found nevertheless.

        A search that left rewrites out knows no bound: one of them may cost less than anything it saw.
        """
        assert not problem.undecided, "how outputs leave is decided first (pdv.search.strategies.together)"
        self.problem = problem
        self._late = Noticed(late)
        blocks = split_blocks(problem.graph, problem.rules)
        self.blocks = tuple(replace(block, key=block.key + problem.pins.mark(block.nodes)) for block in blocks)
        self._numbers = tied_params(problem.graph)
        self.configs = ConfigTable(problem, Redistribution(problem.mesh, problem.axes), self._numbers)
        nodes = problem.graph.nodes
        self.tied = {param: TiedTable(self.configs, param, reads(nodes, param)) for param in self._numbers}
        self.whole_bytes = whole_bytes(problem.graph)
        self._stages = Stages(problem, self.blocks, self.configs, self.tied, self._late)
        self.plans: list[Priced] = []

    def solve(self, limit: float | None = None) -> Solution:
        """The best assignment that fits the problem's limit, or another one: what is known of one helps for the next.

        Raises:
            NoPlanFitsError: saying by how much the smallest plan is too large.
        """
        limit = self.problem.memory_limit if limit is None else limit
        free = self.at_price(0.0)
        if free.memory_bytes <= limit:
            return self._solution(free, free.value, limit)
        best, bound = fitting(self, limit)
        return self._solution(best, bound, limit)

    def at_price(self, price: float) -> Priced:
        """The exact optimum of seconds + price x bytes; ``plans`` are those found so far.

        Raises:
            NoPlanFitsError: if pins leave no legal assignment at all.
        """
        known = next((plan for plan in self.plans if plan.price == price), None)
        if known is None:
            known = self._at_price(price)
            self.plans.append(known)
        return known

    def _at_price(self, price: float) -> Priced:
        if not all(table.states for table in self.tied.values()):
            raise no_legal_plan(self.problem)
        bound = self._stages.bounded(price)
        if not np.isfinite(bound.value):
            raise no_legal_plan(self.problem, cut=self.cut)
        tables = Tables(self._stages, price, bound)
        settled = tables.settle()
        if settled is None:
            raise TooWideError("a block, close to its bound")
        states, parts = settled
        return self.assembled(parts, states, price, tables.value + price * self.whole_bytes, tables)

    @property
    def exact(self) -> bool:
        """True if no price so far was but a bound."""
        return self._stages.exact

    @property
    def cut(self) -> bool:
        """True if rewrites were left out because it was late; a bound then says nothing of these."""
        return self._stages.cut

    @property
    def late(self) -> bool:
        """True once no more should be tried."""
        return self._late()

    def _solution(self, priced: Priced, bound: float, limit: float) -> Solution:
        made = priced.made or self.made(priced.parts, priced.states)
        cost = made.realized.cost
        assert cost.memory_bytes <= limit, f"{cost.memory_bytes} bytes, of {limit} allowed"
        return Solution(
            replace(self.problem, memory_limit=limit),
            made.graph,
            made.steps,
            made.assignment,
            cost.seconds,
            cost.memory_bytes,
            0.0 if self.cut else min(bound, cost.seconds),
            self.configs.states,
            sum(len(variants) for variants in self._stages.variants.values()),
            complete=not self._late.noticed,
            realized=made.realized,
            again=self.solve,
        )

    def assembled(
        self, parts: Sequence[Part], states: tuple[int, ...], price: float, value: float, tables: Tables
    ) -> Priced:
        """The plan made of these parts, with its own price: their sum, or if that is but a bound, the PCG's."""
        if not self.exact or not all(table.exact for table in self.tied.values()):
            made = self.made(parts, states)
            cost = made.realized.cost
            return Priced(price, value, cost.seconds, cost.memory_bytes, tuple(parts), states, tables, made)
        own_s, own_bytes = self.own(states)
        seconds = own_s + sum(part.seconds for part in parts)
        num_bytes = own_bytes + sum(part.num_bytes for part in parts)
        return Priced(price, value, seconds, num_bytes, tuple(parts), states, tables)

    def own(self, states: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes) that belong to no block: tied parameters, and what is whole on every device."""
        found = [table.own_parts(state) for table, state in zip(self.tied.values(), states, strict=True)]
        return sum(seconds for seconds, _ in found), self.whole_bytes + sum(held for _, held in found)

    def made(self, parts: Sequence[Part], states: Sequence[int]) -> Made:
        """The rewritten graph of these parts, its assignment, and both made into a PCG."""
        choices = [
            Choice(block, self._variant(block, part.number), part.configs, part.price)
            for block, part in zip(self.blocks, parts, strict=True)
        ]
        storage = {
            param: table.states[state].storage for (param, table), state in zip(self.tied.items(), states, strict=True)
        }
        graph, assignment, steps = assemble(self.problem.graph, choices, storage)
        assignment = replace(assignment, leaving=self.problem.leaving)
        return Made(
            graph, steps, assignment, realize(replace(self.problem, graph=graph), assignment, self.configs.moves)
        )

    def _variant(self, block: Block, number: int) -> Variant:
        """A variant of a block, which may have been found for an equal one."""
        rules = {rule.name: rule for rule in self.problem.rules}
        names = self._stages.variants[block.key][number].rules
        return apply_rules(block, tuple(rules[name] for name in names), self._numbers)
