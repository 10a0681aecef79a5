"""How a drawn step runs: its micro-batches, where stages are cut, in which order they run, and what runs again.

Entry points: ``draw_run`` draws it; ``micro_graph`` is what one micro-batch computes; ``run_as`` reads it through the
steps of a derivation, as a plan of the planner is read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fuzz_programs_runs.spec import PlanSpec, RunSpec
from ir.dims import divisors
from ir.errors import VerificationError
from ir.graph import Graph, Node
from ir.rows import rows_apart
from ir.scaling.rows import micro_batch
from pdv.cluster import load_cluster
from pdv.emit.analysis.staged import Running
from pdv.plan.running import read_running, running_of, running_steps, type_steps
from pdv.plan.steps import operators
from pdv.problem import Derived, Problem
from pdv.problem.workload import EMITTED, FOLDED, Order, Recompute, Stages
from pdv.schedule.order import why_not

TRIES = 12  # places of cuts that are drawn until each stage has a parameter
MOST_STAGES = 4
ONE_EACH: tuple[Order, ...] = ("gpipe", "eager-1f1b", "1f1b", "zero-bubble")  # orders of one stage on each rank
IN_TURN: tuple[Order, ...] = ("interleaved", *FOLDED)  # of two


def draw_run(graph: Graph, devices: int, rng: random.Random) -> RunSpec:
    """A way to run a step of a program on so many devices, part of which a stage has; sometimes all at once."""
    batch = min(node.type.shape[0] for node in graph.inputs)
    counts = [n for n in divisors(batch) if n > 1 and rows_apart(graph) and micro_batch(graph, n)]
    micro_batches = rng.choice(counts) if counts and rng.random() < 0.7 else 1
    several = [n for n in divisors(devices) if 1 < n <= MOST_STAGES]
    ranks = rng.choice(several) if several and rng.random() < 0.9 else 1
    virtual = 2 if ranks > 1 and micro_batches % ranks == 0 and rng.random() < 0.25 else 1
    cuts = _draw_cuts(graph, ranks * virtual, rng) if ranks > 1 else ()
    again = rng.random() < 0.3
    orders = IN_TURN if virtual > 1 else ONE_EACH
    fit = [order for order in orders if not why_not(order, ranks, virtual, micro_batches, recomputes=again)]
    order = rng.choice(fit) if cuts else "1f1b"
    return RunSpec(micro_batches, cuts, order, virtual if cuts else 1, again, rng.random() < 0.3)


def _draw_cuts(graph: Graph, stages: int, rng: random.Random) -> tuple[int, ...]:
    """Places at which every stage has a parameter of its own to train; none where there are no such."""
    if graph.updates:
        return ()
    nodes = _staged(graph)
    for _ in range(TRIES if len(nodes) >= stages else 0):
        cuts = tuple(sorted(rng.sample(range(1, len(nodes)), stages - 1)))
        stage_of = _stage_of(nodes, cuts)
        trained = {stage_of[node] for node in nodes if any(x.is_param and x.needs_grad for x in node.operands)}
        if len(trained) == stages:
            return cuts
    return ()


def micro_graph(graph: Graph, plan: PlanSpec) -> Graph:
    """What one micro-batch computes."""
    if plan.run.micro_batches == 1:
        return graph
    found = micro_batch(graph, plan.run.micro_batches)
    if found is None:
        raise VerificationError(f"no {plan.run.micro_batches} equal parts of the rows", "", "", check="accumulate")
    return found


def run_as(problem: Problem, graph: Graph, derived: Derived, run: RunSpec) -> Running:
    """How the emitter is told to run the plan of ``problem``, whose rewritten graph is ``graph``.

    Raises:
        VerificationError: if it cannot be run so: rewriting, or shrinking, left a stage without parameters.
    """
    stage_of = _stage_of(_staged(graph), run.cuts) if run.cuts else {}
    stages = Stages(run.ranks, run.virtual, chunk_of=stage_of)
    recompute: Recompute = "full" if run.recompute else "none"
    execution = replace(EMITTED, micro_batches=run.micro_batches, order=run.order, recompute=recompute)
    node = {"devices": problem.mesh.num_devices * run.ranks, "device": "cpu-core", "link": "loopback-gloo"}
    steps = [*running_steps(graph, stages, execution), *type_steps(problem, graph)]
    try:
        found = read_running(problem, graph, steps, lambda: load_cluster({"nodes": [node]}))
    except ValueError as error:
        raise VerificationError(str(error), "", "", check="running") from error
    return running_of(problem, derived, *found)


def _staged(graph: Graph) -> list[Node]:
    """The operators that have a stage."""
    return [node for node in operators(graph) if node.needs_grad]


def _stage_of(nodes: Sequence[Node], cuts: Sequence[int]) -> dict[Node, int]:
    """Operators first computed go first; those behind the last place for a cut belong to the last stage."""
    return {node: sum(number >= cut for cut in cuts) for number, node in enumerate(nodes)}
