"""The meshes that a cluster allows: its levels as axes, or cut and put together. Entry point: `candidate_meshes`."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, replace

from ir.dims import divisors
from ir.errors import ClusterError
from ir.mesh import Axis, Mesh
from pdv.cluster.description import Cluster, Level, Link, Route
from pdv.cluster.routing.route import find_route

Sizes = tuple[tuple[str, int], ...]  # axes by name and size, slow to fast


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """A mesh, and for each of its axes the route of its groups: of several kinds the slowest one's."""

    mesh: Mesh
    routes: tuple[Route, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """The α and β of each axis."""
        return tuple(route.link for route in self.routes)


def candidate_meshes(cluster: Cluster, max_axes: int = 3, *, mirrored: bool = True) -> tuple[MeshCandidate, ...]:
    """The pinned mesh alone, or every mesh of at most `max_axes` axes: fewest axes first, then by sizes.

    One axis over everything; the levels as axes, each whole or as two axes for each n = outer * inner with both above
    one, neighbouring levels put together where there are more of them than axes; and, on nodes joined by a network,
    axes whose border lies inside a node. Unless ``mirrored``, a level whose parts all see the same links is two axes in
    one order: the other has the same plans under other names.
    """
    check_pinned_mesh(cluster, cluster.name)
    if cluster.mesh is not None:
        return (_with_routes(cluster, cluster.mesh),)
    levels = tuple((level.name, level.size) for level in cluster.levels)
    alike = not mirrored and _levels_are_even(cluster)
    meshes = [_with_routes(cluster, sizes) for sizes in _ways(levels, max_axes, alike=alike)]
    return tuple(sorted(meshes, key=lambda candidate: (len(candidate.routes), candidate.mesh.shape)))


def part_meshes(cluster: Cluster, devices: int, max_axes: int = 3, *, mirrored: bool = True) -> tuple[Mesh, ...]:
    """The meshes of each run of so many devices, as ``candidate_meshes``; none where levels do not tile such a run."""
    levels: list[tuple[str, int]] = []
    left = devices
    for level in reversed(cluster.levels):
        size = min(left, level.size)
        if left % size or level.size % size:
            return ()
        levels.insert(0, (level.name, size))
        left //= size
        if left == 1:
            break
    if left > 1:
        return ()
    ways = _ways(tuple(levels), max_axes, alike=not mirrored and _levels_are_even(cluster))
    meshes = [Mesh(tuple(Axis(name, size) for name, size in sizes)) for sizes in ways]
    return tuple(sorted(meshes, key=lambda mesh: (len(mesh.axes), mesh.shape)))


def _ways(levels: Sizes, max_axes: int, *, alike: bool = False) -> list[Sizes]:
    """Every mesh over some levels, each shape once; where parts of a level are ``alike``, it is halved in one order."""
    ways: list[Sizes] = []
    for merged in _merge(levels, max(2, max_axes)):
        each = [[(one,), *_halve(*one, ordered=alike and one in levels)] for one in merged]
        for combination in itertools.product(*each):
            sizes = tuple(itertools.chain.from_iterable(combination))
            if len(sizes) <= max(max_axes, min(2, len(levels))):
                ways.append(sizes)
    if len(levels) > 1:
        devices = math.prod(size for _, size in levels)
        ways += [*_group(levels, devices), ((levels[-1][0], devices),)]
    found: dict[tuple[int, ...], Sizes] = {}
    for sizes in ways:
        found.setdefault(tuple(size for _, size in sizes), sizes)
    return list(found.values())


def _levels_are_even(cluster: Cluster) -> bool:
    """Whether any two parts of a level see the same links, and lie as they are numbered."""
    return cluster.is_uniform and not cluster.places


def check_pinned_mesh(cluster: Cluster, where: str) -> None:
    """Whether the pinned mesh, if any, has exactly the cluster's devices; `where` begins the message.

    Raises:
        ClusterError: the sizes multiply to another number.
    """
    if cluster.mesh is None:
        return
    sizes = dict(cluster.mesh)
    if math.prod(sizes.values()) != cluster.num_devices:
        product = " x ".join(str(size) for size in sizes.values()) or "no axis"
        raise ClusterError(
            f"{where}: the mesh ({product} = {math.prod(sizes.values())} devices) does not fit the cluster's "
            f"{cluster.num_devices} devices",
            mend="Choose axis sizes that multiply to it, or leave `mesh` out",
        )


def _merge(named: Sizes, max_axes: int) -> list[Sizes]:
    """The levels; where there are more than axes, every way to put neighbours together, named by the innermost."""
    if len(named) <= max_axes:
        return [named]
    ways = []
    for borders in itertools.combinations(range(1, len(named)), max_axes - 1):
        parts = [named[start:stop] for start, stop in itertools.pairwise((0, *borders, len(named)))]
        ways.append(tuple((part[-1][0], math.prod(size for _, size in part)) for part in parts))
    return ways


def _halve(name: str, size: int, *, ordered: bool) -> list[Sizes]:
    """A level as two axes, outer first, for every factorization; if ``ordered``, the outer one is no smaller."""
    outers = (outer for outer in range(2, size // 2 + 1) if size % outer == 0)
    return [
        ((f"{name}0", outer), (f"{name}1", size // outer)) for outer in outers if not ordered or outer * outer >= size
    ]


def _group(levels: Sizes, devices: int) -> list[Sizes]:
    """Two axes whose border lies inside a node: as many groups as it takes, over the network, of equal parts."""
    name, inner = levels[-1]
    parts = divisors(inner)[1:-1]
    return [(("group", devices // size), (name, size)) for size in parts]


def _with_routes(cluster: Cluster, sizes: Sizes) -> MeshCandidate:
    """The axes, each with the route of its slowest group: devices are numbered node by node."""
    routes = []
    stride = cluster.num_devices
    for _, size in sizes:
        span, stride = stride, stride // size
        routes.append(axis_route(cluster, stride, span))
    return MeshCandidate(Mesh(tuple(Axis(name, size) for name, size in sizes)), tuple(routes))


def with_wired_links(cluster: Cluster) -> Cluster:
    """The cluster with the links of its levels as routes over its wires find them."""
    levels, span = [], cluster.num_devices
    for level in cluster.levels:
        link = axis_route(cluster, span // level.size, span).link
        levels.append(Level(level.name, level.size, link))
        span //= level.size
    return replace(cluster, levels=tuple(levels))


def axis_route(cluster: Cluster, stride: int, span: int) -> Route:
    """The slowest route among the groups {start, start + stride, ...} of `span` devices that tile the cluster."""
    blocks = range(0, cluster.num_devices, span) if stride < span else range(1)
    starts = [block + offset for block in blocks for offset in range(stride)]
    if _all_alike(cluster, stride, span):
        starts = starts[:1]
    routes = (find_route(cluster, range(start, min(start + span, cluster.num_devices), stride)) for start in starts)
    return min(routes, key=lambda route: (route.link.bandwidth_bytes_per_s, -route.link.latency_s))


def _all_alike(cluster: Cluster, stride: int, span: int) -> bool:
    """Whether every group of the axis lies alike: equal nodes, and no part of the cluster is cut askew."""
    if not cluster.is_uniform:
        return stride >= span
    (group,) = cluster.nodes
    parts = [group.devices * tier.nodes for tier in cluster.network]
    parts += itertools.accumulate((level.size for level in reversed(group.inside)), operator.mul)
    return all(stride % part == 0 or (part % stride == 0 and (part % span == 0 or span % part == 0)) for part in parts)
