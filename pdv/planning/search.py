"""Searching, and what is around it: strategy by name, budget, cache, and the pins to blame if nothing is found."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from threadpoolctl import threadpool_limits

from ir.errors import NoPlanFitsError, UsageError, did_you_mean
from ir.graph import Graph
from pdv import config
from pdv.cluster import Cluster
from pdv.cluster.routing.arrangements import arrangements
from pdv.guard import Progress
from pdv.memory import needed_bytes
from pdv.pins import PinSet
from pdv.pins.conflict import contradiction
from pdv.pins.kept import check_kept
from pdv.pipelines.candidates import Space
from pdv.pipelines.pinned import FREE, Pinned
from pdv.pipelines.search import may_fit_whole, search_pipelines
from pdv.plan.cache import Cache, open_cache, with_cache
from pdv.problem import Pins, Problem
from pdv.problem.problem import ungathered
from pdv.problem.workload import STALE
from pdv.search.best import BestPlan
from pdv.search.meshes import search_meshes
from pdv.search.strategies import STRATEGIES, Strategy
from pdv.simulate.step import simulate
from pdv.watch import SEARCHING, SEARCHING_PIPELINES, UNWATCHED, Watch

LEAST_S = 1.0
"""Of a search where those before it found nothing in all the time that there was."""

Again = Callable[[Graph, Cluster], Sequence[Problem]]


@dataclass(frozen=True)
class Effort:
    """How to search: the strategy's name, CPU-seconds, where earlier searches are kept, seed, who follows, and whether
    it is asked how far from the best a plan in parts may be.

    Raises:
        UsageError: if no strategy is called so, or there is no such budget or seed.
    """

    search: str
    budget_s: float
    cache: Cache | None = None
    seed: int = 0
    watch: Watch = UNWATCHED
    bounded: bool = True

    def __post_init__(self) -> None:
        if self.search not in STRATEGIES:
            allowed = f"Allowed: {', '.join(STRATEGIES)}"
            raise UsageError(f"no search is called {self.search!r}", allowed, did_you_mean(self.search, STRATEGIES))
        if not self.budget_s > 0 or self.seed < 0:
            what = f"no search can be run with a budget of {self.budget_s} s and seed {self.seed}"
            raise UsageError(what, "Allowed: a budget above 0, a seed from 0")

    def until(self, deadline: float) -> Effort:
        """With what is left of a budget for all searches, whose ``deadline`` is a time of this thread."""
        return replace(self, budget_s=max(deadline - time.thread_time(), min(LEAST_S, self.budget_s)))

    def strategy(self, pins: str | None) -> Strategy:
        """What solves one problem."""
        strategy = STRATEGIES[self.search]
        return strategy if self.cache is None else with_cache(strategy, self.search, self.cache, pins)


@dataclass(frozen=True)
class SearchResult:
    """What was found, and the CPU-seconds that it took."""

    found: BestPlan
    seconds: float


def search_problems(
    problems: Sequence[Problem],
    cluster: Cluster,
    effort: Effort,
    pins: str | None,
    progress: Progress,
    again: Again | None,
    *,
    pipelines: config.Pipelines = "never",
    pinned: Pinned = FREE,
    inside: PinSet | None = None,
) -> SearchResult:
    """The best plan of which the emitted program fits, by the lifetimes of what it holds.

    Args:
        problems: one a mesh.
        cluster: what all of them are on.
        effort: how to search; its budget is that of all searches together.
        pins: what the problems' pins say, if anything.
        progress: called with (stage, fraction or None).
        again: the problems of another graph or cluster, without rules; None: nobody asks for what would fit.
        pipelines: whether stages and micro-batches are searched, if none are pinned: always, or if nothing else fits.
        pinned: how a step is to run; pipelines are then searched first.
        inside: what ``pins`` says, where that goes together with what ``pinned`` does.

    Raises:
        UsageError: if nothing can be as ``pinned`` says, or other pins or ``pipelines`` are against it.
        PinsError: if no plan keeps the pins, naming those to blame.
        NoPlanFitsError: if there is none, with changes that would let one fit.
    """
    with threadpool_limits(limits=1, user_api="blas"):  # products are small: threads that wait would take a core each
        started, deadline = time.thread_time(), time.thread_time() + effort.budget_s
        plain, never = pins is None and problems[0].pins == Pins(), pipelines == "never"
        _check_alone(not pinned.says_how or ((plain or inside is not None) and not never))
        may = plain and cluster.mesh is None and effort.search == config.SEARCH and not never
        first = pinned.says_how or (may and (pipelines == "always" or not may_fit_whole(problems[0], cluster)))
        refused: list[NoPlanFitsError] = []
        in_parts = partial(_in_parts, problems, cluster, pinned, pins, inside, progress, refused)
        if first and (result := in_parts(effort)) is not None:
            return _timed(result, started)
        try:
            _check_hopeful(problems[0], cluster, refused)
            return _timed(_search(problems, effort.until(deadline), pins, progress, cluster), started)
        except NoPlanFitsError as error:
            if math.isinf(error.needed_bytes) or pins is not None or effort.watch.stopped():
                raise
            if may and not first and (result := in_parts(effort.until(deadline))) is not None:
                return _timed(result, started)
            needs = partial(_needs, effort=effort, pinned=pinned) if may else None
            raise _refusal([error, *refused], again, problems[0], cluster, progress, needs, effort.budget_s) from error


def _check_hopeful(problem: Problem, cluster: Cluster, refused: Sequence[NoPlanFitsError]) -> None:
    """Whether the whole batch at once may fit where nothing in parts does.

    Raises:
        NoPlanFitsError: as of these, if it cannot, however evenly all is cut.
    """
    if refused and not may_fit_whole(problem, cluster):
        raise refused[0]


def _in_parts(
    problems: Sequence[Problem],
    cluster: Cluster,
    pinned: Pinned,
    pins: str | None,
    inside: PinSet | None,
    progress: Progress,
    refused: list[NoPlanFitsError],
    effort: Effort,
) -> BestPlan | None:
    """The best plan in parts, or the whole batch's where that is faster; None if that is still to be searched.

    Raises:
        NoPlanFitsError: if none fits, and the whole batch is not allowed; else it is among ``refused`` then.
    """
    deadline = time.thread_time() + effort.budget_s

    @cache
    def whole() -> BestPlan | None:
        try:
            found = _search(problems, effort.until(deadline), pins, progress, cluster, of_step=True)
        except NoPlanFitsError:
            return None
        return replace(found, step_s=_step_s(found, cluster))

    try:
        found = _search_pipelines(
            problems, cluster, effort, progress=progress, pinned=pinned, pins=pins, inside=inside, whole=whole
        )
    except NoPlanFitsError as error:
        if not pinned.allows_whole:
            raise
        refused.append(error)
        return None
    if found is None or not found.is_whole or found.lower_bound_s > 0.0:
        return found
    return replace(whole() or found, step_s=None)  # of its price a bound is known, if none is of its step


def _refusal(
    refused: Sequence[NoPlanFitsError],
    again: Again | None,
    problem: Problem,
    cluster: Cluster,
    progress: Progress,
    needs: Callable[..., float | None] | None,
    budget_s: float,
) -> NoPlanFitsError:
    """That of the smallest plan, with what would help where that is asked.

    needs: of plans with stages and micro-batches, where they are allowed. budget_s: as of ``find_remedies``.
    """
    error = min(refused, key=lambda one: one.needed_bytes)
    if again is None:
        return error
    from pdv.report.remedies import find_remedies, with_remedies

    progress("looking for what would fit", None)
    remedies = find_remedies(again, problem.graph, cluster, error, problem.memory_limit, needs, budget_s)
    return with_remedies(error, remedies)


def _needs(
    problems: Sequence[Problem],
    cluster: Cluster,
    within_s: float,
    *,
    effort: Effort,
    pinned: Pinned,
    hosted: bool = False,
) -> float | None:
    """Bytes of a device that the best plan takes, or else the smallest; None if none was met.

    hosted: layers may leave on the hosts what they keep.
    """
    from pdv.report.loaded import workload_of_found

    how = replace(pinned, activations="either") if hosted else pinned
    less = replace(effort, budget_s=within_s, bounded=False)
    try:
        found = search_problems(
            problems, cluster, less, None, lambda *_: None, None, pipelines="always", pinned=how
        ).found
    except NoPlanFitsError as error:
        return None if math.isinf(error.needed_bytes) else error.needed_bytes
    return needed_bytes(workload_of_found(found, found.on(cluster)))


def _timed(found: BestPlan, started: float) -> SearchResult:
    """What a search found, held to its pins, with all that was searched since then, whatever became of it.

    Raises:
        PinsError: naming a pin that it does not keep.
    """
    return SearchResult(check_kept(found), time.thread_time() - started)


def _check_alone(holds: bool) -> None:
    """Whether what is fixed of how a step runs goes together with all else that is.

    Raises:
        UsageError: if it does not.
    """
    if not holds:
        what = (
            "stages, micro-batches, their schedule, recomputation or activations on the host are fixed, and predicates"
            ", or --pipelines never"
        )
        raise UsageError(what, mend="Leave one of them out")


def _search_pipelines(
    problems: Sequence[Problem],
    cluster: Cluster,
    effort: Effort,
    *,
    progress: Progress,
    pinned: Pinned,
    pins: str | None,
    inside: PinSet | None,
    whole: Callable[[], BestPlan | None],
) -> BestPlan | None:
    """The best plan with stages or micro-batches, or of the whole batch if better; None if that alone may be tried.

    Where devices or their links differ, stages may have them in another order than the one in which they are listed.
    """
    progress(SEARCHING_PIPELINES, None)
    first = replace(problems[0], pins=Pins())
    if pinned.schedule in STALE:  # several versions are of what is used as it rests
        first = ungathered(first)
    deadline, orders = time.thread_time() + effort.budget_s, arrangements(cluster)
    others = () if pinned.takes_turns else orders[1:]
    orders = (orders[0], *(one for one in others if Space(first, one, pinned, inside).stages))
    ways: list[BestPlan | None] = []
    refused: list[NoPlanFitsError] = []
    for number, ordered in enumerate(orders):
        left_s = max(0.0, deadline - time.thread_time()) / (len(orders) - number)
        try:
            one = search_pipelines(
                first,
                ordered,
                left_s,
                effort.strategy(pins),
                pinned,
                effort.watch,
                inside,
                whole,
                bounded=effort.bounded,
            )
        except NoPlanFitsError as error:
            refused.append(error)
            one = None
        ways.append(one if one is None or one.is_whole else replace(one, places=ordered.places))  # a whole is as listed
    if len(refused) == len(orders):
        raise min(refused, key=lambda one: one.needed_bytes)
    found = min(filter(None, ways), key=lambda one: one.seconds, default=None)
    if found is None:
        return None
    bound = min(0.0 if one is None else one.lower_bound_s for one in ways)  # of a way without a plan nothing is known
    meshes, states = found.meshes if found.is_whole else len(problems), sum(one.states for one in ways if one)
    return replace(found, meshes=meshes, lower_bound_s=bound, states=states)


def _search(
    problems: Sequence[Problem],
    effort: Effort,
    pins: str | None,
    progress: Progress,
    cluster: Cluster,
    *,
    of_step: bool = False,
) -> BestPlan:
    """The best plan over all meshes of a cluster; ``of_step``: by its step, whatever it costs.

    Raises:
        PinsError: if no plan keeps the pins, naming those to blame.
        NoPlanFitsError: if none fits in memory.
    """
    from pdv.report.remedies import need_of

    strategy = effort.strategy(pins)
    progress(SEARCHING, 0.0)
    try:
        return search_meshes(
            problems, lambda fraction: progress(SEARCHING, fraction), effort.budget_s, strategy, effort.seed,
            need_of(cluster), partial(_step_s, cluster=cluster), effort.watch, of_step=of_step,
        )  # fmt: skip
    except NoPlanFitsError as error:
        if effort.watch.stopped():
            raise
        progress("looking for the pins to blame", None)
        blamed = next(filter(None, (contradiction(problem, error) for problem in problems)), None)
        if blamed is None:
            raise
        raise blamed from error


def _step_s(found: BestPlan, cluster: Cluster) -> float:
    """Seconds of a plan's step, simulated."""
    from pdv.report.loaded import workload_of_found

    return simulate(workload_of_found(found, cluster)).step_s


def cache_in(directory: str | os.PathLike[str] | Cache | None) -> Cache | None:
    """A cache in a directory, which warns as Python does.

    Raises:
        UsageError: if it is no path.
    """
    if directory is None or isinstance(directory, Cache):
        return directory
    if not isinstance(directory, str | os.PathLike):
        raise UsageError(f"cache {directory!r} is no directory", "Allowed: a path, or None to keep no searches")
    return open_cache(Path(directory), lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2))
