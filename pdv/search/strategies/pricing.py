"""What all strategies on the flat network share: memory as a price, the best plan so far, and its certificate.

A strategy here is a way to minimize a network (``Minimizer``). Memory is a hard limit; as in the chain search, it
enters as a price per byte, which is bisected: the network at a price is minimized again, from what was found before.
A plan is taken only once it has been derived, priced as a whole, and fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ir.errors import NoPlanFitsError
from pdv.problem import Problem, Solution
from pdv.search.refusals import no_legal_plan, too_large
from pdv.search.strategies.budget import Budget, Clock, Strategy
from pdv.search.strategies.decode import greedy
from pdv.search.strategies.network import Flat, Flattened, Plain, Values
from pdv.search.strategies.together import together

BISECTIONS = 6
MAX_RAISES = 6  # each makes memory sixteen times dearer: at the last nothing else counts
OFFER_SHARE = 0.99  # a plan on the way is priced as a whole if it is 1 % better than the last one so priced


@dataclass
class NetworkTask:
    """One network to minimize.

    Attributes:
        start: a good plan at another price, or None.
        steps: scales a number of steps by the effort asked for.
        offer: to be called with plans met on the way and their values.
    """

    flat: Flat
    rng: np.random.Generator
    start: Values | None
    clock: Clock
    offer: Callable[[Values, float], None]
    steps: Callable[[int], int]


@dataclass(frozen=True)
class Minimized:
    """The best values met, if any were legal, and a bound below all others' value (-inf: none known)."""

    values: Values | None
    bound: float = float("-inf")


Minimizer = Callable[[NetworkTask], Minimized]


def strategy(minimize: Minimizer) -> Strategy:
    """A strategy on problems from one on networks."""

    def solve(problem: Problem, budget: Budget) -> Solution:
        return _Search(problem, budget, minimize).solve()

    solve.__doc__ = minimize.__doc__
    return together(solve)


class _Search:
    """One run on one problem."""

    def __init__(self, problem: Problem, budget: Budget, minimize: Minimizer) -> None:
        self._problem = problem
        self._budget = budget
        self._minimize = minimize
        self._clock = budget.clock()
        self._flattened = Flattened(problem)
        self._rng = np.random.default_rng(budget.seed)
        self._best: Plain | None = None
        self._smallest: Plain | None = None
        self._start: Values | None = None
        self._bound = 0.0
        self._free = self._flattened.at(0.0)

    def solve(self) -> Solution:
        """The best plan that fits.

        Raises:
            NoPlanFitsError: if none was met.
        """
        limit = self._problem.memory_limit
        free = self._at(0.0, 0.1 if self._is_short(limit) else 1.0)
        low, high = 0.0, free.cost_s / max(free.memory_bytes, 1.0)
        for _ in range(MAX_RAISES):
            if self._best is not None:
                break
            if self._at(high, 0.2).memory_bytes > limit:
                low, high = high, high * 16
        if free.memory_bytes > limit and self._best is not None:
            for step in range(BISECTIONS):
                if self._clock.left_s <= 0 or self._best.cost_s - self._bound <= 1e-3 * self._best.cost_s:
                    break
                middle = (low * high) ** 0.5 if low > 0 else high / 16
                if self._at(middle, 1 / (BISECTIONS - step)).memory_bytes > limit:
                    low = middle
                else:
                    high = middle
        return self._solution()

    def _is_short(self, limit: float) -> bool:
        """Whether a quick plan made without regard to memory does not fit, so that most time is for other prices."""
        if not np.isfinite(limit):
            return False
        flat = self._free
        quick = greedy(flat)
        return flat.value(quick) < flat.illegal and self._flattened.plan(flat, quick).memory_bytes > limit

    def _solution(self) -> Solution:
        best, limit = self._best, self._problem.memory_limit
        if best is None:
            assert self._smallest is not None
            needed = self._smallest.memory_bytes
            raise NoPlanFitsError(
                f"the smallest plan met on {self._problem.mesh} {too_large(needed, limit)}",
                mend="Give the search more time, or search with backtrack, which decides whether there is one",
                needed_bytes=needed,
                bound_s=self._bound,
            )
        states = self._flattened.configs.states
        bound = min(self._bound, best.cost_s)
        return Solution(
            self._problem,
            self._problem.graph,
            (),
            best.assignment,
            best.cost_s,
            best.memory_bytes,
            bound,
            states,
            complete=self._clock.left_s > 0,
        )

    def _at(self, price: float, share: float) -> Plain:
        """The plan found at a price, in a share of the time left."""
        flat = self._free if price == 0.0 else self._flattened.at(price)
        last = float("inf")

        def offer(values: Values, value: float) -> None:
            nonlocal last
            if value < min(flat.illegal, last * OFFER_SHARE):
                last = value
                self._take(self._flattened.plan(flat, values))

        clock = self._clock.share(share)
        task = NetworkTask(flat, self._rng, self._start, clock, offer, self._budget.steps)
        found = self._minimize(task)
        if found.values is None or flat.value(found.values) >= flat.illegal:
            raise no_legal_plan(self._problem) if found.bound == float("inf") else self._unfound()
        self._start = {variable: found.values[variable] for variable in flat.choices}
        plan = self._flattened.plan(flat, found.values)
        self._take(plan)
        self._certify(flat, found.bound)
        return plan

    def _take(self, plan: Plain) -> None:
        """Keep a plan if it fits and is the best so far."""
        if self._smallest is None or plan.memory_bytes < self._smallest.memory_bytes:
            self._smallest = plan
        better = self._best is None or plan.cost_s < self._best.cost_s
        if plan.memory_bytes <= self._problem.memory_limit and better:
            self._best = plan
            self._budget.on_best(self._clock.elapsed_s, plan.cost_s)

    def _certify(self, flat: Flat, bound: float) -> None:
        """Weak duality: no plan that fits costs less than the least of seconds + price x (bytes - limit)."""
        if not np.isfinite(bound):
            return
        if not self._flattened.exact:  # prices are above the true ones somewhere: solve those that are below
            flat = self._flattened.at(flat.price, optimistic=True)
            clock = self._clock.share(1.0)
            task = NetworkTask(flat, self._rng, None, clock, lambda values, value: None, self._budget.steps)
            bound = self._minimize(task).bound
        if flat.price > 0.0:
            bound += flat.price * (self._flattened.whole_bytes - self._problem.memory_limit)
        self._bound = max(self._bound, bound)

    def _unfound(self) -> NoPlanFitsError:
        return NoPlanFitsError(
            f"this search met no legal plan of {self._problem.graph.name} on {self._problem.mesh} in "
            f"{self._clock.elapsed_s:.1f} s (pins: {self._problem.pins.name})",
            mend="Give it more time (--budget), or search with backtrack, which decides whether there is one",
            bound_s=self._bound,
        )
