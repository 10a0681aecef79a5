"""One candidate in full: its inside solved, carried over to the whole program, cut and simulated. Entry: ``Pricer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdv.memory import step_memory
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimate, held_at_once, share
from pdv.pipelines.inside import FREE, Inside, Insides, piece_seconds, workload
from pdv.pipelines.lengthen import lengthen
from pdv.pipelines.pipeline import Whole, stages_of
from pdv.pipelines.shorten import Short
from pdv.problem.workload import Workload
from pdv.search.meshes import BestPlan
from pdv.simulate.step import simulate

ROUNDS = 4  # of a tighter limit, where a cut needs more than the sum of its values
TIGHTER = 5  # of a tighter limit for the search of the inside
CLOSE = 0.99  # of the limit that would just do
CLOSER = 0.97  # the same for the inside, whose bytes follow a limit less closely


@dataclass(frozen=True)
class Found:
    """A plan with what its step takes in seconds, and bytes of the fullest device."""

    estimate: Estimate
    plan: BestPlan
    work: Workload
    step_s: float
    needed_bytes: float
    fits: bool


class Pricer:
    """Estimates of one space, made and simulated; ``insides`` are of short programs, or (without one) of whole ones."""

    def __init__(self, space: Space, insides: Insides, short: Short | None) -> None:
        self.space, self.insides, self.short = space, insides, short

    def found(self, estimate: Estimate) -> Iterator[Found]:
        """The plan of an estimate; where it does not fit after all, others that hold less."""
        short = self.insides.free(estimate.candidate)
        if short is None:
            return
        if estimate.free:
            found = self._price(estimate, self._whole(estimate.candidate, short))
            yield found
            if found.fits:
                return
        yield from self._within(estimate, short)

    def _within(self, estimate: Estimate, short: Inside) -> Iterator[Found]:
        """Plans that hold less and less, until one fits."""
        candidate, limit = estimate.candidate, self.space.problem.memory_limit
        flight = held_at_once(candidate, short, estimate.mode)
        room = limit * candidate.stages * (1.0 if self.short is None else share(self.short, short, flight))
        for _ in range(TIGHTER):
            less = self.insides.within(candidate, room, flight)
            if less is None:
                return
            found = self._price(estimate, self._whole(candidate, less))
            yield found
            if found.fits:
                return
            room *= (CLOSE if self.short is None else CLOSER) * limit / found.needed_bytes

    def _whole(self, candidate: Candidate, short: Inside) -> Inside:
        """The same inside of the whole program."""
        if self.short is None:
            return short
        graph = self.space.graph(candidate.micro_batches)
        assert graph is not None, "the short program has so many micro-batches, too"
        solution = lengthen(short.plan.solution, graph, self.short.middle)
        return self.insides.made(candidate, solution)

    def _price(self, estimate: Estimate, inside: Inside) -> Found:
        """With the best cut whose stages fit, or as it is nearest."""
        limit, candidate = self.space.problem.memory_limit, estimate.candidate
        whole = Whole(candidate, inside.profiles, self.space.cluster, estimate.mode)
        whole = whole.with_seconds(*piece_seconds(self.space, candidate, inside))
        within, found = limit, None
        for _ in range(ROUNDS):
            sizes = whole.cut(within)
            if sizes is None:
                break
            tried = self._cut(estimate, inside, sizes)
            if found is None or tried.needed_bytes < found.needed_bytes:
                found = tried
            if found.fits or candidate.stages == 1:
                break
            within *= CLOSE * limit / tried.needed_bytes
        if found is None:
            sizes = whole.cut(FREE)
            assert sizes is not None, "no more stages than pieces"
            found = self._cut(estimate, inside, sizes)
        return replace(found, step_s=simulate(found.work, draws=0).step_s)

    def _cut(self, estimate: Estimate, inside: Inside, sizes: Sequence[int]) -> Found:
        candidate = estimate.candidate
        stages = stages_of(inside.pieces, candidate.stages, sizes, layered=estimate.mode.recompute == "full")
        work = workload(self.space, candidate, inside, stages, estimate.mode)
        plan = replace(inside.plan, stages=stages, execution=work.execution)
        needed = step_memory(work).worst.least_bytes
        return Found(estimate, plan, work, float("inf"), needed, needed <= self.space.problem.memory_limit)
