"""How sure a step's seconds are, from the deviations of the prices that they are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ir.cost_model import SOURCES, Estimate, Source
from pdv.cost.compute import ROOFLINE_RELATIVE_STD, ComputeModel
from pdv.problem.recomputation import WHOLE
from pdv.simulate.engine.streams import Parts
from pdv.simulate.engine.task import PICO
from pdv.simulate.result import OTHERS
from pdv.simulate.stage import Lowered, Stage

IDLE = ("host", "waiting", "bubble")  # no price of a kernel or a link


@dataclass(frozen=True, slots=True)
class Confidence:
    """Deviation of the step, and seconds by source."""

    std_s: float
    by_source: dict[Source, float]


@dataclass
class _Sums:
    """Of estimates: seconds by source; of those that are better than analytic, deviations and their squares."""

    seconds: dict[Source, float]
    linear: float = 0.0
    squares: float = 0.0

    def add(self, estimate: Estimate, times: float, nodes: int = 1) -> None:
        """An estimate that ``nodes`` nodes have, each ``times`` a step with the same error."""
        self.seconds[estimate.source] += estimate.mean_s * times * nodes
        if estimate.source != "analytic":
            self.linear += estimate.std_s * times * nodes
            self.squares += (estimate.std_s * times) ** 2 * nodes


def confidence(lowered: Lowered, parts: Sequence[Sequence[Parts]], step: int) -> Confidence:
    """Of the class of devices that works most, relative to its work, for the whole step.

    As ``PlanCost.std_s``: errors of two kernels have the model's correlation, which adds up linearly; the rest averages
    out; the analytic part is all shared.
    """
    busy = {
        (stage.number, number): sum(time for name, time in own.items() if name not in IDLE)
        for stage in lowered.stages
        for number, own in enumerate(parts[stage.number])
    }
    stage_number, number = max(busy, key=busy.__getitem__)
    stage, own = lowered.stages[stage_number], parts[stage_number][number]
    sums = _local(lowered, stage, number)
    links = stage.kind.links
    curves_of = {span: link.curves for span, link in zip(links.mesh.spans, links.axes, strict=True)}
    exposed_s, moved_s = 0.0, 0.0
    for name, time in own.items():
        if name not in OTHERS:
            curves = curves_of.get(name)
            source: Source = "analytic" if curves is None else curves.source
            sums.seconds[source] += time / PICO
            exposed_s += (ROOFLINE_RELATIVE_STD if curves is None else curves.relative_std) * time / PICO
            moved_s += 0.0 if curves is not None else time / PICO
    correlation = stage.kind.prices[number].compute.correlation
    shared = ROOFLINE_RELATIVE_STD * (sums.seconds["analytic"] - moved_s) + exposed_s
    shared += math.sqrt(correlation) * sums.linear
    std_s = math.hypot(shared, math.sqrt((1.0 - correlation) * sums.squares))
    total_s = sum(sums.seconds.values())
    relative = std_s / total_s if total_s else 0.0
    return Confidence(relative * step / PICO, {name: s for name, s in sums.seconds.items() if s > 0.0})


def of_step(lowered: Lowered, std_s: float, step_s: float) -> float:
    """The deviation of a step whose prices have ``std_s`` in sum.

    It grows with theirs and levels off at what whole steps were found to be off by: the calibration's constants hold
    what kinds of work have in common. Prices by the roofline alone say nothing of the device, and stay as wide as they
    are.
    """
    calibration = lowered.calibration
    prices = [price for stage in lowered.stages for price in stage.kind.prices]
    if any(isinstance(price.compute, ComputeModel) for price in prices):
        return std_s
    if any(device.kind == "cpu" for stage in lowered.stages for device in stage.kind.links.devices):
        return calibration.std_gain_cpu * std_s
    std_s *= calibration.std_gain
    return std_s / math.hypot(1.0, std_s / (calibration.std_most * step_s))


def _local(lowered: Lowered, stage: Stage, number: int) -> _Sums:
    """Kernels and optimizer of one class of a stage."""
    execution, train = lowered.workload.execution, lowered.workload.problem.train
    sums = _Sums(dict.fromkeys(SOURCES, 0.0))
    counts: dict[int, int] = {}
    for chunk in stage.chunks:
        for node in lowered.chunks.nodes[chunk]:
            entry = lowered.nodes.of[node]
            if entry.role == "local":
                counts[entry.number] = counts.get(entry.number, 0) + 1
    prices, again = stage.kind.prices[number], 2 if execution.recompute in {*WHOLE, "operators"} else 1
    for entry_number, count in counts.items():
        forward, backward = prices.entries[entry_number].estimates
        sums.add(forward, execution.passes * again, count)
        sums.add(backward, execution.passes, count)
    if train:
        for estimate in stage.sums.optimizer(prices):
            sums.add(estimate, 1.0)
        if lowered.workload.stages.chunks - 1 in stage.chunks:
            outputs = [(node.type, lowered.nodes.of[node].sharding) for _, node in lowered.workload.pcg.outputs]
            for estimate in prices.loss(outputs).estimates:
                sums.add(estimate, execution.passes)
    return sums
