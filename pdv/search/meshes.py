"""Search every mesh of a cluster and keep the best plan that really fits, working set included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError
from pdv.cluster.units import MEMORY
from pdv.pcg.plan_cost import realize
from pdv.problem import Problem, Realized, Solution
from pdv.search.best import BestPlan, Needs
from pdv.search.refusals import LESS_EACH, too_large
from pdv.search.solver.tables import TooWideError
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget, EarlierSearches, Strategy
from pdv.search.timed import shortest_step
from pdv.search.told import Told
from pdv.search.variants.variants import KnownSources
from pdv.watch import UNWATCHED, Watch

CLASSES = 5  # of plans, by the size of their working sets
ROUNDS = 6  # of a tighter limit, where plans need more than the search thinks
CLOSE = 0.999  # of the limit that would just do


class NearestTooLargeError(NoPlanFitsError):
    """No plan fits; ``nearest`` is the smallest one found."""

    def __init__(self, problem: Problem, needed: float, nearest: BestPlan, bound_s: float) -> None:
        super().__init__(
            f"the smallest plan found on {problem.mesh} {too_large(needed, problem.memory_limit)}",
            mend=LESS_EACH,
            needed_bytes=needed,
            bound_s=bound_s,
            cut=not nearest.complete,
        )
        self.nearest = nearest


def search_meshes(
    problems: Sequence[Problem],
    progress: Callable[[float], None] = lambda _: None,
    budget_s: float = float("inf"),
    strategy: Strategy = backtrack,
    seed: int = 0,
    needs: Needs | None = None,
    step_s: Needs | None = None,
    watch: Watch = UNWATCHED,
    *,
    of_step: bool = False,
) -> BestPlan:
    """The cheapest plan over several meshes of one cluster; ``budget_s`` CPU-seconds spent, the best so far.

    ``needs`` says what a plan really takes of a device, and has the last word on whether it fits; ``step_s`` the
    seconds of its step, and has the last word among meshes whose plans cost about the same; where the bound that is
    wanted is ``of_step``, among all.

    A strategy that can be cut short gets an equal share of what is left for each mesh; an exact one may take more, for
    most meshes take less. A mesh that was left undecided lowers the bound, to what is known of it; of one that was left
    out nothing is known.

    Raises:
        NoPlanFitsError: the one of the mesh that comes nearest, if none fits.
    """
    plans: list[BestPlan] = []
    refused: list[NoPlanFitsError] = []
    complete, deadline = True, time.thread_time() + budget_s
    told, rest = Told(watch, len(problems)), _Rest(deadline, seed, KnownSources(), watch, strategy, needs)
    for number, problem in enumerate(problems):
        if plans and (time.thread_time() > deadline or watch.stopped()):
            break
        budget = rest.share(len(problems) - number, told.met(number))
        clock = budget.clock()
        try:
            found = search_mesh(problem, strategy, budget, needs)
        except NoPlanFitsError as error:
            refused.append(error)
            complete = complete and not error.cut and (error.bound_s == float("inf") or clock.left_s > 0)
            continue
        finally:
            progress((number + 1) / len(problems))
        plans.append(found)
        told.took(number, found.cost.seconds, found.lower_bound_s)
    if not plans:
        raise min(refused, key=lambda error: error.needed_bytes)
    best = shortest_step(plans, step_s, problems, rest, of_step=of_step)
    complete = complete and not rest.spent
    return _over_all(best, plans, refused, whole=len(plans) + len(refused) == len(problems), complete=complete)


@dataclass
class _Rest:
    """What is left of a budget. It searches one more problem in that; ``spent``: nothing was left for one of them."""

    deadline: float
    seed: int
    sources: KnownSources
    watch: Watch
    strategy: Strategy
    needs: Needs | None
    spent: bool = False

    def share(self, waiting: int, on_best: Callable[[float, float], None]) -> Budget:
        """Of the next of so many meshes that are ``waiting``, with half of it at most for an exact search."""
        left_s = max(0.0, self.deadline - time.thread_time())
        most_s = left_s / min(waiting, 2)
        return Budget(left_s / waiting, self.seed, on_best, most_s=most_s, sources=self.sources, watch=self.watch)

    def __call__(self, problem: Problem) -> BestPlan | None:
        left_s = self.deadline - time.thread_time()
        if left_s < 0.0:
            self.spent = True
            return None
        budget = Budget(left_s, self.seed, sources=self.sources, watch=self.watch)
        return search_mesh(problem, self.strategy, budget, self.needs)


def _over_all(
    best: BestPlan, plans: Sequence[BestPlan], refused: Sequence[NoPlanFitsError], *, whole: bool, complete: bool
) -> BestPlan:
    """The best plan, with what is known over all meshes tried; ``whole`` if no other is left."""
    bounds = [*(plan.lower_bound_s for plan in plans), *(error.bound_s for error in refused)]
    return replace(
        best,
        lower_bound_s=min([*bounds, best.cost.seconds]) if whole else 0.0,
        states=sum(plan.states for plan in plans),
        meshes=len(bounds),
        complete=whole and complete and all(plan.complete for plan in plans),
    )


def search_mesh(
    problem: Problem, strategy: Strategy = backtrack, budget: Budget | None = None, needs: Needs | None = None
) -> BestPlan:
    """The best plan on one mesh whose peak, working set included, is within the limit.

    With ``needs`` that is the last word: a plan that needs more than was priced is searched for again under a tighter
    limit, and where no plan is small enough by its price, the smallest one is asked what it really needs.

    Raises:
        NoPlanFitsError: if none does.
    """
    budget = budget or Budget()
    if needs is None or math.isinf(problem.memory_limit):
        return _price(problem, strategy, budget, _peak)
    try:
        found = _price(problem, strategy, budget, needs)
    except NoPlanFitsError as error:
        return _smallest(problem, strategy, budget, needs, error)
    return found


def _peak(found: BestPlan) -> float:
    return found.cost.peak_bytes


def _smallest(problem: Problem, strategy: Strategy, budget: Budget, needs: Needs, error: NoPlanFitsError) -> BestPlan:
    """The smallest plan by its price, if it fits after all.

    Raises:
        NoPlanFitsError: with what it needs, if it does not.
    """
    if math.isinf(error.needed_bytes) or isinstance(error, NearestTooLargeError):
        raise error
    try:
        found = _find(replace(problem, memory_limit=error.needed_bytes * (1 + 1e-9)), strategy, budget)
    except NoPlanFitsError:
        raise error from None
    needed = needs(found)
    if needed <= problem.memory_limit:
        return replace(found, lower_bound_s=min(found.lower_bound_s, found.cost.seconds))
    raise NearestTooLargeError(problem, needed, found, error.bound_s)


def _price(problem: Problem, strategy: Strategy, budget: Budget, needs: Needs) -> BestPlan:
    """The best plan whose peak, by ``needs``, is within the limit.

    The search prices what stays allocated. Where a plan's largest working set does not fit on top of that, plans are
    searched by the size of their working sets: those of at least so much have the rest of the limit for what stays,
    those of less have no node that needs more. Every plan is in one of these classes, so the least of their bounds
    holds for all.

    Raises:
        NoPlanFitsError: if none does.
    """
    limit = problem.memory_limit
    knowing = replace(budget, known=EarlierSearches())
    first = _find(problem, strategy, knowing)
    if needs(first) <= limit:
        return first
    if needs is not _peak and first.cost.peak_bytes <= limit:
        return _tighten(problem, strategy, budget, knowing, needs, first)
    tried, bounds, nearest, cut = [first], [], needs(first), False
    share = replace(knowing, seconds=budget.seconds / CLASSES)
    for least, below in _working_sets(first.cost.memory["transient"]):
        if least >= limit:
            continue  # nothing would be left for what stays
        room = replace(problem, memory_limit=limit - least, working_limit=_under(below))
        try:
            found = _find(room, strategy, share)
        except NoPlanFitsError as error:
            nearest = min(nearest, error.needed_bytes + least)
            bounds.append(error.bound_s)
            cut = cut or error.cut
            continue
        tried.append(found)
        bounds.append(found.lower_bound_s)
        if needs(found) > limit:
            with suppress(NoPlanFitsError):
                tried.append(_find(replace(room, working_limit=least), strategy, share))
    fitting = [found for found in tried if needs(found) <= limit]
    bound = max(first.lower_bound_s, min(bounds, default=math.inf))
    cut = cut or not all(found.complete for found in tried)
    if not fitting and needs is not _peak:
        return _tighten(problem, strategy, budget, knowing, needs, min(tried, key=needs))
    if not fitting:
        raise _no_peak_fits(problem, nearest, bound, cut=cut)
    best = min(fitting, key=lambda found: found.cost.seconds)
    states = sum(found.states for found in tried)
    return replace(best, lower_bound_s=min(bound, best.cost.seconds), states=states, complete=not cut)


def _no_peak_fits(problem: Problem, nearest: float, bound_s: float, *, cut: bool) -> NoPlanFitsError:
    return NoPlanFitsError(
        f"the peak of the smallest plan found on {problem.mesh} is {MEMORY.format(nearest)} per device, "
        f"the limit is {MEMORY.format(problem.memory_limit)}",
        mend=LESS_EACH,
        needed_bytes=nearest,
        bound_s=bound_s,
        cut=cut,
    )


def _tighten(
    problem: Problem, strategy: Strategy, budget: Budget, knowing: Budget, needs: Needs, first: BestPlan
) -> BestPlan:
    """A plan under a limit lowered until what it needs is within the problem's own.

    ``knowing`` is the budget with what the search for ``first`` left.

    Raises:
        NoPlanFitsError: if there is none, or none was found in so many rounds.
    """
    limit, within = problem.memory_limit, problem.memory_limit
    last = nearest = first
    for _ in range(ROUNDS):
        within = min(within, last.solution.memory_bytes) * CLOSE * min(1.0, limit / needs(last))
        tighter = replace(problem, memory_limit=within)
        try:
            last = _find(tighter, strategy, knowing)
        except NoPlanFitsError as error:
            if error.needed_bytes < math.inf and nearest.solution.memory_bytes > error.needed_bytes * (1 + 1e-6):
                smallest = replace(problem, memory_limit=error.needed_bytes * (1 + 1e-9))
                with suppress(NoPlanFitsError):
                    last = _find(smallest, strategy, budget)
                    nearest = min(nearest, last, key=needs)
            break
        nearest = min(nearest, last, key=needs)
        if needs(last) <= limit:
            break
    if needs(nearest) > limit:
        raise NearestTooLargeError(problem, needs(nearest), nearest, first.lower_bound_s)
    bound = min(first.lower_bound_s, nearest.cost.seconds)
    return replace(nearest, lower_bound_s=bound, complete=first.complete and nearest.complete)


def _under(num_bytes: float) -> float:
    """The largest number below; infinity stays."""
    return num_bytes if math.isinf(num_bytes) else math.nextafter(num_bytes, 0.0)


def _working_sets(largest: float) -> list[tuple[float, float]]:
    """Classes of plans by their largest working set: [least, below) bytes, from the most to the least."""
    ends = [math.inf, *(largest / 2**n for n in range(CLASSES - 1)), 0.0]
    return list(zip(ends[1:], ends, strict=False))


def _find(problem: Problem, strategy: Strategy, budget: Budget) -> BestPlan:
    """The best plan by what stays allocated.

    Raises:
        NoPlanFitsError: if none fits, or the graph is too wide to be solved on this mesh.
    """
    try:
        solution = strategy(problem, budget)
    except TooWideError as error:
        raise NoPlanFitsError(
            f"{problem.graph.name} has too many values alive at once to be solved exactly on {problem.mesh} ({error})",
            mend="Pin a mesh with fewer axes",
            bound_s=0.0,
        ) from error
    made = solution.realized or realize_solution(solution)
    return BestPlan(
        solution, made.derived, made.cost, solution.lower_bound_s, solution.states, complete=solution.complete
    )


def realize_solution(solution: Solution) -> Realized:
    """The PCG of a solution with its price, made afresh."""
    return realize(replace(solution.problem, graph=solution.graph), solution.assignment)
