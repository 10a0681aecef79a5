"""What joins a device with its host's memory, and how fast that is: by what offload is priced. Entry point: `host_of`.

A cluster file may say it of a device (docs/clusters.md); else it is the device's record's, or what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdv.cluster.description import Device
from pdv.cluster.presets import host_link_rate

# Of a link's nominal rate: 25 to 26 GB/s between pinned memory and a device over PCIe 4.0 x16, nominally 32.
REACHED = 0.8
# Of memory, for each device, where nobody says: DGX A100 has two sockets of eight channels of DDR4-3200, 409.6 GB/s
# nominal, for eight devices; 0.8 of it are reached by reading and writing in turns.
BANDWIDTH = 41e9


@dataclass(frozen=True, slots=True)
class Host:
    """A device's part of its host.

    Attributes:
        link_bytes_per_s: between the two, in one direction.
        bandwidth_bytes_per_s: of the host's memory.
        memory_bytes: how much of it there is; infinite where nobody says.
    """

    link_bytes_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: float = math.inf

    def step_s(self, sent: float, stepped: float, returned: float) -> float:
        """Seconds of a step there: bytes that are sent, then read and written by the optimizer, then come back."""
        return (sent + returned) / self.link_bytes_per_s + stepped / self.bandwidth_bytes_per_s


def host_of(device: Device) -> Host:
    """That of a device; a CPU's is itself, where sending is copying."""
    if device.kind == "cpu":
        rate = device.memory_bandwidth_bytes_per_s * device.pace
        return Host(rate / 2, rate)
    link = device.host_link_bytes_per_s or REACHED * host_link_rate(device.name)
    return Host(link, device.host_bandwidth_bytes_per_s or BANDWIDTH, device.host_limit_bytes)


def slowest_host(devices: Iterable[Device]) -> Host:
    """Of each figure the smallest."""
    hosts = [host_of(device) for device in devices]
    return Host(*(min(getattr(host, name) for host in hosts) for name in Host.__slots__))
