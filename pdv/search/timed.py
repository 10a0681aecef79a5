"""Which of the plans found on several meshes has the shortest step: those that may, by their price, are simulated.

Prices are of kernels, collectives and the optimizer. They leave out what hosts take to issue these, and that sums of
gradients are hidden behind backward. ``shortest_step`` is the entry point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations

from ir.errors import NoPlanFitsError
from pdv.pcg.techniques import gathers_weights
from pdv.problem import Pins, Problem
from pdv.problem.problem import idle, ungathered
from pdv.search.best import BestPlan, Needs

NEAR = 1.15  # times the cheapest mesh's price: whose step is timed
TIMED = 4  # meshes at most of about the same price
MOST_TIMED = 8  # at most, where the last word is that of steps
ABOUT = 1.02  # times the shortest step, that is about as short
WHOLE = 2  # of these: where weights are kept whole, too
HOSTED = 1.5  # times a plan's price: a step that is as long waits for its hosts
Search = Callable[[Problem], BestPlan | None]


def shortest_step(
    plans: Sequence[BestPlan],
    step_s: Needs | None,
    problems: Sequence[Problem],
    search: Search,
    *,
    of_step: bool = False,
) -> BestPlan:
    """The plan with the shortest step among those that cost about as much as the cheapest; without ``step_s`` that one.

    Beside plans that gather weights are those that keep them whole, as long as ``search`` has time for these.
    ``of_step``: a plan may cost more, if its step is shorter. Where steps wait for hosts, plans that leave axes idle
    and so issue fewer collectives are then searched, too, and taken where they are clearly faster.
    """
    cheapest = sorted(plans, key=lambda plan: plan.cost.seconds)
    if step_s is None:
        return cheapest[0]
    asked = {problem.mesh: problem for problem in problems}
    step_s = _once(step_s)
    near = (
        _worth_timing(cheapest[:MOST_TIMED], step_s)
        if of_step
        else [plan for plan in cheapest[:TIMED] if plan.cost.seconds <= NEAR * cheapest[0].cost.seconds]
    )
    for plan in near[:WHOLE]:
        problem = asked[plan.solution.problem.mesh]
        if problem.pins.gathers is Pins().gathers and gathers_weights(plan.pcg):
            near += _search(search, ungathered(problem))
    if not of_step:
        return near[0] if len(near) == 1 else shortest(near, step_s)
    best = shortest(near, step_s)
    if not _waits_for_hosts(best, step_s):
        return best
    on = [asked[plan.solution.problem.mesh] for plan in near[:MOST_TIMED]]
    fewer = [plan for problem in _with_idle_axes(on) for plan in _search(search, problem)]
    return min((plan for plan in fewer if step_s(plan) * ABOUT < step_s(best)), key=step_s, default=best)


def _search(search: Search, problem: Problem) -> list[BestPlan]:
    with suppress(NoPlanFitsError):
        return list(filter(None, [search(problem)]))
    return []


def _waits_for_hosts(plan: BestPlan, step_s: Needs) -> bool:
    axes = plan.solution.problem.mesh.axes
    return any(axis.size > 1 for axis in axes) and step_s(plan) > HOSTED * plan.cost.seconds


def _with_idle_axes(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Problems of which some axes cut nothing; all of them on one mesh alone, for that is the same on each."""
    free = {problem.mesh: problem for problem in problems if problem.pins == Pins()}
    for number, problem in enumerate(free.values()):
        names = [axis.name for axis in problem.mesh.axes if axis.size > 1]
        for count in range(len(names), 0, -1):
            if count < len(names) or not number:
                yield from (idle(problem, axes) for axes in combinations(names, count))


def _once(step_s: Needs) -> Needs:
    """Each of a few plans' step, simulated once."""
    known: list[tuple[BestPlan, float]] = []

    def of(plan: BestPlan) -> float:
        seconds = next((seconds for one, seconds in known if one is plan), None)
        if seconds is None:
            seconds = step_s(plan)
            known.append((plan, seconds))
        return seconds

    return of


def _worth_timing(cheapest: Sequence[BestPlan], step_s: Needs) -> list[BestPlan]:
    """Those of a price that is about that of the cheapest, or no more than the shortest step so far.

    Where hosts issue kernels more slowly than devices run them, a step is far longer than its price, and a plan that
    costs more and has fewer calls may be faster.
    """
    near, shortest_s = [cheapest[0]], math.inf
    for plan in cheapest[1:]:
        if plan.cost.seconds > NEAR * cheapest[0].cost.seconds:
            shortest_s = min(map(step_s, near))
            if plan.cost.seconds > shortest_s:
                break
        near.append(plan)
    return near


def shortest(plans: Sequence[BestPlan], step_s: Needs) -> BestPlan:
    """The plan whose step is shortest; where calls of collectives take time of the cores, of about as short the one
    with the fewest axes: along two, gradients are summed by twice as many calls, whose time is the least certain.
    """
    steps = [step_s(plan) for plan in plans]
    called = any(link.called_s for plan in plans for link in plan.solution.problem.axes)
    most_s = min(steps) * (ABOUT if called else 1.0)
    alike = [(len(plan.solution.problem.mesh.axes), seconds) for plan, seconds in zip(plans, steps, strict=True)]
    return plans[min((one for one in range(len(plans)) if steps[one] <= most_s), key=alike.__getitem__)]
