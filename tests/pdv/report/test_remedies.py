"""A refusal tries what would help, mildest first, and says what each change would need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.routing.route import find_route
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph as small_graph
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.report import remedies
from pdv.report.remedies import Problems, find_remedies, in_layers, multiply_nodes, need_of, with_remedies
from pdv.search.meshes import search_meshes
from tests.pdv import worlds

LAPTOP = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}


def problems_within(limit: float) -> Problems:
    def on(graph: Graph, cluster: Cluster) -> Sequence[Problem]:
        return plan_problems(graph, cluster, mode="train", memory_limit=limit, rules=())

    return on


def refused(graph: Graph, cluster: Cluster, limit: float) -> NoPlanFitsError:
    with pytest.raises(NoPlanFitsError) as caught:
        search_meshes(problems_within(limit)(graph, cluster), needs=need_of(cluster))
    error = caught.value
    return with_remedies(error, find_remedies(problems_within(limit), graph, cluster, error, limit))


def test_a_refusal_names_the_nearest_plans_that_fit(golden: Callable[[str, str], None]) -> None:
    graph, cluster = worlds.mlp(batch=512, width=48, hidden=96), load_cluster(LAPTOP)
    error = refused(graph, cluster, 400e3)
    assert error.needed_bytes > 400e3
    for way in error.ways:
        assert way["fits"] == (way["needed_bytes"] <= 400e3)
        assert (str(way["change"]) in str(error)) == way["fits"]
    assert error.facts == {"needed_bytes": error.needed_bytes, "ways": list(error.ways)}
    golden("errors/no-plan-fits-ways.txt", str(error) + "\n")


@pytest.mark.parametrize(
    ("device", "link", "named"), [("a100-80gb-sxm", "nvlink3", 1), ("cpu-core", "loopback-gloo", 0)]
)
def test_activations_on_the_host_are_named_where_that_is_another_memory(device: str, link: str, named: int) -> None:
    """With what a walk of the nearest plan finds."""
    cluster = load_cluster({"nodes": [{"devices": 2, "device": device, "link": link}]})
    model, limit = small_graph(arch("gpt:layers=3,hidden=1024,heads=8,seq=2048,vocab=64"), 16, DType.BF16), 1e6
    with pytest.raises(NoPlanFitsError) as caught:
        search_meshes(problems_within(limit)(model, cluster), needs=need_of(cluster))
    error = caught.value
    again, *there = in_layers(error, cluster, limit)
    assert len(there) == named
    for way in there:
        assert way.change == "--offload activations --recompute full"  # the last that was tried
        assert way.needed_bytes <= again.needed_bytes < error.needed_bytes
    enough = in_layers(error, cluster, error.needed_bytes - 1.0)[1:]
    assert [(way.change, way.fits) for way in enough] == [("--offload activations", True)] * named


def test_a_hopeless_limit_says_so() -> None:
    error = refused(worlds.mlp(batch=16), load_cluster(LAPTOP), 10.0)
    assert not any(way["fits"] for way in error.ways)
    assert "combine" in str(error)


def test_what_a_plan_needs_has_the_last_word() -> None:
    """The search adds up lifetimes and leaves out the loss: a plan within the limit by its price is looked at again."""
    graph, cluster = worlds.mlp(batch=512, width=48, hidden=96, layers=2), load_cluster(LAPTOP)
    of = need_of(cluster)
    free = search_meshes(problems_within(float("inf"))(graph, cluster))
    limit = (of(free) + free.cost.peak_bytes) / 2
    assert free.cost.peak_bytes < limit < of(free)
    found = search_meshes(problems_within(limit)(graph, cluster), needs=of)
    assert of(found) <= limit
    assert found.lower_bound_s <= found.cost.seconds
    assert found.cost.seconds >= free.cost.seconds


def test_more_of_the_same_nodes() -> None:
    one = load_cluster(LAPTOP)
    more = multiply_nodes(one, 4)
    assert more.num_devices == 8
    nodes = {"nodes": [{"count": 2, "devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}], "network": "ib-hdr"}
    several = multiply_nodes(load_cluster(nodes), 2)
    assert (several.num_nodes, several.num_devices) == (4, 32)
    assert find_route(several, (0, 8)).link.bandwidth_bytes_per_s > 0


def test_nothing_is_searched_for_once_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the nearest plan, which is known, its walks are."""
    graph, cluster, limit = worlds.mlp(batch=512, width=48, hidden=96), load_cluster(LAPTOP), 1e3
    with pytest.raises(NoPlanFitsError) as caught:
        search_meshes(problems_within(limit)(graph, cluster), needs=need_of(cluster))
    searched = []
    monkeypatch.setattr(remedies, "search_meshes", lambda *_, **__: searched.append(0))
    found = find_remedies(problems_within(limit), graph, cluster, caught.value, limit, budget_s=0.0)
    assert not searched
    assert {one.change for one in found} <= {"attention's inside recomputed", "each layer recomputed from its input"}
