"""The links of a stage's mesh axes: where the devices of a pipeline's stages lie on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ir.mesh import Mesh
from pdv.cluster import Cluster
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import AxisLink, axis_link, calling_s

SAMPLED = 8  # groups of an axis that are looked at; where nodes are equal, the first and the last


@lru_cache(maxsize=256)
def stage_links(cluster: Cluster, mesh: Mesh, stages: int) -> tuple[tuple[AxisLink, ...], ...]:
    """By stage, the link of each axis: that of its slowest group, for all groups wait for each other in the end.

    Stage ``s`` has places ``s n`` to ``(s + 1) n - 1``, row-major over the mesh.
    """
    devices = mesh.num_devices
    first = _of_stage(cluster, mesh, 0)
    if cluster.is_uniform and _of_stage(cluster, mesh, (stages - 1) * devices) == first:
        return (first,) * stages
    return (first, *(_of_stage(cluster, mesh, stage * devices) for stage in range(1, stages)))


def _of_stage(cluster: Cluster, mesh: Mesh, start: int) -> tuple[AxisLink, ...]:
    return tuple(_of_axis(cluster, mesh, position, start) for position in range(len(mesh.axes)))


def _of_axis(cluster: Cluster, mesh: Mesh, position: int, start: int) -> AxisLink:
    size = mesh.axes[position].size
    routes = [find_route(cluster, ranks) for ranks in _groups(cluster, mesh, position, start)]
    slowest = min(routes, key=lambda route: (route.link.bandwidth_bytes_per_s, -route.link.latency_s))
    called_s = calling_s(entry.device for entry in cluster.classes)
    return axis_link(size, slowest, library=cluster.library, called_s=called_s)


def _groups(cluster: Cluster, mesh: Mesh, position: int, start: int) -> Iterator[tuple[int, ...]]:
    """Some groups of an axis: first and last, and where nodes differ more between."""
    size = mesh.axes[position].size
    stride = Mesh(mesh.axes[position + 1 :]).num_devices
    count = mesh.num_devices // size
    wanted = 2 if cluster.is_uniform else SAMPLED
    for index in sorted({place * (count - 1) // max(wanted - 1, 1) for place in range(wanted)}):
        outer, inner = divmod(index, stride)
        base = start + outer * stride * size + inner
        yield tuple(base + step * stride for step in range(size))
