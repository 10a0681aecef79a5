"""The default: variants by backtracking, blocks solved exactly and chained (``pdv.search.chain``)."""

from __future__ import annotations

from pdv.problem import Problem, Solution
from pdv.search.chain import ChainSolver
from pdv.search.strategies.budget import Budget, EarlierSearches
from pdv.search.strategies.together import together

EXPLORING = 0.7  # of the time, after which what was found is put together


@together
def backtrack(problem: Problem, budget: Budget) -> Solution:
    """The best plan that fits, algebra included; cut short, rewrites not yet looked at are left out.

    Raises:
        NoPlanFitsError: if none does.
        TooWideError: if the graph is too wide for elimination.
    """
    clock = budget.clock()
    allowed_s = EXPLORING * (budget.seconds if budget.most_s is None else budget.most_s)
    known, source = budget.known or EarlierSearches(), budget.sources.of(problem.graph, problem.rules)
    solver = known.solver(problem) or ChainSolver(
        problem,
        lambda: clock.elapsed_s > allowed_s or budget.watch.stopped(),
        source,
        known.configs_of(problem),
        other=known.elsewise(problem),
    )
    solution = solver.solve(problem.memory_limit, budget.gap)
    known.add(solver)
    budget.on_best(clock.elapsed_s, solution.cost_s)
    return solution
