"""What a strategy may spend, and whom it tells about progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ir.sharding import Sharding
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Problem, Solution
from pdv.search.chain import ChainSolver
from pdv.search.memory import GAP
from pdv.search.solver.configs import KnownConfigs
from pdv.search.variants.variants import KnownSources
from pdv.watch import UNWATCHED, Watch


class EarlierSearches:
    """What searches of one problem leave for the next ones, under other limits."""

    def __init__(self, moves: Redistribution | None = None) -> None:
        """``moves``: of the problem's mesh and links, where they are known."""
        self._configs: KnownConfigs | None = None if moves is None else KnownConfigs(moves)
        self._chains: dict[Sharding | None, ChainSolver] = {}  # by how outputs leave

    def configs_of(self, problem: Problem) -> KnownConfigs:
        """What is known whatever the limits are."""
        self._configs = self._configs or KnownConfigs.of(problem)
        return self._configs

    def solver(self, problem: Problem) -> ChainSolver | None:
        """One that differs from what the problem asks for in its limit of memory at most."""
        return self._chains.get(problem.leaving) if math.isinf(problem.working_limit) else None

    def elsewise(self, problem: Problem) -> ChainSolver | None:
        """One whose outputs leave in another way than the problem's, and that is else as ``solver``."""
        found = reversed(self._chains.values()) if math.isinf(problem.working_limit) else ()
        return next(iter(found), None)  # the last one has what those before it had

    def add(self, solver: ChainSolver) -> None:
        """A solver that found a plan. Where working sets are limited, it is not asked again."""
        if math.isinf(solver.problem.working_limit):
            self._chains[solver.problem.leaving] = solver


@dataclass(frozen=True)
class Budget:
    """Effort of one strategy on one mesh.

    Each strategy stops by itself after a number of steps that depends on the problem alone, so that equal seeds give
    equal plans; ``seconds`` of CPU time cut it short, and then the plan depends on the machine.

    Attributes:
        seconds: CPU time; the best plan met so far is taken then.
        effort: times as many steps as by default, for strategies that sample.
        most_s: CPU time that an exact search may take, where ``seconds`` is a fair share; default: ``seconds``.
        seed: of whatever is random.
        gap: how close to its bound a plan is good enough where memory is short, as a share of its seconds.
        known: of the same problem on other limits of memory, read and added to; None: nothing is kept.
        sources: the programs of earlier searches, on any mesh; read and added to.
        on_best: called with (CPU-seconds since the start, seconds per step) of each plan that fits and is better.
        watch: who may end the search before its time is over.
    """

    seconds: float = float("inf")
    seed: int = 0
    on_best: Callable[[float, float], None] = lambda cpu_s, cost_s: None
    effort: float = 1.0
    most_s: float | None = None
    gap: float = GAP
    known: EarlierSearches | None = field(default=None, compare=False, repr=False)
    sources: KnownSources = field(default_factory=KnownSources, compare=False, repr=False)
    watch: Watch = field(default=UNWATCHED, compare=False, repr=False)

    def clock(self) -> Clock:
        """A clock that starts now."""
        return Clock(self.seconds, self.watch.stopped)

    def steps(self, default: int) -> int:
        """How many of something to do."""
        return max(1, round(default * self.effort))


Strategy = Callable[[Problem, Budget], Solution]


class Clock:
    """CPU-seconds since it was made; once ``stopped``, none are left."""

    def __init__(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self._started, self._at = time.thread_time(), time.monotonic()
        self.seconds, self._stopped = seconds, stopped

    @property
    def elapsed_s(self) -> float:
        """CPU-seconds so far."""
        return time.thread_time() - self._started

    @property
    def left_s(self) -> float:
        """CPU-seconds that may still be spent."""
        return 0.0 if self._stopped() else self.seconds - self.elapsed_s

    @property
    def wall_left_s(self) -> float:
        """The same for a solver that watches the clock on the wall, if the machine stays as busy as it was."""
        elapsed_s = self.elapsed_s
        busy = (time.monotonic() - self._at) / elapsed_s if elapsed_s > 0.1 else 1.0
        return self.left_s * max(1.0, busy)

    @property
    def spent(self) -> float:
        """Share of the time that is over, at most one; nothing where there is no limit."""
        if self._stopped():
            return 1.0
        if self.seconds == float("inf"):
            return 0.0
        return min(1.0, self.elapsed_s / self.seconds) if self.seconds > 0 else 1.0

    def share(self, part: float) -> Clock:
        """A clock for a part of what is left."""
        return Clock(max(0.0, part * self.left_s), self._stopped)
