"""What candidates take, from short programs: of few equal layers, stretched. Entry point: ``Estimates``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.graph import Graph
from ir.scaling.rows import micro_batch
from pdv.cluster import Cluster, DeviceClass
from pdv.memory import step_memory
from pdv.pipelines.bounding.floors import Floors
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.inside import Inside, Insides, workload
from pdv.pipelines.lengthen import places_of
from pdv.pipelines.mixing import Mixture, mix
from pdv.pipelines.pipeline import Extra, Mode, Whole, stages_of
from pdv.pipelines.profile import ByStage, Numbers, Profile
from pdv.pipelines.shorten import Short, shorten
from pdv.problem.recomputation import HOSTED, WHOLE
from pdv.problem.workload import Recompute
from pdv.schedule.order import Pipeline, in_flight
from pdv.search.strategies.budget import Budget, Strategy
from pdv.search.variants.variants import SourceBlocks

SLACK = 1.03  # times the limit, of which an estimate may still fit
NEARLY = 1.5  # times the limit, that an estimate may need of which a plan may still fit, where nothing else does
FEWER = 1e-3  # of a micro-batch's activations, that are kept at least
FASTER = (
    0.94  # times what is fastest for a micro-batch by itself, that less memory may take: it may sum less at the end
)
MATCHED = 1.04  # times what would be fastest, that is as good
SEVERAL = 4  # micro-batches, of which one runs backward with gradients there and others on the way
AGAIN = 1.2  # times what a plan takes, that it takes at least where layers run again in backward
LIMITS = 4  # of memory that an inside is solved for at most
FULL = 0.97  # of a limit, that a plan may leave unused
AIM = 0.985  # of a limit, that the next plan is to use
UNEVEN = 1.01  # times what the best cut takes without a limit: then less memory inside may pay
WHOLES = 32  # that are kept: estimates of one inside follow each other
HELD = ("resting_bytes", "kept_bytes", "light_bytes", "sent_bytes")  # of a profile
BETWEEN = (0.85, 0.72)  # of what the fastest inside holds, that stages with less room may hold
LESS = 0.93  # of the memory, that is tried next
ABOUT = 1.5  # times the micro-batches that 1F1B holds: so many count as these, and insides are searched once for both


@dataclass(frozen=True)
class Estimate:
    """A candidate as it would run.

    Attributes:
        inside: of the short program; ``room``: bytes that it was allowed, all stages together, if any were said.
        extra: what devices need beyond the sum of values.
        promising: whether it may fit after all.
    """

    candidate: Candidate
    mode: Mode
    inside: Inside
    room: float | None
    extra: Extra
    step_s: float
    needed_bytes: float
    fits: bool
    promising: bool

    @property
    def is_plain(self) -> bool:
        """True of the whole batch at once on all devices."""
        return self.candidate.stages == self.candidate.micro_batches == 1 and self.mode.recompute == "none"


@dataclass(frozen=True)
class Mixing:
    """A candidate of which each stage may have any of some insides; ``wholes``: as if all had it."""

    estimate: Estimate
    insides: tuple[Inside, ...]
    wholes: tuple[Whole, ...]
    mixture: Mixture


class Estimates:
    """Estimates of candidates; their insides are those of the short program."""

    def __init__(self, space: Space, strategy: Strategy, budget: Budget) -> None:
        self.space = space
        whole = space.pins is not None and space.pins.singles_out
        self.short = shorten(space.problem.graph, space.problem.rules, whole=whole)
        self._graphs: dict[int, Graph | None] = {1: self.short.graph}
        self._extras: dict[tuple[Candidate, str, Recompute], Extra] = {}
        self._sources: dict[int, SourceBlocks | None] = {}
        self._limits: dict[Candidate, float] = {}
        self._wholes: dict[tuple[object, ...], Whole] = {}
        self.insides = Insides(space, self.graph, strategy, budget, rules=False, middle=self.short.repeated)
        self.floors = Floors(space, self.source)

    def graph(self, micro_batches: int) -> Graph | None:
        """The short program of one micro-batch."""
        if micro_batches not in self._graphs:
            whole = self.short.graph
            self._graphs[micro_batches] = whole if micro_batches == 1 else micro_batch(whole, micro_batches)
        return self._graphs[micro_batches]

    def source(self, micro_batches: int) -> SourceBlocks | None:
        """The program's blocks, those of the short one over and over; None if there is none."""
        if micro_batches not in self._sources:
            graph = self.graph(micro_batches)
            source = None if graph is None else SourceBlocks(graph, self.space.problem.rules)
            if source is not None and self.short.times > 1:
                places = places_of(source.graph, source.blocks, self.short.middle)
                source = SourceBlocks(source.graph, source.rules, [source.blocks[at] for at in places])
            self._sources[micro_batches] = source
        return self._sources[micro_batches]

    def free(self, candidate: Candidate) -> Estimate | None:
        """As fast as can be, whether it fits or not; None if there is no plan."""
        inside = self.insides.free(candidate)
        recompute = self.space.recomputations[0]
        orders = self.space.orders(candidate, recompute)
        if inside is None or not orders:
            return None
        mode = Mode(recompute, *orders[0])
        return self._estimate(candidate, inside, mode, None, self._extra(candidate, inside, mode.recompute))

    def of(self, candidate: Candidate, below_s: float) -> Iterator[Estimate]:
        """As fast as can be, and where that does not fit, recomputed or with less in memory.

        What would take more than ``below_s``, did it fit, is not looked into further.
        """
        inside = self.insides.free(candidate)
        if inside is None:
            return
        first = [one for one in self.space.recomputations if one not in (*WHOLE, *HOSTED)]
        of_layers = [[one] for one in self.space.recomputations if one not in first and any(inside.pieces.layers)]
        for group in (first, *of_layers):
            large: list[Estimate] = []  # what may be better with less in memory
            fastest_s, own_s, fitting = math.inf, math.inf, False
            for recompute in group:
                if large and fastest_s > below_s:  # what makes values again takes no less
                    break
                found = self._in_orders(candidate, inside, recompute)
                if not found:
                    break
                yield from found
                fastest_s = min(fastest_s, found[0].step_s)
                fits = [one.step_s for one in found if one.fits]
                own_s = min([own_s, *fits])
                below_s = min(below_s, own_s)
                fitting = fitting or (bool(fits) and (recompute == "none" or self.space.pinned.activations != "either"))
                if not fits or self._is_uneven(found[0]):
                    large.append(self._evenly(found[0]) if fits else found[0])
                elif fitting:
                    break
            for less in reversed(large):  # of what makes light values again less is missing
                hopeful = FASTER * less.step_s < below_s and MATCHED * less.step_s < own_s
                if hopeful and self._least(candidate, less.mode.recompute) <= self.limit:
                    for one in self._within(less, below_s):
                        own_s = min(own_s, one.step_s if one.fits else math.inf)
                        below_s = min(below_s, own_s)
                        yield one
            if fitting or AGAIN * fastest_s > below_s:
                return

    def _in_orders(self, candidate: Candidate, inside: Inside, recompute: Recompute) -> list[Estimate]:
        """An inside in each order of passes."""
        modes = [Mode(recompute, *order) for order in self.space.orders(candidate, recompute)]
        extra = self._extra(candidate, inside, recompute) if modes else Extra()
        return [*filter(None, (self._estimate(candidate, inside, mode, None, extra) for mode in modes))]

    def in_turns(self, one: Estimate, below_s: float) -> Iterator[Estimate]:
        """The same with several stages on each rank, where that may take less than ``below_s``; the most come first."""
        candidate = one.candidate
        for order, each in reversed(self.space.in_turns(candidate, one.mode.recompute)):
            if one.step_s * candidate.filled(each) < below_s:
                found = self._estimate(
                    candidate, one.inside, Mode(one.mode.recompute, order, each), one.room, one.extra
                )
                if found is None:
                    continue
                less = [] if found.fits or FASTER * found.step_s >= below_s else self._within(found, below_s)
                for way in itertools.chain([found], less):
                    below_s = min(below_s, way.step_s if way.fits else math.inf)
                    yield way

    def mixed(self, one: Estimate, below_s: float) -> Mixing | None:
        """The same with stages that differ, where that may take less than ``below_s``.

        Of insides that are known, and some that hold less than the fastest.
        """
        candidate, mode = one.candidate, one.mode
        if not self._may_mix(one, below_s):
            return None
        flight = held_at_once(candidate, one.inside, mode)
        for part in BETWEEN:
            room = one.inside.held_bytes(flight, lean=mode.lean) * part
            self.insides.within(candidate, room, flight, lean=mode.lean)
        insides = tuple(self.insides.known[candidate].values())
        extras = [self._extra(candidate, each, mode.recompute) for each in insides]
        each = zip(insides, extras, strict=True)
        wholes = tuple(self._whole(candidate, inside, mode, extra) for inside, extra in each)
        mixture = mix(wholes, self.limit)
        return None if mixture is None or mixture.step_s >= below_s else Mixing(one, insides, wholes, mixture)

    def _may_mix(self, one: Estimate, below_s: float) -> bool:
        """Whether stages that differ may take less, were all as fast as the fastest, and held the least."""
        known = [inside.profiles.kinds for inside in self.insides.known[one.candidate].values()]
        kinds = [
            replace(free, **{name: np.minimum.reduce([getattr(own, name) for own in each]) for name in HELD})
            for free, *each in zip(one.inside.profiles.kinds, *known, strict=True)
        ]
        inside = replace(one.inside, profiles=ByStage(tuple(kinds), one.inside.profiles.kind_of))
        mixture = mix([self._make_whole(one.candidate, inside, one.mode, one.extra)], self.limit)
        return mixture is not None and mixture.step_s < below_s

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.space.problem.memory_limit

    def tighten(self, estimate: Estimate, needed_bytes: float) -> None:
        """Have estimates of a candidate stay below what a device has, by as much as this one was below its plan."""
        candidate = estimate.candidate
        self._limits[candidate] = self._limit_of(candidate) * min(AIM, estimate.needed_bytes / needed_bytes)

    def _limit_of(self, candidate: Candidate) -> float:
        return self._limits.get(candidate, self.limit)

    def _least(self, candidate: Candidate, recompute: Recompute) -> float:
        return self.space.least_bytes(candidate.stages, candidate.micro_batches, recompute)

    def _within(self, free: Estimate, below_s: float) -> Iterator[Estimate]:
        """The same with less in memory: so much that it fits, and no less unless a more even cut pays for it.

        What an inside may hold is found between what was too much and what leaves room, as long as the faster of these
        beats ``below_s``.
        """
        candidate, mode = free.candidate, free.mode
        flight = held_at_once(candidate, free.inside, mode)
        limit, most = self._limit_of(candidate), free.inside.held_bytes(flight, lean=mode.lean)
        room = most * limit / free.needed_bytes
        large, small = (most, free), (0.0, free)
        digests = {free.inside.plan.pcg.digest}
        for _ in range(LIMITS):
            less = self.insides.within(candidate, room, flight, lean=mode.lean)
            if less is None or less.plan.pcg.digest in digests:
                return
            digests.add(less.plan.pcg.digest)
            found = self._estimate(candidate, less, mode, room, self._extra(candidate, less, mode.recompute))
            if found is None:
                return
            yield found
            if found.fits and self._is_uneven(found):
                room *= LESS
                continue
            if found.fits:
                small = room, found
            else:
                large = room, found
            if not small[1].fits:
                room = large[0] * limit / large[1].needed_bytes
                continue
            over, under = large[1].needed_bytes, small[1].needed_bytes
            share = min(0.9, max(0.1, (AIM * limit - under) / (over - under)))
            hoped_s = small[1].step_s - (small[1].step_s - large[1].step_s) * math.sqrt(share)
            if under > FULL * limit or FASTER * hoped_s > below_s:
                return
            room = small[0] + (large[0] - small[0]) * share

    def _is_uneven(self, found: Estimate) -> bool:
        """Whether memory keeps an estimate from its best cut."""
        if found.candidate.stages == 1:
            return False
        return found.step_s > UNEVEN * self._evenly(found).step_s

    def _evenly(self, one: Estimate) -> Estimate:
        """The same, cut as is fastest, whether it fits or not."""
        whole = self._whole(one.candidate, one.inside, one.mode, one.extra)
        needed, step_s = whole.takes(whole.cut_freely())
        return replace(one, needed_bytes=needed, step_s=step_s, fits=needed <= self._limit_of(one.candidate))

    def _estimate(
        self, candidate: Candidate, inside: Inside, mode: Mode, room: float | None, extra: Extra
    ) -> Estimate | None:
        """None if a micro-batch's program has fewer pieces that train something than there are stages."""
        whole = self._whole(candidate, inside, mode, extra)
        limit = self._limit_of(candidate)
        sizes = whole.cut(limit)
        cut = sizes or whole.cut(math.inf)
        if cut is None:
            return None
        needed, step_s = whole.takes(cut)
        fits, promising = sizes is not None, needed <= SLACK * limit
        return Estimate(candidate, mode, inside, room, extra, step_s, needed, fits, promising)

    def _whole(self, candidate: Candidate, inside: Inside, mode: Mode, extra: Extra) -> Whole:
        """One of the last, which knows what it was asked."""
        key = candidate, inside.plan.pcg.digest, mode, extra
        if key not in self._wholes:
            if len(self._wholes) == WHOLES:
                self._wholes.clear()
            self._wholes[key] = self._make_whole(candidate, inside, mode, extra)
        return self._wholes[key]

    def _make_whole(self, candidate: Candidate, inside: Inside, mode: Mode, extra: Extra) -> Whole:
        stretched = inside.profiles.map(lambda own: own.map(self.short.stretch))
        timings, tied = tuple(one.map(self.short.stretch) for one in inside.timings), self.space.is_tied
        layers = tuple(self.short.stretch(np.array(inside.pieces.layers, float)) > 0.0)
        return Whole(candidate, stretched, timings, self.space.cluster, mode, extra, tied, layers)

    def _extra(self, candidate: Candidate, inside: Inside, recompute: Recompute) -> Extra:
        """From a walk of the short program in two stages, and of one where the candidate has but one."""
        key = candidate, inside.plan.pcg.digest, recompute
        if key not in self._extras:
            self._extras[key] = self._find_extra(candidate, inside, recompute)
        return self._extras[key]

    def _find_extra(self, candidate: Candidate, inside: Inside, recompute: Recompute) -> Extra:
        count = inside.pieces.count
        found = self._walk(candidate, inside, recompute, (count - 1, 1)) if count > 1 else Extra()
        if candidate.stages > 1:
            return found
        return self._walk(candidate, inside, recompute, (count,), found.kept)

    def _walk(
        self,
        candidate: Candidate,
        inside: Inside,
        recompute: Recompute,
        sizes: tuple[int, ...],
        kept: float | None = None,
    ) -> Extra:
        """Of so many pieces a stage; ``kept``: as in the answer, where it is known."""
        own, count = inside.profiles[0], len(sizes)
        few = replace(
            candidate,
            stages=count,
            axes=(candidate.axes * 2)[:count],
            micro_batches=min(SEVERAL, candidate.micro_batches),
        )
        order = self.space.pinned.schedule if self.space.versions(count) > 1 else None
        stages, mode = stages_of(inside.pieces, count, sizes, layered=True), Mode(recompute, order or "1f1b")
        work = workload(self.space, few, inside.plan, stages, mode)
        work = replace(work, execution=replace(work.execution, several=candidate.several))
        walked = step_memory(replace(work, cluster=_of_one_kind(work.cluster))).stages
        first, last = walked[0], walked[-1]
        if kept is None:
            rests = ~np.array(inside.pieces.layers) if recompute in HOSTED else True
            said = float((_left_of(own, recompute) * rests)[: sizes[0]].sum())
            left = first.curve[0].after_bytes - first.curve[-1].after_bytes  # behind the first pass, and at rest
            kept = max(FEWER, left / said) if said else 1.0
        profiles = ByStage(inside.profiles.kinds, (0,) * count)
        made, cluster = Extra(kept=kept), self.space.cluster
        held = Whole(few, profiles, inside.timings, cluster, mode, made, layers=inside.pieces.layers).held(sizes)
        outside = first.total_bytes - first.reserved_bytes
        taken = (first.least_bytes - outside) / first.peak_bytes if first.peak_bytes else 1.0
        return Extra(kept, first.peak_bytes - held[0], last.peak_bytes - held[-1], taken, outside)


def promising_first(every: Sequence[Estimate], limit: float, smallest: int) -> list[Estimate]:
    """Those that may nearly fit, the fastest that may fit first; then a few of the rest, the ``smallest``."""
    near = [one for one in every if one.needed_bytes <= NEARLY * limit]
    rest = sorted((one for one in every if one.needed_bytes > NEARLY * limit), key=lambda one: one.needed_bytes)
    return [*sorted(near, key=lambda one: (not one.promising, one.step_s)), *rest[:smallest]]


def share(short: Short, inside: Inside, flight: float, *, lean: bool) -> float:
    """Of the bytes of the whole program, what its short one has; ``lean``: as of ``Inside.held_bytes``."""
    profile = inside.profiles[0]
    own = profile.resting_bytes + flight * (profile.light_bytes if lean else profile.kept_bytes)
    return float(own.sum() / short.stretch(own).sum())


def held_at_once(candidate: Candidate, inside: Inside, mode: Mode) -> float:
    """How many micro-batches' activations a pipeline holds at once, as a share of what backward needs of each."""
    own = inside.profiles[0]
    pipeline = Pipeline(candidate.stages, mode.virtual, candidate.micro_batches, mode.order)
    flight = in_flight(pipeline, 0) / mode.virtual
    if candidate.in_order <= flight < ABOUT * candidate.in_order:
        flight = candidate.in_order
    if mode.lean:
        return flight
    left = _left_of(own, mode.recompute)
    left = left * ~np.array(inside.pieces.layers) if mode.recompute in HOSTED else left
    kept, left_of_it = float(own.kept_bytes.sum()), float(left.sum())
    return flight * max(FEWER, left_of_it / kept) if mode.recompute != "none" and kept else flight


def _left_of(own: Profile, recompute: Recompute) -> Numbers:
    """[pieces] bytes that one micro-batch keeps of each for its backward pass."""
    return {"full": own.entering_bytes, "light": own.light_bytes}.get(recompute, own.kept_bytes)


def _of_one_kind(cluster: Cluster) -> Cluster:
    """The cluster as if all devices were like its first: a walk in two stages may have more ranks than there are."""
    first, nodes = cluster.device_of(0), tuple(replace(group, device_class=0) for group in cluster.nodes)
    return replace(cluster, classes=(DeviceClass(first, cluster.num_devices),), nodes=nodes)
