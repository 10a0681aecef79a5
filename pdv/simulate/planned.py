"""A saved plan as the emitted program runs it: one stage, one micro-batch, collectives waited for where they stand.

Entry point: ``planned``.
"""

from __future__ import annotations

from collections.abc import Callable

from ir.cost_model import CostModel
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
        return _workload(loaded, problem, own, lambda device: _priced(problem.compute, device))
    axes = []
    size = problem.mesh.num_devices
    for axis in problem.mesh.axes:
        size //= axis.size
        route = cluster.route([i * size for i in range(axis.size)])
        axes.append(axis_link(axis.size, route))
    compute = ComputeModel.of(cluster)
    other = Problem(problem.graph, problem.mesh, tuple(axes), compute, problem.mode)
    return _workload(loaded, other, cluster, lambda device: ComputeModel((device,)))


def _workload(
    loaded: Loaded, problem: Problem, cluster: Cluster, compute_of: Callable[[Device], CostModel]
) -> Workload:
    execution = Execution(overlap=Overlap(transfers=False))
    return Workload(
        problem, loaded.derived.pcg, cluster, Stages(), execution, (problem.axes,), compute_of
    )  # fmt: skip


def _priced(compute: CostModel, device: Device) -> CostModel:
    """By arithmetic each device by its own numbers; other models price the slowest of all."""
    return ComputeModel((device,)) if isinstance(compute, ComputeModel) else compute
