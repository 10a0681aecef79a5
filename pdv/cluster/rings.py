"""Rings and pairwise exchange in a graph of links. Entry points: `rings_of`, `exchange_rate`."""

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
MAX_PERMUTED = 6  # members whose every order is tried; more are put in order greedily
LEAST_RING = 0.05  # of the first ring's rate: a thinner one is not worth its steps


@dataclass(frozen=True, slots=True)
class Graph:
    """Directed edges by start, with bytes/s and seconds of each; and the link's name of an edge ("": not a link)."""

    devices: tuple[str, ...]
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


def rings_of(graph: Graph, members: Sequence[str]) -> tuple[Ring, ...]:
    """The widest ring through all members, then the widest in what it leaves, while that is worth it."""
    left = dict(graph.capacity)
    rings: list[Ring] = []
    while len(rings) < MAX_RINGS:
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


def exchange_rate(graph: Graph, groups: Sequence[Sequence[str]]) -> float:
    """Bytes/s that a device sends while all members of each group send to all others, each pair by its widest path."""
    load: dict[Edge, float] = {}
    own: set[Edge] = set()
    size = len(groups[0])
    for place, group in enumerate(groups):
        for start in group:
            paths = _paths(graph, graph.capacity, start, group)
            for stop in group:
                if stop != start:
                    for edge in paths[stop].edges:
                        load[edge] = load.get(edge, 0.0) + 1 / size
                        if place == 0:
                            own.add(edge)
    return (size - 1) / size / max(load[edge] / graph.capacity[edge] for edge in own)


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
    for start in members if len(members) <= 16 else members[:1]:
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


def _paths(graph: Graph, left: Mapping[Edge, float], start: str, stops: Sequence[str]) -> dict[str, _Path]:
    """The widest paths to `stops`; through other devices, which would have to forward, only where no other leads."""
    found = _widest(graph, left, start, forward=False)
    if all(stop in found for stop in stops):
        return found
    return _widest(graph, left, start, forward=True) | found


def _widest(graph: Graph, left: Mapping[Edge, float], start: str, *, forward: bool) -> dict[str, _Path]:
    """The widest path to each vertex that is reached at all, of the equally wide the one with fewest edges.

    What stays in a node does not go out to its network and back.
    """
    found: dict[str, _Path] = {}
    home = f"{start.partition('.')[0]}.{PORT}v"
    queue: list[tuple[float, int, str, tuple[Edge, ...]]] = [(-math.inf, 0, start, ())]
    while queue:
        width, length, vertex, edges = heapq.heappop(queue)
        if vertex in found:
            continue
        found[vertex] = _Path(-width, edges)
        if vertex in graph.devices and vertex != start and not forward:
            continue
        for other in graph.out.get(vertex, ()):
            if other not in found and other != home and (room := min(-width, left[vertex, other])) > 0:
                heapq.heappush(queue, (-room, length + 1, other, (*edges, (vertex, other))))
    return found
