"""A saved plan, brought back: its problem with limit and pins, the rewritten graph, what nodes do, and the price."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ir.cost_model import CostModel
from ir.errors import PdvError, UsageError, VerificationError
from ir.graph import Graph, Node
from ir.sharding import Sharding
from ir.verify import infer_shardings
from pdv.cluster import Cluster, Device
from pdv.cost.breakdown import PlanCost
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.guard import note
from pdv.pcg.in_slices import workload_in_slices
from pdv.pcg.plan_cost import realize
from pdv.pcg.spread import spread_to_pcg
from pdv.pins import RoleOf, load_pins
from pdv.plan.derivation import replay_steps
from pdv.plan.document import read_problem
from pdv.plan.package import read_document
from pdv.plan.running import read_running
from pdv.plan.seal import damage_error, refusing
from pdv.plan.source import GRAPH, read_source
from pdv.plan.steps import operators
from pdv.prices import stage_axes
from pdv.problem import Assignment, Derived, Problem
from pdv.problem.problem import with_host
from pdv.problem.workload import EMITTED, ONE_STAGE, Execution, Stages, Workload, runs_whole, workload_of_pcg
from pdv.search.best import BestPlan

Document = Mapping[str, Any]  # Any: plan.json


@dataclass(frozen=True)
class Loaded:
    """A plan and all that follows from it.

    ``source`` is the problem that was searched, ``problem`` the same on the rewritten graph, of whose nodes
    ``assignment`` speaks.
    """

    document: Document
    source: Problem
    problem: Problem
    assignment: Assignment
    derived: Derived
    cost: PlanCost
    shardings: Mapping[Node, Sharding]
    role: RoleOf
    stages: Stages = ONE_STAGE
    execution: Execution = EMITTED

    @property
    def is_whole(self) -> bool:
        """Whether a step takes the batch and the model as a whole."""
        return runs_whole(self.stages, self.execution)

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return self.stages.count * self.problem.mesh.num_devices

    @property
    def graph(self) -> Graph:
        """The rewritten graph."""
        return self.problem.graph

    @property
    def operators(self) -> tuple[Node, ...]:
        """Its operators, as derivations number them."""
        return operators(self.graph)

    def splits(self, node: Node) -> dict[str, str]:
        """The loop that a node is cut along, by axis."""
        chosen = self.assignment.splits[node]
        return {axis.name: split.label for axis, split in zip(self.problem.mesh.axes, chosen, strict=True)}


def load_plan(directory: str | os.PathLike[str], compute: CostModel | None = None) -> Loaded:
    """Read a package's plan.json and source graph, and replay; ``compute`` prices it, by default the roofline.

    Raises:
        UsageError: if the directory is no package.
        VerificationError: if the plan does not replay.
    """
    return load_document(*read_planned(directory), compute)


def read_planned(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Graph]:
    """plan.json of a package, and the source graph that it was made for.

    Raises:
        UsageError: if the directory is no package.
        VerificationError: if plan.json or the source graph is another than was written.
    """
    document = read_document(directory)
    files, described = document.get("files"), document.get("source")
    if not isinstance(files, Mapping) or not isinstance(described, Mapping):
        raise damage_error("it does not say which source it is of")
    source = note(read_source(Path(directory), files))
    if source.digest != described.get("hash"):
        raise VerificationError(f"{Path(directory) / GRAPH} is not the graph that was planned", "", "Plan again")
    return document, source


@refusing()
def load_document(document: Document, graph: Graph, compute: CostModel | None = None) -> Loaded:
    """The same of a document and its source graph.

    Raises:
        VerificationError: if the document misses a field, or the plan does not replay.
    """
    source = _limit(read_problem(document, graph, compute), document)
    try:
        rewritten, assignment = replay_steps(source, document["derivation"])
        stages, execution = read_running(
            source, rewritten, document["derivation"], lambda: Cluster.from_dict(document["cluster"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damage_error(error) from error
    problem = replace(source, graph=rewritten, leaving=assignment.leaving)
    made = realize(problem, assignment)
    shardings = infer_shardings(made.derived.pcg, problem.mesh)
    return Loaded(
        document, source, problem, assignment, made.derived, made.cost, shardings, RoleOf(), stages, execution
    )


def check_size(plan: Loaded, cluster: Cluster | None) -> None:
    """Whether a plan may run on another cluster, if one is given.

    Raises:
        UsageError: if it has more or fewer devices than the plan's stages have together.
    """
    if cluster is not None and cluster.num_devices != plan.num_devices:
        stages = f"{plan.stages.count} stages, each on " if plan.stages.count > 1 else ""
        raise UsageError(
            f"{cluster.name} has {cluster.num_devices} devices, the plan is for {plan.num_devices} "
            f"({stages}{plan.problem.mesh})",
            "A cluster of as many devices",
            "Plan for this one with pdv optimize",
        )


def workload_of_plan(
    loaded: Loaded, cluster: Cluster | None = None, compute_of: Callable[[Device], CostModel] | None = None
) -> Workload:
    """The workload of a plan on the cluster that it was made for, or on another one of as many devices.

    Args:
        loaded: the plan.
        cluster: another one; its collectives are priced by its links.
        compute_of: what prices kernels of a device; by default the plan's own model on its own cluster, elsewhere
            arithmetic and traffic.
    """
    problem, derived, stages = loaded.problem, loaded.derived, loaded.stages
    axes = None
    if cluster is None:
        with refusing():
            cluster = Cluster.from_dict(loaded.document["cluster"])
    else:
        axes = stage_links(cluster, problem.mesh, stages.count)
        # the limits and pins of the plan's own cluster are none here
        own = Problem(problem.graph, problem.mesh, axes[0], ComputeModel.of(cluster), problem.mode)
        kept = replace(own, precision=problem.precision, products=problem.products, fused=problem.fused)
        problem = with_host(kept, [entry.device for entry in cluster.classes])
    work = _workload(problem, derived, cluster, stages, loaded.execution, axes)
    return work if compute_of is None else replace(work, compute_of=compute_of)


def workload_of_found(found: BestPlan, cluster: Cluster) -> Workload:
    """The workload of a plan that was found for a cluster."""
    problem = replace(found.solution.problem, graph=found.solution.graph)
    return _workload(problem, found.derived, cluster, found.stages, found.execution, None)


def _workload(
    problem: Problem,
    derived: Derived,
    cluster: Cluster,
    stages: Stages,
    execution: Execution,
    axes: tuple[tuple[AxisLink, ...], ...] | None,
) -> Workload:
    """``axes``: by stage; by default those of the problem, with what is known of them, where the stages are alike."""
    work = workload_of_pcg(problem, derived.pcg, cluster)
    if runs_whole(stages, execution):
        return work
    chunks, layers = (spread_to_pcg(derived, of) for of in (stages.chunk_of, stages.layer_of))
    links = axes or stage_axes(problem.compute, cluster, problem.mesh, stages.count)
    cut = replace(stages, chunk_of=chunks, layer_of=layers)
    return workload_in_slices(replace(work, stages=cut, execution=execution, axes=links))


def _limit(problem: Problem, document: Document) -> Problem:
    """The problem with the memory limit and the pins that the certificate names."""
    try:
        space = document["search"]["certificate"]["space"]
        limit, content = space["memory_limit_bytes"], space["pins"]
        pins = problem.pins if content is None else load_pins(json.loads(content)).on(problem.graph, problem.mesh)
        return replace(problem, memory_limit=float("inf") if limit is None else float(limit), pins=pins)
    except (LookupError, TypeError, ValueError, PdvError) as error:
        raise damage_error(error) from error
