"""Whether the parts of a description fit together: what single ranges cannot see, mostly slips of unit.

What cannot be is an error; what can be, but is sold nowhere, is a warning. Entry point: `checked`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ir.errors import ClusterError
from pdv.cluster.build import links_of
from pdv.cluster.description import Cluster
from pdv.cluster.presets import DEVICES, LINKS
from pdv.cluster.schema import ClusterSpec, DeviceSpec
from pdv.cluster.source import Place, Source
from pdv.cluster.units import LINK_BANDWIDTH, MEMORY, MEMORY_BANDWIDTH, TIME

# The fastest port sold in 2026 is 800 Gb/s; twice that leaves room.
MAX_NETWORK_BYTES_PER_S = 200e9
PORT_BYTES_PER_S = 100e9
SOLD_IN_BYTES = ("nvlink", "nvswitch", "xgmi", "infinity")  # links whose data sheets count bytes
FAR = 4.0  # a value this many times a preset's, or less by it, is another product
BITS = re.compile(r"(?:b|bit)/s\s*$")
GIGABYTES = re.compile(r"\s*(4|6|8|12|16|24|32|40|48|64|80|96|128|141|144|180|192|256)\s*GB\s*", re.ASCII)
MAX_FLOPS_PER_BYTE = 2000.0  # of memory bandwidth; dense float8 on a B200 is 560
SLOW_STEP_S = 2e-4  # of GPUs; a network slower than this is not in one hall


def find_warnings(cluster: Cluster, spec: ClusterSpec, source: Source) -> tuple[str, ...]:
    """Warnings about what is possible but strange.

    Raises:
        ClusterError: links faster than the memory they read, a network that nobody sells, or MIG parts on NVLink.
    """
    memory = max(entry.device.memory_bandwidth_bytes_per_s for entry in cluster.classes)
    for level in cluster.levels:
        _check_rate(level.name == "node", level.link.bandwidth_bytes_per_s, memory, source)
    _check_parts(spec, source)
    places = [*_links(cluster, spec, source), *_devices(spec, source), *_network(cluster, spec)]
    return tuple(dict.fromkeys(places))


def _check_rate(network: bool, rate: float, memory: float, source: Source) -> None:
    place = source.where(("network",) if network else ("nodes", 0, "link"))
    if network and rate > MAX_NETWORK_BYTES_PER_S:
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


def _check_parts(spec: ClusterSpec, source: Source) -> None:
    """Parts of GPUs have no peer-to-peer access, so no NVLink (NVIDIA, MIG user guide)."""
    for place, link in links_of(spec):
        node = spec.nodes[place[1]] if place[0] == "nodes" and isinstance(place[1], int) else None
        if node is not None and node.device.mig is not None and "nvlink" in link.build().name.lower():
            raise ClusterError(
                f"{source.where(place)}: MIG parts ({node.device.mig}) have no NVLink; they reach each other through "
                "the host",
                mend="Write the host's link, for instance `link: pcie5`, or leave `mig` out for whole devices",
            )


def _links(cluster: Cluster, spec: ClusterSpec, source: Source) -> Iterator[str]:
    """Bits where bytes are sold and the reverse, presets changed beyond recognition, steps slower than a hall."""
    gpus = all(entry.device.kind == "gpu" for entry in cluster.classes)
    for place, link in links_of(spec):
        where, plain = source.where(place), link.build()
        rate, name = plain.bandwidth_bytes_per_s, plain.name.lower()
        shown = LINK_BANDWIDTH.format(rate)
        written = _raw(source, (*place, "bandwidth"))
        if any(word in name for word in SOLD_IN_BYTES) and BITS.search(written):
            yield f"{where}: {link.name or link.preset} of {written.strip()} is {shown}; such links are sold in bytes"
        elif place[0] == "network" and link.bandwidth is not None and rate > PORT_BYTES_PER_S:
            yield f"{where}: a port of {shown} is {rate * 8 / 1e9:,.0f} Gb/s; networks are sold in bits"
        elif link.preset is not None and link.bandwidth is not None:
            known = LINKS[link.preset].link.bandwidth_bytes_per_s
            if not known / FAR <= rate <= known * FAR:
                yield f"{where}: {shown} is far from the {LINK_BANDWIDTH.format(known)} of {link.preset}"
        if gpus and plain.latency_s > SLOW_STEP_S:
            yield f"{where}: a latency of {TIME.format(plain.latency_s)} a step is that of a long distance"


def _devices(spec: ClusterSpec, source: Source) -> Iterator[str]:
    """Sizes of memory in decimal units, presets changed beyond recognition, rates that do not go together."""
    for number, node in enumerate(spec.nodes):
        place: Place = ("nodes", number, "device")
        device, where = node.device.build(), source.where(place)
        written = _raw(source, (*place, "memory"))
        if GIGABYTES.fullmatch(written):
            yield (
                f"{where}: {written.strip()} of memory is {MEMORY.format(device.memory_bytes)}; devices are sold in "
                f"GiB, written GB"
            )
        yield from _far(node.device, where)
        peak, memory = max(device.peak_flops.values()), device.memory_bandwidth_bytes_per_s
        if device.kind == "gpu" and peak / memory > MAX_FLOPS_PER_BYTE:
            yield f"{where}: {peak / 1e12:,.0f} TFLOP/s on a memory of {MEMORY_BANDWIDTH.format(memory)}"
        if device.efficiency < 0.2:
            yield f"{where}: an efficiency of {device.efficiency:.0%} is low for large matrix products"


def _far(spec: DeviceSpec, where: str) -> Iterator[str]:
    """A preset's values changed by more than other products of its kind differ."""
    base = DEVICES.get(spec.preset or "")
    if base is None:
        return
    pairs: list[tuple[str, float | None, float]] = [("memory", spec.memory, base.memory_bytes)]
    pairs.append(("memory_bandwidth", spec.memory_bandwidth, base.memory_bandwidth_bytes_per_s))
    pairs += [(f"peak {dtype}", rate, base.peak(dtype)) for dtype, rate in (spec.peak or {}).items()]
    for name, own, known in pairs:
        if own is not None and not known / FAR <= own <= known * FAR:
            yield f"{where}: {name} is {own / known:.3g} times that of {spec.preset}"


def _network(cluster: Cluster, spec: ClusterSpec) -> Iterator[str]:
    """A network faster than what is inside a node; more ports than devices use; switches that leave next to nothing."""
    nodes = [level for level in cluster.levels if level.name == "node"]
    if nodes and cluster.levels[-1] is not nodes[0]:
        outer, inner = (level.link.bandwidth_bytes_per_s for level in (nodes[0], cluster.levels[-1]))
        if outer > inner:
            yield (
                f"the network ({LINK_BANDWIDTH.format(outer)} a device) is faster than the link inside a node "
                f"({LINK_BANDWIDTH.format(inner)}): check their units"
            )
    for group in cluster.nodes:
        if cluster.network and group.ports > 4 * group.devices:
            yield f"{group.ports} network ports for {group.devices} devices in a node: is `ports_per_node` right?"
    for tier in cluster.network:
        if tier.share <= 1 / 16:
            yield f"above {tier.name} switches 1/{1 / tier.share:,.0f} of the ports is left: is oversubscription right?"
    if spec.network is not None and spec.network.rails and cluster.nodes[0].ports < 2:
        yield "rails without several ports in a node: is `ports_per_node` right?"


def _raw(source: Source, place: Place) -> str:
    """The text of a value as the file has it; empty where it has none."""
    value: object = source.data
    for step in place:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return ""
    return value if isinstance(value, str) else ""
