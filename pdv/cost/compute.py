"""Seconds of local work on a device, from the roofline: the peak rate or memory speed, whichever is slower.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 2009). An even plan runs
at the pace of the slowest device, so a node costs its maximum over the cluster's device classes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ir.cost_model import (
    NOTHING,
    Answers,
    Estimate,
    Group,
    NodeEstimate,
    Query,
    Work,
    backward_work,
    forward_work,
    with_rows,
)
from ir.types import DType, TensorType
from pdv.cluster import Cluster, Device

# Mean absolute error of a roofline over 1.4 M measured kernels of 26 devices (docs/architecture.md, Costs);
# errors of one device share their sign, so the deviations of a plan's kernels add up linearly.
ROOFLINE_RELATIVE_STD = 0.6

# AdamW reads weight, gradient and two moments, and writes weight and moments: seven passes over the parameters
# (Loshchilov and Hutter, ICLR 2019, algorithm 2, in one fused pass).
ADAMW_PASSES = 7
# Share of a GPU's bandwidth that torch's fused AdamW reaches, by bytes of a moment: it reads four elements of a tensor
# at once, whatever their size. Llama 1B, a layer of Mixtral and GPT-2 on an H100, PyTorch 2.11, less what the host
# takes before the first kernel (benchmarks/results/gpu_steps_h100.json).
ADAMW_REACHED = {2: 0.62, 4: 0.81}

# Peak rates over bfloat16's, by format of a product: each half of the bits doubles them (data sheets of H100 and B200).
GAIN = {"fp8": 2.0, "fp8_block": 2.0, "nvfp4": 4.0}


@dataclass(frozen=True)
class ComputeModel:
    """The analytic cost model (``ir.cost_model``): roofline seconds on the slowest class of device."""

    devices: tuple[Device, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> ComputeModel:
        """The model of a cluster's device classes."""
        return cls(tuple(entry.device for entry in cluster.classes))

    def on(self, devices: Collection[Device]) -> ComputeModel:
        """See ``CostModel``; any devices, for each is priced by its own numbers."""
        return self if tuple(devices) == self.devices else replace(self, devices=tuple(devices))

    def seconds(self, work: Work, dtype: DType) -> float:
        """Time of one piece of work in elements of ``dtype``."""
        if work.kernels == 0:
            return 0.0
        return max(
            (
                max(
                    work.flops / (device.peak(dtype.torch_name) * device.efficiency),
                    work.bytes_moved / device.memory_bandwidth_bytes_per_s,
                )
                + work.kernels * device.launch_latency_s
            )
            / device.pace
            for device in self.devices
        )

    def optimizer_seconds(self, num_bytes: float, moment: int = 4) -> float:
        """AdamW over ``num_bytes`` of one device's weights; launches are fused over all weights and not counted."""
        return max(
            ADAMW_PASSES * num_bytes / _reached(device, moment) / device.memory_bandwidth_bytes_per_s / device.pace
            for device in self.devices
        )

    @property
    def identity(self) -> str:
        """The devices' numbers."""
        return repr(self)

    @property
    def correlation(self) -> float:
        """Errors of one device share their sign."""
        return 1.0

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """By arithmetic and traffic alone."""
        return self._answers.nodes(queries)

    def fused(self, groups: Sequence[Group]) -> list[float]:
        """By traffic alone."""
        return [group.traffic for group in groups]

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self._ask)

    def _ask(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        found = [self._node(query) for query in queries]
        return found if any(device.kind == "cpu" for device in self.devices) else with_rows(queries, found)

    def _node(self, query: Query) -> NodeEstimate:
        op, loops, operands, result, _, wanted, number = query
        gain = GAIN.get(number, 1.0)
        forward = self.estimate(forward_work(op, loops, operands, result).faster(gain), result.dtype)
        if wanted is None:
            return NodeEstimate(forward)
        backward = backward_work(op, loops, operands, result, wanted).faster(gain)
        return NodeEstimate(forward, self.estimate(backward, result.dtype))

    def estimate(self, work: Work, dtype: DType, why: str = "") -> Estimate:
        """``seconds`` with the roofline's deviation."""
        seconds = self.seconds(work, dtype)
        return Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds, "analytic", why)

    def optimizer(self, num_bytes: float, moment: int = 4) -> Estimate:
        """``optimizer_seconds`` with the roofline's deviation."""
        seconds = self.optimizer_seconds(num_bytes, moment)
        return Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds)

    def outside(self, outputs: Sequence[TensorType]) -> Estimate:  # noqa: ARG002  # the protocol's
        """Not counted: an analytic price is of the graph and the optimizer."""
        return NOTHING

    @property
    def note(self) -> str:
        """It reads no files."""
        return ""

    def provenance(self) -> dict[str, Any]:  # Any: JSON
        """It has no weights."""
        return {"name": "analytic", "hash": None, "devices": {}}


def _reached(device: Device, moment: int) -> float:
    """Share of a device's bandwidth that AdamW reaches; of CPUs none is known."""
    return 1.0 if device.kind == "cpu" else ADAMW_REACHED.get(moment, ADAMW_REACHED[4])
