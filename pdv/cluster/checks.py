"""Whether the parts of a description fit together: what single ranges cannot see, mostly slips of unit."""

from __future__ import annotations

from ir.errors import ClusterError
from pdv.cluster.description import DeviceClass, Level
from pdv.cluster.source import Source
from pdv.cluster.units import LINK_BANDWIDTH, MEMORY_BANDWIDTH

# The fastest port sold in 2026 is 800 Gb/s; twice that leaves room.
MAX_NETWORK_BYTES_PER_S = 200e9


def check_levels(levels: tuple[Level, ...], classes: tuple[DeviceClass, ...], source: Source) -> tuple[str, ...]:
    """Warnings about what is possible but strange.

    Raises:
        ClusterError: links faster than the memory they read, or a network that nobody sells.
    """
    memory = max(entry.device.memory_bandwidth_bytes_per_s for entry in classes)
    for level in levels:
        rate = level.link.bandwidth_bytes_per_s
        place = source.where(("network",) if level.name == "node" else ("nodes", 0, "link"))
        if level.name == "node" and rate > MAX_NETWORK_BYTES_PER_S:
            raise ClusterError(
                f"{place}: a network of {LINK_BANDWIDTH.format(rate)} for each device",
                f"Plausible are up to {LINK_BANDWIDTH.format(MAX_NETWORK_BYTES_PER_S)}",
                "Networks are sold in bits: did you mean Gb/s? And is `ports_per_node` right?",
            )
        if rate > memory:
            raise ClusterError(
                f"{place}: the link ({LINK_BANDWIDTH.format(rate)}) is faster than the device's memory "
                f"({MEMORY_BANDWIDTH.format(memory)})",
                mend="Check the units of both (b is bit, B is byte)",
            )
    return _strange(levels)


def _strange(levels: tuple[Level, ...]) -> tuple[str, ...]:
    if len(levels) == 2 and levels[0].link.bandwidth_bytes_per_s > levels[1].link.bandwidth_bytes_per_s:
        outer, inner = (LINK_BANDWIDTH.format(level.link.bandwidth_bytes_per_s) for level in levels)
        return (f"the network ({outer} a device) is faster than the link inside a node ({inner}): check their units",)
    return ()
