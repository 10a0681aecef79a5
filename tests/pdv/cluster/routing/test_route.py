"""Which links a group loads, and what is left of each for it."""

from __future__ import annotations

import math
import pickle

import pytest

from pdv.cluster import Cluster, load_cluster
from pdv.cluster.routing.route import find_route


def cluster(nodes: int = 8, devices: int = 8, network: object = "ib-hdr", link: object = "nvlink3") -> Cluster:
    node = {"count": nodes, "devices": devices, "device": "a100-80gb-sxm", "link": link}
    return load_cluster({"nodes": [node], "network": network})


def test_a_ring_over_whole_nodes_has_all_ports_and_one_with_a_member_in_each_has_one() -> None:
    found = cluster()
    whole = find_route(found, range(64))
    assert whole.link.bandwidth_bytes_per_s == pytest.approx(200e9)  # min(212 inside, 8 ports of 25)
    assert whole.nodes == 8
    assert [(stage.size, stage.link.name) for stage in whole.stages] == [(8, "ib-hdr"), (8, "nvlink3")]
    assert find_route(found, range(0, 64, 8)).link.bandwidth_bytes_per_s == pytest.approx(25e9)
    assert find_route(found, range(0, 64, 4)).link.bandwidth_bytes_per_s == pytest.approx(50e9)
    assert find_route(found, range(8)).link.bandwidth_bytes_per_s == 212e9
    assert find_route(found, [3]).link.bandwidth_bytes_per_s == math.inf


def test_resources_are_the_ports_that_are_used() -> None:
    found = cluster(2)
    assert find_route(found, (0, 1)).resources == ("n0.g0:nvlink3", "n0.g1:nvlink3")
    assert set(find_route(found, (0, 1)).resources).isdisjoint(find_route(found, (2, 3)).resources)
    assert find_route(found, (0, 9)).resources == ("n0:ib-hdr", "n1:ib-hdr")
    assert set(find_route(found, range(16)).resources) > set(find_route(found, (0, 9)).resources)


def test_devices_and_classes_by_number() -> None:
    new = {"count": 2, "devices": 4, "device": "h100-80gb-sxm", "link": "nvlink4"}
    old = {"count": 1, "devices": 2, "device": "v100-16gb-sxm", "link": "nvlink2"}
    found = load_cluster({"nodes": [new, old, new], "network": "ib-hdr"})
    assert [found.class_of(rank) for rank in range(18)] == [0] * 8 + [1] * 2 + [0] * 8
    assert found.device_of(9).name == "v100-16gb-sxm"
    with pytest.raises(AssertionError):
        found.class_of(18)


def test_in_unequal_nodes_the_slowest_part_decides() -> None:
    big = {"devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}
    small = {"devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}
    found = load_cluster({"nodes": [big, small], "network": {"preset": "ib-hdr", "ports_per_node": 2}})
    assert [(level.name, level.size) for level in found.levels] == [("node", 3), ("gpu", 4)]
    assert find_route(found, range(12)).link.bandwidth_bytes_per_s == pytest.approx(50e9)
    assert find_route(found, [0, 8]).link.bandwidth_bytes_per_s == pytest.approx(50e9 / 8)
    assert find_route(found, [0, 1, 8]).link.bandwidth_bytes_per_s == pytest.approx(50e9 / 4)


def test_there_and_back_as_data() -> None:
    found = cluster()
    find_route(found, range(64))
    assert Cluster.from_dict(found.as_dict()) == found
    assert pickle.loads(pickle.dumps(found)) == found
