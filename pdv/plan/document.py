"""plan.json: a plan as plain data, versioned; docs/plan-format.md says what each field means.

Entry points: ``plan_document`` writes it, ``read_problem`` reads back what a replay needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ir.cost_model import CostModel
from ir.dims import Shape
from ir.errors import UsageError
from ir.graph import Graph, Node
from ir.mesh import Axis, Mesh
from ir.sharding import format_sharding
from ir.verify import infer_shardings
from pdv.cluster import Cluster, Hop, Library, Link
from pdv.config import Mode
from pdv.cost.breakdown import PlanCost
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.cost.curves import Curves
from pdv.cost.sources import cost_document, node_source
from pdv.pcg.techniques import techniques
from pdv.plan.certificate import certificate_document
from pdv.plan.derivation import LEAVE, STORE, to_steps
from pdv.plan.devices import read_devices
from pdv.plan.running import RUNNING, read_types
from pdv.plan.seal import Document, check_version, damage_error, finite, version_fields
from pdv.plan.steps import operators
from pdv.problem import Assignment, Derived, Problem
from pdv.problem.problem import with_host
from pdv.problem.workload import BUCKET_BYTES
from pdv.rewrite.chosen import trusted_rules
from pdv.rewrite.rule import by_name
from pdv.search.best import BestPlan


def plan_document(
    found: BestPlan,
    step: Document | None = None,
    *,
    cluster: Cluster,
    strategy: str,
    seconds: float,
    problems: Sequence[Problem] = (),
    pins: str | None = None,
    running: Mapping[str, Any] | None = None,
) -> Document:
    """The document of a plan found for ``problems`` (one mesh each); the proof is added by whoever proves it.

    step: what a simulation of a step gave (``pdv.report.simulated.step_facts``): what is predicted; by default what the
        search adds up.
    pins, running: what was pinned of the plan, and of how its steps run.
    """
    solution = found.solution
    if step is not None and (found.step_s is not None or not found.is_whole):
        bound = min(found.lower_bound_s, step["step_s"])
        found = replace(found, step_s=step["step_s"], lower_bound_s=bound)
    steps = [describe_step(step, solution.problem) for step in to_steps(solution, found.stages, found.execution)]
    certificate = certificate_document(found, problems or (solution.problem,), pins, running)
    facts = facts_document(
        solution.problem, solution.graph, solution.assignment, found.derived, found.cost, steps, step,
        cluster=cluster, several=found.execution.several,
    )  # fmt: skip
    return {
        **facts,
        "derivation": steps,
        "search": _search(found, strategy, seconds, certificate),
    }


def facts_document(
    problem: Problem,
    graph: Graph,
    assignment: Assignment,
    derived: Derived,
    cost: PlanCost,
    steps: Sequence[Document],
    step: Document | None = None,
    *,
    cluster: Cluster,
    several: bool,
) -> Document:
    """Everything in plan.json that follows from the derivation ``steps`` of ``problem.graph``, on a cluster.

    step: as ``plan_document`` takes it.
    graph, assignment: what the steps make of it; derived, cost: these as a PCG, and its price.
    several: whether micro-batches in flight share copies of weights (``Execution``).
    """
    source = problem.graph
    opaque = _opaque(graph, derived, cost)
    return {
        **version_fields(),
        "source": {
            "name": source.name,
            "hash": source.digest,
            "inputs": [_tensor(node.attr("name"), node) for node in source.inputs],
            "outputs": [_tensor(name, node) for name, node in source.outputs],
            "parameters": sum(node.type.num_elements for node in source.params if node.needs_grad),
        },
        "mode": problem.mode,
        "cluster": cluster.as_dict(),
        "mesh": [
            {
                "name": axis.name,
                "size": axis.size,
                "link": _link_document(link),
            }
            for axis, link in zip(problem.mesh.axes, problem.axes, strict=True)
        ],
        "techniques": techniques(derived.pcg, problem.mesh, several=several),
        "laws": _laws(steps, problem),
        "pcg_hash": derived.pcg.digest,
        "operators": _operators(problem, graph, assignment, derived, cost),
        **({"opaque_operators": opaque} if opaque else {}),
        "cost_model": dict(problem.compute.provenance()),
        "predicted": _predict(cost, problem, cluster) | _predict_step(step),
    }


def _link_document(link: AxisLink) -> Document:
    return {
        "name": link.link.name,
        "bandwidth_bytes_per_s": finite(link.link.bandwidth_bytes_per_s),
        "latency_s": link.link.latency_s,
        **({} if link.library == "nccl" else {"library": link.library}),
        **({"called_s": link.called_s} if link.called_s else {}),
        **({} if link.curves is None else {"curves": link.curves.as_dict()}),
        **({} if not link.wider else {"wider": [[size, one.as_dict()] for size, one in link.wider]}),
        **({} if not link.stages else {"stages": [asdict(stage) for stage in link.stages]}),
    }


def _search(found: BestPlan, strategy: str, seconds: float, certificate: Document) -> Document:
    """What was spent, and what it is worth."""
    return {
        "strategy": strategy,
        "seconds": seconds,
        "states": found.states,
        "meshes": found.meshes,
        "cost": found.seconds,
        "lower_bound": certificate["lower_bound"],
        "gap": certificate["gap"],
        "certificate": certificate,
    }


def read_problem(document: Mapping[str, Any], source: Graph, compute: CostModel | None = None) -> Problem:
    """The problem that a document's derivation is replayed on; a replay needs no prices, hence no ``compute``.

    Raises:
        VerificationError: if the document is of another version, misses a field, or takes a law that is false.
    """
    check_version(document)
    try:
        axes = [(Axis(entry["name"], entry["size"]), entry["link"]) for entry in document["mesh"]]
        devices = read_devices(document)
        compute = compute or ComputeModel(devices)
        mesh = Mesh(tuple(axis for axis, _ in axes))
        sized = tuple(_axis_link(axis.size, link) for axis, link in axes)
        mode: Mode = {"train": "train", "infer": "infer"}[document["mode"]]  # type: ignore[assignment]
        rules = trusted_rules(document["laws"])
        kept = read_types(source, document["derivation"], compute)
        problem = Problem(source, mesh, sized, compute, mode, rules=rules, bucket_bytes=BUCKET_BYTES, **kept)
        return with_host(problem, devices)
    except (UsageError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise damage_error(error) from error


def _link(entry: Mapping[str, Any]) -> Link:
    bandwidth = entry["bandwidth_bytes_per_s"]
    return Link(entry["name"], float("inf") if bandwidth is None else bandwidth, entry["latency_s"])


def _axis_link(size: int, entry: Mapping[str, Any]) -> AxisLink:
    wider = tuple((int(count), Curves.from_dict(of)) for count, of in entry.get("wider", ()))
    library: Library = {"nccl": "nccl", "gloo": "gloo"}[entry.get("library", "nccl")]  # type: ignore[assignment]
    called_s = float(entry.get("called_s", 0.0))
    return AxisLink(size, _link(entry), _curves(entry), _stages(entry), (), library, wider, called_s)


def _curves(entry: Mapping[str, Any]) -> Curves | None:
    return Curves.from_dict(entry["curves"]) if "curves" in entry else None


def _stages(entry: Mapping[str, Any]) -> tuple[Hop, ...]:
    return tuple(Hop(**{**stage, "link": Link(**stage["link"])}) for stage in entry.get("stages", ()))


def _tensor(name: str, node: Node) -> Document:
    shape: Shape = node.type.shape
    return {"name": name, "shape": list(shape), "dtype": node.type.dtype.torch_name}


def describe_step(step: Document, problem: Problem) -> Document:
    """A step of a derivation as plan.json has it, with its kind and law for readers."""
    rules = by_name(problem.rules)
    if step["rule"] in rules:
        return {"kind": "algebraic", **step, "law": rules[step["rule"]].equation}
    kinds = {STORE: "storage", LEAVE: "output", **dict.fromkeys(RUNNING, "running")}
    return {"kind": kinds.get(step["rule"], "parallel"), **step}


def _laws(steps: Sequence[Document], problem: Problem) -> list[str]:
    """The laws that are taken, in full: a plan replays without the file, or the version, that they came from."""
    rules = by_name(problem.rules)
    return list(dict.fromkeys(rules[step["rule"]].law.text for step in steps if step["rule"] in rules))


def _operators(
    problem: Problem, graph: Graph, assignment: Assignment, derived: Derived, price: PlanCost
) -> list[Document]:
    """Per operator of the rewritten graph: number, splits, the sharding of its result and its seconds."""
    shardings = infer_shardings(derived.pcg, problem.mesh)
    entries = []
    for number, node in enumerate(operators(graph)):
        made = derived.places[node]
        cost = price.nodes[made]
        splits = assignment.splits[node]
        entries.append(
            {
                "number": number,
                "op": node.op.name,
                "name": node.name,
                "type": str(node.type),
                "splits": {axis.name: split.label for axis, split in zip(problem.mesh.axes, splits, strict=True)},
                "sharding": format_sharding(shardings[made]),
                "time_s": cost.seconds,
                "source": node_source(cost),
            }
        )
    return entries


def _opaque(graph: Graph, derived: Derived, price: PlanCost) -> list[Document]:
    """Functions of other libraries: how often each runs, along which loops it may be cut, and its seconds."""
    found: dict[tuple[str, str], Document] = {}
    for node in graph.nodes:
        if node.op.is_foreign:
            function, loops = str(node.attr("function")), str(node.attr("loops"))
            entry: Document = {"function": function, "loops": loops, "count": 0, "time_s": 0.0}
            entry = found.setdefault((function, loops), entry)
            entry["count"] += 1
            entry["time_s"] += price.nodes[derived.places[node]].seconds
    return list(found.values())


def _predict_step(step: Document | None) -> Document:
    if step is None:
        return {}
    return {
        "step_time_s": {"mean": step["step_s"], "std": step["std_s"]},
        "breakdown_s": step["breakdown_s"],
        "memory_bytes": step["peak_bytes"],
    }


def _predict(cost: PlanCost, problem: Problem, cluster: Cluster) -> Document:
    return {
        "step_time_s": {"mean": cost.step_s, "std": cost.std_s},
        **cost_document(
            cost, problem.compute.provenance(), [entry.device for entry in cluster.classes], problem.compute.note
        ),
        "breakdown_s": {
            "compute": cost.compute_s,
            "communication": cost.communication_s,
            "optimizer": cost.optimizer_s,
            **({"outside the graph": cost.outside.mean_s} if cost.outside.mean_s else {}),
        },
        "memory_bytes": {entry.device.name: cost.peak_bytes for entry in cluster.classes},
        "memory_breakdown_bytes": dict(cost.memory),
    }
