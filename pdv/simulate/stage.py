"""All stages of a workload, lowered and simulated chunk by chunk; equal stages are one.

Entry point: ``Lowered``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Node
from pdv.cluster import Device
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import AxisLink, all_gather_seconds, all_reduce_seconds, send_seconds
from pdv.problem.workload import Workload
from pdv.simulate.calibration import Calibration
from pdv.simulate.engine.pipeline import Sends
from pdv.simulate.engine.streams import Clocks, Engine, Parts
from pdv.simulate.engine.task import COMPUTE, Placed, Segment, Task, picoseconds
from pdv.simulate.lowering.entries import Nodes
from pdv.simulate.lowering.links import Links, at_reached_rate
from pdv.simulate.lowering.price import DevicePrices, Price
from pdv.simulate.lowering.programs import ChunkProgram, Lowering
from pdv.simulate.lowering.runs import Chunks
from pdv.simulate.lowering.segments import Segments
from pdv.simulate.lowering.sums import Sums


@dataclass
class Kind:
    """Stages of equal devices and links."""

    links: Links
    prices: tuple[DevicePrices, ...]
    segments: Segments
    engine: Engine
    timed: dict[tuple[Placed, ...], Timed] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """A run of segments from quiet streams: until the slowest class is done, and until its collectives are."""

    duration: int
    behind: int
    parts: tuple[Parts, ...]


@dataclass
class Stage:
    """One stage: its chunks in their order, and what is due once a step."""

    number: int
    kind: Kind
    chunks: tuple[int, ...]
    programs: tuple[ChunkProgram, ...]
    sums: Sums
    tail: Segment

    def passes(self, micro_batches: int, *, train: bool) -> list[Sequence[Placed]]:
        """What it runs where there is no pipeline."""
        (program,) = self.programs
        found: list[Sequence[Placed]] = []
        for number in range(micro_batches):
            found.append(program.forward)
            if train:
                found.append(program.last if number == micro_batches - 1 else program.backward)
        return found


class Lowered:
    """A workload as programs of tasks.

    Raises:
        ShardingError: if the workload's graph is no PCG of its mesh.
    """

    def __init__(self, workload: Workload, calibration: Calibration, like: Lowered | None = None) -> None:
        """``like``: the same but for where its stages and chunks are cut, of which nodes and prices are taken."""
        self.workload, self.calibration = workload, calibration
        made = Nodes(workload.problem, workload.pcg, workload.execution) if like is None else like.nodes
        self.nodes: Nodes = made
        names = [axis.name for axis in workload.problem.mesh.axes]
        self._slices = names.index(workload.execution.slices) if workload.execution.slices in names else None
        self.chunks = Chunks(self.nodes, workload.stages, self._slices)
        self._kinds: dict[Hashable, Kind] = {}
        self.prices: dict[Device, DevicePrices] = {} if like is None else like.prices
        self.stages = tuple(self._stage(number) for number in range(workload.stages.count))

    def _kind(self, number: int) -> Kind:
        links = Links.of(self.workload, number, self.calibration)
        key = (links.devices, links.counts, links.axes, links.coupled, links.streams, links.sums)
        if key not in self._kinds:
            prices = tuple(self._price(device) for device in links.devices)
            chunks = self.workload.stages.chunks
            segments = Segments(links, prices, self.workload.execution, self.calibration, chunks)
            self._kinds[key] = Kind(links, prices, segments, Engine())
        return self._kinds[key]

    def _price(self, device: Device) -> DevicePrices:
        if device not in self.prices:
            compute = self.workload.compute_of(device)
            self.prices[device] = DevicePrices.of(
                self.nodes.entries,
                self.workload.execution,
                device,
                compute,
                self.calibration,
                self.workload.stages.layer_of,
            )
        return self.prices[device]

    def _stage(self, number: int) -> Stage:
        stages, execution = self.workload.stages, self.workload.execution
        kind = self._kind(number)
        own = stages.chunks_on(number)
        used = [node for chunk in own for node in self.chunks.nodes[chunk]]
        sums = Sums(self.nodes, kind.links, execution, used)
        programs = []
        for chunk in own:
            part = sums if len(own) == 1 else Sums(self.nodes, kind.links, execution, self.chunks.nodes[chunk])
            program = Lowering(self.nodes, kind.segments).program(self.chunks.runs[chunk], part)
            program = self._with_sums(program, part, kind)
            programs.append(self._with_loss(program, kind) if chunk == stages.chunks - 1 else program)
        ahead = sum(computing(program.forward) for program in programs)
        tail = sums.tail(kind.prices, self._tie(number), kind.segments, ahead) if self._train else Segment(())
        return Stage(number, kind, own, tuple(programs), sums, tail)

    @property
    def _train(self) -> bool:
        return self.workload.problem.train

    def _with_sums(self, program: ChunkProgram, sums: Sums, kind: Kind) -> ChunkProgram:
        """Gradients added up behind each backward pass, and summed over devices where that cannot wait."""
        if not self._train:
            return program
        issue = kind.segments.moves[1]
        beside = self.workload.execution.overlap.gradients
        tasks = (
            *(sums.sum_tasks(issue) if sums.each_time and not beside else ()),
            *sums.accumulation(kind.prices, kind.segments.adds),
        )
        added = (Placed(kind.segments.made(tasks, "accumulate")),) if tasks else ()
        backward = program.last if sums.each_time and beside else program.backward
        return ChunkProgram(program.forward, (*backward, *added), (*program.last, *added))

    def _with_loss(self, program: ChunkProgram, kind: Kind) -> ChunkProgram:
        """The loss behind the last chunk, and before its backward; sums of rows that vocabulary cuts."""
        if not self._train:
            return program
        outputs = [(node.type, self.nodes.of[node].sharding) for _, node in self.workload.pcg.outputs]
        ahead, behind = loss_segments(
            kind.segments, [price.loss(outputs) for price in kind.prices], self._row_sums(kind)
        )
        return ChunkProgram(
            (*program.forward, Placed(ahead)),
            (Placed(behind), *program.backward),
            (Placed(behind), *program.last),
        )

    def _row_sums(self, kind: Kind) -> list[Task]:
        """Of each row's maximum and sum, where the last dim of an output is cut (Shoeybi et al., 2019, section 3)."""
        tasks = []
        for _, output in self.workload.pcg.outputs:
            entry = self.nodes.of[output]
            for axis, state in enumerate(entry.sharding):
                if getattr(state, "dim", None) == output.type.rank - 1 > 0:
                    rows = 4.0 * entry.bytes / output.type.dtype.itemsize / _columns(output, kind, axis)
                    time = picoseconds(all_reduce_seconds(kind.links.axes[axis], rows))
                    name = kind.links.mesh.axes[axis].name
                    detail = (("bytes", rows), ("algorithm", kind.links.algorithm("all_reduce", axis, rows)))
                    for place, classes in enumerate(kind.links.coupled[axis]):
                        streams = kind.links.streams[axis][place]
                        one = Task("all_reduce", name, classes, time, kind.segments.issue[0], streams, detail=detail)
                        tasks += [one] * 2
        return tasks

    # ---- Between stages ----

    @cached_property
    def sends(self) -> Sends:
        """Picoseconds between chunks: of the slowest pair of devices that send to each other."""
        stages, size = self.workload.stages, self.workload.num_devices
        forward, backward = [], []
        for chunk, crossing in enumerate(self.chunks.crossings):
            source, target = stages.place_of(chunk), stages.place_of(chunk + 1)
            times = [0.0, 0.0]
            for i in {0, size - 1} if source != target else ():
                there = self._pair(source * size + i, target * size + i)
                back = self._pair(target * size + i, source * size + i)
                times = [
                    max(times[0], send_seconds(there.link, crossing.forward)),
                    max(times[1], send_seconds(back.link, crossing.backward)),
                ]
            forward.append(picoseconds(times[0] + self._put_together(target, crossing.whole[0])))
            backward.append(picoseconds(times[1] + self._put_together(source, crossing.whole[1])))
        return Sends(forward, backward)

    def _put_together(self, stage: int, num_bytes: float) -> float:
        """Seconds to gather what arrives in slices."""
        axes = self.stages[stage].kind.links.axes
        return 0.0 if self._slices is None or not num_bytes else all_gather_seconds(axes[self._slices], num_bytes)

    def _pair(self, first: int, second: int) -> AxisLink:
        cluster = self.workload.cluster
        link = find_route(cluster, (first, second)).link
        return at_reached_rate(AxisLink(2, link, library=cluster.library), self.calibration)

    def _tie(self, number: int) -> int:
        """Sums of the gradients of parameters that other stages use as well."""
        stages, size = self.workload.stages, self.workload.num_devices
        seconds = 0.0
        for node in self._shared:
            places = sorted({stages.place_of(chunk) for chunk in self.chunks.homes[node]})
            if number in places and len(places) > 1:
                other = next(place for place in reversed(places) if place != number)
                link = self._pair(number * size, other * size).link
                weight = node.type.dtype.itemsize
                own = self.workload.execution.precision.gradient_bytes(weight)
                gradient = self.nodes.of[node].bytes / weight * own
                seconds += all_reduce_seconds(AxisLink(len(places), link), gradient)
        return picoseconds(seconds)

    @cached_property
    def _shared(self) -> Sequence[Node]:
        """Parameters of several chunks."""
        return [node for node in self.workload.pcg.params if node.needs_grad and len(self.chunks.homes[node]) > 1]

    @cached_property
    def tied_stages(self) -> tuple[int, ...]:
        """Stages that wait for each other at the end of the step, to sum the gradients of tied parameters."""
        place = self.workload.stages.place_of
        found = {place(chunk) for node in self._shared for chunk in self.chunks.homes[node]}
        return tuple(sorted(found)) if len(found) > 1 else ()

    # ---- Chunks in time ----

    def weight_time(self, stage: Stage, chunk: int) -> int:
        """Picoseconds of a chunk's backward pass that may wait: the half that gives gradients of weights."""
        products = [self.nodes.of[node] for node in self.chunks.nodes[chunk]]
        numbers = [one.number for one in products if one.two_products and one.node.op.weight_waits]
        return max(sum(price.entries[number].backward // 2 for number in numbers) for price in stage.kind.prices)

    def timed(self, stage: Stage, program: tuple[Placed, ...]) -> Timed:
        """From quiet streams."""
        known = stage.kind.timed.get(program)
        if known is None:
            links = stage.kind.links
            clocks = Clocks.quiet(len(links.devices), links.num_streams)
            stage.kind.engine.run(program, clocks)
            duration = max(clocks.compute)
            parts = tuple(pad_task(own, duration - at) for own, at in zip(clocks.parts, clocks.compute, strict=True))
            behind = max([0, *(at - duration for at in clocks.streams)])
            known = stage.kind.timed[program] = Timed(duration, behind, parts)
        return known


def loss_segments(segments: Segments, losses: Sequence[Price], sums: Sequence[Task] = ()) -> tuple[Segment, Segment]:
    """The loss of each class forward, with ``sums`` behind it, and backward."""
    found = []
    for way in range(2):
        tasks = [
            Task(
                "loss",
                COMPUTE,
                (number,),
                (price.forward, price.backward)[way],
                segments.issue[way] * price.kernels[way],
            )
            for number, price in enumerate(losses)
        ]
        found.append(segments.made((*tasks, *(sums if way == 0 else ())), "loss"))
    return found[0], found[1]


def computing(placed: Sequence[Placed]) -> int:
    """Picoseconds of compute of the first class of devices."""
    tasks = (task for one in placed for task in one.segment.tasks)
    return sum(task.duration for task in tasks if task.part == COMPUTE and 0 in task.classes)


def pad_task(parts: Parts, time: int, part: str = "waiting") -> Parts:
    """With some more time of a kind."""
    return {**parts, part: parts.get(part, 0) + time} if time else parts


def _columns(output: Node, kind: Kind, axis: int) -> float:
    """Extent of an output's last dim on one device."""
    return max(1.0, output.type.shape[-1] / kind.links.axes[axis].size)
