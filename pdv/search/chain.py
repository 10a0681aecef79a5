"""Solve a whole graph within its limit of memory, which enters as a price.

Memory is a hard limit. It enters as a price in seconds per byte (a Lagrange multiplier): at each price the chain is
solved exactly (``priced_chain``), and that value less price x limit is a lower bound on every plan that fits (weak
duality; Everett, Operations Research 1963). With room to spare the price is zero and the solution is optimal; else
plans of several prices are joined (``memory``).
"""

from __future__ import annotations

from dataclasses import replace

from pdv.problem import Solution
from pdv.search.memory import GAP, fitting
from pdv.search.priced_chain import Priced, PricedChain


class ChainSolver(PricedChain):
    """Solves one problem; what it knows of one limit of memory helps for the next."""

    def solve(self, limit: float | None = None, gap: float = GAP) -> Solution:
        """The best assignment that fits the problem's limit, or another; this close to its bound is enough.

        Raises:
            NoPlanFitsError: saying by how much the smallest plan is too large.
        """
        limit = self.problem.memory_limit if limit is None else limit
        free = self.at_price(0.0)
        if free.memory_bytes <= limit:
            alike = self.alike(free)
            return self._solution(alike if alike.memory_bytes <= limit else free, free.value, limit)
        best, bound = fitting(self, limit, gap)
        return self._solution(best, bound, limit)

    def _solution(self, priced: Priced, bound: float, limit: float) -> Solution:
        made = priced.made or self.made(priced.parts, priced.states, priced.tables.ties)
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
            self.variants,
            complete=self.complete,
            realized=made.realized,
        )
