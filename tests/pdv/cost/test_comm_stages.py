"""Collectives over axes that cross several levels: algorithms, bounds, and what a route's stages say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.transition import Collective
from pdv.cluster import Cluster, Link, load_cluster
from pdv.cluster.meshes import axis_route, candidate_meshes
from pdv.cluster.routing.route import find_route
from pdv.cost.comm import (
    AxisLink,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_link,
    choice,
    joint_link,
    least_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from pdv.cost.curves import Curves

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
PRICES = {
    "all_gather": all_gather_seconds, "reduce_scatter": reduce_scatter_seconds, "all_reduce": all_reduce_seconds,
    "all_to_all": all_to_all_seconds,
}  # fmt: skip
BYTES = (0.0, 1.0, 1e4, 1e6, 1e9)
RATES = st.sampled_from((1.0, 12.5, 25.0, 100.0, 212.0, 450.0))
PORTS = st.sampled_from((1.0, 6.25, 12.5, 25.0))


def cluster(nodes: int, devices: int, inside: float = 212, port: float = 25, ports: int = 8, **more: Any) -> Cluster:
    node: dict[str, Any] = {"count": nodes, "devices": devices, "device": "h100-80gb-sxm"}
    node["link"] = {"name": "in", "bandwidth": f"{inside} GB/s", "latency": "2 us"}
    network = {"name": "net", "bandwidth": f"{port * 8} Gb/s", "latency": "10 us", "ports_per_node": ports}
    return load_cluster({"nodes": [node], "network": network | more})


def axis(found: Cluster, stride: int, span: int) -> AxisLink:
    return axis_link(span // stride, axis_route(found, stride, span))


def test_gradients_over_whole_nodes_use_all_ports() -> None:
    """64 GPUs of 8 HDR nodes: the ring runs at 200 GB/s, so that it beats the levels one after the other."""
    over_all = axis(cluster(8, 8), 1, 64)
    taken = choice("all_reduce", over_all, 1e9)
    assert taken.algorithm == "ring"
    assert taken.seconds == pytest.approx(2 * 63 / 64 * 1e9 / 200e9, rel=0.1)
    small = choice("all_reduce", over_all, 1e4)
    assert small.algorithm in {"hierarchical", "tree"}  # few steps
    assert small.seconds < choice("all_reduce", over_all, 1e4, "ring").seconds / 4


def test_an_exchange_leaves_by_each_devices_own_port() -> None:
    """All-to-all of 64: 56 of 64 pieces leave the node, over the eighth part of its ports."""
    over_all = axis(cluster(8, 8), 1, 64)
    assert all_to_all_seconds(over_all, 1e9) == pytest.approx(1e9 * 56 / 64 / 25e9, rel=0.05)


def test_an_algorithm_may_be_named() -> None:
    inside = axis(cluster(8, 8), 1, 8)
    assert {choice("all_reduce", inside, 1e6, name).algorithm for name in ("ring", "doubling", "tree")} == {
        "ring", "doubling", "tree"
    }  # fmt: skip
    with pytest.raises(ValueError, match="no algorithm 'hierarchical'"):
        choice("all_reduce", inside, 1e6, "hierarchical")
    assert choice("all_to_all", inside, 1e6).algorithm == "pairwise"
    assert send_seconds(Link("x", 1e9, 1e-6), 1e6) == pytest.approx(1.001e-3)


@st.composite
def axes(draw: st.DrawFn) -> AxisLink:
    nodes, devices = draw(st.sampled_from((2, 3, 4, 8))), draw(st.sampled_from((2, 4, 6, 8)))
    more: dict[str, Any] = {}
    if nodes == 8 and draw(st.booleans()):
        more["switches"] = [{"nodes": draw(st.sampled_from((2, 4))), "oversubscription": draw(st.sampled_from((1, 3)))}]
    found = cluster(nodes, devices, draw(RATES), draw(PORTS), draw(st.sampled_from((1, 2, 8))), **more)
    candidates = [entry for entry in candidate_meshes(found, 3) if entry.routes]
    candidate = draw(st.sampled_from(candidates))
    place = draw(st.integers(0, len(candidate.routes) - 1))
    return axis_link(candidate.mesh.axes[place].size, candidate.routes[place])


@settings(max_examples=150)
@given(axes(), st.sampled_from(COLLECTIVES), st.sampled_from(BYTES))
def test_never_under_the_bandwidth_bound(over: AxisLink, collective: Collective, num_bytes: float) -> None:
    least = least_seconds(collective, over, num_bytes)
    assert PRICES[collective](over, num_bytes) >= least * (1 - 1e-12)
    for name in ("ring", "doubling", "hierarchical", "tree", "pairwise"):
        try:
            seconds = choice(collective, over, num_bytes, name).seconds
        except ValueError:
            continue
        assert seconds >= least * (1 - 1e-12)
        assert seconds >= PRICES[collective](over, num_bytes) * (1 - 1e-12)  # the cheapest is taken


@settings(max_examples=60)
@given(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 8)), RATES, PORTS, st.sampled_from(COLLECTIVES))
def test_more_bandwidth_never_costs(nodes: int, devices: int, inside: float, port: float, name: Collective) -> None:
    slow = cluster(nodes, devices, inside, port)
    for fast in (cluster(nodes, devices, inside * 2, port), cluster(nodes, devices, inside, port * 1.5)):
        for before, after in zip(candidate_meshes(slow, 2), candidate_meshes(fast, 2), strict=True):
            for one, other, mesh_axis in zip(before.routes, after.routes, before.mesh.axes, strict=True):
                for num_bytes in BYTES:
                    old = PRICES[name](axis_link(mesh_axis.size, one), num_bytes)
                    assert PRICES[name](axis_link(mesh_axis.size, other), num_bytes) <= old * (1 + 1e-12)


@settings(max_examples=40)
@given(st.sampled_from((2, 4)), st.sampled_from((2, 4)))
def test_equal_nodes_told_apart_are_the_same_cluster(nodes: int, devices: int) -> None:
    node: dict[str, Any] = {"devices": devices, "device": "t4", "link": "pcie3"}
    network = {"preset": "ib-hdr", "ports_per_node": 1}
    together = load_cluster({"nodes": [node | {"count": nodes}], "network": network})
    apart = load_cluster({"nodes": [node] * nodes, "network": network})
    assert together.levels == apart.levels
    assert candidate_meshes(together, 3) == candidate_meshes(apart, 3)


def test_units_commute() -> None:
    assert cluster(2, 8, port=25) == cluster(2, 8, port=25.0)
    node = {"count": 2, "devices": 2, "device": "t4", "link": "pcie3"}
    networks = [{"name": "x", "bandwidth": rate, "latency": time} for rate, time in
                (("100 Gb/s", "10 us"), ("12.5 GB/s", "0.01 ms"), ("12500 MB/s", "10000 ns"))]  # fmt: skip
    found = [load_cluster({"nodes": [node], "network": network}) for network in networks]
    for other in found[1:]:
        route, first = find_route(other, range(4)), find_route(found[0], range(4))
        assert route.link.bandwidth_bytes_per_s == pytest.approx(first.link.bandwidth_bytes_per_s, rel=1e-12)
        assert route.link.latency_s == pytest.approx(first.link.latency_s, rel=1e-12)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_axes_as_one_cost_at_most_one_after_the_other_and_no_less_than_bandwidth(collective: Collective) -> None:
    inside, outside = AxisLink(8, Link("in", 212e9, 2e-6)), AxisLink(4, Link("out", 25e9, 10e-6))
    both = joint_link((outside, inside))
    assert both.size == 32
    for num_bytes in BYTES:
        seconds = PRICES[collective](both, num_bytes)
        assert least_seconds(collective, both, num_bytes) <= seconds
        assert seconds <= (PRICES[collective](inside, num_bytes) + PRICES[collective](outside, num_bytes)) * (1 + 1e-9)


def test_curves_of_axes_as_one_are_those_of_hierarchical_collectives() -> None:
    rows = [(name, size, 1e-5 + size / 1e11) for name in COLLECTIVES for size in (1.0, 1e6, 1e12)]
    inside = AxisLink(8, Link("in", 212e9, 2e-6), Curves.of(rows, "measured", 0.1))
    outside = AxisLink(4, Link("out", 25e9, 10e-6))
    both = joint_link((outside, inside))
    assert both.curves is not None
    assert (both.curves.source, both.curves.relative_std) == ("measured", 0.1)
    size = 2.0**24
    expected = 2 * all_gather_seconds(inside, size) + all_reduce_seconds(outside, size / 8)
    assert all_reduce_seconds(both, size) == pytest.approx(expected, rel=1e-9)


def hosts(rate: str = "100 Mb/s") -> Cluster:
    """Two hosts of two CPU processes."""
    node = {"count": 2, "devices": 2, "device": "cpu-core", "link": "loopback-gloo"}
    return load_cluster({"nodes": [node], "network": {"name": "net", "bandwidth": rate, "latency": "750 us"}})


def over_hosts(found: Cluster) -> AxisLink:
    return axis_link(4, find_route(found, range(4)), library=found.library)


def test_gloo_has_rings_and_scatters_a_sum_by_summing_all_of_it() -> None:
    """Measured at 100 Mbit/s, 4 MiB, torch 2.13: all-gather 269 ms, reduce-scatter 544, all-reduce 534."""
    assert hosts().library == "gloo"
    assert cluster(2, 2).library == "nccl"
    whole = over_hosts(hosts("97 Mb/s"))
    assert all_gather_seconds(whole, 2.0**22) == pytest.approx(0.269, rel=0.05)
    assert reduce_scatter_seconds(whole, 2.0**22) == pytest.approx(0.544, rel=0.05)
    assert choice("reduce_scatter", whole, 2.0**22).algorithm == "ring"


def test_an_all_reduce_over_hosts_is_priced_as_it_is_written() -> None:
    """Level by level where that is faster: each device's half over the network; flat where all links are alike."""
    whole = over_hosts(hosts())
    assert whole.levels == (2, 2)
    size = 2.0**24
    assert choice("all_reduce", whole, size).algorithm == "hierarchical"
    outside = size / (100e6 / 8)  # both devices of a host send half, through one port
    assert outside < all_reduce_seconds(whole, size) < 1.15 * outside
    assert over_hosts(hosts("100 Gb/s")).levels == ()
    assert axis_link(2, find_route(hosts(), range(2)), library="gloo").levels == ()


def test_axes_on_one_link_are_known_together_by_the_curve_of_their_size() -> None:
    rows = [(name, size, 1e-5 + size / 1e9) for name in COLLECTIVES for size in (1.0, 1e6)]
    wide = Curves.of([(name, size, 3 * seconds) for name, size, seconds in rows], "measured", 0.2)
    pair = AxisLink(2, Link("in", 1e9, 1e-5), Curves.of(rows, "measured", 0.1), library="gloo", wider=((4, wide),))
    assert all_reduce_seconds(joint_link((pair, pair)), 1e6) == pytest.approx(wide.seconds("all_reduce", 1e6))
    unknown = joint_link((replace(pair, wider=()), replace(pair, wider=())))
    assert unknown.parts
