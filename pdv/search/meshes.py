"""Search every mesh of a cluster and keep the best plan that really fits, working set included."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from pdv.cost.plan_cost import PlanCost, plan_cost
from pdv.problem import Problem, Solution
from pdv.rewrite.derive import Derived, derive
from pdv.rewrite.redistribute import Redistribution
from pdv.search.chain import ChainSolver

RETRIES = 4


@dataclass(frozen=True)
class Found:
    """The best solution over all meshes tried, its derived graph and price, and the least of their lower bounds."""

    solution: Solution
    derived: Derived
    cost: PlanCost
    lower_bound_s: float
    states: int
    meshes: int = 1

    @property
    def pcg(self) -> Graph:
        """The parallel computation graph found."""
        return self.derived.pcg

    @property
    def gap(self) -> float:
        """Relative distance that optimality may still be away, over all meshes tried."""
        seconds = self.cost.seconds
        return max(0.0, (seconds - self.lower_bound_s) / seconds) if seconds > 0 else 0.0


def search_meshes(
    problems: Sequence[Problem],
    progress: Callable[[float], None] = lambda _: None,
    budget_s: float = float("inf"),
) -> Found:
    """The cheapest plan over several meshes of one cluster; ``budget_s`` of wall time spent, the best so far.

    Raises:
        NoPlanFitsError: the one of the mesh that comes nearest, if none fits.
    """
    best: Found | None = None
    refused: list[NoPlanFitsError] = []
    bounds: list[float] = []
    states = 0
    deadline = time.monotonic() + budget_s
    for number, problem in enumerate(problems):
        if best is not None and time.monotonic() > deadline:
            break
        try:
            found = search_mesh(problem)
        except NoPlanFitsError as error:
            refused.append(error)
            continue
        finally:
            progress((number + 1) / len(problems))
        bounds.append(found.lower_bound_s)
        states += found.states
        if best is None or found.cost.seconds < best.cost.seconds:
            best = found
    if best is None:
        raise min(refused, key=lambda error: error.needed_bytes)
    return replace(best, lower_bound_s=min(bounds), states=states, meshes=len(bounds) + len(refused))


def search_mesh(problem: Problem) -> Found:
    """The best plan on one mesh whose peak, working set included, is within the limit.

    The search prices what stays allocated; the largest working set is known only afterwards, so the limit is
    lowered by it and the search repeated until the peak fits.

    Raises:
        NoPlanFitsError: if none does.
    """
    limit = problem.memory_limit
    lower_bound_s = 0.0
    states = 0
    for attempt in range(RETRIES):
        solution = ChainSolver(problem).solve()
        states += solution.states
        if attempt == 0:
            lower_bound_s = solution.lower_bound_s  # with the most room: a bound for every later try
        rewritten = replace(problem, graph=solution.graph)
        derived = derive_solution(solution)
        cost = plan_cost(rewritten, derived.pcg)
        if cost.peak_bytes <= limit:
            return Found(solution, derived, cost, lower_bound_s, states)
        problem = replace(problem, memory_limit=problem.memory_limit - (cost.peak_bytes - limit))
    raise NoPlanFitsError(
        f"the peak of the smallest plan on {problem.mesh} is {cost.peak_bytes / 2**30:.3g} GiB per device, "
        f"the limit is {limit / 2**30:.3g} GiB",
        mend="Use more devices, or a smaller batch",
        needed_bytes=cost.peak_bytes,
    )


def derive_solution(solution: Solution) -> Derived:
    """The PCG of a solution."""
    problem = replace(solution.problem, graph=solution.graph)
    return derive(problem, solution.assignment, Redistribution(problem.mesh, problem.axes))
