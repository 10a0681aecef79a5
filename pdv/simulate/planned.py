"""A saved plan as the emitted program runs it: one stage, one micro-batch, collectives waited for where they stand.

Entry points: ``planned``, and ``emitted`` of one that is not saved yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ir.cost_model import CostModel
from ir.graph import Graph
from pdv.cluster import Cluster, Device
from pdv.cluster.route import find_route
from pdv.cost.comm import axis_link
from pdv.cost.compute import ComputeModel
from pdv.problem import Problem
from pdv.problem.workload import EMITTED, Stages, Workload
from pdv.report.loaded import Loaded


def planned(
    loaded: Loaded, cluster: Cluster | None = None, compute_of: Callable[[Device], CostModel] | None = None
) -> Workload:
    """The workload of a plan on the cluster that it was made for, or on another one of as many devices.

    Args:
        loaded: the plan.
        cluster: another one; its collectives are priced by its links.
        compute_of: what prices kernels of a device; by default the plan's own model on its own cluster, elsewhere
            arithmetic and traffic.
    """
    problem = loaded.problem
    if cluster is None:
        work = emitted(problem, loaded.derived.pcg, Cluster.from_dict(loaded.document["cluster"]))
    else:
        axes = []
        size = problem.mesh.num_devices
        for axis in problem.mesh.axes:
            size //= axis.size
            axes.append(axis_link(axis.size, find_route(cluster, [i * size for i in range(axis.size)])))
        other = Problem(problem.graph, problem.mesh, tuple(axes), ComputeModel.of(cluster), problem.mode)
        work = emitted(other, loaded.derived.pcg, cluster)
    return work if compute_of is None else replace(work, compute_of=compute_of)


def emitted(problem: Problem, pcg: Graph, cluster: Cluster) -> Workload:
    """What the emitted program of a PCG runs; ``problem`` is on the rewritten graph."""
    return Workload(
        problem, pcg, cluster, Stages(), EMITTED, (problem.axes,), lambda device: _priced(problem.compute, device)
    )


def _priced(compute: CostModel, device: Device) -> CostModel:
    """By arithmetic each device by its own numbers; other models price the slowest of all."""
    return ComputeModel((device,)) if isinstance(compute, ComputeModel) else compute
