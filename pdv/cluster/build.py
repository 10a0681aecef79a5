"""From a checked file to nodes, network, classes and levels. Entry point: `built`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ir.errors import ClusterError
from pdv.cluster.description import DeviceClass, Level, Link, NodeGroup, Tier
from pdv.cluster.schema import ClusterSpec, NetworkSpec, NodeSpec
from pdv.cluster.source import Source


@dataclass(frozen=True, slots=True)
class Built:
    """What `Cluster` is made of."""

    classes: tuple[DeviceClass, ...]
    nodes: tuple[NodeGroup, ...]
    network: tuple[Tier, ...]
    levels: tuple[Level, ...]


def built(spec: ClusterSpec, source: Source) -> Built:
    """The parts of the cluster that a file describes.

    Raises:
        ClusterError: several nodes without a network.
    """
    classes: list[DeviceClass] = []
    nodes = []
    for node in spec.nodes:
        device, count = node.device.build(), node.count * node.devices
        known = next((place for place, entry in enumerate(classes) if entry.device == device), len(classes))
        if known == len(classes):
            classes.append(DeviceClass(device, count))
        else:
            classes[known] = DeviceClass(device, classes[known].count + count)
        nodes.append(_node(node, known, spec.network))
    network = _network(spec, source, nodes)
    levels = _levels(spec, nodes, network)
    return Built(tuple(classes), tuple(nodes), network, levels)


def _node(node: NodeSpec, device_class: int, network: NetworkSpec | None) -> NodeGroup:
    kind = "core" if node.device.build().kind == "cpu" else "gpu"
    inside: tuple[Level, ...] = ()
    if node.devices > 1:
        assert node.link is not None, "checked by the schema"
        inside = (Level(kind, node.devices, node.link.build()),)
    if network is None:
        return NodeGroup(node.count, node.devices, device_class, inside)
    ports = network.ports_of(node.devices)
    uplink = ports * network.build().bandwidth_bytes_per_s
    return NodeGroup(node.count, node.devices, device_class, inside, uplink, ports)


def _network(spec: ClusterSpec, source: Source, nodes: list[NodeGroup]) -> tuple[Tier, ...]:
    """Outer to inner; nothing where there is one node."""
    count = sum(node.count for node in nodes)
    if count == 1:
        return ()
    if spec.network is None:
        raise ClusterError(
            f"{source.where(('nodes',))}: {count} nodes, but no network between them",
            mend="Add `network: PRESET`, for instance ib-hdr or ethernet-25g",
        )
    link = spec.network.build()
    rate = min(node.uplink_bytes_per_s / node.devices for node in nodes)
    return (Tier("node", count, 1.0, Link(link.name, rate, link.latency_s)),)


def _levels(spec: ClusterSpec, nodes: list[NodeGroup], network: tuple[Tier, ...]) -> tuple[Level, ...]:
    """The levels with more than one member, outer to inner; unequal nodes are cut into parts of equal size.

    Of unequal links the slowest counts.
    """
    part = math.gcd(*(node.devices for node in nodes))
    count = sum(node.count * node.devices for node in nodes) // part
    levels = []
    if network and count > 1:
        levels.append(Level("node", count, network[-1].link))
    if part > 1:
        kinds = {spec_node.device.build().kind for spec_node in spec.nodes}
        links = [node.inside[-1].link for node in nodes]
        levels.append(Level("core" if kinds == {"cpu"} else "gpu", part, _slowest(links)))
    return tuple(levels)


def _slowest(links: list[Link]) -> Link:
    """A collective waits for the slowest: least bandwidth, most latency."""
    if len(set(links)) == 1:
        return links[0]
    names = "+".join(sorted({link.name for link in links}))
    return Link(names, min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links))
