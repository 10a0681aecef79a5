"""How a step of a plan runs, as steps of its derivation and back: micro-batches, and the stages of a pipeline.

    accumulate    the batch is taken in equal parts, one after the other; the gradient is the sum of theirs. It asks
                  that no row of the batch sees another (``ir/rows.py``), which is looked up in the operators' splits.
    stage         operators, by number, run on the devices of one stage. What they compute stays what it is; it asks
                  that no stage reads what a later one computes. Stages may be on fewer ranks, in turn ("ranks").
                  In the order 2bw a step ends the batch before, whose passes all read the weights of one step before
                  ("staleness": 1): what is proved of a step is proved of that batch, at these weights.
    slice         each micro-batch passes the stages in equal slices in time, one behind the other. It asks that no
                  operator needs all positions at once, and that no position depends on later ones, which is proved.
    recompute     backward runs the forward of each layer again, from what that took; or, one by one, what is cheap to
                  make again of what is kept ("light"). The same values twice ask nothing.
    offload-activations    what layers keep for backward (of a layer that is recomputed: what it takes) is in the host's
                  memory until then. Copies are the identity.
    round         parameters rest in a wider type than that of compute, as do their gradients and the optimizer's
                  moments; forward reads them rounded, which is the identity in the proof. It is given, not searched.
    offload       parameters rest in the host's memory, where the optimizer keeps its moments and steps; forward reads
                  copies, which are the identity in the proof.
    compile       parts of the program run as torch.compile makes them: the same operators, of which element-wise ones
                  in a row are one kernel. It is the identity in the proof, and given, not searched.
    scale         products with these matrices are of factors in a narrow format, cast as they are multiplied, forward
                  and backward; a cast is the identity in the proof.

Entry points: ``running_steps`` writes them, ``read_running`` reads them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any, TypedDict

from ir.cost_model import CostModel
from ir.errors import ShardingError, UsageError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.rows import what_joins_rows
from pdv.cluster import Cluster
from pdv.emit.analysis.staged import Running, Scaled
from pdv.pcg.fused import fused_of
from pdv.pcg.in_slices import in_slices
from pdv.pcg.scaled import products_of
from pdv.pcg.spread import spread_to_pcg
from pdv.pcg.units import joins_unit
from pdv.plan.steps import Step, operators, require
from pdv.problem import Derived, Problem
from pdv.problem.formats import EMITTED_FORMATS, Products
from pdv.problem.fused import Fused
from pdv.problem.precision import MASTER, PRECISIONS, ROUNDED, Precision
from pdv.problem.recomputation import HOSTED, WHOLE
from pdv.problem.workload import (
    EMITTED,
    FOLDED,
    ON_HOST,
    ONE_STAGE,
    RUN_ORDERS,
    STALE,
    Execution,
    Order,
    Recompute,
    Stages,
    emitted,
)
from pdv.schedule.check import stuck
from pdv.schedule.order import Pipeline, why_not
from pdv.schedule.pieces import pieces
from pdv.schedule.slices import why_not_in_slices
from pdv.search.best import BestPlan

ACCUMULATE, STAGE, SLICE = "accumulate", "stage", "slice"
RECOMPUTE, OFFLOAD_ACTIVATIONS = "recompute", "offload-activations"
ROUND, OFFLOAD, SCALE, COMPILE = "round", "offload", "scale", "compile"
TYPES = (ROUND, OFFLOAD, SCALE, COMPILE)
"""Steps that say in which types a plan is run, where what it trains rests, and if it is compiled, in their order."""
RUNNING = (ACCUMULATE, STAGE, SLICE, RECOMPUTE, OFFLOAD_ACTIVATIONS, *TYPES)
HOST = "host"
SAID = 80  # letters of a reason, in a program


class TypesOfRun(TypedDict):
    """Fields of a ``Problem``."""

    precision: Precision
    products: Products | None
    fused: Fused | None


ONE_TYPE = "parameters that rest otherwise than they are read"
PARTS = ["parts"]
"""What is compiled: each block that a model repeats, or all of it (``model.compile``)."""
LAYERS = ["layers"]
"""What is computed again, or has what it keeps on the host: the model's repeated layers (``pdv.schedule.pieces``)."""
LIGHT = ["light"]
"""What is computed again: light values (``ir.memory.kept``)."""


def running_steps(graph: Graph, stages: Stages, execution: Execution) -> list[dict[str, Any]]:
    """The steps of a plan whose rewritten graph is ``graph``; none for one micro-batch and one stage."""
    steps: list[dict[str, Any]] = []
    if execution.micro_batches > 1:
        sites: list[Any] = [node.attr("name") for node in graph.inputs]
        steps.append({"rule": ACCUMULATE, "bindings": {"micro_batches": execution.micro_batches}, "sites": sites})
    if stages.count > 1:
        numbers: dict[int, list[int]] = {stage: [] for stage in range(stages.chunks)}
        for number, node in enumerate(operators(graph)):
            if node.needs_grad:
                numbers[stages.chunk_of[node]].append(number)
        for stage, sites in numbers.items():
            bindings = {"stage": stage, "of": stages.chunks, "order": execution.order}
            bindings |= {"ranks": stages.count} if stages.virtual > 1 else {}
            bindings |= {"staleness": STALE[execution.order]} if execution.order in STALE else {}
            steps.append({"rule": STAGE, "bindings": bindings, "sites": sites})
    if execution.moments > 1:
        inputs: list[Any] = [node.attr("name") for node in graph.inputs]
        steps.append({"rule": SLICE, "bindings": {"slices": execution.moments}, "sites": inputs})
    if execution.recompute in (*WHOLE, "light"):
        sites = LAYERS if execution.recompute in WHOLE else LIGHT
        steps.append({"rule": RECOMPUTE, "bindings": {}, "sites": sites})
    if execution.recompute in HOSTED:
        steps.append({"rule": OFFLOAD_ACTIVATIONS, "bindings": {"to": HOST}, "sites": LAYERS})
    return steps


def round_steps(problem: Problem) -> list[dict[str, Any]]:
    """The step that says in which types parameters are kept, where these are not the types of compute."""
    sites = _trained(problem)
    if not (problem.precision.master and sites):
        return []
    kept = MASTER.torch_name
    bindings = {"to": ROUNDED.torch_name, "parameters": kept, "gradients": kept, "moments": kept}
    return [{"rule": ROUND, "bindings": bindings, "sites": sites}]


def offload_steps(problem: Problem) -> list[dict[str, Any]]:
    """The step that says that what is trained, and the optimizer's state, are in the host's memory."""
    sites = _trained(problem) if problem.precision.on_host else []
    return [{"rule": OFFLOAD, "bindings": {"to": HOST}, "sites": sites}] if sites else []


def _trained(problem: Problem) -> list[Any]:
    """Names of parameters that an optimizer updates."""
    return [param.attr("name") for param in problem.graph.params if param.needs_grad] if problem.train else []


def scale_steps(problem: Problem, graph: Graph) -> list[dict[str, Any]]:
    """The step that says which products of the rewritten ``graph`` are in a narrow format."""
    sites = [] if problem.products is None else problem.products.weights(graph)
    if problem.products is None or not (sites and problem.train):
        return []
    return [{"rule": SCALE, "bindings": {"format": problem.products.format.name}, "sites": sites}]


def compile_steps(problem: Problem) -> list[dict[str, Any]]:
    """The step that says that the program is compiled."""
    return [] if problem.fused is None else [{"rule": COMPILE, "bindings": {}, "sites": PARTS}]


def type_steps(problem: Problem, graph: Graph) -> list[dict[str, Any]]:
    """All that a plan, whose rewritten graph is ``graph``, says of the types in which it runs."""
    typed = [*round_steps(problem), *offload_steps(problem), *scale_steps(problem, graph)]
    return [*typed, *compile_steps(problem)]


def read_types(source: Graph, steps: Sequence[Step], compute: CostModel) -> TypesOfRun:
    """In which types, and where, training keeps parameters, and which products are narrower, by a derivation's steps.

    Raises:
        ValueError: if they name a format that no program is emitted in.
    """
    rules, formats = {step["rule"] for step in steps}, set[str]()
    for step in steps:
        formats |= {step["bindings"]["format"]} if step["rule"] == SCALE else set()
    require(formats <= set(EMITTED_FORMATS) and len(formats) < 2, f"products are in {sorted(formats)}")
    chosen = [products_of(source, EMITTED_FORMATS[name]) for name in formats]
    kept = replace(PRECISIONS["mixed" if ROUND in rules else "as-emitted"], on_host=OFFLOAD in rules)
    fused = fused_of(source, compute) if COMPILE in rules else None
    return {"precision": kept, "products": next(iter(chosen), None), "fused": fused}


def read_running(
    problem: Problem, graph: Graph, steps: Sequence[Step], cluster: Callable[[], Cluster]
) -> tuple[Stages, Execution]:
    """What the steps say of the operators of ``graph``, the rewritten one of ``problem``, and how it then runs.

    cluster: what it runs on, asked for where there are steps.

    Raises:
        ValueError: if a step does not apply.
    """
    typed = [{name: step[name] for name in ("rule", "bindings", "sites")} for step in steps if step["rule"] in TYPES]
    require(
        typed == type_steps(problem, graph),
        "round and offload are of all parameters, and of the types that training has; scale of all matrices of layers; "
        "compile of all parts",
    )
    own = [step for step in steps if step["rule"] in RUNNING and step["rule"] not in TYPES]
    if not own:
        return ONE_STAGE, EMITTED
    stage_of, count, ranks, order = _read_stages(graph, [step for step in own if step["rule"] == STAGE])
    micro_batches = _read_parts(problem.graph, [step for step in own if step["rule"] == ACCUMULATE])
    again, hosted = ([step for step in own if step["rule"] == rule] for rule in (RECOMPUTE, OFFLOAD_ACTIVATIONS))
    leaves = bool(again or hosted)
    wrong = "" if ranks == 1 else why_not(order, ranks, count // ranks, micro_batches, recomputes=leaves)
    require(not wrong, wrong)
    moments = _read_slices(problem.graph, [step for step in own if step["rule"] == SLICE])
    if moments > 1:
        wrong = why_not_in_slices(problem, order, ranks, count // ranks, moments, leaves=leaves)
        require(not wrong, wrong)
    kept = problem.precision
    require(order not in STALE or not (kept.master or kept.on_host), f"the order {order} of {ONE_TYPE}")
    waits = "" if ranks == 1 else stuck(Pipeline(ranks, count // ranks, micro_batches, order, moments=moments))
    require(not waits, f"the order of passes: {waits}")
    light = [step for step in again if step["sites"] == LIGHT]
    alike = not (light and hosted) and all(step["sites"] in (LAYERS, LIGHT) for step in again)
    require(len(again) <= 1 and alike, f"what runs again is {again}")
    whole = all(step["sites"] == LAYERS and step["bindings"] == {"to": HOST} for step in hosted)
    require(len(hosted) <= 1 and whole, f"what leaves activations to the host is {hosted}")
    recompute: Recompute = "light" if light else "full" if again else "none"
    recompute = ON_HOST[recompute] if hosted else recompute
    execution = emitted(cluster(), problem, micro_batches, recompute, order, ranks, moments)
    stages = _with_layers(graph, stage_of, count, ranks, layered=leaves or count > 1)
    return replace(stages, folded=order in FOLDED), execution


def _read_parts(source: Graph, steps: Sequence[Step]) -> int:
    require(len(steps) <= 1, "the batch is taken in parts twice")
    if not steps:
        return 1
    count = steps[0]["bindings"]["micro_batches"]
    require(type(count) is int and count > 1, f"a step of {count!r} micro-batches")
    require(steps[0]["sites"] == [node.attr("name") for node in source.inputs], "accumulate is of all inputs")
    joined = what_joins_rows(source)
    require(not joined, f"a step in micro-batches of a program that has {joined}")
    return int(count)


def _read_slices(source: Graph, steps: Sequence[Step]) -> int:
    require(len(steps) <= 1, "micro-batches are cut into slices twice")
    if not steps:
        return 1
    count = steps[0]["bindings"]["slices"]
    require(type(count) is int and count > 1, f"micro-batches in {count!r} slices")
    require(steps[0]["sites"] == [node.attr("name") for node in source.inputs], "slice is of all inputs")
    try:
        in_slices(source, Mesh(()), count)
    except ShardingError as error:
        raise ValueError(str(error)) from error
    return int(count)


def _read_stages(graph: Graph, steps: Sequence[Step]) -> tuple[dict[Node, int], int, int, Order]:
    """The stage of each operator with a gradient, how many there are, on how many ranks, and the order of passes."""
    nodes, of = operators(graph), dict[Node, int]()
    shapes: set[tuple[int, int, Order]] = set()
    for step in steps:
        stage, count, order = step["bindings"]["stage"], step["bindings"]["of"], step["bindings"]["order"]
        require(type(stage) is int and type(count) is int and 0 <= stage < count, f"stage {stage!r} of {count!r}")
        ranks = step["bindings"].get("ranks", count)
        require(order in RUN_ORDERS, f"the order {order!r}")
        require(step["bindings"].get("staleness", 0) == STALE.get(order, 0), f"the staleness of the order {order!r}")
        require(type(ranks) is int and 1 < ranks <= count and count % ranks == 0, f"{count} stages on {ranks!r} ranks")
        shapes.add((count, ranks, order))
        for number in step["sites"]:
            require(0 <= number < len(nodes) and nodes[number] not in of, f"operator {number} in stage {stage}")
            of[nodes[number]] = stage
    if not shapes:
        return {}, 1, 1, "1f1b"
    require(len(shapes) == 1, f"stages of several pipelines: {sorted(shapes)}")
    ((count, ranks, order),) = shapes
    require(set(of.values()) == set(range(count)), f"stages {sorted(set(of.values()))} of {count}")
    require(set(of) == {node for node in nodes if node.needs_grad}, "operators without a stage, or without gradient")
    require(not graph.updates, "a pipeline of a program that overwrites buffers")
    computed = [(node, stage) for node, stage in of.items() if node not in graph.fixed]  # the rest is its readers'
    busy = {stage for node, stage in computed if any(x in graph.fixed and x.needs_grad for x in node.operands)}
    idle = set(range(count)) - busy
    require(not idle, f"stages {sorted(idle)} without parameters, so that their optimizers have none")
    late = [node for node, stage in of.items() if any(of.get(operand, 0) > stage for operand in node.operands)]
    require(not late, f"a stage reads what a later one computes: {late[:3]}")
    return of, count, ranks, order


def _with_layers(graph: Graph, stage_of: Mapping[Node, int], count: int, ranks: int, *, layered: bool) -> Stages:
    """The stages, with the model's layers in each."""
    found = pieces(graph)
    layers: list[set[int]] = [set() for _ in range(count)]
    for node, stage in stage_of.items():
        if found.layers[found.of[node]]:
            layers[stage].add(found.of[node])
    layer_of = {node: piece for node, piece in found.of.items() if found.layers[piece]} if layered else {}
    sizes = tuple(map(len, layers)) if count > 1 else ()
    return Stages(ranks, count // ranks, chunk_of=dict(stage_of), layers=sizes, layer_of=layer_of)


def as_run(found: BestPlan, cluster: Cluster) -> BestPlan:
    """The same plan with its stages and its execution as they are read back from its derivation."""
    problem, graph = found.solution.problem, found.solution.graph
    steps = [*running_steps(graph, found.stages, found.execution), *type_steps(problem, graph)]
    stages, execution = read_running(problem, graph, steps, lambda: cluster)
    return replace(found, stages=stages, execution=execution)


def running_of(problem: Problem, derived: Derived, stages: Stages, execution: Execution) -> Running:
    """The same as the emitter takes it: the stage of each node of a PCG that has a gradient."""
    if execution.order in STALE:
        gathers = [move for move in derived.pcg.nodes if joins_unit(move, several=execution.several)]
        if gathers:
            what = f"the order {execution.order} with {len(gathers)} weights that rest cut and are gathered (ZeRO)"
            raise UsageError(what, "Weights that rest as they are used", "Leave ZeRO out, or choose another schedule")
    own = spread_to_pcg(derived, stages.chunk_of) if stages.chunks > 1 else {}
    stage_of = {node: stage for node, stage in own.items() if node.needs_grad}
    again, hosted = execution.recompute in WHOLE, execution.recompute in HOSTED
    levels = tuple(problem.link(span).levels for span in problem.mesh.spans)
    shape = stages.chunks, execution.micro_batches, execution.order, stages.virtual
    scaled = None
    if problem.products is not None and (weights := problem.products.weights(derived.pcg)):
        scaled = Scaled(problem.products.format.name, frozenset(weights))
    masters, offload = bool(round_steps(problem)), bool(offload_steps(problem))
    return Running(
        stage_of, *shape, again, hosted, levels, light=execution.recompute == "light", scaled=scaled, masters=masters,
        offload=offload,
        moments=execution.moments, compiled=problem.fused is not None, joined=_joined(problem, stages, execution),
    )  # fmt: skip


def _joined(problem: Problem, stages: Stages, execution: Execution) -> str:
    """Why no step may take the batch in parts; empty of those that do, of which it was asked."""
    if not problem.train or stages.chunks > 1 or execution.micro_batches > 1:
        return ""
    why = what_joins_rows(problem.graph) or ("" if problem.rows else "outputs that are not by rows")
    return shorten(why, SAID, placeholder=" …")
