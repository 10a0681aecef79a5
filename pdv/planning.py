"""Searching, and what is around it: the strategy by name, the budget, and the pins to blame if nothing is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ir.errors import NoPlanFitsError, UsageError
from pdv.cluster.suggest import did_you_mean
from pdv.pins import contradiction
from pdv.problem import Problem
from pdv.search.meshes import Found, search_meshes
from pdv.search.strategies import STRATEGIES, Strategy

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Searched:
    """What was found, and the CPU-seconds that it took."""

    found: Found
    seconds: float


def strategy_called(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        UsageError: if there is none.
    """
    if name not in STRATEGIES:
        allowed = f"Allowed: {', '.join(STRATEGIES)}"
        raise UsageError(f"no search is called {name!r}", allowed, did_you_mean(name, STRATEGIES))
    return STRATEGIES[name]


def searched(problems: Sequence[Problem], strategy: Strategy, budget_s: float, progress: Progress) -> Searched:
    """The best plan over all meshes.

    Raises:
        PinsError: if no plan keeps the pins, naming those to blame.
        NoPlanFitsError: if none fits in memory.
    """
    started = time.process_time()
    try:
        found = search_meshes(problems, lambda fraction: progress("searching", fraction), budget_s, strategy)
    except NoPlanFitsError as error:
        progress("looking for the pins to blame", None)
        blamed = contradiction(problems[0], error)
        if blamed is None:
            raise
        raise blamed from error
    return Searched(found, time.process_time() - started)
