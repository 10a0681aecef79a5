"""The meshes that a cluster allows: its levels as axes, or each cut into two. Entry point: `candidate_meshes`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ir.errors import ClusterError
from ir.mesh import Axis, Mesh
from pdv.cluster.description import Cluster, Level, Link

IN_ONE_DEVICE = Link("none", math.inf, 0.0)  # an axis of size one sends nothing


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """A mesh, and the link that each of its axes runs over."""

    mesh: Mesh
    links: tuple[Link, ...]


def candidate_meshes(cluster: Cluster, max_axes: int = 3) -> tuple[MeshCandidate, ...]:
    """The pinned mesh alone, or every mesh of at most `max_axes` axes: fewest axes first, then by sizes.

    A level of size n is one axis, or two axes for each n = outer * inner with both above one. On nodes joined by a
    network, parts of nodes may also be grouped across it: an axis of all such parts, and one inside each.
    """
    check_pinned_mesh(cluster, cluster.name)
    if cluster.mesh is not None:
        return (_pinned(cluster, cluster.mesh),)
    choices = [[((level.name, level.size, level.link),), *_halved(level)] for level in cluster.levels]
    meshes = []
    for combination in itertools.product(*choices):
        axes = tuple(itertools.chain.from_iterable(combination))
        if len(axes) <= max(max_axes, len(cluster.levels)):
            mesh = Mesh(tuple(Axis(name, size) for name, size, _ in axes))
            meshes.append(MeshCandidate(mesh, tuple(link for *_, link in axes)))
    meshes += _grouped(cluster)
    return tuple(sorted(meshes, key=lambda candidate: (len(candidate.links), candidate.mesh.shape)))


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


def _halved(level: Level) -> list[tuple[tuple[str, int, Link], ...]]:
    """The level as two axes, outer first, for every factorization."""
    return [
        ((f"{level.name}0", outer, level.link), (f"{level.name}1", level.size // outer, level.link))
        for outer in range(2, level.size // 2 + 1)
        if level.size % outer == 0
    ]


def _grouped(cluster: Cluster) -> list[MeshCandidate]:
    """Two axes whose border lies inside a node: as many groups as it takes, over the network, of equal parts."""
    if len(cluster.levels) != 2:
        return []
    inner = cluster.levels[-1]
    parts = [size for size in range(2, inner.size) if inner.size % size == 0]
    return [_pinned(cluster, (("group", cluster.num_devices // size), (inner.name, size))) for size in parts]


def _pinned(cluster: Cluster, sizes: tuple[tuple[str, int], ...]) -> MeshCandidate:
    """The user's axes, each with the slowest link that it crosses: devices are numbered node by node."""
    links = []
    stride = cluster.num_devices
    for _, size in sizes:
        span, stride = stride, stride // size
        links.append(_slowest_link(cluster, stride, span))
    return MeshCandidate(Mesh(tuple(Axis(name, size) for name, size in sizes)), tuple(links))


def _slowest_link(cluster: Cluster, stride: int, span: int) -> Link:
    """The outermost level that an axis of this stride and span crosses."""
    inside = cluster.num_devices
    for level in cluster.levels:
        inside //= level.size  # devices below one member of this level
        if stride < span and span > inside:
            return level.link
    return IN_ONE_DEVICE
