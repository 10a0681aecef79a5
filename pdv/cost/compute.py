"""Seconds of local work on a device, from the roofline: the peak rate or memory speed, whichever is slower.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 2009). An even plan runs
at the pace of the slowest device, so a node costs its maximum over the cluster's device classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.operator import Work
from ir.types import DType
from pdv.cluster import Cluster, Device

# Mean absolute error of a roofline over 1.4 M measured kernels of 26 devices (public kernel measurements, DESIGN
# section 6); errors of one device share their sign, so the deviations of a plan's kernels add up linearly.
ROOFLINE_RELATIVE_STD = 0.6

# AdamW reads weight, gradient and two moments, and writes weight and moments: seven passes over the parameters
# (Loshchilov and Hutter, ICLR 2019, algorithm 2, in one fused pass).
ADAMW_PASSES = 7


@dataclass(frozen=True)
class ComputeModel:
    """Roofline seconds on the slowest class of device."""

    devices: tuple[Device, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> ComputeModel:
        """The model of a cluster's device classes."""
        return cls(tuple(entry.device for entry in cluster.classes))

    def seconds(self, work: Work, dtype: DType) -> float:
        """Time of one piece of work in elements of ``dtype``."""
        if work.kernels == 0:
            return 0.0
        return max(
            max(
                work.flops / (device.peak(dtype.torch_name) * device.efficiency),
                work.bytes_moved / device.memory_bandwidth_bytes_per_s,
            )
            + work.kernels * device.launch_latency_s
            for device in self.devices
        )

    def optimizer_seconds(self, num_bytes: float) -> float:
        """AdamW over ``num_bytes`` of one device's weights; launches are fused over all weights and not counted."""
        return max(ADAMW_PASSES * num_bytes / device.memory_bandwidth_bytes_per_s for device in self.devices)
