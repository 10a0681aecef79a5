"""Experts' plans and other circumstances: each is planned, simulated and priced as the plan itself is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ir.graph import Graph
from ir.scaling.rows import fewer_rows, more_rows
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.pcg.techniques import techniques
from pdv.plan.package import Plan
from pdv.report.loaded import load_plan
from pdv.rivals import experts as module
from pdv.rivals.circumstances import add_nodes, circumstances, faster_links
from pdv.rivals.experts import experts
from pdv.rivals.setting import LEFT_OUT, Setting, row
from tests.pdv.report.pages import piped, sharded

CLUSTERS = ("laptop-4", "2x8-a100", "8x8-h100", "mixed-a100-v100", "32-dgx-a100", "2x8-a40-pairs")


def named(name: str) -> Cluster:
    return load_cluster(f"examples/clusters/{name}.yaml")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return setting_of(sharded(), tmp_path_factory)


def setting_of(plan: Plan, folders: pytest.TempPathFactory, budget_s: float = 600.0) -> Setting:
    return Setting.of(load_plan(plan.save(folders.mktemp("rivals") / "p")), budget_s)


@cache
def words() -> Graph:
    return program(arch("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=128"), 8).graph


def test_experts_plans_are_what_they_are_called(setting: Setting) -> None:
    for name, ways in module._kinds(setting).items():
        for mesh, of in ways:
            found = module._pinned(setting, mesh, of)
            does = techniques(found.pcg, mesh)
            for axis, technique in of.items():
                if technique in ("ddp", "fsdp"):
                    assert "data parallel" in does[axis], (name, mesh, does)
                    assert (technique == "fsdp") == ("ZeRO-3" in does[axis]), (name, mesh, does)
                else:
                    assert any(entry.startswith("tensor parallel") for entry in does[axis]), (name, mesh, does)


def test_experts_come_fastest_first_and_say_why_there_is_none(setting: Setting) -> None:
    rows = experts(setting)
    names = [one["name"] for one in rows]
    assert {"DDP", "FSDP", "TP", "DDP × TP", "FSDP × TP", "PP, 2 stages"} <= set(names)
    steps = [one["step_s"] for one in rows if one["step_s"] is not None and one["fits"]]
    assert steps == sorted(steps)
    assert len(steps) >= 5
    assert all(one["why"] for one in rows if one["step_s"] is None)


def test_time_that_is_over_is_said(setting: Setting) -> None:
    late = replace(setting, deadline=0.0)
    assert {one["why"] for one in [*experts(late), *circumstances(late)]} == {LEFT_OUT}


def test_a_pipeline_s_batch_is_taken_whole_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    setting = setting_of(piped(), tmp_path_factory)
    assert setting.graph.digest == sharded().source.digest
    assert setting.stages == 2


def test_what_is_planned_again_takes_what_changed(setting: Setting) -> None:
    rows = {one["name"]: one for one in circumstances(setting)}
    assert {"links twice as fast", "the batch doubled", "bfloat16", "twice the devices"} <= set(rows)
    assert all(one["step_s"] > 0 for one in rows.values())
    same = row("same", lambda: module._pinned(setting, *module._kinds(setting)["DDP"][0]), setting.cluster, setting)
    assert same["step_s"] > 0


@pytest.mark.parametrize("name", CLUSTERS)
def test_faster_links_are_links_alone(name: str) -> None:
    cluster = named(name)
    faster = faster_links(cluster, 2.0)
    assert faster_links(faster, 0.5) == cluster
    for slow, fast in zip(cluster.levels, faster.levels, strict=True):
        assert fast.link.bandwidth_bytes_per_s == 2 * slow.link.bandwidth_bytes_per_s
        assert fast.link.latency_s == slow.link.latency_s
    assert faster.classes == cluster.classes


@pytest.mark.parametrize("name", CLUSTERS)
def test_more_nodes_are_a_cluster(name: str) -> None:
    cluster = named(name)
    larger = add_nodes(cluster, 2)
    assert (larger is None) == (cluster.num_nodes == 1 or len(cluster.classes) > 1 or len(cluster.network) > 1)
    if larger is not None:
        assert larger.num_devices == cluster.num_devices // cluster.num_nodes * (cluster.num_nodes + 2)
        assert Cluster.from_dict(larger.as_dict()) == larger


@pytest.mark.parametrize("times", [2, 3])
def test_more_rows_are_undone_by_fewer(times: int) -> None:
    graph = words()
    larger = more_rows(graph, times)
    assert larger.inputs[0].type.shape[0] == times * graph.inputs[0].type.shape[0]
    again = fewer_rows(larger, times)
    assert again is not None
    assert again.digest == graph.digest
