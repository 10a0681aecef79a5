"""The search's cost model from measurements and learned weights. Entry point: ``KernelCosts``.

Each kernel of an operator is priced by the most trusted source that knows it: a measurement of this very kernel on this
device, the learned model where the kernel is within its range, the analytic model otherwise (and then the estimate says
why). Kernels that were not asked before are predicted in one batch.

An even plan runs at the pace of the slowest device, so a kernel costs its maximum over the cluster's device classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ir.cost_model import NOTHING, SOURCES, Answers, Estimate, Group, Key, NodeEstimate, Query, Work, with_rows
from ir.types import DType, TensorType
from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.data.measured import Measurements, share_of
from learned_cost.describe import DTYPES, backward_kernels, forward_kernels, in_format
from learned_cost.devices.device import DeviceRecord
from learned_cost.devices.host import CPU
from learned_cost.evaluation.evaluate import Answer

# Digits kept of a prediction: sums in another order differ in the last bits (``forward.Arithmetic``),
# and equal questions have equal answers whatever else is asked.
DIGITS = 4
UNKNOWN_DEVICE_STD = (
    0.25  # of log seconds, added for a device without a record (leave one device out, docs/cost-model.md)
)
Named = tuple[Key, Kernel]
BEYOND_STD = 0.2  # of kernels that are larger than all measured ones: those of a family differ by as much in rate
MOVED_STD = 0.3  # of measured collectives: two runs of gloo on one machine, all sizes, 2026-11-21
OUT_OF_RANGE = "out of the range of the weights"
NO_WEIGHTS = "no learned weights"
NO_RECORD = "no record of the device"
COMPILER = "inductor"


class Predictor(Protocol):
    """What ``learned_cost.kernels.predict.Predictor`` does."""

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        """Of each subgraph on a device."""


class Analytic(Protocol):
    """The model that is fallen back to."""

    @property
    def devices(self) -> tuple[Any, ...]:  # Any: as the cluster describes them
        """Of its classes, in their order."""

    def on(self, devices: Collection[Any]) -> Analytic:
        """As ``CostModel``."""

    def estimate(self, work: Work, dtype: DType, why: str = "") -> Estimate:
        """Of one piece of work."""

    def optimizer(self, num_bytes: float, moment: int = 4) -> Estimate:
        """As ``CostModel``."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device class: its record, whether that is a known one, and what a process has of its speed.

    Attributes:
        guess: whether a device that is not known is priced by what is learned of others.
    """

    record: DeviceRecord
    known: bool = True
    pace: float = 1.0
    guess: bool = True


@dataclass
class KernelCosts:
    """``ir.cost_model.CostModel`` by kernels.

    Attributes:
        identity: of the weights, profiles and devices.
        correlation: between the errors of two kernels of a device, in logs.
        facts: for plan.json.
        note: as ``CostModel``.
    """

    places: tuple[Place, ...]
    analytic: Analytic
    identity: str
    predictor: Predictor | None = None
    measured: Measurements | None = None
    correlation: float = 0.5
    facts: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    note: str = ""
    _kernels: dict[Key, Estimate] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[int, ...], KernelCosts] = field(default_factory=dict, repr=False)

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """Estimates, one for each query; what is new is predicted in one batch."""
        return self._answers.nodes(queries)

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self._ask)

    def _ask(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        described = [_describe(query) for query in queries]
        self._price(dict(named for pair in described for part in pair for named in part))
        found = [NodeEstimate(self._sum(forward), self._sum(backward)) for forward, backward in described]
        return found if any(place.record.kind == "cpu" for place in self.places) else with_rows(queries, found)

    def fused(self, groups: Sequence[Group]) -> list[float]:
        """By the network's word of the compiled group and of its kernels; by traffic where it has none."""
        if self.predictor is None or any(not place.known for place in self.places):
            return [group.traffic for group in groups]
        known: dict[Key, float] = {}
        for key, group in zip(keys := [_group_key(group) for group in groups], groups, strict=True):
            if key not in known:
                parts = [kernel for query in group.queries for kernel in _forward(query)]
                whole = len(parts) == len(group.queries)
                known[key] = (self._share(parts, group) if whole else None) or group.traffic
        return [known[key] for key in keys]

    def _share(self, parts: Sequence[Kernel], group: Group) -> float | None:
        """Forward, on the slowest place; None where a kernel is out of range."""
        assert self.predictor is not None
        traffic = group.traffic * sum(kernel.bytes for kernel in parts)
        compiled = tuple(replace(kernel, stack=COMPILER) for kernel in parts)
        asked = [Subgraph(compiled, group.edges, True, traffic), *map(Subgraph.of, parts)]
        taken = []
        for place in self.places:
            answer = self.predictor.predict(asked, place.record)
            if not answer.in_range.all():
                return None
            one, *alone = np.exp(np.asarray(answer.mean_log_s, dtype=np.float64)).tolist()
            taken.append((one / place.pace, sum(alone) / place.pace))
        together, apart = (max(times) for times in zip(*taken, strict=True))
        return float(f"{min(1.0, together / apart):.{DIGITS}g}")

    def optimizer(self, num_bytes: float, moment: int = 4) -> Estimate:
        """Fused AdamW over a parameter, and what it costs the host beside it; analytic on GPUs, which hide that."""
        if any(place.record.kind != "cpu" for place in self.places):
            return self.analytic.optimizer(num_bytes, moment)
        seconds = max(CPU.seconds(num_bytes) / place.pace for place in self.places)
        return Estimate(seconds, CPU.relative_std * seconds, "measured")

    def outside(self, outputs: Sequence[TensorType]) -> Estimate:
        """The loss, taken as a softmax over the last dim of each output, forward and backward."""
        kernels = [(kernel.key, kernel) for output in outputs if output.rank for kernel in _loss(output)]
        self._price(dict(kernels))
        return self._sum(kernels)

    def move(self, interconnect: str, size: int, share: float) -> tuple[tuple[str, float, float], ...]:
        """(collective, bytes, seconds) measured among so many devices of a cluster of one kind, if they were.

        share: of a core, that each process has; 1 where none share any.
        """
        if self.measured is None or len(self.places) != 1:
            return ()
        return self.measured.collectives.get((self.places[0].record.name, interconnect, size, share_of(share)), ())

    def provenance(self) -> Mapping[str, Any]:
        """Names and hashes."""
        return self.facts

    def on(self, devices: Collection[Any]) -> KernelCosts:  # Any: as the cluster describes them
        """See ``CostModel``; itself for devices of which it knows none."""
        known = self.analytic.devices
        chosen = tuple(number for number, device in enumerate(known) if device in devices)
        if len(chosen) in (0, len(self.places)):
            return self
        if chosen not in self._parts:
            places = tuple(self.places[number] for number in chosen)
            analytic = self.analytic.on([known[number] for number in chosen])
            identity = repr((self.identity, places))
            own = self.predictor, self.measured, self.correlation, self.facts, self.note
            self._parts[chosen] = KernelCosts(places, analytic, identity, *own)
        return self._parts[chosen]

    def _sum(self, kernels: Sequence[Named]) -> Estimate:
        """One after the other; errors are taken to share their sign."""
        if not kernels:
            return NOTHING
        parts = [self._kernels[key] for key, _ in kernels]
        if len(parts) == 1:
            return parts[0]
        worst = max(parts, key=lambda part: SOURCES.index(part.source))
        return Estimate(sum(p.mean_s for p in parts), sum(p.std_s for p in parts), worst.source, worst.why)

    def _price(self, kernels: Mapping[Key, Kernel]) -> None:
        """Know all of these."""
        new = {key: kernel for key, kernel in kernels.items() if key not in self._kernels}
        if not new:
            return
        asked = list(new.values())
        slowest: list[Estimate] | None = None
        for place in self.places:
            found = self._on(place, asked)
            slowest = found if slowest is None else [max(a, b, key=_mean) for a, b in zip(slowest, found, strict=True)]
        assert slowest is not None, "a cluster has devices"
        self._kernels.update(zip(new, slowest, strict=True))

    def _on(self, place: Place, kernels: Sequence[Kernel]) -> list[Estimate]:
        found: list[Estimate | None] = [None] * len(kernels)
        if self.measured is not None:
            for number, kernel in enumerate(kernels):
                seconds = self.measured.seconds(kernel, place.record)
                if seconds is not None:
                    found[number] = Estimate(seconds[0] / place.pace, seconds[1] / place.pace, "measured")
                elif place.record.kind == "cpu" and (seconds := self.measured.beyond(kernel, place.record)):
                    # Weights know of a GPU's kernels of every size; of a CPU's, small ones alone.
                    relative = max(BEYOND_STD, seconds[1] / seconds[0])
                    found[number] = _learn(seconds[0] / place.pace, relative, known_device=place.known)
        missing = [number for number, estimate in enumerate(found) if estimate is None]
        learned = self.predictor if place.known or place.guess else None
        if missing and learned is not None:
            predicted = learned.predict([Subgraph.of(kernels[number]) for number in missing], place.record)
            for number, mean, std, known in zip(
                missing,
                np.exp(np.asarray(predicted.mean_log_s, dtype=np.float64)).tolist(),
                np.asarray(predicted.std_log, dtype=np.float64).tolist(),
                predicted.in_range.tolist(),
                strict=True,
            ):
                if known and math.isfinite(mean) and mean > 0.0:
                    found[number] = _learn(mean / place.pace, std, known_device=place.known)
        why = NO_WEIGHTS if self.predictor is None else NO_RECORD if learned is None else OUT_OF_RANGE
        return [
            estimate or self.analytic.estimate(Work(kernel.flops, kernel.bytes, 1), _dtype(kernel), why)
            for estimate, kernel in zip(found, kernels, strict=True)
        ]


def _learn(mean_s: float, std_log: float, *, known_device: bool) -> Estimate:
    """A prediction of log-normal form: its median, and the deviation of its logarithm relative to it."""
    if not known_device:
        std_log = math.hypot(std_log, UNKNOWN_DEVICE_STD)
    mean_s = float(f"{mean_s:.{DIGITS}g}")
    return Estimate(mean_s, float(f"{mean_s * std_log:.{DIGITS}g}"), "learned")


def _mean(estimate: Estimate) -> float:
    return estimate.mean_s


def _describe(query: Query) -> tuple[list[Named], list[Named]]:
    """The kernels forward and backward, by name."""
    op, loops, operands, result, attrs, wanted, number = query
    forward = _forward(query)
    backward = () if wanted is None else backward_kernels(op, loops, operands, result, attrs, wanted)
    if number:
        forward, backward = (tuple(in_format(kernel, number) for kernel in part) for part in (forward, backward))
    return [(kernel.key, kernel) for kernel in forward], [(kernel.key, kernel) for kernel in backward]


def _group_key(group: Group) -> Key:
    return tuple(query.key for query in group.queries), group.edges, group.traffic


def _forward(query: Query) -> tuple[Kernel, ...]:
    return forward_kernels(query.op, query.loops, query.operands, query.result, query.attrs)


def _loss(output: TensorType) -> list[Kernel]:
    n = output.shape[-1]
    m = max(1, output.num_elements // max(n, 1))
    dtype, size, points = DTYPES.get(output.dtype, "fp32"), float(output.num_bytes), float(m * n)
    return [
        Kernel("softmax", "row", dtype, {"m": m, "n": n}, (m, 1, n, 1), 5.0 * points, 2 * size, "forward"),
        Kernel("softmax", "row", dtype, {"m": m, "n": n}, (m, 1, n, 1), 10.0 * points, 3 * size, "backward"),
    ]


_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def _dtype(kernel: Kernel) -> DType:
    return _BY_NAME.get(kernel.dtype, DType.F32)
