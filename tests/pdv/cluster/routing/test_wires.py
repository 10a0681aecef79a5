"""Routes over single links: rings and exchanges searched for in a graph."""

from __future__ import annotations

from typing import Any

import pytest

from ir.errors import ClusterError
from pdv.cluster import Cluster, candidate_meshes, load_cluster
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import axis_link, least_seconds

LINK = {"name": "wire", "bandwidth": "25 GB/s", "latency": "2 us"}
# NVLinks of a DGX-1 with V100 (hybrid cube mesh), six of each device
CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def wired(pairs: dict[tuple[str, str], int], **more: Any) -> Cluster:  # Any: YAML
    links = [
        {"between": list(pair), "link": LINK | {"bandwidth": f"{25 * count} GB/s"}} for pair, count in pairs.items()
    ]
    nodes = more.pop("nodes", [{"devices": 4, "device": "v100-16gb-sxm"}])
    return load_cluster({"nodes": nodes, "links": links, **more})


def circle(size: int = 4) -> Cluster:
    pairs = {(f"n0.g{place}", f"n0.g{(place + 1) % size}"): 1 for place in range(size)}
    return wired(pairs, nodes=[{"devices": size, "device": "v100-16gb-sxm"}])


def gigabytes(cluster: Cluster, *ranks: int) -> float:
    return find_route(cluster, ranks).link.bandwidth_bytes_per_s / 1e9


def test_a_circle_runs_both_ways_round() -> None:
    found = circle()
    assert gigabytes(found, 0, 1, 2, 3) == pytest.approx(50)
    assert gigabytes(found, 0, 1) == pytest.approx(25)
    (stage,) = find_route(found, range(4)).stages
    assert stage.exchange_bytes_per_s == pytest.approx(25e9)  # half the pairs are two links apart
    (level,) = found.levels
    assert level.name == "gpu"
    assert level.link.bandwidth_bytes_per_s == pytest.approx(50e9)


def test_the_cube_mesh_gives_all_links_of_a_device_and_no_more() -> None:
    nodes = [{"count": 2, "devices": 8, "device": "v100-16gb-sxm"}]
    pairs = {(f"n*.g{a}", f"n*.g{b}"): count for (a, b), count in CUBE.items()}
    found = wired(pairs, nodes=nodes, network={"preset": "ib-edr", "ports_per_node": 4})
    assert gigabytes(found, *range(8)) == pytest.approx(150)
    assert gigabytes(found, *range(16)) == pytest.approx(50)  # the ports of a node
    assert gigabytes(found, 0, 8) == pytest.approx(50 / 8)
    assert gigabytes(found, 0, 3) == pytest.approx(50)
    meshes = {
        str(entry.mesh): [link.bandwidth_bytes_per_s / 1e9 for link in entry.links]
        for entry in candidate_meshes(found, 2)
    }
    assert meshes["node=2xgpu=8"] == pytest.approx([6.25, 150])
    assert meshes["group=4xgpu=4"] == pytest.approx([12.5, 100])


def test_wires_between_nodes_faster_than_inside() -> None:
    pairs = {("n0.g0", "n1.g0"): 4, ("n0.g1", "n1.g1"): 4}
    nodes = [{"count": 2, "devices": 2, "device": "t4", "link": "pcie3"}]
    found = wired(pairs, nodes=nodes)
    assert gigabytes(found, 0, 2) == pytest.approx(100)
    assert gigabytes(found, 0, 1) == pytest.approx(12.2)
    assert any("faster than the link inside" in warning for warning in found.warnings)


def test_contending_groups_share_a_switch() -> None:
    pairs = {(f"n0.g{place}", "hub"): 1 for place in range(4)}
    found = wired(pairs)
    assert gigabytes(found, 0, 1, 2, 3) == pytest.approx(25)
    assert gigabytes(found, 0, 2) == pytest.approx(25)  # the other pair has its own ports
    assert set(find_route(found, (0, 2)).resources).isdisjoint(find_route(found, (1, 3)).resources)


def test_no_axis_beats_what_the_links_of_a_device_carry() -> None:
    for found, carried in ((circle(), 50e9), (circle(6), 50e9)):
        route = find_route(found, range(found.num_devices))
        axis = axis_link(found.num_devices, route)
        assert least_seconds("all_reduce", axis, 1e9) >= 2 * 1e9 * (axis.size - 1) / axis.size / carried * 0.999


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({("n0.g0", "n0.g1"): 1}, "no way from n0.g0 to n0.g2 and 1 more"),
        ({("n0.g0", "n0.g4"): 1}, "there is no device n0.g4"),
        ({("n1.g0", "n0.g0"): 1}, "there is no device n1.g0"),
        ({("n0.g0", "n0.g0"): 1}, "to itself"),
        ({("n0.g0", "N0"): 1}, "is no end of a link"),
    ],
)
def test_wires_that_lead_nowhere(pairs: dict[tuple[str, str], int], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        wired(pairs)


def test_single_links_are_for_small_clusters() -> None:
    nodes = [{"count": 40, "devices": 8, "device": "t4", "link": "pcie3"}]
    with pytest.raises(ClusterError, match="320 devices"):
        wired({("n0.g0", "n1.g0"): 1}, nodes=nodes, network="ib-hdr")
