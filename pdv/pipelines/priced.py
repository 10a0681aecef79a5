"""One candidate in full: its inside carried over to the whole program, cut and simulated.

Entry points: ``Pricer``; ``sliced``, ``hosted_bytes``: what was found, in another way; ``refuse``: nothing was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError
from pdv.cluster.units import MEMORY
from pdv.memory import KnownPasses, needed_bytes, step_memory
from pdv.pcg.in_slices import workload_in_slices
from pdv.pcg.resting import exchanged
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import LESS, UNEVEN, Estimate, Mixing, held_at_once, share
from pdv.pipelines.inside import Inside, Insides, workload
from pdv.pipelines.mixing import Mixture, mix
from pdv.pipelines.pipeline import Whole, stages_of
from pdv.pipelines.shorten import Short
from pdv.problem.workload import FOLDED, IN_HALVES, ON_HOST, Workload, are_several
from pdv.schedule.pieces import pieces
from pdv.search.best import BestPlan
from pdv.search.refusals import LESS_EACH, too_large
from pdv.simulate.engine.task import BUBBLE
from pdv.simulate.step import simulate

ROUNDS = 3  # of a tighter limit, where a cut needs more than the sum of its values
TIGHTER = 8  # of a tighter limit for the search of the inside
CLOSE = 0.99  # of the limit that would just do
CLOSER = 0.97  # the same for the inside of a short program, whose bytes follow a limit less closely


@dataclass(frozen=True)
class Found:
    """A plan with what its step takes in seconds, if it fits, and bytes of the fullest device.

    ``uneven``: memory keeps it from its best cut.
    """

    estimate: Estimate
    plan: BestPlan
    work: Workload
    step_s: float
    needed_bytes: float
    fits: bool
    uneven: bool = False


class Pricer:
    """Estimates of one space, made and simulated; ``insides`` are of short programs, or (without one) of whole ones."""

    def __init__(self, space: Space, insides: Insides, short: Short) -> None:
        self.space, self.insides, self.short = space, insides, short
        self._walked: KnownPasses = {}  # cuts of one inside differ in few stages

    def found(self, estimate: Estimate) -> Iterator[Found]:
        """The plan of an estimate, unless it is the estimate's own over again; while it does not fit, one with less.

        With less, too, while memory keeps it from its best cut.
        """
        candidate, limit = estimate.candidate, self.space.problem.memory_limit
        flight, (room, inside) = held_at_once(candidate, estimate.inside, estimate.mode), self._first(estimate)
        before = estimate.inside.plan.pcg.digest if self.insides.rules else ""
        for _ in range(TIGHTER):
            if inside is None:
                return
            needed, digest = 0.0, inside.plan.pcg.digest
            if digest != before:
                found = self._price(estimate, self._of_whole(candidate, inside))
                if found is None:
                    return
                yield found
                if found.fits and not found.uneven:
                    return
                needed = found.needed_bytes
            elif estimate.fits and self.insides.rules:
                return
            before = digest
            room *= LESS if needed and needed <= limit else min(CLOSER, CLOSE * limit / max(limit, needed))
            inside = self.insides.within(candidate, room, flight, lean=estimate.mode.lean)

    def mixed(self, mixing: Mixing) -> Iterator[Found]:
        """The plan whose stages differ; one that holds less, while it does not fit."""
        limit = within = self.space.problem.memory_limit
        mixture: Mixture | None = mixing.mixture
        for _ in range(ROUNDS):
            if mixture is None:
                return
            inside = self.insides.mixed(mixing.insides, mixture, self.short)
            found = self._cut(mixing.estimate, inside, mixture.sizes)
            if found.fits:
                yield from self._shifted(found, inside, mixture.sizes)
                return
            within *= CLOSE * limit / found.needed_bytes
            mixture = mix(mixing.wholes, within)

    def _shifted(self, found: Found, inside: Inside, sizes: Sequence[int]) -> Iterator[Found]:
        """It, and with pieces of the busiest stage given to one beside it, one by one, as long as that is faster.

        A piece keeps its inside: stages that have pieces of two kinds are not among those that mixtures are made of.
        """
        simulation = simulate(found.work, draws=0)
        yield replace(found, step_s=simulation.step_s)
        while found.estimate.mode.virtual == 1:
            busiest = min(simulation.breakdown, key=lambda one: one.parts.get(BUBBLE, 0)).stage
            tried = [(given, self._cut(found.estimate, inside, given)) for given in _given(sizes, busiest)]
            fitting = [(simulate(one.work, draws=0), one, given) for given, one in tried if one.fits]
            best = min(fitting, key=lambda each: each[0].step_ps, default=None)
            if best is None or best[0].step_ps >= simulation.step_ps:
                return
            simulation, found, sizes = best
            yield replace(found, step_s=simulation.step_s)

    def exchanged(self, found: Found) -> Iterator[Found]:
        """The same plan, cut alike, with parameters that rest otherwise along data axes, where that is faster."""
        candidate, stages = found.estimate.candidate, found.plan.stages
        if not candidate.several:
            return
        for solution in exchanged(found.plan.solution, found.plan.pcg):
            plan = self.insides.make_plan(solution)
            work = workload(self.space, candidate, plan, stages, found.estimate.mode)
            step_s = simulate(work, draws=0).step_s
            if step_s >= found.step_s:
                continue  # what it holds, which takes longer to find, does not matter
            needed = needed_bytes(work, self._walked)
            if needed <= self.space.problem.memory_limit:
                plan = replace(plan, stages=stages, execution=work.execution)
                yield Found(found.estimate, plan, work, step_s, needed, fits=True)

    def _first(self, estimate: Estimate) -> tuple[float, Inside | None]:
        """Bytes of all stages that an inside may take where the estimate's does not fit, and the one to begin with."""
        candidate = estimate.candidate
        flight = held_at_once(candidate, estimate.inside, estimate.mode)
        lean = estimate.mode.lean
        room = estimate.inside.held_bytes(flight, lean=lean) if estimate.room is None else estimate.room
        if not self.is_short:
            room /= share(self.short, estimate.inside, flight, lean=lean)
        if estimate.room is None:
            return room, self.insides.free(candidate)
        return room, self.insides.within(candidate, room, flight, lean=lean)

    @property
    def is_short(self) -> bool:
        """Whether insides are those of the short program."""
        return self.insides.graph_of(1) is self.short.graph

    def _of_whole(self, candidate: Candidate, inside: Inside) -> Inside:
        """The same inside of the whole program."""
        return self.insides.lengthened(candidate, inside, self.short) if self.is_short else inside

    def _price(self, estimate: Estimate, inside: Inside) -> Found | None:
        """With the best cut that fits, or the nearest; None if rewriting left fewer pieces than stages."""
        limit, candidate = self.space.problem.memory_limit, estimate.candidate
        whole = Whole(
            candidate, inside.profiles, inside.timings, self.space.cluster, estimate.mode, estimate.extra,
            self.space.is_tied, inside.pieces.layers,
        )  # fmt: skip
        sizes, within = whole.cut(limit), limit
        first = sizes or whole.cut(math.inf)
        if first is None:
            return None
        found = self._cut(estimate, inside, first)
        tried = {sizes}
        for _ in range(ROUNDS - 1):
            if found.fits or sizes is None:
                break
            within *= CLOSE * limit / found.needed_bytes
            sizes = whole.cut(within)
            if sizes is None or sizes in tried:
                break
            tried.add(sizes)
            other = self._cut(estimate, inside, sizes)
            found = min(found, other, key=lambda one: one.needed_bytes)
        if not found.fits or sizes is None:
            return found
        uneven = candidate.stages > 1 and whole.step_s(sizes) > UNEVEN * whole.step_s(whole.cut_freely())
        return replace(found, step_s=simulate(found.work, draws=0).step_s, uneven=uneven)

    def _cut(self, estimate: Estimate, inside: Inside, sizes: Sequence[int]) -> Found:
        candidate = estimate.candidate
        layered, each = estimate.mode.recompute != "none", estimate.mode.virtual
        stages = stages_of(inside.pieces, candidate.stages, sizes, layered=layered, virtual=each)
        stages = replace(stages, folded=estimate.mode.order in FOLDED)
        work = workload(self.space, candidate, inside.plan, stages, estimate.mode)
        plan = replace(inside.plan, stages=stages, execution=work.execution)
        needed = needed_bytes(work, self._walked)
        return Found(estimate, plan, work, math.inf, needed, needed <= self.space.problem.memory_limit)


def _given(sizes: Sequence[int], stage: int) -> list[tuple[int, ...]]:
    """Pieces of each stage, one of a stage given to the one before it, or behind."""
    others = [other for other in (stage - 1, stage + 1) if 0 <= other < len(sizes) and sizes[stage] > 1]
    return [tuple(size + (at == other) - (at == stage) for at, size in enumerate(sizes)) for other in others]


def sliced(best: Found, count: int, states: int, limit: float) -> BestPlan:
    """The best plan of whole micro-batches, whose passes are of slices: of its step no bound is known.

    Raises:
        NoPlanFitsError: if it does not fit so: each slice keeps a copy of what it reads of earlier ones.
    """
    made = best.work.execution
    several = are_several(best.plan.stages.count, made.micro_batches * count)
    execution = replace(made, moments=count, several=several)
    work = workload_in_slices(replace(best.work, execution=execution))
    needed = needed_bytes(work)
    if needed > limit:
        what = f"the plan found, in {count} slices, {too_large(needed, limit)}"
        raise NoPlanFitsError(what, mend="Fewer --slices, or leave them out", needed_bytes=needed)
    step_s = simulate(work).step_s
    return replace(best.plan, execution=execution, step_s=step_s, lower_bound_s=0.0, states=states)


def hosted_bytes(space: Space, found: Found) -> float | None:
    """What a plan needs of a device with what its layers keep on the host; None where that may not be, or has no room.

    Of a CPU the host's memory is its own.
    """
    candidate, mode = found.estimate.candidate, found.estimate.mode
    on_cpu = any(entry.device.kind == "cpu" for entry in space.cluster.classes)
    if on_cpu or mode.recompute not in ON_HOST or mode.order in IN_HALVES or not space.layers:
        return None
    own = pieces(found.plan.solution.graph)
    stages = found.plan.stages
    if stages.count == 1:
        stages = stages_of(own, 1, (own.count,), layered=True)
    hosted = workload(space, candidate, found.plan, stages, replace(mode, recompute=ON_HOST[mode.recompute]))
    memory = step_memory(hosted)
    has_room = all(one.host_bytes <= one.device.host_limit_bytes for one in memory.stages)
    return memory.worst.least_bytes if has_room else None


def refuse(space: Space, nearest: Found | None) -> NoPlanFitsError:
    """What is said where nothing that is as pinned fits, of the smallest plan found."""
    pinned, mend = space.pinned.says_how, LESS_EACH
    named = [] if space.pins is None else [f"{axis} ({where})" for axis, where in space.pins.axes.items()]
    if pinned:
        others = f", or the pins of {', '.join(named)}" if named else ""
        mend = f"Leave out --stages, --micro-batches, --schedule or --recompute{others}. {mend}"
    if nearest is None:
        return NoPlanFitsError("the search met no plan as it is pinned", mend=mend)
    limit = space.problem.memory_limit
    kind = " that is as pinned" if pinned else f", of {_how_it_runs(nearest)},"
    what = f"the smallest plan found{kind} {too_large(nearest.needed_bytes, limit)}"
    hosted = hosted_bytes(space, nearest)
    if hosted is not None and hosted <= limit:
        mend = f"With --offload activations it would fit ({MEMORY.format(hosted)} per device). {mend}"
    return NoPlanFitsError(what, mend=mend, needed_bytes=nearest.needed_bytes)


def _how_it_runs(found: Found) -> str:
    """In how many parts, in words."""
    candidate, mode = found.estimate.candidate, found.estimate.mode
    again = "" if mode.recompute == "none" else ", light values recomputed" if mode.lean else ", recomputed"
    stages = f"{candidate.stages} stage{'' if candidate.stages == 1 else 's'}"
    parts = f"{candidate.micro_batches} micro-batch{'' if candidate.micro_batches == 1 else 'es'}"
    return f"{stages} and {parts}{again}"
