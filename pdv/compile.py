"""The pipeline, top to bottom: load, search, prove, and hand over the plan."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ir.cost_model import CostModel
from ir.errors import NoPlanFitsError, PinsError, UsageError, VerificationError
from ir.exact import Proof, verify_equal
from ir.graph import Graph
from ir.types import DType
from pdv import config
from pdv.cache import Cache
from pdv.cluster import Cluster, Device, candidate_meshes, load_cluster
from pdv.cluster.presets import LINKS
from pdv.cost.comm import AxisLink, axis_link
from pdv.cost.compute import ComputeModel
from pdv.cost.curves import Curves
from pdv.derivation import replay
from pdv.document import plan_document, read_devices, read_problem
from pdv.pins import PinSet, load_pins
from pdv.plan import Plan, read_document
from pdv.planning import Effort, Progress, Searched, opened, searched
from pdv.problem import Mode, Pins, Problem
from pdv.report.explain import explain_document, explain_operators
from pdv.report.loaded import load_plan, read_planned
from pdv.report.reasons import operators_called, reasons
from pdv.rewrite.algebra import RULES
from pdv.rewrite.chosen import chosen_rules
from pdv.rewrite.rule import Rule
from pdv.search.meshes import Found
from pdv.search.strategies import STRATEGIES

if TYPE_CHECKING:
    from pdv.frontend.program import Program
    from pdv.simulate.setup import Workload

__all__ = [
    "STRATEGIES", "Plan", "explain", "explanation", "optimize", "plan_problems", "proof_document", "saved_workload",
    "verify",
]  # fmt: skip


def optimize(
    model: Any,  # Any: a path, a torch.nn.Module or a torch.export.ExportedProgram
    example_inputs: Any = None,  # Any: what the module's forward takes
    *,
    cluster: str | os.PathLike[str] | Mapping[str, Any] | Cluster,
    batch: int | None = None,
    mode: Mode = config.MODE,
    dtype: str | None = None,
    memory_limit: float | None = None,
    search: str = config.SEARCH,
    mesh: Mapping[str, int] | None = None,
    pins: str | os.PathLike[str] | Mapping[str, Any] | PinSet | Pins | None = None,
    budget_s: float = config.BUDGET_S,
    seed: int = 0,
    cache: str | os.PathLike[str] | Cache | None = None,
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    cost: str | os.PathLike[str] | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> Plan:
    """Plan a model for a cluster and prove the plan.

    Args:
        model: an ONNX file, an ``nn.Module``, an exported program, or a `Program` (`pdv.frontend.arch.program`).
        example_inputs: a batch as the training loop would pass it, for a module.
        cluster: a YAML file, its content, or a loaded cluster.
        batch: global batch size, where the model leaves it open.
        mode: "train" prices forward, backward and optimizer; "infer" forward alone.
        dtype: compute in "float32", "bfloat16" or "float16"; default: as the model.
        memory_limit: bytes per device; default: the smallest device's memory.
        search: the strategy's name.
        mesh: axis sizes, slow to fast; default: every mesh that the cluster allows.
        pins: what is fixed or forbidden: a YAML file or its content (docs/pins.md), or predicates.
        budget_s: wall time of search after which the best plan so far is taken.
        seed: of searches that sample (mcmc, gradient, reinforce, bayes); the same seed gives the same plan.
        cache: a directory of searches made before; default: none is kept.
        rules: algebraic rules that may be applied: "shipped" (default), "none", files of laws, or several of these.
        cost: what prices kernels: "analytic", "learned", "measured", a weight file, or a folder of profiles.
        progress: called with (stage, fraction or None).

    Raises:
        PdvError: one of its kinds, each with what is wrong and what to do (docs/errors.md).
    """
    effort = Effort(search, budget_s, opened(cache), seed)
    devices, pinned = _loaded(cluster, mesh, pins if pins is None or isinstance(pins, Pins) else load_pins(pins))
    compute, used = cost_model(cost, [entry.device for entry in devices.classes]), chosen_rules(rules)
    program = _read(model, example_inputs, batch, dtype, progress)
    problems = plan_problems(
        program.graph, devices, mode=mode, memory_limit=memory_limit, pins=pinned, rules=used, compute=compute
    )
    return _planned(program, problems, devices, effort, pinned, progress)


def cost_model(choice: str | os.PathLike[str] | None, devices: Sequence[Device]) -> CostModel:
    """What prices local work on devices.

    ``choice`` is "analytic", "learned", "measured", a weight file, a folder of profiles, or None for the default.

    Raises:
        UsageError: if ``choice`` is none of them.
        WeightsError, DataError: if the file or folder is damaged or foreign.
    """
    analytic = ComputeModel(tuple(devices))
    name = os.fspath(config.COST if choice is None else choice)
    if name == config.ANALYTIC:
        return analytic
    from learned_cost.choose import Described, chosen

    described = [
        Described(
            device.name, device.kind, device.memory_bytes, tuple(device.peak_flops.items()),
            device.memory_bandwidth_bytes_per_s, device.share,
        )
        for device in devices
    ]  # fmt: skip
    return chosen(name, described, analytic)


def _priced_by(document: Mapping[str, Any], cost: str | os.PathLike[str] | None) -> CostModel:
    """The cost model that priced a plan, here again.

    Raises:
        UsageError: if the weights or profiles here are others.
    """
    facts = document.get("cost_model", {"name": config.ANALYTIC})
    name = facts["name"]
    model = cost_model(name if cost is None and name in config.COSTS else cost or name, read_devices(document))
    if name != config.ANALYTIC or cost is not None:
        here = model.provenance()
        for kind in ("weights", "profiles"):
            said, found = facts.get(kind), here.get(kind)
            if said != found:
                raise UsageError(
                    f"the plan was priced by {kind} {_file(said)}, here are {_file(found)}",
                    "The files that priced it",
                    "Name them with --cost FILE, or plan again",
                )
    return model


def _file(facts: Mapping[str, Any] | None) -> str:
    return "none" if facts is None else f"{facts['name']} ({str(facts['hash'])[:12]})"


def _planned(
    program: Program,
    problems: Sequence[Problem],
    cluster: Cluster,
    effort: Effort,
    pins: PinSet | Pins | None,
    progress: Progress,
) -> Plan:
    """Search and prove."""
    if isinstance(pins, Pins):
        effort = replace(effort, cache=None)  # predicates have no content to remember them by
    content = pins.content if isinstance(pins, PinSet) else None
    result = _searched(program.graph, problems, effort, content, cluster, progress)
    found, graph = result.found, program.graph
    document = plan_document(
        found, source=graph, cluster=cluster, strategy=effort.search, seconds=result.seconds,
        problems=problems, pins=content,
    )  # fmt: skip
    progress("proving", None)
    proof = proof_document(_proved(found, document, graph))
    progress("simulating", None)
    document = {**document, "proof": proof, "simulated": _simulated(found, cluster)}
    return Plan(document, graph, found.pcg, found.solution.problem.mesh, program.weights)


def _searched(
    graph: Graph,
    problems: Sequence[Problem],
    effort: Effort,
    pins: str | None,
    cluster: Cluster,
    progress: Progress,
) -> Searched:
    """The best plan of which the emitted program fits, by the lifetimes of what it holds.

    Raises:
        NoPlanFitsError: if there is none, with changes that would let one fit.
    """
    from pdv.memory.ways import needs, told, ways_out

    limit = problems[0].memory_limit
    try:
        return searched(problems, effort, pins, progress, needs(cluster))
    except NoPlanFitsError as error:
        if math.isinf(error.needed_bytes) or pins is not None:
            raise
        progress("looking for what would fit", None)

        def on(graph: Graph, cluster: Cluster) -> tuple[Problem, ...]:
            return plan_problems(
                graph, cluster, mode=problems[0].mode, memory_limit=limit, rules=(), compute=problems[0].compute
            )

        raise told(error, limit, ways_out(on, graph, cluster, error, limit)) from error


def _simulated(found: Found, cluster: Cluster) -> dict[str, Any]:
    """What a step of the emitted program takes and holds, by events (docs/simulator.md)."""
    from pdv.memory import step_memory
    from pdv.report.simulated import ordered
    from pdv.simulate.planned import emitted
    from pdv.simulate.step import simulate

    solution = found.solution
    work = emitted(replace(solution.problem, graph=solution.graph), found.pcg, cluster)
    step, memory = simulate(work), step_memory(work)
    return {
        "step_s": step.step_s,
        "std_s": step.std_s,
        "breakdown_s": ordered(step.totals),
        "peak_bytes": {entry.device.name: entry.total_bytes for entry in memory.stages},
        "fits": memory.fits,
    }


def _read(
    model: Any,  # Any: as optimize
    example_inputs: Any,
    batch: int | None,
    dtype: str | None,
    progress: Progress,
) -> Program:
    """The program of a model, under the model's name and in the type asked for."""
    progress("reading the model", None)
    from pdv.frontend import load_program

    program = load_program(model, example_inputs, batch=batch)
    return replace(program, graph=_with_dtype(replace(program.graph, name=_name_of(model)), dtype))


def _proved(found: Found, document: Mapping[str, Any], source: Graph) -> Proof:
    """The proof of a plan's own document: its derivation, replayed, is what was found, and equal to the source."""
    problem = read_problem(document, source)
    pcg = replay(problem, document["derivation"])
    if pcg.digest != found.pcg.digest:
        raise VerificationError("the derivation replays to another graph than the search found", "", "Report this")
    return verify_equal(source, pcg, problem.mesh, gradients=problem.train)


def plan_problems(
    graph: Graph,
    cluster: Cluster,
    *,
    mode: Mode,
    memory_limit: float | None = None,
    pins: Pins | PinSet | None = None,
    rules: tuple[Rule, ...] = RULES,
    compute: CostModel | None = None,
) -> tuple[Problem, ...]:
    """One problem per mesh that the cluster allows; by default what is on the smallest device limits memory.

    Raises:
        PinsError: if pins name what the graph or every mesh does not have.
    """
    limit = cluster.memory_bytes if memory_limit is None else memory_limit
    meshes = candidate_meshes(cluster, config.MAX_MESH_AXES)
    if isinstance(pins, PinSet):
        meshes = tuple(entry for entry in meshes if pins.speaks_of(entry.mesh)) or meshes[-1:]
    compute = compute or ComputeModel.of(cluster)
    return tuple(
        Problem(
            graph,
            candidate.mesh,
            tuple(
                with_curves(cluster, compute, axis_link(axis.size, route))
                for axis, route in zip(candidate.mesh.axes, candidate.routes, strict=True)
            ),
            compute,
            mode,
            limit,
            pins.on(graph, candidate.mesh) if isinstance(pins, PinSet) else pins or Pins(),
            rules,
        )
        for candidate in meshes
    )


def with_curves(cluster: Cluster, compute: CostModel, axis: AxisLink) -> AxisLink:
    """The axis with its collectives as measured, where the cost model has that; else as learned, if the link is known.

    Of several classes of devices the slowest counts: all wait for it. What crosses several levels, or has a part of
    a link only, no curve knows.
    """
    known = LINKS.get(axis.link.name)
    shared = known is not None and known.link != axis.link
    if isinstance(compute, ComputeModel) or len(axis.stages) > 1 or shared or axis.size < 2:
        return axis
    return replace(axis, curves=_curves(cluster, compute, axis.link.name, axis.size))


def _curves(cluster: Cluster, compute: CostModel, link: str, size: int) -> Curves | None:
    from learned_cost.collective_curves import INTERCONNECTS, axis_curve
    from learned_cost.estimator import MOVED_STD, KernelCosts

    measured = compute.moved(INTERCONNECTS.get(link, link), size) if isinstance(compute, KernelCosts) else ()
    if measured:
        return Curves.of(measured, "measured", MOVED_STD)
    found = [axis_curve(entry.device.name, link, size, entry.device.share) for entry in cluster.classes]
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found) or not known:
        return None
    rows = [
        (name, num_bytes, max(entry[0][place][2] for entry in known))
        for place, (name, num_bytes, _) in enumerate(known[0][0])
    ]
    return Curves.of(rows, "learned", max(entry[1] for entry in known))


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Replay the plan of a package and prove again that it equals its source.

    Raises:
        UsageError: if the directory is no package.
        VerificationError: if the plan does not replay, or does not compute what its source computes.
    """
    document, source = read_planned(directory)
    problem = read_problem(document, source)
    pcg = replay(problem, document.get("derivation", []))
    if pcg.digest != document.get("pcg_hash"):
        raise VerificationError("the derivation replays to another graph than plan.json says", "", "Plan again")
    return proof_document(verify_equal(source, pcg, problem.mesh, gradients=problem.train))


def explain(
    directory: str | os.PathLike[str], operator: str | None = None, cost: str | os.PathLike[str] | None = None
) -> str:
    """What the plan of a package does and costs, and why, as text.

    Args:
        directory: a package.
        operator: a kind, name or number of operators, to tell about these alone, in detail.
        cost: the weight file or profile folder that priced the plan, where that was none of the shipped ones.

    Raises:
        UsageError: if the directory is no package, its plan.json misses a field, no operator is called so, or the plan
            was priced by other weights or profiles than there are.
        VerificationError: if the plan does not replay.
    """
    told = explanation(directory, operator, cost)
    if operator is not None:
        return explain_operators(told["operators"])
    try:
        return explain_document(read_document(directory), told)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(error) from error


def explanation(
    directory: str | os.PathLike[str], operator: str | None = None, cost: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The same as data: operators, and rewrites where no operator is given (docs/plan-format.md).

    Raises:
        UsageError: as ``explain``.
        VerificationError: if the plan does not replay.
    """
    try:
        plan = load_plan(directory, _priced_by(read_document(directory), cost))
        return reasons(plan) if operator is None else {"operators": operators_called(plan, operator)}
    except (KeyError, TypeError) as error:
        raise _damaged(error) from error


def saved_workload(
    directory: str | os.PathLike[str], cluster: Cluster | None = None, cost: str | os.PathLike[str] | None = None
) -> Workload:
    """What the plan of a package runs, for `pdv simulate`: on its own cluster, or on another of as many devices.

    Raises:
        UsageError: as ``explain``, or if the other cluster has more or fewer devices.
        VerificationError: if the plan does not replay.
    """
    from pdv.simulate.planned import planned

    document = read_document(directory)
    try:
        plan = load_plan(directory, _priced_by(document, cost))
        if cluster is not None and cluster.num_devices != plan.problem.mesh.num_devices:
            own, axes = plan.problem.mesh.num_devices, plan.problem.mesh
            raise UsageError(
                f"{cluster.name} has {cluster.num_devices} devices, the plan is for {own} ({axes})",
                "A cluster of as many devices",
                "Plan for this one with pdv optimize",
            )
        return planned(plan, cluster, None if cluster is None else lambda device: cost_model(cost, [device]))
    except (KeyError, TypeError) as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> UsageError:
    return UsageError(f"plan.json is damaged: {error!r}", "A directory that `pdv optimize` wrote", "Plan again")


def proof_document(proof: Proof) -> dict[str, Any]:
    """A proof as JSON, with the sentence that people read."""
    return {
        "statement": proof_statement(proof),
        "prime": proof.prime,
        "trials": proof.trials,
        "error_bound": proof.error_bound,
        "scaled": proof.scaled,
    }


def proof_statement(proof: Proof) -> str:
    """A proof as a sentence; how long it took is left out, so that equal plans read the same."""
    return (
        f"equal to its source over the integers mod {proof.prime}, {proof.trials} trials, {proof.scaled}; "
        f"programs that differ would pass with probability at most {proof.error_bound:.1e}"
    )


def _loaded(
    cluster: str | os.PathLike[str] | Mapping[str, Any] | Cluster,
    mesh: Mapping[str, int] | None,
    pins: Pins | PinSet | None,
) -> tuple[Cluster, Pins | PinSet | None]:
    """The cluster, with its mesh pinned to the one that the caller or the pins give, if any; and the pins.

    Raises:
        UsageError: if the caller's mesh is none of the cluster's.
        PinsError: if the pins' is none, or they fix another than the caller.
    """
    devices = load_cluster(Path(cluster) if isinstance(cluster, os.PathLike) else cluster)
    pinned = _pinned_mesh(mesh, pins)
    if pinned is None:
        return devices, pins
    sizes = list(pinned.values())
    if math.prod(sizes) != devices.num_devices:
        axes = ", ".join(f"{name}={size}" for name, size in pinned.items())
        allowed = f"{devices.name} has {devices.num_devices} devices"
        mend = "Choose axis sizes that multiply to it, or leave the mesh out"
        what = f"the mesh {axes} has {math.prod(sizes)} devices"
        if mesh is None and isinstance(pins, PinSet):
            raise PinsError(f"{pins.source.where(('mesh',))}: {what}", allowed, mend)
        raise UsageError(what, allowed, mend)
    return devices.with_mesh(pinned), pins


def _pinned_mesh(mesh: Mapping[str, int] | None, pins: Pins | PinSet | None) -> Mapping[str, int] | None:
    """The mesh that the caller or the pins fix, if any.

    Raises:
        PinsError: if they fix two.
    """
    pinned = pins.mesh if isinstance(pins, PinSet) else None
    if mesh is None or pinned is None or list(mesh.items()) == list(pinned.items()):
        return mesh or pinned
    said, asked = (", ".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in (pinned, mesh))
    raise PinsError(f"the pins say mesh {said}, the caller says {asked}", mend="Leave one of them out")


def _name_of(model: Any) -> str:  # Any: as optimize takes it
    """What people call a model: its file without suffix, its class."""
    if isinstance(model, str | os.PathLike):
        return Path(model).stem
    if isinstance(getattr(model, "graph", None), Graph):  # a program, which has a name
        return str(model.graph.name)
    owner = getattr(model, "graph_module", model)  # an exported program has no better name than its module's
    return type(owner).__name__.lower()


def _with_dtype(graph: Graph, name: str | None) -> Graph:
    """The graph computing in the type called ``name``, if any."""
    if name is None:
        return graph
    from pdv.passes.precision import with_dtype

    try:
        dtype = DType.from_name(name)
    except KeyError:
        dtype = DType.BOOL
    if not dtype.is_floating:
        raise UsageError(f"dtype {name!r} is not known", "Allowed: float32, bfloat16, float16")
    return with_dtype(graph, dtype)
