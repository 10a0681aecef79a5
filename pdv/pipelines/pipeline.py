"""One candidate's inside as a pipeline: its cut, and what a step of it takes by arithmetic. Entry: ``Whole``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from pdv.cluster import Cluster, Link
from pdv.cluster.host import slowest_host
from pdv.cluster.routing.route import find_route
from pdv.pipelines.candidates import Candidate
from pdv.pipelines.cuts import cut_pieces, held_bytes, leaning_cuts, level, run_costs, slowest_of, sooner_cuts, within
from pdv.pipelines.profile import ByStage, Numbers, Profile
from pdv.pipelines.timing import Timing
from pdv.problem.recomputation import HOSTED
from pdv.problem.workload import STALE, Order, Recompute, Stages
from pdv.schedule.order import Pipeline, in_flight, most_held
from pdv.schedule.pieces import Pieces
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.pipeline import STEADY, Durations, Sends, Timeline, compose
from pdv.simulate.engine.shared import Cores, compose_shared
from pdv.simulate.engine.steady import done
from pdv.simulate.engine.task import PICO, picoseconds

SENT = 0.02  # of a step, by which what one micro-batch sends may differ, and cuts are all alike


@dataclass(frozen=True)
class Mode:
    """How micro-batches run, beside where; ``virtual``: stages on each rank."""

    recompute: Recompute = "none"
    order: Order = "1f1b"
    virtual: int = 1

    @property
    def lean(self) -> bool:
        """Whether light values are not kept for backward, but made again."""
        return self.recompute == "light"


@dataclass(frozen=True)
class Extra:
    """Bytes that a device needs beyond the sum of its values, as a walk of a small pipeline finds them.

    Attributes:
        kept: times what values say that a micro-batch leaves for its backward pass.
        first, last: working sets, of the stages before the last one and of that.
        taken: times what tensors need, that an allocator takes.
        outside: of the allocator.
    """

    kept: float = 1.0
    first: float = 0.0
    last: float = 0.0
    taken: float = 1.0
    outside: float = 0.0

    def room(self, limit: float, stage: int, count: int) -> float:
        """What a limit leaves for values, on one of so many stages."""
        return (limit - self.outside) / self.taken - (self.last if stage == count - 1 else self.first)

    def needed(self, values: float, stage: int, count: int) -> float:
        """Bytes of a device, given those of its values."""
        return (values + (self.last if stage == count - 1 else self.first)) * self.taken + self.outside


@dataclass(frozen=True)
class Whole:
    """A candidate with what its pieces take on each stage; ``tied``: some stages wait for others once a step.

    timings: of each kind of stage that the profiles are of; layers: of each piece, whether it is one.
    """

    candidate: Candidate
    profiles: ByStage
    timings: tuple[Timing, ...]
    cluster: Cluster
    mode: Mode
    extra: Extra = Extra()
    tied: bool = False
    layers: tuple[bool, ...] = ()

    def cut(self, limit: float) -> tuple[int, ...] | None:
        """Pieces of each stage, so that the slowest is fastest; None if nothing is within so many bytes a device.

        Where stages or what they send differ, so that a step is, of that cut and those that fill the pipeline sooner.
        """
        if limit not in self._known_cuts:
            self._known_cuts[limit] = self._cut(limit)
        return self._known_cuts[limit]

    @cached_property
    def _known_cuts(self) -> dict[float, tuple[int, ...] | None]:
        return {}

    def _cut(self, limit: float) -> tuple[int, ...] | None:
        if self.candidate.stages == 1:
            whole = (self.profiles[0].count,)
            return whole if self.held(whole)[0] <= limit else None
        if self.mode.virtual > 1:  # chunks of a rank are unequal: what one leaves, another may take
            fitting = [sizes for sizes in self._level_cuts(math.inf) if max(self.held(sizes)) <= limit]
            fitting = fitting or self._level_cuts(limit)
            return min(fitting, key=self.step_s, default=None)
        costs = self.costs(limit)
        sizes = cut_pieces(costs)
        if sizes is None:
            return None
        slowest_s = slowest_of(costs, sizes)
        if not self._differs(slowest_s):
            return sizes
        return min(dict.fromkeys((sizes, *sooner_cuts(costs, self._passes, slowest_s))), key=self.step_s)

    def _level_cuts(self, limit: float) -> list[tuple[int, ...]]:
        """Of chunks within an equal part of each rank's room: the slowest fastest, and ranks more alike in all.

        Where micro-batches take turns, who comes later in a turn waits for who takes longer in it: it matters, too,
        which of equal chunks have one piece more.
        """
        costs = self.costs(limit)
        place = [self._pipeline.layout.place_of(chunk) for chunk in range(self.chunks)]
        found = [*leaning_cuts(costs, (0.0, 1.0, -1.0))]
        return [*dict.fromkeys((*found, *(level(costs, cut, place) for cut in found)))]

    def _differs(self, slowest_s: float) -> bool:
        """Whether cuts differ in what one micro-batch takes of all stages, and of sends between them.

        ``slowest_s``: of a step, what its slowest stage takes.
        """
        if Cores.of(self.cluster, self.candidate.stages) is not None:
            return False
        if len(self.profiles.kinds) > 1:
            return True
        links, passed = [link for link in self.links if link is not None], self._timed[0].sent_bytes[:-1]
        sent_s = max((np.ptp(passed) / link.bandwidth_bytes_per_s for link in links), default=0.0)
        return bool(2 * sent_s > SENT * slowest_s)

    @property
    def _passes(self) -> list[Numbers]:
        """By stage, as of ``sooner_cuts``."""
        found = []
        for stage in range(self.candidate.stages):
            own, link = self._timed[stage], self.links[stage + 1]
            sent_s = 0.0 if link is None else 2 * np.append(0.0, own.sent_bytes) / link.bandwidth_bytes_per_s
            found.append(own.runs.forward_s * (1 + self.again) + own.runs.backward_s + sent_s)
        return found

    def cut_freely(self) -> tuple[int, ...]:
        """The same whatever a device holds; there are no more stages than pieces."""
        sizes = self.cut(math.inf)
        assert sizes is not None, "no more stages than pieces"
        return sizes

    def takes(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Bytes of the fullest device, and seconds of a step."""
        return max(self.held(sizes)), self.step_s(sizes)

    def costs(self, limit: float) -> list[Numbers]:
        """By chunk, what runs of pieces take, each of the chunks of a rank within an equal part of its room."""
        candidate, links, each = self.candidate, self.links, self.mode.virtual
        limits = [self.extra.room(limit, stage, candidate.stages) / each for stage in range(candidate.stages)]
        costs: dict[tuple[object, ...], Numbers] = {}
        free = self._free_costs
        of_chunk, flight, timed = [], self.flight, self._timed
        for chunk in range(self.chunks):
            stage = self._pipeline.layout.place_of(chunk)
            ends = self.profiles.kind_of[stage], links[chunk], links[chunk + 1]
            key = *ends, flight[stage], limits[stage]
            if ends not in free:
                free[ends] = run_costs(
                    timed[stage],
                    micro_batches=candidate.micro_batches,
                    recompute=self.again,
                    before=links[chunk],
                    behind=links[chunk + 1],
                )
            if key not in costs:
                costs[key] = within(
                    free[ends],
                    timed[stage],
                    in_flight=flight[stage] / each,
                    limit=limits[stage],
                    recompute=self.again,
                )
            of_chunk.append(costs[key])
        return of_chunk

    @cached_property
    def _free_costs(self) -> dict[tuple[object, ...], Numbers]:
        """Of chunks with the same links on the same kind of stage, where memory does not matter."""
        return {}

    @property
    def chunks(self) -> int:
        """Stages of all ranks."""
        return self.candidate.stages * self.mode.virtual

    @property
    def again(self) -> bool:
        """Whether forward runs again in backward, which keeps a layer's inputs on the device."""
        return self.mode.recompute == "full"

    @cached_property
    def flight(self) -> list[float]:
        """By rank, chunks whose activations are held at once, each as many as its values say."""
        return [self.extra.kept * in_flight(self._pipeline, stage) for stage in range(self.candidate.stages)]

    @property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self.candidate.stages, self.mode.virtual, self.candidate.micro_batches, self.mode.order)

    @cached_property
    def links(self) -> list[Link | None]:
        """Before each chunk and behind the last: of the slowest pair of devices that send there."""
        size, place = self.candidate.mesh.num_devices, self._pipeline.layout.place_of
        known: dict[tuple[int, int], Link | None] = {}
        found: list[Link | None] = [None]
        for chunk in range(self.chunks - 1):
            ends = one, other = place(chunk), place(chunk + 1)
            if one == other:
                known[ends] = None
            if ends not in known:
                columns = (0, size - 1) if self.cluster.is_uniform else range(size)
                pairs = [(one * size + at, other * size + at) for at in columns]
                routes = [find_route(self.cluster, pair).link for pair in pairs]
                known[ends] = min(routes, key=lambda link: link.bandwidth_bytes_per_s)
            found.append(known[ends])
        return [*found, None]

    def held(self, sizes: Sequence[int]) -> list[float]:
        """By rank, bytes of a device."""
        ends, count = [0, *accumulate(sizes)], self.candidate.stages
        found = []
        for at in range(count):
            held = 0.0
            for chunk, flight in most_held(self._pipeline, at).items():
                values = held_bytes(self._kept[at], in_flight=self.extra.kept * flight, recompute=self.again)
                held += float(values[ends[chunk], ends[chunk + 1]])
            found.append(self.extra.needed(held, at, count))
        return found

    def step_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a step: the passes of all stages, each as soon as what it needs is there."""
        key = tuple(sizes)
        if key not in self._steps_s:
            self._steps_s[key] = self._compose(sizes)
        return self._steps_s[key]

    @cached_property
    def _steps_s(self) -> dict[tuple[int, ...], float]:
        return {}

    def _compose(self, sizes: Sequence[int]) -> float:
        ends, links, timed = [0, *accumulate(sizes)], self.links, self._timed
        durations, sends = [], []
        for chunk in range(self.chunks):
            stage, own, link = (
                self._pipeline.layout.place_of(chunk),
                slice(ends[chunk], ends[chunk + 1]),
                links[chunk + 1],
            )
            timing = self.timings[self.profiles.kind_of[stage]]
            forward, backward = float(timed[stage].forward_s[own].sum()), float(timed[stage].backward_s[own].sum())
            last = backward + float((timing.last_s - timing.backward_s)[own].sum())
            begun = timing.begun_s
            forward += begun[0]
            again = forward if self.again else 0.0
            back, end = backward + begun[1] + again, last + begun[2] + again
            behind = timing.behind_s if self.profiles[stage].sums_s[own].any() else 0.0
            tail = behind + float(self.profiles[stage].optimizer_s[own].sum()) if self._goes_on else 0.0
            durations.append(Durations(forward, back, end, behind, timing.later * backward, tail))
            passed = timed[stage].sent_bytes[ends[chunk + 1] - 1]
            sends.append(0.0 if link is None else link.latency_s + passed / link.bandwidth_bytes_per_s)
        line = self._timeline(durations, sends[:-1])
        if self._goes_on:
            return float(line.period) / (1 if Cores.of(self.cluster, self.candidate.stages) is None else PICO)
        done = []
        for stage, (end, behind) in enumerate(zip(line.ends, line.behind, strict=True)):
            optimizer_s, here = self.profiles[stage].optimizer_s, self._pipeline.layout.chunks_on(stage)
            stepped = sum(float(optimizer_s[ends[chunk] : ends[chunk + 1]].sum()) for chunk in here)
            done.append(max(end, behind) + stepped)
        return float(max(done)) + CALIBRATION.outside_s((entry.device for entry in self.cluster.classes), train=True)

    @property
    def _goes_on(self) -> bool:
        """Whether no step empties the pipeline."""
        return self.mode.order in STALE and not self.tied

    def _timeline(self, durations: Sequence[Durations], sends: Sequence[Any]) -> Timeline:
        """In seconds, as ``sends`` (any number) are; on cores that stages share where they do."""
        cores, several = Cores.of(self.cluster, self.candidate.stages), STEADY if self._goes_on else 0
        if cores is None:
            both = Sends(sends, sends)
            if not several:
                return done(self._pipeline, durations, both)
            return compose(self._pipeline, durations, both, blocking=False, record=False, several=several)
        chunks = [Durations(*map(picoseconds, one)) for one in durations]
        sent = [picoseconds(one) for one in sends]
        stages = [self._pipeline.layout.place_of(chunk) for chunk in range(len(chunks))]
        busy = [self.timings[self.profiles.kind_of[stage]].busy for stage in stages]
        both = Sends(sent, sent)
        line = compose_shared(self._pipeline, chunks, busy, both, cores, blocking=False, several=several)
        return replace(line, ends=[end / PICO for end in line.ends], behind=[end / PICO for end in line.behind])

    @cached_property
    def _timed(self) -> ByStage:
        """With simulated seconds of passes."""

        def timed(own: Profile, timing: Timing) -> Profile:
            forward, backward = timing.forward_s, timing.backward_s
            if self.mode.lean:
                backward = backward + own.light_s
            if self.mode.recompute in HOSTED:
                again = self.mode.recompute == "full-hosted"
                moved = (own.entering_bytes if again else own.kept_bytes) * np.array(self.layers)
                backward = backward + forward * again
                forward, backward = (self._with_moves(one, moved) for one in (forward, backward))
            return replace(own, forward_s=forward, backward_s=backward, kept_bytes=self._left(own))

        each = zip(self.profiles.kinds, self.timings, strict=True)
        return ByStage(tuple(timed(*one) for one in each), self.profiles.kind_of)

    def _with_moves(self, seconds: Numbers, moved: Numbers) -> Numbers:
        """[pieces] while so many bytes go between the device and its host: beside compute, but on a CPU."""
        devices = [entry.device for entry in self.cluster.classes]
        moved_s = moved / slowest_host(devices).link_bytes_per_s
        return seconds + moved_s if any(one.kind == "cpu" for one in devices) else np.maximum(seconds, moved_s)

    def _left(self, own: Profile) -> Numbers:
        """[pieces] of what a micro-batch keeps, all that is left on the device."""
        kept = own.light_bytes if self.mode.lean else own.kept_bytes
        return kept * ~np.array(self.layers) if self.mode.recompute in HOSTED else kept

    @cached_property
    def _kept(self) -> ByStage:
        return self.profiles.map(lambda own: replace(own, kept_bytes=self._left(own)))


def stages_of(found: Pieces, count: int, sizes: Sequence[int], *, layered: bool, virtual: int = 1) -> Stages:
    """The pipeline over operators of the rewritten graph, given the pieces of each chunk; ``virtual`` on each rank."""
    chunk_of_piece = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    layers = [0] * count * virtual
    for piece, stage in enumerate(chunk_of_piece):
        layers[stage] += found.layers[piece]
    chunk_of = {node: chunk_of_piece[piece] for node, piece in found.of.items()} if count > 1 else {}
    inside = [node for node, piece in found.of.items() if found.layers[piece]] if layered or count > 1 else []
    layer_of = {node: found.of[node] for node in inside}
    return Stages(count, virtual, chunk_of, tuple(layers) if count > 1 else (), layer_of)
