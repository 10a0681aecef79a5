"""The default: variants by backtracking, blocks solved exactly and chained (``pdv.search.chain``)."""

from __future__ import annotations

from pdv.problem import Problem, Solution
from pdv.search.chain import ChainSolver
from pdv.search.strategies.budget import Budget, Clock


def backtrack(problem: Problem, budget: Budget) -> Solution:
    """The best plan that fits, algebra included; it is not cut short.

    Raises:
        NoPlanFitsError: if none does.
        TooWideError: if the graph is too wide for elimination.
    """
    clock = Clock(budget.seconds)
    solution = ChainSolver(problem).solve()
    budget.on_best(clock.elapsed_s, solution.cost_s)
    return solution
