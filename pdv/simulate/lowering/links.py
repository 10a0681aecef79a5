"""Picoseconds of collectives and sends on the links of one stage, and which device classes each couples.

Entry point: ``Links.of``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ir.mesh import Mesh
from ir.transition import Collective
from pdv.cluster import Device
from pdv.cluster.host import host_of
from pdv.cluster.presets import LINKS
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import (
    AxisLink,
    all_gather_seconds,
    all_reduce_seconds,
    choice,
    joint_link,
    move_seconds,
    reduce_scatter_seconds,
)
from pdv.problem.recomputation import HOSTED
from pdv.problem.workload import Workload
from pdv.simulate.calibration import Calibration
from pdv.simulate.engine.task import picoseconds
from pdv.simulate.lowering.entries import Entry

Streams = tuple[tuple[tuple[int, ...], ...], ...]
"""By axis and set of classes: a stream of their own, then links."""


@dataclass(frozen=True)
class Links:
    """The links of a stage.

    Attributes:
        devices: the kinds of devices of the stage: its classes.
        counts: how many devices each class has.
        axes: each axis of the mesh, then each joint one (``Mesh.spans``).
        coupled: by axis, sets of classes whose devices meet in the axis's groups.
        streams: by axis and set, the streams that its collectives occupy: their own, and links shared with others.
        sums: the same of sums of gradients; where these have communicators of their own, other streams.
        hosted: whether anything goes between devices and their hosts, on two more streams for each class.
    """

    mesh: Mesh
    devices: tuple[Device, ...]
    counts: tuple[int, ...]
    axes: tuple[AxisLink, ...]
    coupled: tuple[tuple[tuple[int, ...], ...], ...]
    streams: Streams
    sums: Streams
    hosted: bool = False

    @classmethod
    def of(cls, workload: Workload, stage: int, calibration: Calibration) -> Links:
        """Of one stage of the cluster."""
        mesh, cluster = workload.problem.mesh, workload.cluster
        count, shape = workload.num_devices, tuple(axis.size for axis in workload.axes[stage])
        first = stage * count
        ranks = range(first, first + count)
        alike = len(cluster.classes) == 1  # then nobody need be asked one by one
        kinds = [cluster.class_of(first)] * len(ranks) if alike else [cluster.class_of(rank) for rank in ranks]
        numbers: dict[Device, int] = {}
        known = {kind: numbers.setdefault(cluster.classes[kind].device, len(numbers)) for kind in dict.fromkeys(kinds)}
        classes = [known[kind] for kind in kinds]
        single = [at_reached_rate(axis, calibration) for axis in workload.axes[stage]]
        spans = [mesh.positions(name) for name in mesh.spans]
        several = [[at for at in span if shape[at] > 1] or span[:1] for span in spans]
        axes = tuple(joint_link(tuple(single[position] for position in span)) for span in several)
        placed = np.array(classes).reshape(shape)
        coupled = tuple(_couple(placed, span) for span in spans)
        loaded = [
            [_resources(workload, first, span, classes.index(found[0])) for found in sets]
            for span, sets in zip(spans, coupled, strict=True)
        ]
        streams, sums = _streams(loaded, apart=workload.execution.overlap.apart)
        counts = tuple(classes.count(number) for number in range(len(numbers)))
        hosted = workload.execution.recompute in HOSTED and workload.problem.train
        return cls(mesh, tuple(numbers), counts, axes, coupled, streams, sums, hosted)

    def is_in_time(self, axis: int) -> bool:
        """Whether ranks along an axis are one device's passes, behind one another, or some of them."""
        return self.axes[axis].size < self.mesh.size(self.mesh.spans[axis])

    @cached_property
    def num_streams(self) -> int:
        """Streams beside compute."""
        every = (number for axis in (*self.streams, *self.sums) for found in axis for number in found)
        return 1 + max(every, default=-1) + self.hosted * 2 * len(self.devices)

    def to_host(self, number: int, *, back: bool) -> int:
        """The stream on which a class of devices sends its host something, or gets it back."""
        return self.num_streams - 2 * (number + 1) + back

    def host_move(self, number: int, num_bytes: float) -> int:
        """Picoseconds of that."""
        return picoseconds(num_bytes / host_of(self.devices[number]).link_bytes_per_s)

    @cached_property
    def of_cores(self) -> tuple[float, ...]:
        """By axis, the part of a collective's time that a CPU's core is busy: it copies what a network sends, too."""
        rate = LINKS["loopback-gloo"].link.bandwidth_bytes_per_s
        return tuple(min(1.0, axis.link.bandwidth_bytes_per_s / rate) for axis in self.axes)

    @cached_property
    def _moves(self) -> dict[Entry, tuple[int, int]]:
        return {}

    @cached_property
    def _algorithms(self) -> dict[tuple[str, int, float], str]:
        return {}

    def move(self, entry: Entry) -> tuple[int, int]:
        """Forward and backward of a parallel operator."""
        known = self._moves.get(entry)
        if known is None:
            forward, backward = move_seconds(entry.name, self.axes[entry.axis], entry.held)
            known = self._moves[entry] = (picoseconds(forward), picoseconds(backward))
        return known

    def algorithm(self, collective: Collective, axis: int, num_bytes: float) -> str:
        """For traces."""
        link, key = self.axes[axis], (collective, axis, num_bytes)
        if link.size == 1 or not num_bytes:
            return "none"
        if key not in self._algorithms:
            self._algorithms[key] = choice(collective, link, num_bytes).algorithm
        return self._algorithms[key]

    def sum_gradients(self, axes: Sequence[int], num_bytes: float) -> int:
        """All-reduce over several axes: scattered along inner ones, summed along the outermost, gathered again."""
        *inner, outermost = sorted(axes, reverse=True)
        seconds = 0.0
        for axis in inner:
            link = self.axes[axis]
            seconds += reduce_scatter_seconds(link, num_bytes) + all_gather_seconds(link, num_bytes)
            num_bytes /= link.size
        return picoseconds(seconds + all_reduce_seconds(self.axes[outermost], num_bytes))

    def scatter_gradients(self, axes: Sequence[int], num_bytes: float) -> int:
        """Reduce-scatter over several axes, inner first."""
        return self._narrowing(reduce_scatter_seconds, axes, num_bytes)

    def gather_weights(self, axes: Sequence[int], num_bytes: float) -> int:
        """All-gather to ``num_bytes`` over several axes: the mirror of ``scatter_gradients``."""
        return self._narrowing(all_gather_seconds, axes, num_bytes)

    def _narrowing(self, seconds_of: Callable[[AxisLink, float], float], axes: Sequence[int], num_bytes: float) -> int:
        """A collective along one axis after the other, inner first, each with its part of the bytes."""
        seconds = 0.0
        for axis in sorted(axes, reverse=True):
            seconds += seconds_of(self.axes[axis], num_bytes)
            num_bytes /= self.axes[axis].size
        return picoseconds(seconds)

    def degree(self, axes: Sequence[int]) -> int:
        """Devices in a group over several axes."""
        return int(np.prod([self.axes[axis].size for axis in axes], dtype=np.int64))


def at_reached_rate(axis: AxisLink, calibration: Calibration) -> AxisLink:
    """The axis at what collectives reach; curves are of collectives that were measured, and have reached it.

    So do gloo's rings over networks: TCP fills a slow link (benchmarks/links.py).
    """
    if axis.size == 1 or axis.library == "gloo" or axis.curves is not None:
        return axis
    share = calibration.collective_efficiency
    link = replace(axis.link, bandwidth_bytes_per_s=axis.link.bandwidth_bytes_per_s * share)
    stages = tuple(
        replace(
            stage,
            link=replace(stage.link, bandwidth_bytes_per_s=stage.link.bandwidth_bytes_per_s * share),
            exchange_bytes_per_s=None if stage.exchange_bytes_per_s is None else stage.exchange_bytes_per_s * share,
        )
        for stage in axis.stages
    )
    return replace(axis, link=link, stages=stages)


def _couple(
    placed: np.ndarray[tuple[int, ...], np.dtype[np.int64]], span: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Sets of classes that share groups along some axes, each sorted; together they are all classes."""
    if not placed.any():
        return ((0,),)
    size = math.prod(placed.shape[axis] for axis in span)
    groups = np.unique(np.moveaxis(placed, span, range(-len(span), 0)).reshape(-1, size), axis=0)
    sets: list[set[int]] = []
    for row in groups:
        found = {int(number) for number in row}
        touched = [other for other in sets if other & found]
        sets = [other for other in sets if not other & found]
        sets.append(found.union(*touched))
    return tuple(sorted(tuple(sorted(found)) for found in sets))


def _resources(workload: Workload, first: int, span: tuple[int, ...], place: int) -> frozenset[str]:
    """Links that the group along some axes of a stage's device loads, with those that run beside it."""
    shape = tuple(axis.size for axis in workload.axes[0])
    ranks = np.arange(first, first + workload.num_devices).reshape(shape)
    at = np.unravel_index(place, shape)
    group = ranks[tuple(slice(None) if axis in span else at[axis] for axis in range(len(shape)))].flatten()
    return frozenset() if len(group) == 1 else frozenset(find_route(workload.cluster, group.tolist()).resources)


def _streams(loaded: Sequence[Sequence[frozenset[str]]], *, apart: bool) -> tuple[Streams, Streams]:
    """Of moves and of sums: one for each axis and set of classes, and one for each link that several of these load.

    apart: sums have their own, beside moves along the same axis, with which they share a link at least. Links that the
    same streams load are one.
    """
    own = itertools.count()
    moves = [[next(own) for _ in sets] for sets in loaded]
    sums = [[next(own) for _ in sets] for sets in loaded] if apart else moves
    users: dict[str, set[int]] = {}
    for axis, sets in enumerate(loaded):
        for place, found in enumerate(sets):
            for name in (*found, f"{axis}, {place}"):
                users.setdefault(name, set()).update((moves[axis][place], sums[axis][place]))
    shared = sorted({tuple(sorted(found)) for found in users.values() if len(found) > 1})
    links = {found: next(own) for found in shared}

    def with_links(numbers: Sequence[Sequence[int]]) -> Streams:
        return tuple(tuple((n, *(links[found] for found in shared if n in found)) for n in sets) for sets in numbers)

    return with_links(moves), with_links(sums)
