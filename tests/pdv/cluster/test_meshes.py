"""The meshes of a cluster, and the link of each axis."""

from __future__ import annotations

from collections import Counter

import pytest

from ir.errors import ClusterError
from pdv.cluster import Cluster, candidate_meshes, load_cluster
from pdv.cost.comm import AxisLink, axis_link


def cluster(nodes: int, devices: int, mesh: dict[str, int] | None = None) -> Cluster:
    node: dict[str, object] = {"count": nodes, "devices": devices, "device": "a100-80gb-sxm", "link": "nvlink3"}
    if devices == 1:
        del node["link"]
    described = {"nodes": [node], "network": "ib-hdr"} | ({"mesh": mesh} if mesh else {})
    return load_cluster(described)


def names(found: Cluster, max_axes: int = 3) -> list[str]:
    return [str(candidate.mesh) for candidate in candidate_meshes(found, max_axes)]


def test_levels_and_their_halves() -> None:
    two_axes = ["gpu=16", "node=2xgpu=8", "group=4xgpu=4", "group=8xgpu=2"]
    assert names(cluster(2, 8)) == [*two_axes, "node=2xgpu0=2xgpu1=4", "node=2xgpu0=4xgpu1=2"]
    assert names(cluster(2, 8), max_axes=2) == two_axes
    assert len(names(cluster(8, 8), max_axes=4)) == 12
    assert names(cluster(1, 1)) == ["single"]
    assert names(cluster(1, 7)) == ["gpu=7"]
    assert names(cluster(7, 1)) == ["node=7"]


def test_what_differs_in_the_order_of_axes_alone_is_left_out() -> None:
    def once(found: Cluster) -> list[str]:
        return [str(candidate.mesh) for candidate in candidate_meshes(found, 3, mirrored=False)]

    kept = [mesh for mesh in names(cluster(2, 8)) if mesh != "node=2xgpu0=2xgpu1=4"]
    assert once(cluster(2, 8)) == kept  # of axes over the network and inside a node neither can stand for the other
    wired = {
        "nodes": [{"count": 1, "devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}],
        "links": [{"between": ["n0.g0", "n0.g1"], "link": "nvlink4"}],
    }
    assert once(cluster(1, 8)) == ["gpu=8", "gpu0=4xgpu1=2"]
    assert once(load_cluster(wired)) == names(load_cluster(wired)) == ["gpu=8", "gpu0=2xgpu1=4", "gpu0=4xgpu1=2"]


@pytest.mark.parametrize("shape", [(2, 8), (8, 8)])
def test_meshes_that_are_left_out_have_the_links_of_one_that_is_kept(shape: tuple[int, int]) -> None:
    found = cluster(*shape)

    def links(*, mirrored: bool) -> list[Counter[AxisLink]]:
        each = candidate_meshes(found, 3, mirrored=mirrored)
        pairs = (zip(one.mesh.shape, one.routes, strict=True) for one in each)
        return [Counter(axis_link(size, route) for size, route in of) for of in pairs]

    assert len(links(mirrored=False)) < len(links(mirrored=True))
    assert all(one in links(mirrored=False) for one in links(mirrored=True))


def test_every_mesh_has_all_devices_and_a_link_for_each_axis() -> None:
    found = cluster(4, 8)
    for candidate in candidate_meshes(found, 4):
        assert candidate.mesh.num_devices == 32
        slow = [axis.name.startswith(("node", "group")) or axis.size == 32 for axis in candidate.mesh.axes]
        assert [link.name == "ib-hdr" for link in candidate.links] == slow


@pytest.mark.parametrize(
    ("mesh", "links"),
    [
        ({"dp": 2, "tp": 8}, ["ib-hdr", "nvlink3"]),
        ({"dp": 4, "tp": 4}, ["ib-hdr", "nvlink3"]),  # crosses the node: the slow link counts
        ({"pp": 2, "dp": 2, "tp": 4}, ["ib-hdr", "nvlink3", "nvlink3"]),
        ({"all": 16}, ["ib-hdr"]),
        ({"one": 1, "all": 16}, ["none", "ib-hdr"]),
    ],
)
def test_pinned(mesh: dict[str, int], links: list[str]) -> None:
    (candidate,) = candidate_meshes(cluster(2, 8, mesh))
    assert [axis.name for axis in candidate.mesh.axes] == list(mesh)
    assert [link.name for link in candidate.links] == links


@pytest.mark.parametrize(
    ("mesh", "gigabytes"),
    [
        ({"all": 16}, [200]),  # a ring over whole nodes has all eight ports of a node
        ({"dp": 2, "tp": 8}, [25, 212]),  # one member in a node: its share of the ports
        ({"dp": 4, "tp": 4}, [50, 212]),
        ({"dp": 8, "tp": 2}, [100, 212]),
        ({"fast": 8, "slow": 2}, [100, 212]),
    ],
)
def test_a_group_has_the_ports_of_all_its_members_in_a_node(mesh: dict[str, int], gigabytes: list[float]) -> None:
    (candidate,) = candidate_meshes(cluster(2, 8, mesh))
    assert [link.bandwidth_bytes_per_s / 1e9 for link in candidate.links] == pytest.approx(gigabytes)


def test_a_pin_from_outside_is_checked_too() -> None:
    with pytest.raises(ClusterError, match="does not fit"):
        candidate_meshes(cluster(2, 8).with_mesh({"x": 3}))
