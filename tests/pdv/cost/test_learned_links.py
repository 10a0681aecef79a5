"""Axes get the learned curves of links that the weights know, where learned prices are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ir.builder import Builder
from learned_cost.estimator import KernelCosts
from pdv.cluster import load_cluster
from pdv.cost.comm import CALLED_S, TURN_S, AxisLink
from pdv.cost.compute import ComputeModel
from pdv.planning.problems import plan_problems
from pdv.prices import cost_model


def axes_of(folder: Path, text: str, *, learned: bool) -> list[AxisLink]:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    cluster = load_cluster(path)
    analytic = ComputeModel.of(cluster)
    compute = KernelCosts((), analytic, "no kernels") if learned else analytic
    problems = plan_problems(Builder().graph({}), cluster, mode="train", compute=compute)
    return [axis for problem in problems for axis in problem.axes if axis.size > 1]


KNOWN = "nodes: [{devices: 4, device: {preset: h200-141gb-sxm}, link: nvlink4}]\n"
CORES = "nodes: [{devices: 4, device: {preset: cpu-core, share: 0.5}, link: loopback-gloo}]\n"
HOSTS = """nodes: [{count: 2, devices: 2, device: {preset: cpu-core, share: 0.5}, link: loopback-gloo}]
network: {name: wire, bandwidth: 1 Gbit/s, latency: 50 us}
"""
OWN = "nodes: [{devices: 4, device: {preset: h200-141gb-sxm}, link: {name: wire, bandwidth: 9 GB/s, latency: 3 us}}]\n"


def test_known_links_have_learned_curves(tmp_path: Path) -> None:
    found = [axis for axis in axes_of(tmp_path, KNOWN, learned=True) if axis.curves is not None]
    assert found
    for axis in found:
        assert axis.curves is not None
        assert axis.curves.source == "learned"
        seconds = axis.curves.seconds("all_reduce", 2.0**28)
        assert seconds is not None
        assert seconds >= 2.0**28 / 450e9  # the switch's bound: the buffer once


def test_four_processes_on_cores_cost_what_was_measured_of_four(tmp_path: Path) -> None:
    axes = axes_of(tmp_path, CORES, learned=True)
    assert all(axis.curves is None for axis in axes if axis.size == 2)  # two of them would have had cores of their own
    (axis,) = (axis for axis in axes if axis.size == 4)
    assert axis.curves is not None
    assert axis.curves.seconds("all_reduce", 2.0**26) == pytest.approx(0.107, rel=0.1)  # profiles/cpu-core


def test_processes_that_share_cores_pay_for_turns_once() -> None:
    """Measured beside products, they are in the price of a collective; of a network that nobody measured, beside it.

    Two of four processes are measured as such, be they on one host or on two.
    """
    by_text = {}
    for text in (CORES, HOSTS):
        cluster = load_cluster(yaml.safe_load(text))
        compute = cost_model("measured", [entry.device for entry in cluster.classes])
        problems = plan_problems(Builder().graph({}), cluster, mode="train", compute=compute)
        by_text[text] = {(axis.size, axis.link.name): axis for p in problems for axis in p.axes if axis.size > 1}
    one, two = by_text[CORES], by_text[HOSTS]
    inside = 2, "loopback-gloo"
    assert one[inside].curves == two[inside].curves != one[4, "loopback-gloo"].curves
    for axis in (*one.values(), *two.values()):
        assert axis.called_s == (TURN_S if axis.curves is None else CALLED_S)
    assert any(axis.curves is None for axis in two.values())


@pytest.mark.parametrize(("text", "learned"), [(KNOWN, False), (CORES, False), (OWN, True)])
def test_others_keep_alpha_and_beta(tmp_path: Path, text: str, *, learned: bool) -> None:
    assert all(axis.curves is None for axis in axes_of(tmp_path, text, learned=learned))
