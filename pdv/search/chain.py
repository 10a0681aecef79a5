"""Solve a whole graph: equal blocks once, chained by min-plus over boundary shardings, memory priced by a multiplier.

Memory is a hard limit. It enters as a price in seconds per byte (a Lagrange multiplier): at each price the chain is
solved exactly, and that value less price x limit is a lower bound on every plan that fits (weak duality; Everett,
Operations Research 1963). With room to spare the price is zero and the solution is optimal. Where more than three want
one value, prices are no longer exact (``sharing``), and the bound is that of the optimistic ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.errors import NoPlanFitsError
from ir.graph import Graph, Node
from pdv.pcg.derive import derive
from pdv.pcg.plan_cost import plan_cost, whole_bytes
from pdv.pcg.redistribute import Redistribution
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution
from pdv.search.assemble import Choice, assemble
from pdv.search.backtrack import Deadline
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.configs import Config, ConfigTable
from pdv.search.path import at
from pdv.search.stage import Stage, Stages, narrowed
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
        self._tied = {param: TiedTable(self.configs, param, _reads(problem.graph, param)) for param in self._numbers}
        self._whole_bytes = whole_bytes(problem.graph)
        self._stages = Stages(problem, self.blocks, self.configs, self._tied, self._late)
        self.exact = True  # no plan so far had a price that is but bounded

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
        bound = self._stages.bounded(price)
        if not np.isfinite(bound.value):
            raise NoPlanFitsError(
                f"no legal plan of {self.problem.graph.name} on {self.problem.mesh} keeps the pins "
                f"({self.problem.pins.name})",
                mend="Loosen a pin, or change the mesh so that sizes divide",
            )
        found, value = (bound, bound.value) if bound.exact else narrowed(self._stages, price, bound)
        self.exact = self.exact and found.exact
        return self._priced(price, value + price * self._whole_bytes, found)

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
            if best.cost_s - bound <= 1e-3 * best.cost_s or self._late():
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
            sum(len(variants) for variants in self._stages.variants.values()),
            complete=not self._late.noticed,
        )

    def _priced(self, price: float, value: float, stage: Stage) -> Priced:
        """The plan that a stage's best path stands for, with its own price."""
        states, path = stage.path.best()
        recovered: dict[tuple[str, int, int], tuple[int, list[Config]]] = {}
        choices = []
        for block, (source, sink) in zip(self.blocks, path, strict=True):
            key = (block.key, source, sink)
            if key not in recovered:
                recovered[key] = self._recovered(stage, block, source, sink, states)
            number, configs = recovered[key]
            choices.append(Choice(block, self._variant(block, stage.numbers[block.key][number]), configs))
        storage = {
            param: table.states[state].storage for (param, table), state in zip(self._tied.items(), states, strict=True)
        }
        graph, assignment, steps = assemble(self.problem.graph, choices, storage, price)
        problem = replace(self.problem, graph=graph)
        cost = plan_cost(problem, derive(problem, assignment, self.configs.moves).pcg)
        return Priced(price, value, cost.seconds, cost.memory_bytes, graph, steps, assignment)

    def _recovered(
        self, stage: Stage, block: Block, source: int, sink: int, states: Sequence[int]
    ) -> tuple[int, list[Config]]:
        """Which variant is best between two boundary shardings, and its nodes' configurations."""
        entry = stage.portfolios[block.key]
        number = int(entry.choice[(source, sink, *at(states, entry.choice.shape[2:]))])
        solved = entry.solved[number]
        column = solved.sinks.index(entry.sinks[sink]) if entry.sinks else 0
        return number, solved.configs_for(source, column, dict(zip(self._tied, states, strict=True)))

    def _variant(self, block: Block, number: int) -> Variant:
        """A variant of a block, which may have been found for an equal one."""
        rules = {rule.name: rule for rule in self.problem.rules}
        names = self._stages.variants[block.key][number].rules
        return apply_rules(block, tuple(rules[name] for name in names), self._numbers)


def _reads(graph: Graph, param: Node) -> list[tuple[Node, int]]:
    return [(node, i) for node in graph.nodes for i, operand in enumerate(node.operands) if operand is param]
