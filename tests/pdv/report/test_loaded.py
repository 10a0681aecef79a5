"""A saved plan, simulated as its program runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdv.cluster import Cluster, Device, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.pcg.plan_cost import plan_cost
from pdv.plan.document import plan_document
from pdv.planning.problems import plan_problems
from pdv.problem.workload import EMITTED
from pdv.report.loaded import Loaded, load_document, workload_of_plan
from pdv.search.meshes import search_meshes
from pdv.simulate.engine.task import PICO
from pdv.simulate.stage import Lowered
from pdv.simulate.step import simulate
from tests.pdv.simulate.workloads import PLAIN
from tests.pdv.worlds import attention_block


def cluster(device: str = "a100-80gb-sxm") -> Cluster:
    return load_cluster({"nodes": [{"devices": 6, "device": device, "link": "nvlink3"}], "mesh": {"a": 2, "b": 3}})


@pytest.fixture(scope="module")
def plan() -> Loaded:
    graph = attention_block()
    found = search_meshes(plan_problems(graph, cluster(), mode="train", memory_limit=float("inf")))
    document = plan_document(found, cluster=cluster(), strategy="backtrack", seconds=0.0)
    document["search"]["certificate"]["space"]["pins"] = None
    return load_document(json.loads(json.dumps(document)), graph)


def test_on_its_own_cluster_it_takes_what_the_plan_says_and_the_loss(plan: Loaded) -> None:
    """With gradients summed one by one, and launches, which a plan counts in kernels and a simulation on the host."""
    workload = replace(workload_of_plan(plan), execution=EMITTED)
    lowered = Lowered(workload, PLAIN)
    outputs = [(node.type, lowered.nodes.of[node].sharding) for _, node in workload.pcg.outputs]
    loss = lowered.stages[0].kind.prices[0].loss(outputs)
    device = workload.cluster.device_of(0)
    counts = [lowered.nodes.of[node] for node in workload.pcg.nodes if lowered.nodes.of[node].role == "local"]
    launches = sum(sum(entry.kernels) for entry in counts) * device.launch_latency_s
    found = simulate(workload, calibration=PLAIN, draws=0)
    cost = plan_cost(replace(plan.problem, bucket_bytes=0.0), plan.derived.pcg)
    assert found.step_s == pytest.approx(cost.step_s - launches + (loss.forward + loss.backward) / PICO, rel=1e-3)


def test_nothing_overlaps(plan: Loaded) -> None:
    assert all(
        task.blocks
        for placed in Lowered(workload_of_plan(plan), PLAIN).stages[0].programs[0].backward
        for task in placed.segment.tasks
    )


def test_on_another_cluster(plan: Loaded) -> None:
    slow = simulate(workload_of_plan(plan, cluster("v100-16gb-sxm")), calibration=PLAIN, draws=0)
    own = simulate(workload_of_plan(plan), calibration=PLAIN, draws=0)
    assert slow.step_s > own.step_s
    assert {share.device for share in slow.breakdown} == {"v100-16gb-sxm"}


def test_on_another_cluster_by_another_cost_model(plan: Loaded) -> None:
    def twice(device: Device) -> ComputeModel:
        return ComputeModel((replace(device, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / 2),))

    plain = simulate(workload_of_plan(plan, cluster()), calibration=PLAIN, draws=0)
    slow = simulate(workload_of_plan(plan, cluster(), twice), calibration=PLAIN, draws=0)
    assert slow.totals["compute"] > plain.totals["compute"]
    assert slow.std_s == pytest.approx(0.6 * slow.step_s, rel=0.01)
