"""The cluster as plain data: what the planner reads, in SI units, without any file format.

A cluster is a list of levels, outer (slow) to inner (fast): nodes on a network, devices on a link inside each node.
Devices are numbered node by node. All devices of all nodes may not be equal: `classes` counts each kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    `efficiency` is the share of `peak_flops` that a large matrix product reaches; `launch_latency_s` is what starting
    one kernel costs when nothing hides it. `share` is the part of the device's time that a process gets: 1/2 where two
    take turns on it.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]  # FLOP/s by dtype name: "float32", "bfloat16", ...
    memory_bandwidth_bytes_per_s: float
    launch_latency_s: float
    efficiency: float
    kind: Literal["gpu", "cpu"] = "gpu"
    share: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))

    def peak(self, dtype: str) -> float:
        """FLOP/s of `dtype`; one that the device does not list is computed in float32, as libraries do."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    def __reduce__(self) -> tuple[type[Device], tuple[object, ...]]:
        """Pickle by value: a mapping proxy cannot be pickled."""
        values = (self.name, self.memory_bytes, dict(self.peak_flops), self.memory_bandwidth_bytes_per_s)
        return Device, (*values, self.launch_latency_s, self.efficiency, self.kind, self.share)

    def __hash__(self) -> int:
        """Equal devices hash alike; the peak rates by their sorted items."""
        return hash((self.name, self.memory_bytes, tuple(sorted(self.peak_flops.items()))))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the members of one level: the α–β model of one step of a collective.

    `bandwidth_bytes_per_s` counts per device and direction; `latency_s` is the α of each step.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """`size` groups of devices joined by `link`."""

    name: str
    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """`count` equal devices."""

    device: Device
    count: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Levels outer to inner, the devices by class, and the mesh the user pinned, if any (name, size; slow to fast)."""

    name: str
    levels: tuple[Level, ...]
    classes: tuple[DeviceClass, ...]
    mesh: tuple[tuple[str, int], ...] | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        in_classes = sum(entry.count for entry in self.classes)
        assert in_classes == self.num_devices, f"{in_classes} devices in classes, {self.num_devices} in levels"

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return math.prod(level.size for level in self.levels)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device: an even plan has to fit there."""
        return min(entry.device.memory_bytes for entry in self.classes)

    def with_mesh(self, mesh: Mapping[str, int] | None) -> Cluster:
        """The same cluster with another pinned mesh (axis sizes, slow to fast), or with none."""
        return replace(self, mesh=None if mesh is None else tuple(mesh.items()))

    def as_dict(self) -> dict[str, object]:
        """As JSON-ready data: every field, with the totals."""
        return {
            "name": self.name,
            "num_devices": self.num_devices,
            "memory_bytes": self.memory_bytes,
            "levels": [asdict(level) for level in self.levels],
            "classes": [{"device": _device_as_dict(entry.device), "count": entry.count} for entry in self.classes],
            "mesh": None if self.mesh is None else dict(self.mesh),
        }


def _device_as_dict(device: Device) -> dict[str, object]:
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "peak_flops": dict(device.peak_flops),
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "launch_latency_s": device.launch_latency_s,
        "efficiency": device.efficiency,
        **({} if device.share == 1.0 else {"share": device.share}),
    }
