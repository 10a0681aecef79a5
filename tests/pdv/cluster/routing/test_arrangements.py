"""Orders of devices in pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pdv.cluster import Cluster, load_cluster
from pdv.cluster.routing.arrangements import arranged, arrangements
from pdv.cluster.routing.route import find_route

GPU = "a100-80gb-sxm"


def joined(fast: set[tuple[int, int]], count: int = 4) -> Cluster:
    """Nodes of one device each, any two joined by a wire of their own, some of them faster."""
    links = []
    for pair in itertools.combinations(range(count), 2):
        name, rate = ("fast", "10 Gb/s") if pair in fast else ("slow", "1 Gb/s")
        ends = [f"n{number}.g0" for number in pair]
        links.append({"between": ends, "link": {"name": name, "bandwidth": rate, "latency": "10 us"}})
    return load_cluster({"name": "wired", "nodes": [{"count": count, "devices": 1, "device": GPU}], "links": links})


def neighbours(cluster: Cluster) -> list[str]:
    """Links between devices at neighbouring places."""
    places = range(cluster.num_devices)
    return [find_route(cluster, pair).link.name for pair in itertools.pairwise(places)]


def test_a_pipeline_may_follow_fast_links() -> None:
    cluster = joined({(0, 2), (1, 2), (1, 3)})
    assert "slow" in neighbours(cluster)
    listed, *others = arrangements(cluster)
    assert listed is cluster
    assert ["fast"] * 3 in [neighbours(one) for one in others]


def test_pairs_with_fast_links_become_stages() -> None:
    others = arrangements(joined({(0, 2), (1, 3)}))[1:]
    assert [one.places for one in others] == [(0, 2, 1, 3)]
    assert others[0].keeps_order(2)
    assert others[0].keeps_order(4)
    assert not others[0].keeps_order(1)


@pytest.mark.parametrize("fast", [set(), set(itertools.combinations(range(4), 2))])
def test_where_all_links_are_alike_there_is_one_order(fast: set[tuple[int, int]]) -> None:
    assert len(arrangements(joined(fast))) == 1


def nodes_of(*devices: str) -> Cluster:
    nodes: list[dict[str, Any]] = [{"devices": 2, "device": device, "link": "nvlink3"} for device in devices]
    return load_cluster({"name": "mixed", "nodes": nodes, "network": "ib-hdr"})


def test_nodes_of_one_kind_may_follow_each_other() -> None:
    other = "v100-32gb-sxm"
    cluster = nodes_of(GPU, other, GPU, other)
    kinds = [[one.device_of(place).name for place in range(0, 8, 2)] for one in arrangements(cluster)]
    assert kinds == [
        [GPU, other, GPU, other], [other, GPU, other, GPU], [GPU, GPU, other, other], [other, other, GPU, GPU],
        [GPU, other, other, GPU], [other, GPU, GPU, other],
    ]  # fmt: skip
    assert len(arrangements(nodes_of(GPU, GPU))) == 1


def test_devices_keep_their_kinds_and_links_wherever_they_stand() -> None:
    cluster = nodes_of(GPU, "v100-32gb-sxm")
    turned = arranged(cluster, (2, 3, 0, 1))
    assert [turned.class_of(place) for place in range(4)] == [1, 1, 0, 0]
    assert find_route(turned, (0, 1)) == find_route(cluster, (2, 3))
    assert find_route(turned, (0, 3)) == find_route(cluster, (2, 1))
    assert Cluster.from_dict(turned.as_dict()) == turned
    with pytest.raises(AssertionError):
        arranged(cluster, (0, 0, 1, 2))


def test_plans_that_were_turned_around_are_read() -> None:
    """They had nodes from the last to the first, and said so."""
    cluster = nodes_of(GPU, "v100-32gb-sxm")
    document = cluster.as_dict()
    nodes = document["nodes"]
    assert isinstance(nodes, list)
    document |= {"nodes": nodes[::-1], "backwards": True}
    assert Cluster.from_dict(document) == arranged(cluster, (2, 3, 0, 1))
