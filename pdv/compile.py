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
from ir.graph import Graph
from ir.proof.exact import Proof, verify_equal
from ir.types import DType
from pdv import config
from pdv.cluster import Cluster, candidate_meshes, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.emit.package import emission_of
from pdv.guard import guarded, noted, passing
from pdv.open_sizes import sizes_document
from pdv.pins import PinSet, load_pins
from pdv.plan.cache import Cache
from pdv.plan.derivation import replay
from pdv.plan.document import plan_document, read_problem
from pdv.plan.package import Plan
from pdv.plan.proofs import proof_document, run_document
from pdv.planning import Effort, Progress, Searched, opened, searched
from pdv.prices import cost_model, priced_axes
from pdv.problem import Pins, Problem
from pdv.rewrite.algebra import RULES
from pdv.rewrite.chosen import chosen_rules
from pdv.rewrite.rule import Rule
from pdv.search.meshes import Found

if TYPE_CHECKING:
    from pdv.frontend.program import Program

__all__ = ["optimize", "plan_problems"]


@guarded("pdv.optimize")
def optimize(
    model: Any,  # Any: a path, a torch.nn.Module or a torch.export.ExportedProgram
    example_inputs: Any = None,  # Any: what the module's forward takes
    *,
    cluster: str | os.PathLike[str] | Mapping[str, Any] | Cluster,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    dynamic_shapes: Any = None,  # Any: as torch.export.export takes it
    mode: config.Mode = config.MODE,
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
        model: an ONNX file, an ``nn.Module``, an exported program, or a `Program` (`pdv.frontend.arch.graph.program`).
        example_inputs: a batch as the training loop would pass it, for a module.
        cluster: a YAML file, its content, or a loaded cluster.
        batch: global batch size, where the model leaves it open.
        dims: at which size to plan other dims that the model leaves open, by name: ``{"sequence": 128}``.
        dynamic_shapes: which dims a module leaves open besides the batch, as ``torch.export.export`` takes them.
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
    effort, progress = Effort(search, budget_s, opened(cache), seed), passing(progress)
    devices, pinned = _loaded(cluster, mesh, pins if pins is None or isinstance(pins, Pins) else load_pins(pins))
    compute, used = cost_model(cost, [entry.device for entry in devices.classes]), chosen_rules(rules)
    inputs = (example_inputs, batch, dims, dynamic_shapes)
    program, reading = _read(model, inputs, dtype, progress, train=mode == "train")
    problems = plan_problems(
        program.graph, devices, mode=mode, memory_limit=memory_limit, pins=pinned, rules=used, compute=compute
    )
    return _planned(program, problems, devices, effort, pinned, progress, reading)


def _planned(
    program: Program,
    problems: Sequence[Problem],
    cluster: Cluster,
    effort: Effort,
    pins: PinSet | Pins | None,
    progress: Progress,
    reading: str,
) -> Plan:
    """Search and prove; ``reading``: what a run against the model showed."""
    if isinstance(pins, Pins):
        effort = replace(effort, cache=None)  # predicates have no content to remember them by
    content = pins.content if isinstance(pins, PinSet) else None
    result = _searched(program.graph, problems, effort, content, cluster, progress)
    found, graph = result.found, program.graph
    sizes = sizes_document(program)
    document = plan_document(
        found,
        cluster=cluster,
        strategy=effort.search,
        seconds=result.seconds,
        problems=problems,
        pins=content,
    )
    document = {**document, "reading": reading}
    progress("proving", None)
    proof = proof_document(_proved(found, document, graph))
    progress("simulating", None)
    document = {**document, "sizes": sizes, "proof": proof, "simulated": _simulated(found, cluster)}
    mesh = found.solution.problem.mesh
    plan = Plan(document, graph, mesh, emission_of(found.pcg, mesh, document), program.weights)
    progress("running the emitted text on simulated ranks", None)
    return replace(plan, document={**document, "run": run_document(plan)})


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
    from pdv.report.ways import needs, told, ways_out

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

        raise told(error, ways_out(on, graph, cluster, error, limit)) from error


def _simulated(found: Found, cluster: Cluster) -> dict[str, Any]:
    """What a step of the emitted program takes and holds, by events (docs/simulator.md)."""
    from pdv.problem.workload import workload_of_pcg
    from pdv.report.simulated import step_facts

    solution = found.solution
    return step_facts(workload_of_pcg(replace(solution.problem, graph=solution.graph), found.pcg, cluster))


def _read(
    model: Any,  # Any: as optimize
    given: tuple[Any, int | None, Mapping[str, int] | None, Any],  # Any: inputs, and torch's dynamic shapes
    dtype: str | None,
    progress: Progress,
    *,
    train: bool,
) -> tuple[Program, str]:
    """The program of a model, under the model's name and in the type asked for; and what a run against it showed.

    Raises:
        ModelError: if the program is not the module that was given.
    """
    progress("reading the model", None)
    from pdv.frontend import load_program

    inputs, batch, dims, dynamic_shapes = given
    sizes: dict[str, Any] = {"batch": batch, "dims": dims, "dynamic_shapes": dynamic_shapes}
    if isinstance(model, str | os.PathLike) or isinstance(getattr(model, "graph", None), Graph):
        program, reading = load_program(model, inputs, **sizes), ""
    else:
        from pdv.check.reading import check_reading, copy_of

        source = copy_of(model, inputs, train=train)
        program = load_program(model, inputs, **sizes)
        progress("running what was read against the model", None)
        reading = check_reading(noted(program.graph), source, train=train)
    name = _name_of(model)
    program = program.mapped(lambda graph: _with_dtype(replace(graph, name=name), dtype))
    noted(program.graph)
    return program, reading


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
    mode: config.Mode,
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
            priced_axes(cluster, compute, candidate),
            compute,
            mode,
            limit,
            pins.on(graph, candidate.mesh) if isinstance(pins, PinSet) else pins or Pins(),
            rules,
        )
        for candidate in meshes
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
