"""What is searched freely takes no longer than what is pinned: on unequal devices, and where meshes are many."""

from __future__ import annotations

from functools import partial
from typing import Any

from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.pipelines.pinned import FREE, Pinned
from pdv.planning.problems import plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.prices import cost_model
from pdv.report.loaded import workload_of_found
from pdv.simulate.step import simulate

A100, T4 = "a100-80gb-sxm", "t4"


def step_s(cluster: Cluster, sizes: str, batch: int, pinned: Pinned = FREE, pipelines: Any = "always") -> float:
    """Simulated, of the plan found."""
    compute = cost_model("auto", [entry.device for entry in cluster.classes])
    ask = partial(plan_problems, mode="train", compute=compute)
    problems = ask(graph(arch(sizes), batch, DType.BF16), cluster, rules=())
    effort = Effort("backtrack", 600.0)
    found = search_problems(
        problems, cluster, effort, None, lambda *_: None, None, pipelines=pipelines, pinned=pinned
    ).found
    return simulate(workload_of_found(found, found.on(cluster))).step_s


def test_stages_of_unequal_devices_have_times_of_their_own() -> None:
    """A fast device waits for its host where a slow one computes: of one no time of the other can be told."""
    nodes = [{"devices": 1, "device": device} for device in (A100, T4)]
    cluster = load_cluster({"name": "mixed", "nodes": nodes, "network": "ethernet-10g"})
    sizes = "llama:layers=8,hidden=1024,heads=16,kv_heads=4,seq=512,vocab=32000"
    free = step_s(cluster, sizes, 16)
    for count in (1, 2, 4):
        assert free <= 1.02 * step_s(cluster, sizes, 16, Pinned(stages=2, micro_batches=count))


def test_all_meshes_of_the_whole_batch_are_looked_at() -> None:
    node = {"devices": 12, "device": A100, "link": "nvlink3"}
    cluster = load_cluster({"name": "many", "nodes": [node]})
    sizes = "llama:layers=4,hidden=2048,heads=16,kv_heads=4,seq=1024,vocab=32000"
    assert step_s(cluster, sizes, 30) <= 1.01 * step_s(cluster, sizes, 30, pipelines="never")
