"""The pipeline, top to bottom: read the model, search, prove, simulate, run the text, and hand over the plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Gt

from ir.errors import VerificationError
from ir.graph import Graph
from pdv import config
from pdv.cluster import Cluster
from pdv.emit.package import emission_of
from pdv.guard import Progress, door, passing
from pdv.memory import step_memory
from pdv.pins import PinSet
from pdv.pipelines.pinned import Pinned
from pdv.plan.cache import Cache
from pdv.plan.derivation import replay
from pdv.plan.document import plan_document, read_problem
from pdv.plan.package import Plan
from pdv.plan.proofs import prove, proved_sizes, run_document
from pdv.plan.running import as_run, running_of
from pdv.planning.choices import Choice, check_host, read_choices, search_choices, with_activations
from pdv.planning.model import read_model, state_document
from pdv.planning.parts import find_part
from pdv.planning.problems import load_target, plan_problems, read_precision
from pdv.planning.search import Effort, SearchResult, cache_in, search_problems
from pdv.planning.sizes import sizes_document
from pdv.prices import cost_model
from pdv.problem import Pins, Problem
from pdv.problem.workload import Order, Recompute, Workload
from pdv.report.html.facts import Step, page_facts
from pdv.report.loaded import workload_of_found
from pdv.report.opaque import OpaqueWarning, opaque_warning
from pdv.report.simulated import step_facts
from pdv.report.summary import summarize
from pdv.rewrite.chosen import chosen_rules
from pdv.search.best import BestPlan
from pdv.simulate.step import simulate
from pdv.watch import UNWATCHED, Watch


@door("pdv.optimize")
def optimize(
    model: Any,  # Any: a path, a torch.nn.Module or a torch.export.ExportedProgram
    example_inputs: Any = None,  # Any: what the module's forward takes
    *,
    cluster: str | os.PathLike[str] | Mapping[str, Any] | Cluster,
    batch: Annotated[int, Ge(1)] | None = None,
    dims: Mapping[str, bool | float | Sequence[float]] | None = None,
    dynamic_shapes: Any = None,  # Any: as torch.export.export takes it
    mode: config.Mode = config.MODE,
    dtype: str | None = None,
    precision: str = config.PRECISION,
    products: str = config.PRODUCTS,
    offload: str = config.OFFLOAD,
    allow: Sequence[str] = (),
    compiled: bool = False,
    memory_limit: Annotated[float, Gt(0)] | None = None,
    search: str = config.SEARCH,
    mesh: Mapping[str, int] | None = None,
    pins: str | os.PathLike[str] | Mapping[str, Any] | PinSet | Pins | None = None,
    budget_s: float = config.BUDGET_S,
    pipelines: config.Pipelines = config.PIPELINES,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: Order | None = None,
    recompute: Recompute | None = None,
    virtual_stages: int | None = None,
    slices: int | None = None,
    seed: int = 0,
    cache: str | os.PathLike[str] | Cache | None = None,
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    cost: str | os.PathLike[str] | None = None,
    check: bool = True,
    strict: bool = False,
    freeze: str | Sequence[str] = (),
    weights: str | os.PathLike[str] | None = None,
    progress: Progress = lambda stage, fraction: None,
    watch: Watch = UNWATCHED,
) -> Plan:
    """Plan a model for a cluster and prove the plan.

    Args:
        model: an ONNX file, an ``nn.Module``, an exported program, or a `Program` (`pdv.frontend.arch.graph.program`).
        example_inputs: a batch as the training loop would pass it, for a module.
        cluster: a YAML file, its content, or a loaded cluster.
        batch: global batch size, where the model leaves it open.
        dims: at which size to plan other dims that the model leaves open, by name: ``{"sequence": 128}``; and values of
            a file's inputs that are shapes, axes and the like: ``{"axes": [0, 1]}``.
        dynamic_shapes: which dims a module leaves open besides the batch, as ``torch.export.export`` takes them.
        mode: "train" prices forward, backward and optimizer; "infer" forward alone.
        dtype: compute in "float32", "bfloat16" or "float16"; default: as the model.
        precision: of training: "as-emitted" keeps parameters, gradients and moments in the type of compute, "mixed"
            keeps them in float32 and computes in bfloat16.
        products: the format of a layer's products in training: "own", "fp8" (scaled by tensors) or "fp8-rowwise".
        offload: what is in the host's memory: "optimizer" (with what is trained), "activations" (what layers keep for
            backward), "all", or "none".
        allow: what a search may take besides, where it is faster or nothing else fits: "fp8", "offload".
        compiled: the program is one that `build` has torch.compile compile, part by part, and is priced so.
        memory_limit: bytes per device; default: the smallest device's memory.
        search: the strategy's name.
        mesh: axis sizes, slow to fast, of a stage where these are fixed; default: every mesh that the cluster allows.
        pins: what is fixed or forbidden: a YAML file or its content (docs/pins.md), or predicates.
        budget_s: CPU-seconds of search after which the best plan so far is taken.
        pipelines: whether stages and micro-batches are searched: "always", "never", or "where-needed", where no plan
            for the whole batch at once fits. Nothing may be pinned then but the five that follow, and the mesh.
        stages: on how many ranks (each a mesh of its own) a pipeline is; default: searched.
        micro_batches: how many a step has; default: searched.
        schedule: of passes in a pipeline, "gpipe", "1f1b", "interleaved", …; default: searched (docs/pins.md).
        recompute: "full": backward runs the forward of each layer again; "none"; default: searched.
        virtual_stages: how many each rank of a pipeline has, in turn; default: searched.
        slices: in time, in which each micro-batch passes the stages one by one; default: none.
        seed: of searches that sample (mcmc, gradient, reinforce, bayes); the same seed gives the same plan.
        cache: a directory of searches made before; default: none is kept.
        rules: algebraic rules that may be applied: "shipped" (default), "none", files of laws, or several of these.
        cost: what prices kernels: "auto" (default), "analytic", "learned", "measured", a weight file, or a folder of
            profiles.
        check: whether what was read is run against the model: a module on its example inputs, an ONNX file on random
            ones in ONNX Runtime, or else in onnx's reference implementation.
        weights: a .safetensors file, or the .index.json of several, that has the model's tensors in place of its own.
        freeze: names or patterns (``"*.embed_positions.weight"``) of parameters that training leaves as they are; a
            module says so itself by ``requires_grad``, a file cannot.
        strict: refuse operators that have no declaration, instead of running them as they are on every rank.
        progress: called with (stage, fraction or None).
        watch: told how far the search is, and asked whether to end it with the best plan so far.

    Raises:
        PdvError: one of its kinds, each with what is wrong and what to do (docs/errors.md).
    """
    progress, watch = passing(progress), Watch(passing(watch.tell), passing(watch.stopped))
    fixed = Pinned(stages, micro_batches, schedule, recompute, virtual_stages=virtual_stages, slices=slices).settled
    devices, pinned, how = load_target(cluster, mesh, pins, with_activations(fixed, offload, (), mode, ()))
    predicates = isinstance(pinned, Pins)  # have no content by which a search could be remembered
    effort = Effort(search, budget_s, None if predicates else cache_in(cache), seed, watch)
    content = pinned.content if isinstance(pinned, PinSet) else None
    compute, used = cost_model(cost, [entry.device for entry in devices.classes]), chosen_rules(rules)
    kept, dtype = read_precision(precision, dtype, mode)
    program, reading = read_model(
        model, example_inputs, dtype, progress, train=mode == "train", check=check, strict=strict,
        frozen=freeze, weights=weights, batch=batch, dims=dims, dynamic_shapes=dynamic_shapes,
    )  # fmt: skip
    ask = partial(plan_problems, mode=mode, memory_limit=memory_limit, compute=compute, precision=kept)
    of_whole = pinned if how.stages in (None, 1) else None  # a mesh of the cluster has other axes than a stage's
    problems = ask(program.graph, devices, pins=pinned if predicates else of_whole, rules=used)
    units = [entry.device for entry in devices.classes]
    choices = read_choices(products, offload, allow, mode, how, program.graph, units, compiled=compiled)
    how = with_activations(how, offload, allow, mode, units)
    inside = pinned if isinstance(pinned, PinSet) and how.says_how else None

    def others(chosen: Choice, rules: Any, graph: Graph, cluster: Cluster) -> list[Problem]:
        return [chosen.of(problem, units) for problem in ask(graph, cluster, rules=rules)]

    def search_in(chosen: Choice, within_s: float, last: bool) -> SearchResult:
        asked, own = [chosen.of(problem, units) for problem in problems], replace(effort, budget_s=within_s)
        remedies = partial(others, chosen, ()) if last else None
        result = search_problems(
            asked, devices, own, content, progress, remedies, pipelines=pipelines, pinned=how, inside=inside
        )
        if chosen.on_host or how.activations is not None:
            check_host(step_memory(_workload(result.found, devices)))
        return result

    result = search_choices(choices, effort.budget_s, search_in, partial(_step_s, devices), watch.stopped)
    listed, devices = devices, result.found.on(devices)
    found, plan_mesh = as_run(result.found, devices), result.found.solution.problem.mesh
    progress("simulating", None)
    workload = workload_of_found(found, devices)
    simulation, memory = simulate(workload), step_memory(workload)
    step, part = step_facts(simulation, memory), None
    if content is None and not (predicates or how.says_how or listed.mesh) and search == config.SEARCH:
        progress("looking at parts of the cluster", None)
        part = find_part(simulation.step_s, program.graph, listed, partial(others, choices[0], used), effort)
    document = {
        **plan_document(
            found,
            step,
            cluster=devices,
            strategy=search,
            seconds=result.seconds,
            problems=problems,
            pins=content,
            running=how.as_dict(),
        ),
        "simulated": step,
        **({} if part is None else {"part": asdict(part)}),
        "reading": reading,
        "sizes": sizes_document(program),
        **state_document(program),
    }
    progress("proving", None)
    if warning := opaque_warning(document):
        warnings.warn(warning, OpaqueWarning, stacklevel=2)
    document["proof"] = _prove(found, document)
    document["sizes"] = proved_sizes(document["sizes"], document["proof"])
    running = running_of(found.solution.problem, found.derived, found.stages, found.execution)
    emission = emission_of(found.pcg, plan_mesh, document, running)
    drawn = page_facts(Step(workload, found.derived, found.cost, simulation, memory), document)
    plan = Plan(document, found.solution.problem.graph, plan_mesh, emission, program.weights, drawn)
    progress("running the emitted text on simulated ranks", None)
    document |= {"run": run_document(plan)}
    return replace(plan, document=document, told=summarize(document))


def _workload(found: BestPlan, listed: Cluster) -> Workload:
    """Of what was found for a cluster."""
    devices = found.on(listed)
    return workload_of_found(as_run(found, devices), devices)


def _step_s(devices: Cluster, result: SearchResult) -> float:
    """Simulated, of what was found."""
    return simulate(_workload(result.found, devices)).step_s


def _prove(found: BestPlan, document: Mapping[str, Any]) -> dict[str, Any]:
    """The proof of a plan's own document: its derivation, replayed, is what was found, and equal to the source."""
    source = found.solution.problem.graph
    problem = read_problem(document, source)
    pcg = replay(problem, document["derivation"])
    if pcg.digest != found.pcg.digest:
        raise VerificationError("the derivation replays to another graph than the search found", "", "Report this")
    if pcg.draws != source.draws:
        raise VerificationError("the plan draws other masks of dropout than the source", "", "Report this")
    return prove(source, pcg, problem, found.execution.moments)
