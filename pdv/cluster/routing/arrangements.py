"""Where devices stand in a pipeline: orders in which fast devices or fast links follow each other.

Entry points: `arrangements`, `arranged`. Stages take devices in turn, so that of links only those between neighbours
carry what passes between stages, and of unequal devices those of one kind should follow each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdv.cluster.description import Cluster, following
from pdv.cluster.meshes import with_wired_links
from pdv.cluster.routing.route import find_route

PAIRED = 16  # devices with single links at most, between every two of which a route is looked for
Places = tuple[int, ...]
Rates = dict[tuple[int, int], float]


def arranged(cluster: Cluster, places: Places) -> Cluster:
    """The cluster with its devices, by their numbers as described, at these places."""
    if places == cluster.places:
        return cluster
    found = replace(cluster, places=places)
    return with_wired_links(found) if cluster.wires else found


def arrangements(cluster: Cluster) -> tuple[Cluster, ...]:
    """The cluster as it was described, then others of which a pipeline may be faster; each looks different."""
    listed = tuple(range(cluster.num_devices))
    rates = _rates(cluster) if cluster.wires and cluster.num_devices <= PAIRED else {}
    found: dict[object, Places] = {_seen(cluster, rates, listed): ()}
    for places in (*_by_kind(cluster), *_along_links(rates, cluster.num_devices)):
        found.setdefault(_seen(cluster, rates, places), places)
    return tuple(arranged(cluster, places) for places in found.values())


def _seen(cluster: Cluster, rates: Rates, places: Places) -> object:
    """What plans see of devices at these places: their kinds, and single links."""
    kinds = tuple(map(cluster.class_of, places)) if len(cluster.classes) > 1 else ()
    return kinds, tuple(rates[pair] for pair in itertools.combinations(places, 2)) if rates else ()


def _by_kind(cluster: Cluster) -> Iterator[Places]:
    """Nodes from the last to the first; those of one kind behind each other, either kind first; and either kind around
    the other, so that both ends of the model, which may share a weight and are like no other part, are on one kind.
    """
    if len(cluster.classes) == 1:
        return
    nodes = following(group.devices for group in cluster.nodes for _ in range(group.count))
    together = sorted(nodes, key=lambda node: cluster.class_of(node[0]))
    for order in (nodes[::-1], together, together[::-1]):
        yield tuple(itertools.chain.from_iterable(order))
    numbers = range(cluster.num_devices)
    for kind in range(len(cluster.classes)):
        outer = [number for number in numbers if cluster.class_of(number) == kind]
        inner = [number for number in numbers if cluster.class_of(number) != kind]
        half = len(outer) // 2
        yield (*outer[:half], *inner, *outer[half:])


def _rates(cluster: Cluster) -> Rates:
    """Bytes/s between every two devices, their neighbours sending too."""
    pairs = itertools.permutations(range(cluster.num_devices), 2)
    return {pair: find_route(cluster, pair).link.bandwidth_bytes_per_s for pair in pairs}


def _along_links(rates: Rates, devices: int) -> Iterator[Places]:
    """Parts that fast links join inside, in turn over links that are fast, too; those of large parts first."""
    parts: list[tuple[int, ...]] = [(number,) for number in range(devices)] if rates else []
    found: list[Places] = []
    while len(parts) > 1:
        found.append(tuple(itertools.chain.from_iterable(_chain(parts, rates))))
        parts = _matched(parts, rates)
    return reversed(found)


def _matched(parts: Sequence[tuple[int, ...]], rates: Rates) -> list[tuple[int, ...]]:
    """Two and two as one, those with the fastest links first; none if one is left over."""
    import networkx as nx  # a tenth of a start-up, and few clusters have single links

    graph = nx.Graph()
    for one, other in itertools.combinations(parts, 2):
        graph.add_edge(one, other, weight=-_slowness(one, other, rates))
    pairs = nx.max_weight_matching(graph, maxcardinality=True)
    return sorted(tuple(sorted(one + other)) for one, other in pairs) if 2 * len(pairs) == len(parts) else []


def _chain(parts: Sequence[tuple[int, ...]], rates: Rates) -> list[tuple[int, ...]]:
    """All of them, one after the other, over links that are fast together: a shortest path through all.

    The tour of least weight through them and a vertex that is near to all (greedy, then improved by annealing).
    """
    import networkx as nx

    graph = nx.Graph()
    for one, other in itertools.combinations(parts, 2):
        graph.add_edge(one, other, weight=_slowness(one, other, rates))
    for one in parts:
        graph.add_edge((), one, weight=0.0)
    tour = nx.approximation.greedy_tsp(graph, source=())
    if len(parts) > 2:
        tour = nx.approximation.threshold_accepting_tsp(graph, tour, source=(), seed=0)
    path: list[tuple[int, ...]] = tour[1:-1]
    return path if path[0] < path[-1] else path[::-1]


def _slowness(one: Sequence[int], other: Sequence[int], rates: Rates) -> float:
    """Seconds a byte, of the slowest two devices that stand at one place of both."""
    return max(1.0 / rates[pair] for pair in zip(one, other, strict=True))
