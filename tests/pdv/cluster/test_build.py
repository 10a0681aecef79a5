"""Parts, switches, rails and presets of nodes, as levels and routes."""

from __future__ import annotations

from typing import Any

import pytest

from ir.errors import ClusterError
from pdv.cluster import Cluster, candidate_meshes, load_cluster
from pdv.cluster.nodes import NODES
from pdv.cluster.routing.route import find_route

PAIRS: dict[str, Any] = {  # Any: YAML
    "devices": 8, "device": "a40", "link": {"preset": "socket", "ports": 1},
    "parts": [
        {"name": "socket", "devices": 4, "link": "pcie4"}, {"name": "pair", "devices": 2, "link": "nvlink3-bridge"},
    ],
}  # fmt: skip


def gigabytes(cluster: Cluster, *ranks: int) -> float:
    return find_route(cluster, ranks).link.bandwidth_bytes_per_s / 1e9


def test_parts_are_levels_and_the_bridge_is_shared() -> None:
    found = load_cluster({"nodes": [PAIRS]})
    assert [(level.name, level.size) for level in found.levels] == [("socket", 2), ("pair", 2), ("gpu", 2)]
    assert gigabytes(found, 0, 1) == 45
    assert gigabytes(found, 0, 2) == 20
    assert gigabytes(found, 0, 4) == pytest.approx(23.5 / 4)  # four pairs like it cross the bridge at once
    assert gigabytes(found, *range(8)) == pytest.approx(23.5)
    assert find_route(found, (0, 4)).resources == ("n0.socket0:socket", "n0.socket1:socket")


def switched(oversubscription: float) -> Cluster:
    switches = [{"nodes": 4, "oversubscription": oversubscription}, {"nodes": 8}]
    network = {"preset": "ib-hdr", "switches": switches}
    return load_cluster({"nodes": [{"count": 16, "preset": "dgx-a100"}], "network": network})


def test_switches_are_levels_and_oversubscription_narrows_them() -> None:
    found = switched(4)
    assert [(level.name, level.size) for level in found.levels] == [("spine", 2), ("leaf", 2), ("node", 4), ("gpu", 8)]
    assert gigabytes(found, 0, 8) == 25  # below one leaf switch
    assert gigabytes(found, 0, 32) == 25 / 4
    assert gigabytes(found, *range(0, 128, 8)) == 25  # four members below each leaf switch
    assert find_route(found, (0, 32)).resources[-2:] == ("leaf0:ib-hdr", "leaf1:ib-hdr")
    even = switched(1)
    assert gigabytes(even, 0, 32) == 25


def test_meshes_of_many_levels_put_neighbours_together() -> None:
    meshes = [str(entry.mesh) for entry in candidate_meshes(switched(2), 2)]
    assert meshes[0] == "gpu=128"
    assert {"spine=2xgpu=64", "leaf=4xgpu=32", "node=16xgpu=8"} <= set(meshes)


def test_rails_are_separate_ports() -> None:
    found = load_cluster({"nodes": [{"count": 2, "preset": "dgx-a100"}]})
    assert found.rails
    assert find_route(found, (0, 8)).resources == ("n0:ib-hdr.0", "n1:ib-hdr.0")
    assert set(find_route(found, (0, 8)).resources).isdisjoint(find_route(found, (1, 9)).resources)


@pytest.mark.parametrize("name", NODES)
def test_every_preset_of_a_node_is_a_cluster_without_warnings(name: str) -> None:
    found = load_cluster({"nodes": [{"preset": name, "count": 2}]})
    assert found.num_devices == 2 * NODES[name].devices
    assert found.warnings == ()
    assert NODES[name].source
    assert Cluster.from_dict(found.as_dict()) == found


def test_a_node_preset_may_be_changed() -> None:
    found = load_cluster({"nodes": [{"preset": "dgx-a100", "devices": 4, "device": "a100-40gb-sxm"}]})
    assert (found.num_devices, found.classes[0].device.name) == (4, "a100-40gb-sxm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [PAIRS | {"parts": [{"devices": 3, "link": "pcie4"}]}]}, "parts of 3 devices in 8"),
        ({"nodes": [PAIRS | {"link": None}]}, "no link between them"),
        ({"network": {"preset": "ib-hdr", "switches": [{"nodes": 3}]}}, "switches of 3 nodes"),
        ({"network": {"preset": "ib-hdr", "switches": [{"nodes": 4}, {"nodes": 2}]}}, "4 below them"),
        ({"network": {"preset": "ib-hdr", "switches": [{"nodes": 2, "oversubscription": 0.5}]}}, "oversubscription"),
    ],
)
def test_parts_and_switches_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        load_cluster({"nodes": [PAIRS | {"count": 4}], "network": "ib-hdr"} | change)
