"""Which links a group of devices loads, and what is left of each for it. Entry point: `find_route`.

A cluster is a tree: devices below groups inside a node, nodes below switches. A part of the tree with d devices and an
uplink of C bytes/s, of which m are members of a group that reaches beyond the part, leaves C · m / d to that group
while the d / m groups like it run too: a ring enters and leaves each part once, and the groups share the uplink. The
slowest part decides. So a ring over whole nodes has all their network ports, and one with a member in each node has
one device's share. Wires between single devices make it a graph: `pdv.cluster.routing.wires`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from pdv.cluster.description import Cluster, Hop, Level, Link, NodeGroup, Route
from pdv.cluster.routing.wires import wired_route

REMEMBERED = 1 << 14  # routes: simulations ask for the same again
IN_ONE_DEVICE = Link("none", math.inf, 0.0)  # a group of one sends nothing


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A level that the group crosses: the uplinks it uses, as (name, bandwidth left to the group), and parts."""

    name: str
    latency_s: float
    parts: int
    uplinks: tuple[tuple[str, float], ...]


def find_route(cluster: Cluster, ranks: Sequence[int]) -> Route:
    """What a collective among devices at distinct places runs over, while all other groups like it run too.

    Of two devices: what a transfer from one to the other runs over, while their neighbours do the like.
    """
    return _route_of(cluster, tuple(ranks))


@lru_cache(maxsize=REMEMBERED)
def _route_of(cluster: Cluster, ranks: tuple[int, ...]) -> Route:
    members = sorted(map(cluster.number_at, ranks))
    assert len(set(members)) == len(members) > 0, f"ranks {ranks!r} are empty or repeated"
    places = _Places(cluster)
    by_node = {node: list(found) for node, found in groupby(members, key=places.node_of)}
    if len(members) == 1:
        return Route(IN_ONE_DEVICE, (), 1, ())
    if cluster.wires:
        return wired_route(cluster, ranks, len(by_node))
    crossings = [*_network_crossings(cluster, places, by_node), *_inside_crossings(cluster, places, by_node)]
    return _route(crossings, len(by_node))


def _route(crossings: Sequence[_Crossing], nodes: int) -> Route:
    """Of the levels crossed, outer to inner."""
    stages: list[Hop] = []
    below = 1  # members of the group below one part of the stage
    for crossing in reversed(crossings):
        ring = min(rate for _, rate in crossing.uplinks)
        stages.append(Hop(crossing.parts, Link(crossing.name, ring / below, crossing.latency_s)))
        below *= crossing.parts
    bandwidth = min(rate for crossing in crossings for _, rate in crossing.uplinks)
    latency = max(crossing.latency_s for crossing in crossings)
    resources = tuple(name for crossing in crossings for name, _ in crossing.uplinks)
    return Route(Link(crossings[0].name, bandwidth, latency), resources, nodes, tuple(reversed(stages)))


class _Places:
    """Where devices are: nodes by number, with prefix sums of devices and of network ports."""

    def __init__(self, cluster: Cluster) -> None:
        self.groups = cluster.nodes
        self.node_ends = list(accumulate(group.count for group in cluster.nodes))
        self.device_ends = list(accumulate(group.count * group.devices for group in cluster.nodes))
        self.port_ends = list(accumulate(group.count * group.uplink_bytes_per_s for group in cluster.nodes))

    def node_of(self, rank: int) -> int:
        """The number of the node of a device."""
        place = bisect.bisect_right(self.device_ends, rank)
        first = self.device_ends[place - 1] if place else 0
        return (self.node_ends[place - 1] if place else 0) + (rank - first) // self.groups[place].devices

    def group_of(self, node: int) -> NodeGroup:
        """What kind of node it is."""
        return self.groups[bisect.bisect_right(self.node_ends, node)]

    def first_device(self, node: int) -> int:
        """The number of the first device of a node (of all devices, for the node after the last)."""
        return self._before(node)[0]

    def between(self, start: int, stop: int) -> tuple[int, float]:
        """Devices, and bytes/s of network ports, of the nodes from `start` to before `stop`."""
        stop = min(stop, self.node_ends[-1])
        (first, first_ports), (last, last_ports) = self._before(start), self._before(stop)
        return last - first, last_ports - first_ports

    def _before(self, node: int) -> tuple[int, float]:
        place = bisect.bisect_right(self.node_ends, node)
        done = self.node_ends[place - 1] if place else 0
        devices = self.device_ends[place - 1] if place else 0
        ports = self.port_ends[place - 1] if place else 0.0
        if place == len(self.groups):
            return devices, ports
        group = self.groups[place]
        return devices + (node - done) * group.devices, ports + (node - done) * group.uplink_bytes_per_s


def _network_crossings(cluster: Cluster, places: _Places, by_node: dict[int, list[int]]) -> list[_Crossing]:
    """The tiers of the network that the group crosses, outer to inner."""
    crossings: list[_Crossing] = []
    carried: list[tuple[str, float]] = []  # uplinks on the way to a higher switch, where nothing branches off
    for place in range(len(cluster.network) - 1, -1, -1) if len(by_node) > 1 else ():
        tier = cluster.network[place]
        below = cluster.network[place + 1].nodes if place + 1 < len(cluster.network) else 1
        parts: dict[int, int] = {}  # part of a switch of this tier -> members
        for node, members in by_node.items():
            parts[node // below] = parts.get(node // below, 0) + len(members)
        if len(parts) == 1:
            break  # all below one part
        for part, inside in parts.items():
            devices, ports = places.between(part * below, (part + 1) * below)
            left = ports * tier.share * inside / devices
            carried += [(name, left) for name in _ports(cluster, places, place, part, by_node)]
        switches = Counter(part * below // tier.nodes for part in parts)
        if max(switches.values()) > 1:
            link = tier.link
            crossings.append(_Crossing(link.name, link.latency_s, max(switches.values()), tuple(carried)))
            carried = []
    return crossings[::-1]


def _ports(cluster: Cluster, places: _Places, tier: int, part: int, by_node: dict[int, list[int]]) -> list[str]:
    """Names of the uplinks of a part: of a node all its ports, or those of the members' rails; of a switch its own."""
    if tier + 1 < len(cluster.network):
        return [f"{cluster.network[tier + 1].name}{part}:{cluster.network[tier].link.name}"]
    port = f"n{part}:{cluster.network[tier].link.name}"
    if not cluster.rails:
        return [port]
    group, first = places.group_of(part), places.first_device(part)
    rails = sorted({(rank - first) * group.ports // group.devices for rank in by_node[part]})
    return [f"{port}.{rail}" for rail in rails]


def _inside_crossings(cluster: Cluster, places: _Places, by_node: dict[int, list[int]]) -> Iterator[_Crossing]:
    """The levels inside nodes that the group crosses. Of unequal nodes those from the innermost are put together."""
    deepest = max(len(group.inside) for group in cluster.nodes)
    for depth in range(-deepest, 0):
        found: list[tuple[Level, int, tuple[tuple[str, float], ...]]] = []
        for node, members in by_node.items():
            group = places.group_of(node)
            if len(members) > 1 and -depth <= len(group.inside):
                found += _crossing_in_node(group, depth, node, [rank - places.first_device(node) for rank in members])
        if found:
            slowest = min(found, key=lambda entry: min(rate for _, rate in entry[2]))[0]
            uplinks = tuple(uplink for *_, some in found for uplink in some)
            latency = max(level.link.latency_s for level, *_ in found)
            yield _Crossing(slowest.link.name, latency, max(parts for _, parts, _ in found), uplinks)


def _crossing_in_node(
    group: NodeGroup, depth: int, node: int, local: Sequence[int]
) -> Iterator[tuple[Level, int, tuple[tuple[str, float], ...]]]:
    """(level, parts, uplinks) if the members with these numbers in the node cross the level at `depth` from inside."""
    level = group.inside[depth]
    below = math.prod(inner.size for inner in group.inside[depth:][1:])
    parts: dict[int, int] = {}
    for index in local:
        parts[index // below] = parts.get(index // below, 0) + 1
    per_joint = Counter(part // level.size for part in parts)
    if max(per_joint.values()) == 1:
        return
    kind = "g" if below == 1 else level.name
    uplinks = tuple(
        (f"n{node}.{kind}{part}:{level.link.name}", level.link.bandwidth_bytes_per_s * members)
        for part, members in parts.items()
        if per_joint[part // level.size] > 1
    )
    yield level, max(per_joint.values()), uplinks
