"""The most memory that a step needs, by stage: when it is, and who holds it.

Decides: a stage's peak, from one walk of a micro-batch through each of its chunks and the order in which the schedule
runs them. Entry point: ``step_memory``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pdv.cluster import Device
from pdv.memory import allocator
from pdv.memory.alike import marks, numbers
from pdv.memory.log import Heap, Holder, Log, exactly
from pdv.memory.passes import Passes, passes
from pdv.memory.setting import Setting
from pdv.memory.state import State, state
from pdv.problem.workload import Workload
from pdv.schedule.order import Pipeline, orders
from pdv.schedule.passes import Pass

OPTIMIZER = "optimizer step"

KnownPasses = dict[tuple[str, bool], Passes]  # by mark of a chunk, and whether on a GPU


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes allocated at most in one turn of the schedule (None: the optimizer's), and what stays behind it."""

    turn: Pass | None
    most_bytes: float
    after_bytes: float


@dataclass(frozen=True)
class StageMemory:
    """One kind of device of one stage.

    Attributes:
        stage: its number.
        device: what it is; ``count`` of them.
        peak_bytes: tensors allocated at once, at most; on a GPU as the caching allocator rounds them.
        reserved_bytes: what the allocator has taken from the device.
        total_bytes: that, CUDA's context and the buffers of communicators: what nvidia-smi shows.
        least_bytes: with what of it the step still runs, the allocator's cache given back.
        when: the moment of the peak.
        holders: who holds the peak.
        curve: over the step.
        host_bytes: of its host's memory, at most.
    """

    stage: int
    device: Device
    count: int
    peak_bytes: float
    reserved_bytes: float
    total_bytes: float
    least_bytes: float
    when: str
    holders: Mapping[Holder, float] = field(repr=False)
    curve: tuple[Point, ...] = field(repr=False)
    host_bytes: float = 0.0

    @property
    def by_kind(self) -> dict[str, float]:
        """The peak by kind of holder, the largest first."""
        found: dict[str, float] = defaultdict(float)
        for holder, num_bytes in self.holders.items():
            found[holder.kind] += num_bytes
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @property
    def margin_bytes(self) -> float:
        """What the device has left; negative if it does not fit."""
        return self.device.memory_bytes - self.least_bytes

    def fits(self, device: Device | None = None) -> bool:
        """True if all of it is on the device (or on another one of its kind), and on its host."""
        there = device or self.device
        return self.least_bytes <= there.memory_bytes and self.host_bytes <= there.host_limit_bytes


@dataclass(frozen=True)
class StepMemory:
    """By stage and kind of device, in this order."""

    stages: tuple[StageMemory, ...]

    @cached_property
    def worst(self) -> StageMemory:
        """The one that is fullest."""
        return max(self.stages, key=lambda one: (one.least_bytes / one.device.memory_bytes, -one.stage))

    @property
    def host_bytes(self) -> float:
        """The most that one device has on its host."""
        return max(one.host_bytes for one in self.stages)

    @property
    def fits(self) -> bool:
        """True if every stage fits."""
        return all(one.fits() for one in self.stages)


def step_memory(workload: Workload, *, known: KnownPasses | None = None, named: bool = True) -> StepMemory:
    """What each kind of device of each stage holds at the step's peak, once the optimizer's state is there.

    Not ``named``: moments and holders may be called as another, equal stage's are; that takes a fraction of the time,
    and less where stages are ``known`` of other workloads, to which those of this one are added.
    """
    setting = Setting(workload)
    each = numbers(setting) if named else marks(setting)
    tells = setting.eager and not named  # of other workloads, too
    walks = _Walks(setting, each, known if tells and known is not None else {})
    found = [one for stage in range(workload.stages.count) for one in _stage(walks, stage)]
    return StepMemory(tuple(found))


def needed_bytes(workload: Workload, known: KnownPasses | None = None) -> float:
    """What the fullest device needs at least for a step to run; ``known`` of workloads asked for before."""
    return step_memory(workload, known=known, named=False).worst.least_bytes


@dataclass
class _Walks:
    """Each chunk's passes, found once for all chunks of an equal mark and all devices that round alike."""

    setting: Setting
    marks: Sequence[str]
    known: KnownPasses

    def of(self, chunk: int, *, on_gpu: bool) -> Passes:
        """Its forward and backward."""
        key = self.marks[chunk], on_gpu
        if key not in self.known:
            twice, rounded = self.setting.execution.passes > 1, allocator.round_up if on_gpu else exactly
            self.known[key] = passes(self.setting, chunk, Heap(rounded), twice=twice, on_gpu=on_gpu)
        return self.known[key]


def _stage(walks: _Walks, stage: int) -> Iterator[StageMemory]:
    """One for each kind of device."""
    setting = walks.setting
    workload = setting.workload
    count = workload.num_devices
    devices: dict[Device, int] = defaultdict(int)
    if len(workload.cluster.classes) == 1:
        devices[workload.cluster.classes[0].device] = count
    else:
        for rank in range(stage * count, (stage + 1) * count):
            devices[workload.cluster.device_of(rank)] += 1
    communicators = sum(axis.size > 1 for axis in workload.axes[stage]) + (workload.stages.count > 1)
    for device, number in devices.items():
        peak = _peak(walks, stage, on_gpu=device.kind == "gpu")
        reserved = allocator.reserved_bytes(peak.num_bytes, device, peak.flat, eager=setting.eager)
        outside = allocator.outside(device, communicators)
        least = allocator.least_reserved_bytes(peak.num_bytes, device, peak.flat, eager=setting.eager) + outside
        total = min(reserved + outside, max(least, device.memory_bytes))
        yield StageMemory(
            stage,
            device,
            number,
            peak.num_bytes,
            total - outside,
            total,
            least,
            peak.when,
            peak.holders,
            tuple(peak.curve),
            peak.on_host,
        )


@dataclass
class _Peak:
    num_bytes: float = 0.0
    flat: float = 0.0
    when: str = ""
    holders: Mapping[Holder, float] = field(default_factory=dict)
    curve: list[Point] = field(default_factory=list)
    on_host: float = 0.0


def _peak(walks: _Walks, stage: int, *, on_gpu: bool) -> _Peak:
    """Over the turns of a stage."""
    setting = walks.setting
    stages, execution = setting.workload.stages, setting.workload.execution
    own = stages.chunks_on(stage)
    known = {chunk: walks.of(chunk, on_gpu=on_gpu) for chunk in own}
    kept = state(setting, own, on_gpu=on_gpu)
    search = _Search(setting, kept, known)
    shape = execution.micro_batches, execution.order, setting.train, execution.moments
    pipeline = Pipeline(stages.count, stages.virtual, *shape)
    search.begin(pipeline.ahead(stage))
    for turn in orders(pipeline)[stage]:
        search.take(turn)
    if setting.train:
        search.optimizer()
    return search.found()


class _Search:
    """The largest sum of what is there all the time, what is in flight, and what a turn adds."""

    def __init__(self, setting: Setting, kept: State, known: Mapping[int, Passes]) -> None:
        self.setting, self.kept, self.known = setting, kept, known
        self.best = _Peak(flat=kept.flat, on_host=kept.on_host)
        self.base = sum(kept.held.values())
        self.now = self.base
        self.in_flight: dict[int, int] = defaultdict(int)  # micro-batches by chunk
        self.waiting: dict[int, int] = defaultdict(int)  # those whose gradients of weights do
        self.begun: dict[int, bool] = {}  # chunks whose gradients are there
        self._peaks: dict[tuple[int, bool, bool], tuple[float, int, float]] = {}
        self._marked: tuple[Log, int, dict[int, int], dict[int, int], tuple[int, ...]] | None = None

    def begin(self, turns: Sequence[Pass]) -> None:
        """With what forward passes of the step before have left."""
        for turn in turns:
            self.take(turn)
        self.best.curve.clear()

    def take(self, turn: Pass) -> None:
        """Run one micro-batch through a chunk, one way."""
        log, (most, at, end) = self._log(turn)
        waiting = self.known[turn.chunk].waiting if turn.part != "all" else 0.0
        if turn.part == "weights":
            self.best.curve.append(Point(turn, self.now, self.now - waiting))
            self.now -= waiting
            self.waiting[turn.chunk] -= 1
            return
        if self.now + most > self.best.num_bytes:
            where = log.moments[at - 1] if at else f"{'backward' if turn.backward else 'forward'} begins"
            when = f"{self.setting.execution.name(turn.micro_batch)}, {where}".removeprefix(", ")
            self._mark(self.now + most, when, log, at)
        before = self.now
        self.now += end + waiting
        self.waiting[turn.chunk] += turn.part == "values"
        self.best.curve.append(Point(turn, before + most, self.now))
        self.in_flight[turn.chunk] += -1 if turn.backward else 1
        hosted = sum(count * self.known[chunk].on_host for chunk, count in self.in_flight.items())
        self.best.on_host = max(self.best.on_host, self.kept.on_host + hosted)
        if turn.backward:
            self.begun[turn.chunk] = True

    def optimizer(self) -> None:
        """The optimizer's step, with all gradients there."""
        most = self.now + self.kept.step - self.kept.gone
        if most > self.best.num_bytes:
            log = Log()
            log.add(self.kept.step, Holder("temporaries", "optimizer"), OPTIMIZER)
            self._mark(most, OPTIMIZER, log, 1)
        left = sum(count * self.known[chunk].forward.end for chunk, count in self.in_flight.items())
        self.best.curve.append(Point(None, most, self.base + left))

    def _log(self, turn: Pass) -> tuple[Log, tuple[float, int, float]]:
        """The changes of a turn, and their (most, where, end), worked out once."""
        one, later = self.known[turn.chunk], self.begun.get(turn.chunk, False)
        log = one.forward if not turn.backward else one.later if later else one.backward
        key = turn.chunk, turn.backward, turn.backward and later
        if key not in self._peaks:
            self._peaks[key] = (*log.peak(), log.end)
        return log, self._peaks[key]

    def _mark(self, num_bytes: float, when: str, log: Log, at: int) -> None:
        """A new peak, after ``at`` changes of a turn's log."""
        self.best.num_bytes, self.best.when = num_bytes, when
        self._marked = log, at, dict(self.in_flight), dict(self.waiting), tuple(self.begun)

    def found(self) -> _Peak:
        """The peak with its holders: what stays, what is in flight, and what the turn has made (or freed) by then."""
        if self._marked is None:
            return self.best
        log, at, in_flight, waiting, begun = self._marked
        sums: dict[Holder, float] = defaultdict(float, self.kept.held)
        sums[Holder("activations", "gradients of weights")] += sum(
            count * self.known[chunk].waiting for chunk, count in waiting.items()
        )
        parts = [(log.held(at), 1)]
        parts += [(self.known[chunk].forward.held(), count) for chunk, count in in_flight.items()]
        parts += [(one.held(), 1) for chunk in begun for one in (self.known[chunk].forward, self.known[chunk].backward)]
        for part, count in parts:
            for holder, size in part.items():
                sums[holder] += count * size
        self.best.holders = {holder: size for holder, size in sums.items() if size}
        return self.best
