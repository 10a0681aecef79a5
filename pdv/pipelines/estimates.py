"""What candidates take, from short programs: of few equal layers, stretched. Entry point: ``Estimates``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ir.graph import Graph
from ir.scaling.rows import fewer_rows
from pdv.memory import step_memory
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.inside import Inside, Insides, piece_seconds, workload
from pdv.pipelines.pipeline import Mode, Whole, stages_of
from pdv.pipelines.shorten import Short, shorten
from pdv.problem.workload import RECOMPUTATIONS, Recompute
from pdv.search.strategies.budget import Budget, Strategy

SLACK = 1.1  # times the limit, of which an estimate may still fit: they are mostly high
FEWER = 1e-3  # of a micro-batch's activations, that are kept at least


@dataclass(frozen=True)
class Estimate:
    """A candidate as it would run: ``free`` where memory was no matter in the choice of its inside."""

    candidate: Candidate
    mode: Mode
    free: bool
    step_s: float
    needed_bytes: float
    fits: bool
    promising: bool  # whether it may fit after all

    @property
    def is_plain(self) -> bool:
        """True of the whole batch at once on all devices."""
        return self.candidate.stages == self.candidate.micro_batches == 1 and self.mode.recompute == "none"


class Estimates:
    """Estimates of candidates; their insides are those of the short program."""

    def __init__(self, space: Space, strategy: Strategy, budget: Budget) -> None:
        self.space = space
        self.short = shorten(space.problem.graph)
        self._graphs: dict[int, Graph | None] = {1: self.short.graph}
        self.insides = Insides(space, self.graph, strategy, budget, rules=False)

    def graph(self, micro_batches: int) -> Graph | None:
        """The short program of one micro-batch."""
        if micro_batches not in self._graphs:
            self._graphs[micro_batches] = fewer_rows(self.short.graph, micro_batches)
        return self._graphs[micro_batches]

    def of(self, candidate: Candidate, below_s: float) -> Iterator[Estimate]:
        """As fast as can be, and where that does not fit, recomputed or with less in memory.

        What would take more than ``below_s``, did it fit, is not looked into further.
        """
        inside = self.insides.free(candidate)
        if inside is None:
            return
        for recompute in self.space.recomputations if any(inside.pieces.layers) else RECOMPUTATIONS[:1]:
            modes = [Mode(recompute, order) for order in self.space.orders(candidate)]
            found = [self._estimate(candidate, inside, mode, free=True) for mode in modes]
            yield from found
            if any(one.fits for one in found):
                return
            if found[0].step_s < below_s and self._least(candidate, recompute) <= self.limit:
                yield from self._within(candidate, inside, modes[0])

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.space.problem.memory_limit

    def _least(self, candidate: Candidate, recompute: Recompute) -> float:
        return self.space.least_bytes(candidate.stages, candidate.micro_batches, recompute)

    def _within(self, candidate: Candidate, inside: Inside, mode: Mode) -> Iterator[Estimate]:
        """The same with less in memory; the search's limit is moved once, by what came of the first."""
        flight, room = held_at_once(candidate, inside, mode), self.limit * candidate.stages
        room *= share(self.short, inside, flight)
        for _ in range(2):
            less = self.insides.within(candidate, room, flight)
            if less is None:
                return
            found = self._estimate(candidate, less, mode, free=False)
            yield found
            if found.fits:
                return
            room *= self.limit / found.needed_bytes

    def _estimate(self, candidate: Candidate, inside: Inside, mode: Mode, *, free: bool) -> Estimate:
        stretched = inside.profiles.map(lambda own: own.map(self.short.stretch))
        whole = Whole(candidate, stretched, self.space.cluster, mode)
        timed = whole.with_seconds(*map(self.short.stretch, piece_seconds(self.space, candidate, inside)))
        beside, last = self._beside(candidate, inside, mode)
        sizes = timed.cut(self.limit - beside, self.limit - last)
        fits = sizes is not None
        if sizes is None:
            sizes = timed.cut(float("inf"))
        assert sizes is not None, "no more stages than pieces"
        *held, of_last = timed.held(sizes)
        needed = max([of_last + last, *(one + beside for one in held)])
        return Estimate(candidate, mode, free, timed.step_s(sizes), needed, fits, needed <= SLACK * self.limit)

    def _beside(self, candidate: Candidate, inside: Inside, mode: Mode) -> tuple[float, float]:
        """Bytes beyond the sum of its values that a stage of the short program needs, and that the last one does.

        These are working sets, such as the optimizer's, and what the allocator rounds; the last stage has the loss.
        """
        found = []
        for count in dict.fromkeys((min(2, candidate.stages), 1)):
            sizes = (inside.pieces.count,) if count == 1 else (inside.pieces.count - 1, 1)
            few = replace(candidate, stages=count, axes=candidate.axes[:count], micro_batches=1)
            stages = stages_of(inside.pieces, count, sizes, layered=True)
            work = workload(self.space, few, inside, stages, mode)
            held = Whole(few, inside.profiles.first(count), self.space.cluster, mode).held(sizes)
            found.append(max(0.0, step_memory(work).stages[0].least_bytes - held[0]))
        return found[0], found[-1]


def share(short: Short, inside: Inside, flight: float) -> float:
    """Of the bytes of the whole program, what its short one has."""
    own = inside.profiles[0].resting_bytes + flight * inside.profiles[0].kept_bytes
    return float(own.sum() / short.stretch(own).sum())


def held_at_once(candidate: Candidate, inside: Inside, mode: Mode) -> float:
    """How many micro-batches' activations a pipeline holds at once, as a share of what backward needs of each."""
    own, in_order = inside.profiles[0], min(candidate.stages, candidate.micro_batches)
    flight = float(candidate.micro_batches if mode.order == "gpipe" and candidate.stages > 1 else in_order)
    kept, entering = float(own.kept_bytes.sum()), float(own.entering_bytes.sum())
    return flight * max(FEWER, entering / kept) if mode.recompute == "full" and kept else flight
