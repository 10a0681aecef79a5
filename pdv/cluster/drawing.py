"""A cluster as a tree of text: switches, nodes, parts, devices, with the rate of each link. Entry point: `drawing`.

What is equal is drawn once and counted. Lines have at most 100 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdv.cluster.description import Cluster, Level, NodeGroup
from pdv.cluster.units import LINK_BANDWIDTH, TIME

COLUMNS = 100
MAX_CHILDREN = 4  # of one kind under one joint; more are counted
MAX_DEVICES = 16  # in one row
MAX_WIRES = 24
BRANCH, LAST, PIPE, SPACE = "├── ", "└── ", "│   ", "    "

Tree = tuple[str, list["Tree"]]  # a line, and what is below it


def drawing(cluster: Cluster) -> str:
    """The cluster as lines."""
    text, children = _root(cluster)
    lines = [text, *_lines(children, ""), *_wires(cluster)]
    return "\n".join(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…" for line in lines)


def _lines(children: Sequence[Tree], indent: str) -> Iterator[str]:
    for place, (text, below) in enumerate(children):
        last = place == len(children) - 1
        yield indent + (LAST if last else BRANCH) + text
        yield from _lines(below, indent + (SPACE if last else PIPE))


def _root(cluster: Cluster) -> Tree:
    if not cluster.network:
        if cluster.num_nodes == 1:
            return _node(cluster, 0, cluster.nodes[0])
        return cluster.name, _some_nodes(cluster, 0, cluster.num_nodes)
    return _switch(cluster, 0, 0)


def _switch(cluster: Cluster, place: int, number: int) -> Tree:
    """A switch of a tier, with the rate of what is below it."""
    tier = cluster.network[place]
    start = number * tier.nodes
    name = tier.name if place == 0 else f"{tier.name}{number}"
    if place + 1 < len(cluster.network):
        below = cluster.network[place + 1]
        count = tier.nodes // below.nodes
        share = f", 1/{1 / tier.share:.3g} of the ports" if tier.share < 1 else ""
        text = f"{name}: {count} {below.name} switches over {tier.link.name}, {_rate(tier.link.bandwidth_bytes_per_s)}"
        drawn = [_switch(cluster, place + 1, start // below.nodes)]
        return f"{text} a device{share}", _more(drawn, count)
    nodes = min(tier.nodes, cluster.num_nodes)
    rails = ", one switch for each port (rails)" if cluster.rails else ""
    text = f"{name}: {nodes} nodes over {tier.link.name}, {TIME.format(tier.link.latency_s)} a step{rails}"
    return text, _some_nodes(cluster, start, start + nodes)


def _more(drawn: list[Tree], count: int) -> list[Tree]:
    left = count - len(drawn)
    return [*drawn, (f"{left} more like it", [])] if left else drawn


def _kinds(cluster: Cluster) -> Iterator[tuple[int, NodeGroup]]:
    """(number, kind) of the first node of each kind."""
    number = 0
    for group in cluster.nodes:
        yield number, group
        number += group.count


def _some_nodes(cluster: Cluster, start: int, stop: int) -> list[Tree]:
    """The first node of each kind between two numbers, and how many more there are."""
    found: list[Tree] = []
    for first, group in _kinds(cluster):
        begin, end = max(first, start), min(first + group.count, stop)
        if begin >= end:
            continue
        found.append(_node(cluster, begin, group))
        if end - begin == 2:
            text, _ = _node(cluster, begin + 1, group)
            found.append((f"{text.partition(':')[0]}: as n{begin}", []))
        elif end - begin > 2:
            found.append((f"n{begin + 1} to n{end - 1}: as n{begin}", []))
    return found


def _node(cluster: Cluster, number: int, group: NodeGroup) -> Tree:
    device = cluster.classes[group.device_class].device
    network = ""
    if group.uplink_bytes_per_s and cluster.network:
        each = _rate(group.uplink_bytes_per_s / group.ports)
        network = f", {group.ports} x {each} to the network" if group.ports > 1 else f", {each} to the network"
    text = f"n{number}: {group.devices} x {device.name}{network}"
    return text, _inside(group.inside, 0, group.devices, number) if group.devices > 1 else []


def _inside(levels: Sequence[Level], first: int, devices: int, node: int) -> list[Tree]:
    """The devices from `first` on, by the levels that join them."""
    if not levels:
        return [(_row(first, devices), [])]
    level, *inner = levels
    rate = f"{level.link.name}, {_rate(level.link.bandwidth_bytes_per_s)} a device, {TIME.format(level.link.latency_s)}"
    if not inner:
        return [(f"{rate}: {_row(first, devices)}", [])]
    size = devices // level.size
    parts: list[Tree] = []
    for part in range(level.size if level.size <= MAX_CHILDREN else 1):
        name, start = f"{level.name}{first // size + part}", first + part * size
        below = _inside(inner, start, size, node)
        if len(below) == 1 and not below[0][1]:
            parts.append((f"{name}: {below[0][0]}", []))
        else:
            parts.append((f"{name}: g{start} to g{start + size - 1}", below))
    return [(f"{rate} between {level.size} {level.name}s", _more(parts, level.size))]


def _row(first: int, devices: int) -> str:
    if devices > MAX_DEVICES:
        return f"g{first} to g{first + devices - 1}"
    return " ".join(f"g{first + place}" for place in range(devices))


def _wires(cluster: Cluster) -> Iterator[str]:
    """Single links, those that every node has told once."""
    told: dict[str, int] = {}
    for wire in cluster.wires:
        (node, _, first), (other, _, second) = wire.first.partition("."), wire.second.partition(".")
        same = bool(first) and node == other and cluster.num_nodes > 1
        ends = f"{first} ── {second}" if same else f"{wire.first} ── {wire.second}"
        text = f"{ends}  {wire.link.name}, {_rate(wire.link.bandwidth_bytes_per_s)}, {TIME.format(wire.link.latency_s)}"
        told[text + ("@" if same else "")] = told.get(text + ("@" if same else ""), 0) + 1
    for place, (text, count) in enumerate(told.items()):
        if place == MAX_WIRES:
            yield f"{len(told) - MAX_WIRES} more links"
            return
        where = f" (in {count} nodes)" if text.endswith("@") else (f" (x {count})" if count > 1 else "")
        yield text.removesuffix("@") + where


def _rate(value: float) -> str:
    return LINK_BANDWIDTH.format(value)
