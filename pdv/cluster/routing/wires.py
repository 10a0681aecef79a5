"""Routes where single wires join devices: rings and paths, searched for in a graph.

Entry points: `wired_route`, and `check_reached`, what a cluster with wires must be.

Vertices are devices, switches, and the joints of the tree (what joins a node's devices, a node's ports, switches of the
network). A collective runs in rings: the widest ring through all members is taken, then the widest in what is left of
the links, and so on, as NCCL does; an exchange of all with all takes the widest path of each pair. All other groups
like it, which are its translations (ranks + t), load the same links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ir.errors import ClusterError
from pdv.cluster.description import Cluster, Hop, Link, Route
from pdv.cluster.routing.rings import PORT, Edge, LinkGraph, Ring, exchange_loads, rings_of

Uplink = Callable[[Sequence[str], str, str, Link, float], None]


def check_reached(cluster: Cluster, where: str) -> None:
    """Whether links lead from the first device to all others; `where` begins the message.

    Raises:
        ClusterError: a device that no link reaches.
    """
    graph, devices = graph_of(cluster), devices_of(cluster)
    reached, todo = {devices[0]}, [devices[0]]
    while todo:
        for other in graph.out.get(todo.pop(), []):
            if other not in reached:
                reached.add(other)
                todo.append(other)
    alone = [device for device in devices if device not in reached]
    if alone:
        raise ClusterError(
            f"{where}: no way from {devices[0]} to {alone[0]}" + (f" and {len(alone) - 1} more" if alone[1:] else ""),
            mend="Add the links that join them, or a `link` in the node and a `network` between nodes",
        )


def wired_route(cluster: Cluster, ranks: tuple[int, ...], nodes: int) -> Route:
    """The route of a group of several devices."""
    graph, devices = graph_of(cluster), devices_of(cluster)
    groups = [tuple(devices[rank] for rank in group) for group in _translations(ranks, devices)]
    traffic = _traffic(cluster, tuple(sorted(groups)))
    rings, sent = traffic.rings[groups[0]], traffic.exchanges[groups[0]]
    used = sorted({edge for ring in rings for edge in ring.edges})
    share = min(1.0, *(graph.capacity[edge] / traffic.load[edge] for edge in used))
    names = Counter(name for edge in used if (name := graph.names[edge]))
    link = Link(
        min(names, key=lambda name: (-names[name], name)),
        share * sum(ring.rate for ring in rings),
        rings[0].step_s,
    )
    resources = tuple(sorted({f"{min(edge)}-{max(edge)}:{graph.names[edge]}" for edge in used if graph.names[edge]}))
    slowest = max(traffic.exchange_load[edge] / graph.capacity[edge] for edge in sent)
    exchange = (len(ranks) - 1) / len(ranks) / slowest
    return Route(link, resources, nodes, (Hop(len(ranks), link, exchange),))


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What groups that run together put on the links: rings and their bytes/s, exchanges in units of one device's."""

    rings: Mapping[tuple[str, ...], tuple[Ring, ...]]
    load: Mapping[Edge, float]
    exchanges: Mapping[tuple[str, ...], Mapping[Edge, float]]
    exchange_load: Mapping[Edge, float]


@lru_cache(maxsize=64)
def _traffic(cluster: Cluster, groups: tuple[tuple[str, ...], ...]) -> _Traffic:
    graph = graph_of(cluster)
    rings = {group: rings_of(_fair(graph, cluster, group), group) for group in groups}
    load: dict[Edge, float] = {}
    for found in rings.values():
        for ring in found:
            for edge, times in ring.edges.items():
                load[edge] = load.get(edge, 0.0) + ring.rate * times
    exchanges = dict(zip(groups, exchange_loads(graph, groups), strict=True))
    exchange_load: dict[Edge, float] = {}
    for sent in exchanges.values():
        for edge, share in sent.items():
            exchange_load[edge] = exchange_load.get(edge, 0.0) + share
    return _Traffic(rings, load, exchanges, exchange_load)


def _fair(graph: LinkGraph, cluster: Cluster, group: Sequence[str]) -> LinkGraph:
    """The graph with the group's share of each node's network ports, so that its rings do not count on more."""
    members = Counter(device.partition(".")[0] for device in group)
    if len(members) == 1:
        return graph
    devices = Counter(device.partition(".")[0] for device in devices_of(cluster))
    capacity = dict(graph.capacity)
    for edge in capacity:
        for end in edge:
            node, _, inner = end.partition(".")
            if inner in {f"{PORT}^", f"{PORT}v"} and node in members and graph.names[edge]:
                capacity[edge] *= members[node] / devices[node]
    return replace(graph, capacity=capacity)


@lru_cache(maxsize=8)
def graph_of(cluster: Cluster) -> LinkGraph:
    """The tree of the cluster and its wires, as one graph.

    A joint that shares an uplink has a vertex for each direction, so that no path turns round in it.
    """
    devices = {device: number for number, device in enumerate(devices_of(cluster))}
    graph = LinkGraph(devices, {}, {}, {}, {})

    def add(start: str, stop: str, rate: float, latency_s: float, name: str) -> None:
        edge = (start, stop)
        if edge not in graph.capacity:
            graph.out.setdefault(start, []).append(stop)
            graph.capacity[edge] = 0.0
        graph.capacity[edge] += rate
        graph.latency_s[edge], graph.names[edge] = latency_s, name

    def uplink(members: Sequence[str], port: str, joint: str, link: Link, rate: float) -> None:
        if len(members) == 1:
            add(members[0], joint, rate, link.latency_s / 2, link.name)
            add(joint, members[0], rate, link.latency_s / 2, link.name)
            return
        for member in members:
            add(member, f"{port}^", math.inf, 0.0, "")
            add(f"{port}v", member, math.inf, 0.0, "")
        add(f"{port}^", joint, rate, link.latency_s / 2, link.name)
        add(joint, f"{port}v", rate, link.latency_s / 2, link.name)

    below: list[list[str]] = []  # devices of each part of the next tier
    rates: list[float] = []
    for node, group in enumerate(kind for kind in cluster.nodes for _ in range(kind.count)):
        members = [f"n{node}.g{place}" for place in range(group.devices)]
        size = group.devices
        for depth, level in enumerate(group.inside):
            around, size = size, size // level.size
            for part in range(group.devices // size):
                some = members[part * size : (part + 1) * size]
                joint = f"n{node}.joint{depth}.{part * size // around}"
                uplink(some, f"n{node}.{level.name}{part}", joint, level.link, level.link.bandwidth_bytes_per_s * size)
        below.append(members)
        rates.append(group.uplink_bytes_per_s)
    _join_network(cluster, below, rates, uplink)
    for wire in cluster.wires:
        add(wire.first, wire.second, wire.link.bandwidth_bytes_per_s, wire.link.latency_s, wire.link.name)
        add(wire.second, wire.first, wire.link.bandwidth_bytes_per_s, wire.link.latency_s, wire.link.name)
    return graph


def _join_network(cluster: Cluster, below: list[list[str]], rates: list[float], uplink: Uplink) -> None:
    """Nodes to the lowest switches, these to the next: each part's uplink is its share of its nodes' ports."""
    ports = [f"n{node}.{PORT}" for node in range(len(below))]
    per_part = 1
    for tier in reversed(cluster.network):
        sums: dict[str, float] = {}
        for part, members in enumerate(below):
            switch = f"{tier.name}{part * per_part // tier.nodes}"
            uplink(members, ports[part], switch, tier.link, rates[part] * tier.share)
            sums[switch] = sums.get(switch, 0.0) + rates[part]
        below, rates, ports, per_part = [[switch] for switch in sums], list(sums.values()), list(sums), tier.nodes


@lru_cache(maxsize=8)
def devices_of(cluster: Cluster) -> tuple[str, ...]:
    """The names of all devices, by place."""
    nodes = (group.devices for group in cluster.nodes for _ in range(group.count))
    names = [f"n{node}.g{index}" for node, devices in enumerate(nodes) for index in range(devices)]
    return tuple(names[cluster.number_at(place)] for place in range(len(names)))


def _translations(ranks: Sequence[int], devices: Sequence[str]) -> list[tuple[int, ...]]:
    """The group itself, then those that tile the rest of the cluster by shifting it, lying in nodes as it does.

    The group alone where they do not tile it: then it is none of a mesh's.
    """

    def nodes(group: Sequence[int]) -> list[bool]:
        names = [devices[rank].partition(".")[0] for rank in group]
        return [name == names[0] for name in names]

    taken, like = set(ranks), nodes(ranks)
    groups = [tuple(ranks)]
    for shift in range(-min(ranks), len(devices) - max(ranks)):
        shifted = tuple(rank + shift for rank in ranks)
        if taken.isdisjoint(shifted) and nodes(shifted) == like:
            groups.append(shifted)
            taken.update(shifted)
    return groups if len(taken) == len(devices) else groups[:1]
