"""What is due once a step: sums of gradients along data axes, ZeRO's gathered weights, the optimizer.

Entry point: ``Sums``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ir.cost_model import Estimate
from ir.graph import Node
from pdv.pcg.units import Key, gathered_units
from pdv.problem.workload import Execution
from pdv.simulate.engine.task import COMPUTE, OPTIMIZER, Segment, Task, picoseconds
from pdv.simulate.lowering.entries import Nodes
from pdv.simulate.lowering.links import Links
from pdv.simulate.lowering.price import DevicePrices
from pdv.simulate.lowering.runs import NodeRun
from pdv.simulate.lowering.segments import Segments

Bucket = tuple[int, int, float]
"""(axis under which it counts, picoseconds, bytes)"""


@dataclass(frozen=True, slots=True)
class Due:
    """A parameter's gradient, whole along ``axes``: bytes of the gradient and of the weight on one device.

    Axes are outer to inner; sums count under the outermost and run on its stream, which is data parallelism's: an inner
    axis may have collectives of its own on the way (context parallelism's keys and values).
    """

    axes: tuple[int, ...]
    gradient: float
    weight: float


class Sums:
    """Of the parameters that a stage's chunks use."""

    def __init__(self, nodes: Nodes, links: Links, execution: Execution, used: Sequence[Node]) -> None:
        self.nodes, self.links, self.execution = nodes, links, execution
        self.params = [node for node in dict.fromkeys(used) if node.is_param and node.needs_grad]
        axes: dict[Node, list[int]] = {}
        last: dict[Node, Node] = {}  # the move nearest to the parameter: the last to run backward
        for node in dict.fromkeys(used):
            if nodes.of[node].role == "sum":
                base = nodes.base[node]
                axes.setdefault(base, []).append(nodes.of[node].axis)
                last.setdefault(base, node)
        self.due = {base: self._due(last[base], tuple(found)) for base, found in axes.items()}
        self._at = {node: base for base, node in last.items()}
        kept = [node for node in dict.fromkeys(used) if nodes.of[node].role == "once"]
        self._unit_of = gathered_units(kept, several=execution.several)
        self._units: dict[Key, list[Node]] = {}
        for node, unit in self._unit_of.items():
            self._units.setdefault(unit, []).append(node)
        self._whole = {node.operands[0]: nodes.of[node].bytes for node in kept}
        self._behind = self._read_behind(used)

    def _read_behind(self, used: Sequence[Node]) -> dict[Key, list[Node]]:
        """By unit, in the order in which units are read, what is done before the next one is."""
        found: dict[Key, list[Node]] = {}
        here: list[Node] = []
        for node in used:
            unit = self._unit_of.get(node)
            if unit is not None and unit not in found:
                found[unit] = here = []
            here.append(node)
        return found

    def _due(self, move: Node, axes: tuple[int, ...]) -> Due:
        weight = self.nodes.of[move].bytes
        return Due(tuple(sorted(set(axes))), weight * self._gradient_share(move), weight)

    def _gradient_share(self, node: Node) -> float:
        weight = node.type.dtype.itemsize
        return self.execution.precision.gradient_bytes(weight) / weight

    def buckets(self, runs: Sequence[NodeRun]) -> dict[int, tuple[Bucket, ...]]:
        """By place in the chunk: buckets that are full, and units whose gradients are all there, as backward goes."""
        waiting: dict[tuple[int, ...], float] = {}
        found: dict[int, tuple[Bucket, ...]] = {}
        place = 0
        missing = Counter(self._unit_of.values())
        for run in reversed(runs):
            for number in reversed(range(len(run.nodes))):
                node = run.nodes[number]
                unit, base = self._unit_of.get(node), self._at.get(node)
                if unit is not None:
                    missing[unit] -= 1
                    if not missing[unit]:
                        here = run.start + number
                        found[here] = (*found.get(here, ()), self._scatter(unit))
                if base is None:
                    continue
                due, place = self.due[base], run.start + number
                waiting[due.axes] = waiting.get(due.axes, 0.0) + due.gradient
                if waiting[due.axes] >= self.execution.overlap.bucket_bytes:
                    found[place] = (*found.get(place, ()), self._bucket(due.axes, waiting.pop(due.axes)))
        left = tuple(self._bucket(axes, size) for axes, size in waiting.items())
        if left:
            found[place] = (*found.get(place, ()), *left)
        return found

    def _bucket(self, axes: tuple[int, ...], num_bytes: float) -> Bucket:
        if self.execution.zero:
            return axes[0], self.links.scatter_gradients(axes, num_bytes), num_bytes
        return axes[0], self.links.sum_gradients(axes, num_bytes), num_bytes

    def _scatter(self, unit: Key) -> Bucket:
        """The gradients of a unit that is gathered once a step."""
        members = self._units[unit]
        axis, size = self.nodes.of[members[0]].axis, sum(self._whole_gradient(move.operands[0]) for move in members)
        return axis, self.links.scatter_gradients((axis,), size), size

    def _whole_gradient(self, base: Node) -> float:
        """Bytes of the gradient that a micro-batch adds to."""
        return self._whole.get(base, self.nodes.of[base].bytes) * self._gradient_share(base)

    def _kept_gathers(self, prices: Sequence[DevicePrices], issue: int, slowed: Sequence[float]) -> list[Task]:
        """Units that are gathered once a step, in front of the next one; what lies in blocks is put in order.

        The first one is waited for. Each other one is gathered while the first micro-batch does what stands between,
        and counts as what is left of it then, and as what it slows that: such a share.
        """
        tasks: list[Task] = []
        beside = 0
        for unit, behind in self._behind.items():
            entries = [self.nodes.of[move] for move in self._units[unit]]
            axis, size = entries[0].axis, sum(entry.bytes for entry in entries)
            whole = self.links.gather_weights((axis,), size)
            left = whole - round(min(whole, beside) * (1.0 - slowed[axis]))
            tasks += self._collectives("weights", (axis, left, size), issue)
            numbers = [entry.number for entry in map(self.nodes.of.__getitem__, behind) if entry.role == "local"]
            beside = min(sum(own.entries[number].forward for number in numbers) for own in prices)
        for number, own in enumerate(prices):
            time = own.copies_of_units([self.nodes.of[move] for move in self._unit_of])
            tasks.append(Task("copy", COMPUTE, (number,), time, issue * len(self._unit_of)))
        return tasks

    def by_axes(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """Bytes of gradients and of weights that are due, by axes."""
        found: dict[tuple[int, ...], tuple[float, float]] = {}
        for due in self.due.values():
            gradient, weight = found.get(due.axes, (0.0, 0.0))
            found[due.axes] = (gradient + due.gradient, weight + due.weight)
        return found

    @property
    def each_time(self) -> bool:
        """Whether each micro-batch's gradients are summed: who keeps a part of them cannot add up the whole."""
        return self.execution.zero == 2 and self.execution.passes > 1

    def sum_tasks(self, issue: int) -> list[Task]:
        """Sums of gradients that are waited for, in buckets."""
        tasks: list[Task] = []
        for axes, (gradient, _) in self.by_axes().items():
            for size in self._pieces(gradient):
                tasks += self._collectives("gradients", self._bucket(axes, size), issue)
        return tasks

    def tail(self, prices: Sequence[DevicePrices], tied: int, segments: Segments, ahead: int = 0) -> Segment:
        """What follows the last backward: sums that do not overlap, those of tied weights, the optimizer, gathers.

        ``tied``: picoseconds of sums with other stages; ``ahead``: of compute of the next step's first forward pass,
        which hides gathers where they may run beside it.
        """
        issue, updates = segments.issue[0], segments.updates * len(self.params)
        tasks = barrier(self.links)
        if not (self.execution.overlap.gradients or self.each_time):
            tasks += self.sum_tasks(issue)
        everyone = tuple(range(len(prices)))
        if tied:
            tasks.append(Task("tied gradients", "tied", everyone, tied, issue))
        for number, own in enumerate(prices):
            tasks.append(self._clipping(number, own, issue))
            time = sum(picoseconds(estimate.mean_s) for estimate in self.optimizer(own))
            ahead_of = max(0, updates - time)  # launches begin before the host has looked at all parameters
            tasks.append(Task("optimizer", OPTIMIZER, (number,), time, issue + ahead_of))
        if self.execution.zero:
            tasks += self._gathers(prices[0], issue, ahead)
        if self._unit_of:
            tasks += self._kept_gathers(prices, issue, segments.slowed)
        return Segment(tuple(task for task in tasks if task.duration or task.name == "wait"), "step")

    def _gathers(self, prices: DevicePrices, issue: int, ahead: int) -> list[Task]:
        """Of weights, after the optimizer has each rank's part of them: what nothing hides."""
        sent: dict[tuple[int, ...], float] = {}
        for base, due in self.due.items():
            sent[due.axes] = sent.get(due.axes, 0.0) + due.weight * prices.cast_share(base)
        sizes = [(axes, size) for axes, weight in sent.items() for size in self._pieces(weight)]
        pieces = [(axes[0], self.links.gather_weights(axes, size), size) for axes, size in sizes]
        whole = sum(duration for _, duration, _ in pieces)
        left = max(0, whole - ahead) / whole if whole and self.execution.overlap.weights else 1.0
        exposed = [(axis, round(duration * left), size) for axis, duration, size in pieces]
        return [task for piece in exposed for task in self._collectives("weights", piece, issue)]

    def optimizer(self, prices: DevicePrices) -> list[Estimate]:
        """Of each parameter; equal ones are asked for once."""
        known: dict[tuple[int, int], Estimate] = {}
        for base in self.params:
            entry, parts = self.nodes.of[base], self.parts(base)
            if (entry.number, parts) not in known:
                known[entry.number, parts] = prices.optimizer(entry, self.execution.precision, parts)
        return [known[self.nodes.of[base].number, self.parts(base)] for base in self.params]

    def accumulation(self, prices: Sequence[DevicePrices], issue: int) -> tuple[Task, ...]:
        """Adding a micro-batch's gradients to those before: one launch a parameter, or fused with their product.

        A fused product reads and writes the sum in place of writing the gradient; a kernel of its own reads both.
        """
        precision = self.execution.precision
        size, launches = 0.0, 0
        for base in self.params:
            weight, held = base.type.dtype.itemsize, self._whole.get(base, self.nodes.of[base].bytes)
            kept = precision.gradient_bytes(weight)
            if self.execution.passes > 1 or kept != weight:
                size += held / weight * (2 * kept - weight if self.execution.fused else 2 * kept + weight)
                launches += not self.execution.fused
        if not size:
            return ()
        return tuple(
            Task("accumulate", COMPUTE, (number,), picoseconds(own.traffic(size).mean_s), issue * launches)
            for number, own in enumerate(prices)
        )

    def parts(self, base: Node) -> int:
        """How many ways a parameter's optimizer state is cut."""
        due = self.due.get(base)
        return self.links.degree(due.axes) if due is not None and self.execution.zero else 1

    def _clipping(self, number: int, prices: DevicePrices, issue: int) -> Task:
        """A framework's mixed precision unscales gradients and clips their norm: they are read once more."""
        held = (self.nodes.of[p].bytes * self._gradient_share(p) / self.parts(p) for p in self.params)
        size = sum(held) if self.execution.precision.master and not self.execution.eager else 0.0
        time = picoseconds(prices.traffic(size).mean_s) if size else 0
        return Task("gradient norm", OPTIMIZER, (number,), time, issue)

    def _pieces(self, num_bytes: float) -> list[float]:
        """In buckets of equal size."""
        count = max(1, math.ceil(num_bytes / self.execution.overlap.bucket_bytes))
        return [num_bytes / count] * count

    def _collectives(self, name: str, bucket: Bucket, issue: int) -> list[Task]:
        axis, duration, num_bytes = bucket
        span, streams, detail = self.links.mesh.spans[axis], self.links.streams[axis], (("bytes", num_bytes),)
        return [
            Task(name, span, classes, duration, issue, streams[place], detail=detail)
            for place, classes in enumerate(self.links.coupled[axis])
        ]


def barrier(links: Links) -> list[Task]:
    """The step goes on when every collective behind compute is done."""
    return [
        Task("wait", links.mesh.spans[axis], classes, 0, streams=streams)
        for axis, sets in enumerate(links.coupled)
        if not links.is_in_time(axis)
        for place, classes in enumerate(sets)
        for streams in dict.fromkeys((links.streams[axis][place], links.sums[axis][place]))
    ]


def finish(links: Links, times: Sequence[int], issue: int) -> tuple[Task, ...]:
    """What follows the last backward where nothing but the optimizer is due: so many picoseconds on each class."""
    tasks = [Task("optimizer", OPTIMIZER, (number,), time, issue) for number, time in enumerate(times) if time]
    return (*barrier(links), *tasks)
