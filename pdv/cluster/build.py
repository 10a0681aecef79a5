"""From a checked file to nodes, network, wires, classes and levels. Entry point: `built`."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ir.errors import ClusterError
from pdv.cluster.description import DeviceClass, Level, Link, NodeGroup, Tier, Wire
from pdv.cluster.schema import ClusterSpec, LinkSpec, NetworkSpec, NodeSpec
from pdv.cluster.source import Source

SWITCHES = ("leaf", "spine", "super", "hall")  # what switches are called that have no name, from below
DEVICE_END = re.compile(r"n(\*|[0-9]+)\.g([0-9]+)", re.ASCII)
MAX_WIRED = 256  # devices of a cluster with single wires: its routes are searched for, not computed


@dataclass(frozen=True, slots=True)
class Built:
    """What `Cluster` is made of."""

    classes: tuple[DeviceClass, ...]
    nodes: tuple[NodeGroup, ...]
    network: tuple[Tier, ...]
    wires: tuple[Wire, ...]
    levels: tuple[Level, ...]


def assemble_cluster(spec: ClusterSpec, source: Source) -> Built:
    """The parts of the cluster that a file describes.

    Raises:
        ClusterError: what should be linked is not, switches do not fit the nodes, or wires end nowhere.
    """
    classes: list[DeviceClass] = []
    nodes = []
    for place, node in enumerate(spec.nodes):
        if node.devices > 1 and node.link is None and (spec.links is None or node.parts):
            raise ClusterError(
                f"{source.where(('nodes', place))}: {node.devices} devices in a node, but no link between them",
                mend="Add `link: PRESET`, for instance nvlink3 or pcie4",
            )
        device, count = node.device.build(), node.count * node.devices
        known = next((place for place, entry in enumerate(classes) if entry.device == device), len(classes))
        if known == len(classes):
            classes.append(DeviceClass(device, count))
        else:
            classes[known] = DeviceClass(device, classes[known].count + count)
        nodes.append(_node(node, known, spec.network))
    network = _network(spec, source, nodes)
    wires = tuple(_wires(spec, source, nodes))
    return Built(tuple(classes), tuple(nodes), network, wires, levels_of(nodes, network, tuple(classes)))


def _node(node: NodeSpec, device_class: int, network: NetworkSpec | None) -> NodeGroup:
    kind = "core" if node.device.build().kind == "cpu" else "gpu"
    inside: list[Level] = []
    around, link = node.devices, node.link
    for place, part in enumerate(node.parts or ()):
        assert link is not None, "checked by `built`"
        name = part.name or ("part" if place == 0 else f"part{place + 1}")
        inside.append(Level(name, around // part.devices, link.build(part.devices)))
        around, link = part.devices, part.link
    if around > 1 and link is not None:
        inside.append(Level(kind, around, link.build()))
    if network is None:
        return NodeGroup(node.count, node.devices, device_class, tuple(inside))
    ports = network.ports_of(node.devices)
    uplink = ports * network.build().bandwidth_bytes_per_s
    return NodeGroup(node.count, node.devices, device_class, tuple(inside), uplink, ports)


def _network(spec: ClusterSpec, source: Source, nodes: list[NodeGroup]) -> tuple[Tier, ...]:
    """Outer to inner; nothing where there is one node."""
    count = sum(node.count for node in nodes)
    if count == 1:
        return ()
    if spec.network is None:
        if spec.links is not None:
            return ()
        raise ClusterError(
            f"{source.where(('nodes',))}: {count} nodes, but no network between them",
            mend="Add `network: PRESET`, for instance ib-hdr or ethernet-25g",
        )
    link = spec.network.build()
    rate = min(node.uplink_bytes_per_s / node.devices for node in nodes)
    tiers = [Tier("switch", count, 1.0, Link(link.name, rate, link.latency_s))]
    below, share, latency_s = 1, 1.0, link.latency_s
    for place, switch in enumerate(spec.network.switches or ()):
        if switch.nodes <= below or switch.nodes % below or count % switch.nodes:
            raise ClusterError(
                f"{source.where(('network', 'switches', place))}: switches of {switch.nodes} nodes, {below} below "
                f"them, {count} in all",
                "Allowed: each number divides the next, and the last one all nodes",
                "Write switches from the nodes up",
            )
        tiers[0] = Tier(switch.name or SWITCHES[place], switch.nodes, share, Link(link.name, rate * share, latency_s))
        below, share = switch.nodes, share / switch.oversubscription
        latency_s = max(latency_s, switch.latency or 0.0)
        if switch.nodes < count:
            tiers.insert(0, Tier("switch", count, share, Link(link.name, rate * share, latency_s)))
    return tuple(tiers)


def _wires(spec: ClusterSpec, source: Source, nodes: list[NodeGroup]) -> Iterator[Wire]:
    """Each single link, `n*` written out.

    Raises:
        ClusterError: an end that is no device, or more devices than routes are searched for.
    """
    if spec.links is None:
        return
    devices = [group.devices for group in nodes for _ in range(group.count)]
    if sum(devices) > MAX_WIRED:
        raise ClusterError(
            f"{source.where(('links',))}: single links in a cluster of {sum(devices)} devices",
            f"Allowed: up to {MAX_WIRED} devices",
            "Describe equal nodes by `link` and `parts`, and the network by `switches`",
        )
    for place, wire in enumerate(spec.links):
        where = source.where(("links", place, "between"))
        every = any(end.startswith("n*.") for end in wire.between)
        for node in range(len(devices)) if every else (None,):
            ends = [_end(end, node, devices, where) for end in wire.between]
            yield Wire(ends[0], ends[1], wire.link.build())


def _end(end: str, every: int | None, devices: Sequence[int], where: str) -> str:
    found = DEVICE_END.fullmatch(end)
    if found is None:
        return end if every is None else f"n{every}.{end}"  # a switch; with n* one in each node
    node = every if found[1] == "*" else int(found[1])
    assert node is not None, "n* is written out"
    if node >= len(devices) or int(found[2]) >= devices[node]:
        raise ClusterError(
            f"{where}: there is no device {end}",
            f"Nodes are n0 to n{len(devices) - 1}, devices of a node g0 to g{max(devices) - 1}",
        )
    return f"n{node}.g{int(found[2])}"


def levels_of(nodes: Sequence[NodeGroup], network: Sequence[Tier], classes: Sequence[DeviceClass]) -> tuple[Level, ...]:
    """The levels with more than one member, outer to inner; unequal nodes are cut into parts of equal size.

    Of unequal links the slowest counts. Switches and parts are levels where all nodes are equal in devices.
    """
    part = math.gcd(*(node.devices for node in nodes))
    count = sum(node.count * node.devices for node in nodes) // part
    equal = all(node.devices == part for node in nodes)
    levels = []
    if count > 1:
        tiers = list(network) if equal else list(network[:1])
        for tier, below in itertools.zip_longest(tiers, tiers[1:]):
            size = tier.nodes // below.nodes if below else (tier.nodes if equal else count)
            levels.append(Level(below.name if below else "node", size, tier.link))
        if not tiers:  # wires alone
            levels.append(Level("node", count, Link("wires", math.inf, 0.0)))
    kind = "core" if {entry.device.kind for entry in classes} == {"cpu"} else "gpu"
    insides = [node.inside for node in nodes]
    if equal and len({tuple((level.name, level.size) for level in inside) for inside in insides}) == 1:
        for place, level in enumerate(insides[0]):
            levels.append(Level(level.name, level.size, _slowest([inside[place].link for inside in insides])))
        if not insides[0] and part > 1:
            levels.append(Level(kind, part, Link("wires", math.inf, 0.0)))
    elif part > 1:
        links = [level.link for inside in insides for level in inside] or [Link("wires", math.inf, 0.0)]
        levels.append(Level(kind, part, _slowest(links)))
    return _named_apart(level for level in levels if level.size > 1)


def _named_apart(levels: Iterator[Level]) -> tuple[Level, ...]:
    """Levels become mesh axes: no two with one name."""
    found: list[Level] = []
    taken: Counter[str] = Counter()
    for level in levels:
        taken[level.name] += 1
        name = level.name if taken[level.name] == 1 else f"{level.name}_{taken[level.name]}"
        found.append(Level(name, level.size, level.link))
    return tuple(found)


def _slowest(links: list[Link]) -> Link:
    """A collective waits for the slowest: least bandwidth, most latency."""
    if len(set(links)) == 1:
        return links[0]
    names = "+".join(sorted({link.name for link in links}))
    return Link(names, min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links))


def links_of(spec: ClusterSpec) -> Iterator[tuple[tuple[str | int, ...], LinkSpec | NetworkSpec]]:
    """Every link that the file describes, with its place."""
    for place, node in enumerate(spec.nodes):
        if node.link is not None:
            yield ("nodes", place, "link"), node.link
        for inner, part in enumerate(node.parts or ()):
            yield ("nodes", place, "parts", inner, "link"), part.link
    if spec.network is not None:
        yield ("network",), spec.network
    for place, wire in enumerate(spec.links or ()):
        yield ("links", place, "link"), wire.link
