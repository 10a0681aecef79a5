"""What a PCG costs, node by node and in sum: seconds with their deviation and source, bytes by lifetime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.cost_model import NOTHING, SOURCES, Estimate, Source
from ir.graph import Node
from pdv.cost.compute import ROOFLINE_RELATIVE_STD


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds of one PCG node, forward and backward; ``estimates`` says where those of local work come from."""

    forward_s: float
    backward_s: float
    estimates: tuple[Estimate, ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PlanCost:
    """Per step and device. ``memory`` by lifetime; ``transient`` is the largest node's working set."""

    compute_s: float
    communication_s: float
    optimizer_s: float
    memory: Mapping[str, float]
    nodes: Mapping[Node, NodeCost] = field(repr=False)
    optimizer: tuple[Estimate, ...] = field(default=(), repr=False)
    outside: Estimate = NOTHING
    correlation: float = 1.0

    @property
    def seconds(self) -> float:
        """All that the search decides, nothing overlapped."""
        return self.compute_s + self.communication_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        """A whole step: the above, and what runs beside the graph."""
        return self.seconds + self.outside.mean_s

    @property
    def estimates(self) -> list[Estimate]:
        """Of every kernel, parameter and move."""
        local = [estimate for cost in self.nodes.values() for estimate in cost.estimates]
        return [*local, *self.optimizer, self.outside]

    @property
    def seconds_by_source(self) -> dict[Source, float]:
        """The step's seconds by where they come from; sources of nothing are left out."""
        found = dict.fromkeys(SOURCES, 0.0)
        for estimate in self.estimates:
            found[estimate.source] += estimate.mean_s
        return {source: seconds for source, seconds in found.items() if seconds > 0.0}

    @property
    def std_s(self) -> float:
        """Deviation of ``step_s``.

        Errors of two kernels of one device have the model's ``correlation``: that part of the variance adds up
        linearly over kernels, the rest averages out. The analytic part is all shared, as its errors share their sign.
        """
        better = [estimate for estimate in self.estimates if estimate.source != "analytic"]
        known_s, linear = sum(e.mean_s for e in better), sum(e.std_s for e in better)
        squares = sum(e.std_s**2 for e in better)
        shared = ROOFLINE_RELATIVE_STD * (self.step_s - known_s) + math.sqrt(self.correlation) * linear
        return math.hypot(shared, math.sqrt((1.0 - self.correlation) * squares))

    @property
    def memory_bytes(self) -> float:
        """What stays allocated until backward: weights, gradients, optimizer state, activations."""
        return sum(size for name, size in self.memory.items() if name != "transient")

    @property
    def peak_bytes(self) -> float:
        """The above and the largest working set."""
        return sum(self.memory.values())
