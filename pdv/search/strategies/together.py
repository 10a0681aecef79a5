"""Programs with several outputs, all of which leave alike: each way to leave is searched by itself, the best one taken.

The bound is the least of theirs, so that it holds for plans of every way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ir.errors import NoPlanFitsError
from pdv.problem import Problem, Solution
from pdv.search.strategies.budget import Budget, Strategy

Ask = Callable[[], Solution]


def together(strategy: Strategy) -> Strategy:
    """The strategy, asked once for each way in which the outputs may leave, if there are several."""

    def solve(problem: Problem, budget: Budget) -> Solution:
        if not problem.undecided:
            return strategy(problem, budget)
        ways = [replace(problem, leaving=way) for way in problem.exits]
        deadline, clock = time.thread_time() + budget.seconds, budget.clock()
        least = math.inf

        def on_best(_: float, cost_s: float) -> None:
            nonlocal least
            if cost_s < least:
                least = cost_s
                budget.on_best(clock.elapsed_s, cost_s)

        def asked(number: int, way: Problem) -> Ask:
            def ask() -> Solution:
                left = max(0.0, deadline - time.thread_time()) / (len(ways) - number)
                most = None if budget.most_s is None else budget.most_s / len(ways)
                return strategy(way, replace(budget, seconds=left, most_s=most, on_best=on_best))

            return ask

        return _best([asked(number, way) for number, way in enumerate(ways)])

    solve.__doc__ = strategy.__doc__
    return solve


def _best(asks: Sequence[Ask]) -> Solution:
    """The cheapest of several solutions, with the bound of all.

    Raises:
        NoPlanFitsError: the one that comes nearest, if none fits, with the bound of all.
    """
    found: list[Solution] = []
    refused: list[NoPlanFitsError] = []
    for ask in asks:
        try:
            found.append(ask())
        except NoPlanFitsError as error:
            refused.append(error)
    bound = min([*(one.lower_bound_s for one in found), *(error.bound_s for error in refused)])
    if not found:
        nearest = min(refused, key=lambda error: error.needed_bytes)
        raise nearest.bounded(bound, cut=any(error.cut for error in refused)) from nearest
    best = min(found, key=lambda one: one.cost_s)
    return replace(
        best,
        lower_bound_s=min(bound, best.cost_s),
        states=sum(one.states for one in found),
        complete=all(one.complete for one in found) and not any(error.cut for error in refused),
    )
