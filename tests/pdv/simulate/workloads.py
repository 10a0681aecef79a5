"""Small workloads: problems of ``worlds`` with their best plan, and GPTs whose stages are set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.graph import Graph
from ir.mesh import Mesh
from ir.types import DType
from pdv.cluster import Cluster, Device, Link, load_cluster
from pdv.cluster.description import DeviceClass, Level, NodeGroup, Tier
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.manual.configuration import configuration, workload
from pdv.pcg.plan_cost import realize
from pdv.problem import Problem
from pdv.problem.workload import Execution, Overlap, Stages, Workload
from pdv.search.strategies import Budget
from pdv.search.strategies.backtrack import backtrack
from pdv.simulate.calibration import Calibration
from tests.pdv.worlds import DEVICE, FAST

CPU = replace(DEVICE, kind="cpu")
# Programs as their prices have them: nothing beside kernels and links.
PLAIN = Calibration(
    std_gain_cpu=1.0,
    host_forward_s=0.0, host_backward_s=0.0, host_add_s=0.0, host_pass_s=0.0, host_step_s=0.0, step_cpu_s=0.0,
    overlap_slowdown=1.0, straggler_std=0.0,
    collective_efficiency=1.0, products_gpu=1.0, attention_gpu=1.0, traffic_gpu=1.0, kernels_cpu=1.0, unaligned=1.0,
    half_aligned=1.0,
)  # fmt: skip
# of no other bytes than as emitted, but without the copies that the emitted program makes around its collectives
WAITING = Execution(overlap=Overlap(transfers=False), eager=False)


def flat(devices: Sequence[Device], link: Link = FAST) -> Cluster:
    """Devices on one link, each class in one run."""
    kinds = list(dict.fromkeys(devices))
    groups, classes = [], []
    for number, kind in enumerate(kinds):
        count = sum(device == kind for device in devices)
        classes.append(DeviceClass(kind, count))
        groups.append(NodeGroup(1, count, number, (Level("device", count, link),), 1e9))
    network = (Tier("network", len(groups), 1.0, link),) if len(groups) > 1 else ()
    return Cluster("toy", (Level("device", len(devices), link),), tuple(classes), tuple(groups), network)


def best(problem: Problem, execution: Execution = WAITING, devices: Sequence[Device] | None = None) -> Workload:
    """The cheapest plan of a problem, in one stage."""
    solution = backtrack(problem, Budget())
    made = realize(replace(problem, graph=solution.graph), solution.assignment)
    return of_pcg(problem, made.derived.pcg, execution, devices)


def of_pcg(
    problem: Problem, pcg: Graph, execution: Execution = WAITING, devices: Sequence[Device] | None = None
) -> Workload:
    """A PCG in one stage, each device priced by its own numbers."""
    count = problem.mesh.num_devices
    cluster = flat([CPU] * count if devices is None else devices)
    return Workload(
        problem, pcg, cluster, Stages(), execution, (problem.axes,), lambda device: ComputeModel((device,))
    )  # fmt: skip


def gpt(
    spec: str,
    *,
    model: str = "gpt:layers=4,hidden=256,heads=8,seq=128,vocab=1024",
    nodes: int = 2,
    devices: int = 4,
    device: object = "a100-80gb-sxm",
    link: object = "nvlink3",
    network: object = "ib-hdr",
) -> Workload:
    """A model under a user's own configuration."""
    from pdv.frontend.arch.description import arch
    from pdv.frontend.arch.graph import graph

    shape, given = arch(model), configuration(spec)
    node = {"count": nodes, "devices": devices, "device": device, "link": link}
    cluster = load_cluster({"nodes": [node], **({"network": network} if nodes > 1 else {})})
    return workload(
        lambda batch: graph(shape, batch, DType.BF16, tp=given.tp),
        given,
        cluster,
        lambda d: ComputeModel((d,)),
        stage_links,
    )


ONE = Mesh.of(a=2)
TWO = Mesh.of(a=2, b=3)
