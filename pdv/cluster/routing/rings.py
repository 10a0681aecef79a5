"""Rings and pairwise exchange in a graph of links. Entry points: `rings_of`, `exchange_loads`."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Edge = tuple[str, str]  # from, to
PORT = "port"  # of a node's network ports; ^ is out, v is in
MAX_RINGS = 6
MANY = 16  # members of a group beyond which two rings are looked for, in fewer orders
MAX_PERMUTED = 6  # members whose every order is tried; more are put in order greedily
LEAST_RING = 0.05  # of the first ring's rate: a thinner one is not worth its steps


@dataclass(frozen=True, slots=True)
class LinkGraph:
    """Directed edges by start, with bytes/s and seconds of each; and the link's name of an edge ("": not a link)."""

    devices: Mapping[str, int]
    out: dict[str, list[str]]
    capacity: dict[Edge, float]
    latency_s: dict[Edge, float]
    names: dict[Edge, str]


@dataclass(frozen=True, slots=True)
class Ring:
    """Bytes/s of one ring, how often it uses each edge, and the latency of its slowest step."""

    rate: float
    edges: Mapping[Edge, int]
    step_s: float


@dataclass(frozen=True, slots=True)
class _Path:
    width: float
    edges: tuple[Edge, ...]


def rings_of(graph: LinkGraph, members: Sequence[str]) -> tuple[Ring, ...]:
    """The widest ring through all members, then the widest in what it leaves, while that is worth it."""
    left = dict(graph.capacity)
    rings: list[Ring] = []
    while len(rings) < (MAX_RINGS if len(members) <= MANY else 2):
        paths = {member: _paths(graph, left, member, members if not rings else ()) for member in members}
        order = _order(members, paths)
        steps = [paths[a].get(b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        if any(step is None for step in steps):
            break
        edges = Counter(edge for step in steps if step for edge in step.edges)
        rate = min(left[edge] / times for edge, times in edges.items())
        if rings and rate < LEAST_RING * rings[0].rate:
            break
        step_s = max(sum(graph.latency_s[edge] for edge in step.edges) for step in steps if step)
        rings.append(Ring(rate, edges, step_s))
        for edge, times in edges.items():
            left[edge] -= rate * times
    assert rings, f"no ring through {members}"
    return tuple(rings)


def exchange_loads(graph: LinkGraph, groups: Sequence[Sequence[str]]) -> list[dict[Edge, float]]:
    """What each group puts on each link while its members send all to all, each pair by its widest path.

    In units of what one device sends.
    """
    loads: list[dict[Edge, float]] = []
    for group in groups:
        load: dict[Edge, float] = {}
        for start in group:
            paths = _paths(graph, graph.capacity, start, group)
            for stop in group:
                for edge in paths[stop].edges if stop != start else ():
                    load[edge] = load.get(edge, 0.0) + 1 / len(group)
        loads.append(load)
    return loads


def _order(members: Sequence[str], paths: Mapping[str, Mapping[str, _Path]]) -> tuple[str, ...]:
    """The order whose narrowest step is widest, then with fewest edges; beyond some members the best of greedy ones."""

    def quality(order: Sequence[str]) -> tuple[float, int]:
        steps = [paths[a].get(b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        if any(step is None for step in steps):
            return (0.0, 0)
        return min(step.width for step in steps if step), -sum(len(step.edges) for step in steps if step)

    first, rest = members[0], members[1:]
    if len(members) <= MAX_PERMUTED:
        return max(((first, *order) for order in itertools.permutations(rest)), key=quality)
    orders = [tuple(members), tuple(reversed(members))]
    for start in members if len(members) <= MANY else members[:1]:
        order, todo = [start], [member for member in members if member != start]
        while todo:
            reach = paths[order[-1]]
            near = max(todo, key=lambda other: _nearness(reach.get(other)))
            order.append(near)
            todo.remove(near)
        orders.append(tuple(order))
    return max(orders, key=quality)


def _nearness(path: _Path | None) -> tuple[float, int]:
    return (0.0, 0) if path is None else (path.width, -len(path.edges))


def _paths(graph: LinkGraph, left: Mapping[Edge, float], start: str, stops: Sequence[str]) -> dict[str, _Path]:
    """The widest paths to `stops`; through other devices, which would have to forward, only where no other leads.

    Without `stops`: to all devices that links reach without forwarding.
    """
    found = _widest(graph, left, start, stops, forward=False)
    if any(stop not in found for stop in stops):
        return _widest(graph, left, start, stops, forward=True) | found
    return found


def _widest(
    graph: LinkGraph, left: Mapping[Edge, float], start: str, stops: Sequence[str], *, forward: bool
) -> dict[str, _Path]:
    """The widest path to each device that is reached at all, of the equally wide the one with fewest edges.

    What stays in a node does not go out to its network and back.
    """
    width: dict[str, float] = {}
    before: dict[str, str] = {}
    home, devices = f"{start.partition('.')[0]}.{PORT}v", graph.devices
    queue: list[tuple[float, int, str, str]] = [(-math.inf, 0, start, start)]
    todo = set(stops) if stops else set(devices)
    while queue and todo:
        room, length, vertex, last = heapq.heappop(queue)
        if vertex in width:
            continue
        width[vertex], before[vertex] = -room, last
        todo.discard(vertex)
        if vertex in devices and vertex != start and not forward:
            continue
        for other in graph.out.get(vertex, ()):
            if other not in width and other != home and (more := min(-room, left[vertex, other])) > 0:
                heapq.heappush(queue, (-more, length + 1, other, vertex))
    reached = stops or tuple(device for device in devices if device in width)
    return {stop: _Path(width[stop], _edges(before, start, stop)) for stop in reached if stop in width}


def _edges(before: Mapping[str, str], start: str, stop: str) -> tuple[Edge, ...]:
    edges: list[Edge] = []
    while stop != start:
        edges.append((before[stop], stop))
        stop = before[stop]
    return tuple(reversed(edges))
