"""A saved plan as the emitted program runs it: one stage, one micro-batch, collectives waited for where they stand.

Entry points: ``planned``, and ``emitted`` of one that is not saved yet.
"""

from __future__ import annotations

from ir.cost_model import CostModel
from ir.graph import Graph
from pdv.cluster import Cluster, Device
from pdv.cost.comm import axis_link
from pdv.cost.compute import ComputeModel
from pdv.problem import Problem
from pdv.report.loaded import Loaded
from pdv.simulate.setup import Execution, Overlap, Stages, Workload


def planned(loaded: Loaded, cluster: Cluster | None = None) -> Workload:
    """The workload of a plan on the cluster that it was made for, or on another one of as many devices.

    On another cluster, work is priced by arithmetic and traffic alone, and collectives by its links.
    """
    problem = loaded.problem
    if cluster is None:
        own = Cluster.from_dict(loaded.document["cluster"])
        return emitted(problem, loaded.derived.pcg, own)
    axes = []
    size = problem.mesh.num_devices
    for axis in problem.mesh.axes:
        size //= axis.size
        route = cluster.route([i * size for i in range(axis.size)])
        axes.append(axis_link(axis.size, route))
    compute = ComputeModel.of(cluster)
    other = Problem(problem.graph, problem.mesh, tuple(axes), compute, problem.mode)
    return emitted(other, loaded.derived.pcg, cluster)


def emitted(problem: Problem, pcg: Graph, cluster: Cluster) -> Workload:
    """What the emitted program of a PCG runs; ``problem`` is on the rewritten graph."""
    execution = Execution(overlap=Overlap(transfers=False))
    return Workload(
        problem, pcg, cluster, Stages(), execution, (problem.axes,), lambda device: _priced(problem.compute, device)
    )  # fmt: skip


def _priced(compute: CostModel, device: Device) -> CostModel:
    """By arithmetic each device by its own numbers; other models price the slowest of all."""
    return ComputeModel((device,)) if isinstance(compute, ComputeModel) else compute
