"""The search over pipelines: candidates are estimated, the best made and simulated. Entry: ``search_pipelines``.

Coordinate descent over estimates, from a first guess for each number of stages: of the best the micro-batches are
doubled and halved, then other meshes are tried, as long as that helps.
What cannot be faster than the best so far, by ``Floors.least_s``, is not looked at.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ir.mesh import Mesh
from pdv.cluster import Cluster
from pdv.pins import PinSet
from pdv.pipelines.bounding.bounds import Bounds
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import AGAIN, NEARLY, Estimate, Estimates, Mixing, promising_first
from pdv.pipelines.inside import Insides
from pdv.pipelines.pinned import FREE, Pinned
from pdv.pipelines.pipeline import Mode
from pdv.pipelines.priced import Found, Pricer, refuse, sliced
from pdv.problem import Problem
from pdv.problem.workload import Order, Recompute
from pdv.search.best import BestPlan
from pdv.search.strategies.budget import Budget, Strategy
from pdv.search.variants.backtrack import Noticed
from pdv.simulate.step import simulate
from pdv.watch import UNWATCHED, Standing, Watch

NEAR = 1.01  # times the bound: good enough
WORSE = 1.15  # times the best so far: stages are not made more of behind two such
ABOUT = 1.1  # times the estimate of what was found, of which the whole batch at once may take less on another mesh
STARTS = 3  # numbers of stages that are looked at closely
CLOSE = 1.01  # times the best found: what is estimated higher is not made
BETTER = 0.998  # times what a mesh takes where memory does not matter, that another is looked at for
ENOUGH = 0.96  # times the step found: what is bounded so is not bounded more closely
BOUNDING = 0.3  # of the time that there is, for the bound of what was found by then
MIXED = 3  # candidates whose stages may differ
TIED = 1.003  # times an estimate: what simulations may order otherwise
ROUNDS = 3  # of estimates, as long as plans need more than they said
MISLED = 1.02  # times what was hoped for, that the best may take and nothing else is looked for
MADE = 4  # plans at most, once one fits
ALIKE = 2  # numbers of micro-batches of them with the same stages on the same mesh: estimates of these err alike

ROUGHLY = Budget(gap=0.02)  # of insides, that are compared by simulated steps
SHARE = 0.2  # of the time that there is, for one inside: most take a hundredth, GPT-3 175B a tenth, wide ones hours


def search_pipelines(
    problem: Problem,
    cluster: Cluster,
    budget_s: float,
    strategy: Strategy,
    pinned: Pinned = FREE,
    watch: Watch = UNWATCHED,
    pins: PinSet | None = None,
    whole: Callable[[], BestPlan | None] = lambda: None,
    *,
    bounded: bool = True,
) -> BestPlan | None:
    """The fastest plan found; None where its rows cannot be run apart, or nothing but the whole batch may be tried.

    ``problem`` is that of the whole batch on some mesh of the whole cluster, with nothing pinned but what ``pinned``
    says; ``pins`` are of the insides of stages. ``whole``: the best plan, with its step, of the whole batch at once on
    all devices, which is asked where that may be the fastest. Unless ``bounded``, the bound is zero.

    Raises:
        UsageError: if nothing can be as it is pinned.
        PinsError: the same of ``pins``.
        NoPlanFitsError: if nothing that is fits.
    """
    pinned.check(problem, cluster)
    space = Space(problem, cluster, pinned, pins)
    space.check_pins()
    if not (problem.train and space.open):
        return None
    estimates = Estimates(space, strategy, replace(ROUGHLY, seconds=SHARE * budget_s))
    now = time.thread_time()
    search = Search(space, estimates, strategy, now + (1.0 - BOUNDING) * budget_s, watch)
    best = search.run()
    if best is None and (search.nearest is not None or not pinned.allows_whole):
        raise refuse(space, search.nearest)
    if best is None:
        return None
    if pinned.slices is not None:
        return sliced(best, pinned.slices, search.states, problem.memory_limit)
    found = replace(best.plan, step_s=simulate(best.work).step_s, states=search.states, complete=search.complete)
    plain = best.estimate.is_plain
    other = whole() if plain or search.leaves_whole else None
    if other is not None and (plain or other.seconds < found.seconds):
        found = replace(other, states=found.states + other.states, complete=found.complete and other.complete)
    watch.tell(Standing(f"bounding {search.looked_at}", found.seconds))
    end = now + budget_s
    bounding = Noticed(lambda: time.thread_time() > end or watch.stopped())
    least_s = Bounds.of(estimates, found).least_s(ENOUGH * found.seconds, bounding) if bounded else 0.0
    watch.tell(Standing(search.looked_at, found.seconds, min(found.seconds, least_s)))
    complete = found.complete and not (search.stopped.noticed or bounding.noticed)
    return replace(found, lower_bound_s=min(found.seconds, least_s), complete=complete)


def may_fit_whole(problem: Problem, cluster: Cluster) -> bool:
    """False if no plan for the whole batch at once can fit, however evenly everything is cut."""
    return Space(problem, cluster).least_bytes(1, 1) <= problem.memory_limit


class Refuted(NamedTuple):
    """An estimate of which no plan fits, and what the smallest needs."""

    estimate: Estimate
    needed_bytes: float


@dataclass
class Search:
    """What is known so far."""

    space: Space
    estimates: Estimates
    strategy: Strategy
    deadline: float
    watch: Watch = UNWATCHED
    known: dict[Candidate, list[Estimate]] = field(default_factory=dict)
    best: Found | None = None
    nearest: Found | None = None  # of those that do not fit, the smallest
    _mixings: list[Mixing] = field(default_factory=list)

    def __post_init__(self) -> None:
        short, middle, budget = self.estimates.graph, self.estimates.short.repeated, self.estimates.insides.budget
        self._rewritten = Insides(self.space, short, self.strategy, budget, rules=True, middle=middle)
        self.stopped = Noticed(lambda: time.thread_time() > self.deadline or self.watch.stopped())

    @property
    def states(self) -> int:
        """Configurations priced."""
        return sum(one.states for one in (self.estimates.insides, self._rewritten))

    @property
    def complete(self) -> bool:
        """False if an inside was cut short."""
        return self.estimates.insides.complete and self._rewritten.complete

    @property
    def leaves_whole(self) -> bool:
        """Whether the whole batch at once may beat what was found, and fit after all.

        By its estimates, which are of a few meshes, it is about as fast; or none of them fits.
        """
        if self.best is None or not self.space.pinned.allows_whole:
            return False
        fitting = [one.step_s for one in self._all if one.is_plain and one.fits]
        if fitting:
            return min(fitting) < ABOUT * self.best.estimate.step_s
        said = 1 in self.space.stages  # not of unequal devices in another order
        least_s = self.estimates.floors.least_s(1, 1) if said else 0.0
        return self.space.least_bytes(1, 1) <= self.limit and least_s * NEAR < self.best.step_s

    def run(self) -> Found | None:
        """The best plan that fits: rewritten where that is another one than as written, of the best estimates."""
        made: set[tuple[Candidate, Mode]] = set()
        for _ in range(ROUNDS):
            self._explore()
            for mixing in self._mixings[:1]:
                for found in Pricer(self.space, self.estimates.insides, self.estimates.short).mixed(mixing):
                    self._keep(found)
            refuted = self._make_all(made)
            if not self._was_misled(refuted):
                break
            for estimate, needed in refuted:
                made.discard((estimate.candidate, estimate.mode))
                self.known.pop(estimate.candidate, None)
                self.estimates.tighten(estimate, needed)
            # Of those that do not fit, what takes longer than was hoped for was not looked into.
            self.known = {one: each for one, each in self.known.items() if any(found.fits for found in each)}
        plain = min((one for one in self._all if one.is_plain and one.fits), key=lambda one: one.step_s, default=None)
        if plain is not None and self.best is not None and plain.step_s < self.best.step_s:
            self._make(plain, self.estimates.insides)  # what estimates of pipelines leave out it may not have
        if self.best is not None:
            for found in Pricer(self.space, self._rewritten, self.estimates.short).exchanged(self.best):
                self._keep(found)
        return self.best

    def _make_all(self, earlier: set[tuple[Candidate, Mode]]) -> list[Refuted]:
        """Make the best estimates but those made ``earlier``, to which they are added: those of which no plan fits."""
        done: dict[tuple[Candidate, Recompute, Order], float] = {}
        made: set[tuple[Candidate, Mode]] = set()
        refuted: list[Refuted] = []
        for one in promising_first(self._all, self.limit, 1 if self.late else MADE):
            if self.best is not None and (len(made) >= MADE or one.step_s > CLOSE * self.best.step_s or self.late):
                break
            kind, turns = (one.candidate, one.mode), (one.candidate, one.mode.recompute, one.mode.order)
            same = [c for c, _ in made if (c.stages, c.mesh) == (one.candidate.stages, one.candidate.mesh)]
            alike = {c.micro_batches for c in (*same, one.candidate)}
            if kind in made | earlier or one.step_s > TIED * done.get(turns, math.inf):
                continue
            if self.best is None or len(alike) <= ALIKE:
                made.add(kind)
                needed = math.inf if self.late else self._make(one, self._rewritten)
                needed = needed if needed <= self.limit else min(needed, self._make(one, self.estimates.insides))
                if needed <= self.limit:
                    done.setdefault(turns, one.step_s)  # of more or fewer stages on each rank the fastest
                elif one.promising:
                    refuted.append(Refuted(one, needed))
        earlier |= made
        return refuted

    def _was_misled(self, refuted: Sequence[Refuted]) -> bool:
        """Whether estimates that do not hold kept others, which may be better than what was found, from being tried."""
        hoped_s = min((one.step_s for one, _ in refuted), default=math.inf)
        return not self.late and hoped_s < math.inf and (self.best is None or MISLED * hoped_s < self.best.step_s)

    def _mixed(self) -> list[Mixing]:
        """Plans whose stages differ, the best first, of what is fastest and does not fit if all stages have it."""
        best_s = min((one.step_s for one in self._all if one.fits), default=math.inf)
        known = [each for each in self.known.values() if each and each[0].candidate.stages > 1]
        near: list[Mixing | None] = []
        for each in sorted(known, key=lambda each: min(one.step_s for one in each))[:MIXED]:
            fastest = min(each, key=lambda one: one.step_s)
            free = min((one for one in each if one.room is None), key=lambda one: one.needed_bytes)
            if not (self.late or fastest.fits):
                near.append(self.estimates.mixed(free, BETTER * best_s))
        return sorted(filter(None, near), key=lambda one: one.mixture.step_s)

    def _make(self, estimate: Estimate, insides: Insides) -> float:
        """Bytes that plans of an estimate need at least, with one of the insides; the best is kept."""
        needed = math.inf
        for found in Pricer(self.space, insides, self.estimates.short).found(estimate):
            self._keep(found)
            needed = min(needed, found.needed_bytes)
        return needed

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.space.problem.memory_limit

    @property
    def late(self) -> bool:
        """True once no more should be tried."""
        return self.stopped()

    @property
    def _all(self) -> list[Estimate]:
        return [estimate for found in self.known.values() for estimate in found]

    def _keep(self, found: Found) -> None:
        if found.fits and (self.best is None or found.step_s < self.best.step_s):
            self.best = found
        if not found.fits and (self.nearest is None or found.needed_bytes < self.nearest.needed_bytes):
            self.nearest = found
        self._tell()

    def _tell(self) -> None:
        best_s = self._best_s if self.best is None else self.best.step_s
        self.watch.tell(Standing(self.looked_at, best_s if math.isfinite(best_s) else None))

    @property
    def looked_at(self) -> str:
        """How many ways to run a step were estimated, in words."""
        return f"{len(self.known)} pipeline{'s' if len(self.known) > 1 else ''}"

    # ---- Estimates ----

    def _explore(self) -> None:
        """Stages, each on one axis, or one for each level that it spans; then micro-batches, then other meshes."""
        firsts: list[Estimate] = []
        others: list[Estimate] = []
        worse = 0
        for stages in self.space.stages:
            found = self._first(stages, self.space.meshes(stages)[: 1 + self.space.spans_nodes(stages)])
            best_s = min((self._hoped_s(one) for one in firsts if one.fits), default=math.inf)
            firsts += found[:1]
            others += found[1:]
            worse = worse + 1 if best_s < math.inf and (not found or self._hoped_s(found[0]) > WORSE * best_s) else 0
            if worse > 1 or self.late:
                break
        fitting = sorted((one for one in firsts if one.fits), key=self._hoped_s)
        large = sorted((one for one in firsts if not one.fits), key=lambda one: one.needed_bytes)
        for first in (*fitting, *large):  # what hardly fits is mostly slow in the end
            self._try(first.candidate)
        for other in sorted(others, key=self._hoped_s):
            if self._hoped_s(other) * (1.0 if other.fits else AGAIN) < self._best_s:
                self._try(other.candidate)
        for start in self._starts():
            self._descend(start, self._counts)
        whole = min((one for one in self.known if one.stages == 1), key=self._value, default=None)
        for start in dict.fromkeys([*self._starts(), *([whole] if whole else [])]):
            for mesh in self.space.all_meshes(start.stages):
                self._try_mesh(start, mesh)
        if starts := self._starts():
            self._descend(starts[0], self._counts)
        self._mixings = self._mixed()

    def _first(self, stages: int, meshes: Sequence[Mesh]) -> list[Estimate]:
        """Of the first guesses of micro-batches, the best first; where none is a plan, the first of fewer that is."""

        def estimates(ways: Iterable[tuple[Mesh, int]]) -> Iterator[Estimate]:
            return filter(None, (self.estimates.free(self.space.candidate(stages, *way)) for way in ways))

        firsts = estimates((mesh, count) for mesh in meshes for count in self.space.first_counts(stages, mesh))
        fewer = estimates((mesh, count) for mesh in meshes for count in self.space.fewer_counts(stages))
        found = sorted(firsts, key=lambda one: (not one.fits, one.step_s))
        return found or list(itertools.islice(fewer, 1))

    def _try_mesh(self, candidate: Candidate, mesh: Mesh) -> None:
        """The same on another mesh, if that is faster where memory does not matter.

        Where its slow axis cannot cut the rows of a micro-batch, also with the nearest numbers of those that it can.
        """
        count, size = candidate.micro_batches, next((axis.size for axis in mesh.axes), 1)
        counts = [count]
        if (self.space.batch // count) % size:
            cut = [c for c in self.space.counts_of(candidate.stages) if (self.space.batch // c) % size == 0]
            counts += [c for c in cut if c > count][:1] + [c for c in cut if c < count][-1:]
        for one in counts:
            other = self.space.candidate(candidate.stages, mesh, one)
            if other in self.known or self.late or not self._may_win(other, mesh):
                continue
            least_bytes = self.space.least_bytes(other.stages, one, self.space.recomputations[0])
            if one != count and least_bytes > self.space.problem.memory_limit:
                continue
            free, known = self.estimates.free(other), self.estimates.free(candidate)
            if free is None or known is None or not (one == count or free.promising):
                continue
            if free.step_s < BETTER * known.step_s:
                self._try(other)

    def _starts(self) -> list[Candidate]:
        """The best candidates of different numbers of stages."""
        best: dict[int, Candidate] = {}
        worst = math.isinf(self._best_s), math.inf
        for one in sorted((one for one in self.known if self._value(one) < worst), key=self._value):
            best.setdefault(one.stages, one)
        return list(best.values())[:STARTS]

    def _descend(self, candidate: Candidate, near: Callable[[Candidate], list[Candidate]]) -> None:
        """From a candidate to the best that none of its neighbours beats."""
        while not self.late:
            around = [candidate, *near(candidate)]
            for other in around:
                self._try(other)
            best = min(around, key=self._value)
            if best is candidate:
                return
            candidate = best

    def _value(self, candidate: Candidate) -> tuple[bool, float]:
        """Whether no estimate of a candidate may fit, and seconds of the fastest that may, or nearly may.

        Estimates may say far more than is needed, most where one part of a model needs more than all others.
        """
        near = (one for one in self.known.get(candidate, ()) if one.needed_bytes <= NEARLY * self.limit)
        return min(((not one.promising, one.step_s) for one in near), default=(True, math.inf))

    def _hoped_s(self, free: Estimate) -> float:
        """Seconds of a step of one stage on each rank, as they would be with several."""
        return free.step_s * self.space.filled(free.candidate)

    @property
    def _best_s(self) -> float:
        return min((one.step_s for one in self._all if one.promising), default=math.inf)

    def _try(self, candidate: Candidate) -> None:
        """Estimate a candidate, unless it cannot be the best."""
        if candidate in self.known or (self.late and self.known):
            return
        best_s, filled = self._best_s, self.space.filled(candidate)
        if self._may_win(candidate):
            found = list(self.estimates.of(candidate, best_s / filled))
            fastest = min((one for one in found if one.fits), key=lambda one: one.step_s, default=None)
            if fastest is not None and fastest.mode.virtual == 1:
                best_s = min(one.step_s for one in [*self._all, fastest] if one.fits)
                found += self.estimates.in_turns(fastest, BETTER * best_s)
            self.known[candidate] = found
            self._tell()

    def _may_win(self, candidate: Candidate, mesh: Mesh | None = None) -> bool:
        """Whether the best so far takes longer than what a candidate computes at least, again where it has to.

        On one mesh, or (None) on any: one that computes more may lead to others. Of some meshes nothing is known.
        """
        stages, count = candidate.stages, candidate.micro_batches
        if candidate.mesh not in self.space.meshes(stages):
            return True
        fits = self.space.least_bytes(stages, count) <= self.space.problem.memory_limit
        again = not fits and self.space.pinned.activations is None
        least_s = self.estimates.floors.least_s(stages, count, mesh, again=again)
        return least_s * self.space.filled(candidate) * NEAR < self._best_s

    def _counts(self, candidate: Candidate) -> list[Candidate]:
        """With about twice and half as many micro-batches."""
        counts, count = self.space.counts_of(candidate.stages), candidate.micro_batches
        more = next((c for c in counts if c >= 2 * count), None)
        less = next((c for c in reversed(counts) if 2 * c <= count), None)
        return [self.space.candidate(candidate.stages, candidate.mesh, other) for other in (more, less) if other]
