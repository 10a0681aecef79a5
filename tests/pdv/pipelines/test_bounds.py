"""Bounds of simulated steps: no plan beats that of its cell, whatever its mesh, micro-batches, order and cut."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from ir.cost_model import CostModel, NodeEstimate, Query
from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.memory import step_memory
from pdv.pipelines.bounds import Bounds, least_rounds, slowest_rounds
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimates
from pdv.pipelines.inside import Inside, Insides, workload
from pdv.pipelines.least import least_slowest
from pdv.pipelines.pipeline import Mode, stages_of
from pdv.planning.problems import plan_problems
from pdv.prices import cost_model
from pdv.problem.workload import Workload
from pdv.schedule.order import Order, Pipeline
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget
from pdv.simulate.engine.pipeline import Durations, Sends, compose
from pdv.simulate.step import simulate

MODELS = (
    "gpt:layers=4,hidden=1024,heads=8,seq=512,vocab=2048",
    "llama:layers=4,hidden=1024,heads=8,kv_heads=4,ffn=2816,seq=512,vocab=4096",
)
PLANS = 3  # stages, meshes and micro-batches of each model
PRICES = ("arithmetic", "learned", "jagged")  # of kernels
MODES = (Mode(), Mode("none", "gpipe"), Mode("full"), Mode("full", "gpipe"))


@cache
def nodes() -> Cluster:
    """Two nodes of two GPUs."""
    node = {"count": 2, "devices": 2, "device": "a100-80gb-sxm", "link": "nvlink3"}
    return load_cluster(
        {"name": "nodes", "nodes": [node], "network": {"name": "port", "bandwidth": "200 Gb/s", "latency": "5 us"}}
    )


@cache
def unequal() -> Cluster:
    """Two nodes of two GPUs each, of two kinds."""
    kinds = ("a100-80gb-sxm", "h100-80gb-sxm")
    node = [{"count": 1, "devices": 2, "device": device, "link": "nvlink3"} for device in kinds]
    return load_cluster(
        {"name": "unequal", "nodes": node, "network": {"name": "port", "bandwidth": "200 Gb/s", "latency": "5 us"}}
    )


class Jagged(ComputeModel):
    """Arithmetic times a number between 1/4 and 4 that each shape draws: no more of anything need take longer."""

    def _node(self, query: Query) -> NodeEstimate:
        draw = random.Random(repr((query.op.name, *query.loops.extents.values())))
        found, factor = super()._node(query), 4.0 ** draw.uniform(-1.0, 1.0)
        return NodeEstimate(*(replace(one, mean_s=one.mean_s * factor, source="measured") for one in found))


class Prices:
    """What a ``CostModel`` says, and is no ``ComputeModel``."""

    def __init__(self, model: CostModel) -> None:
        self.nodes, self.optimizer, self.outside = model.nodes, model.optimizer, model.outside
        self.identity, self.correlation, self.provenance = model.identity, model.correlation, model.provenance


@cache
def prices(name: str, cluster: Callable[[], Cluster] = nodes) -> CostModel:
    """Of kernels on a cluster's devices."""
    devices = tuple(entry.device for entry in cluster().classes)
    if name == "jagged":
        return Prices(Jagged(devices))
    return ComputeModel(devices) if name == "arithmetic" else cost_model("learned", devices)


def bounds_of(
    model: str, limit: float | None = None, priced: str = "arithmetic", cluster: Callable[[], Cluster] = nodes
) -> Bounds:
    """Of all plans for a batch of 16."""
    source, compute = graph(arch(model), 16, DType.BF16), prices(priced, cluster)
    problem = plan_problems(source, cluster(), mode="train", memory_limit=limit, rules=(), compute=compute)[0]
    return Bounds.of(Estimates(Space(problem, cluster()), backtrack, Budget()))


def random_plans(space: Space, draw: random.Random, count: int) -> Iterator[tuple[Candidate, Workload]]:
    """Some stages, meshes and micro-batches; insides of some limits of memory; all modes, cut anywhere."""
    insides = Insides(space, space.graph, backtrack, Budget(), rules=False)
    options = [(p, mesh, m) for p in space.stages for mesh in space.meshes(p) for m in space.counts]
    for stages, mesh, micro_batches in draw.sample(options, count):
        candidate = space.candidate(stages, mesh, micro_batches)
        free = insides.free(candidate)
        assert free is not None
        less = insides.within(candidate, draw.uniform(0.3, 0.9) * free.num_bytes, 1.0)
        for inside in filter(None, (free, less)):
            for mode in MODES:
                if micro_batches >= stages or mode.order == "gpipe":
                    yield candidate, _run(space, candidate, inside, mode, draw)


def _run(space: Space, candidate: Candidate, inside: Inside, mode: Mode, draw: random.Random) -> Workload:
    borders = sorted(draw.sample(range(1, inside.pieces.count), candidate.stages - 1))
    sizes = [stop - start for start, stop in itertools.pairwise([0, *borders, inside.pieces.count])]
    return workload(
        space, candidate, inside.plan, stages_of(inside.pieces, candidate.stages, sizes, layered=True), mode
    )


@pytest.mark.parametrize("priced", PRICES)
@pytest.mark.parametrize("model", MODELS)
def test_no_plan_beats_its_cell(model: str, priced: str) -> None:
    """Nor the least of all cells; where memory is short, none that fits."""
    free, draw = bounds_of(model, priced=priced), random.Random(model + priced)
    plans = list(random_plans(free.space, draw, PLANS))
    needed = [step_memory(work).worst.least_bytes for _, work in plans]
    limit, least_s = statistics.median(needed), free.least_s(float("inf"))
    short = bounds_of(model, limit, priced)
    assert len(plans) >= 3 * PLANS
    for (candidate, work), num_bytes in zip(plans, needed, strict=True):
        stages, mesh, micro_batches = candidate.stages, candidate.mesh, candidate.micro_batches
        step_s = simulate(work).step_s
        assert step_s >= free._even_s(stages, (micro_batches,)) > 0.0
        assert step_s >= free._even_s(stages, (micro_batches,), mesh)
        assert step_s >= free._within_s(stages, mesh, micro_batches)
        assert step_s >= least_s
        if num_bytes <= limit:
            assert step_s >= short._even_s(stages, (micro_batches,))
            assert step_s >= short._within_s(stages, mesh, micro_batches)


@pytest.mark.parametrize("priced", PRICES)
def test_no_plan_on_unequal_devices_beats_its_cell(priced: str) -> None:
    """What runs where is free, too."""
    bounds, draw = bounds_of(MODELS[0], priced=priced, cluster=unequal), random.Random(priced)
    for candidate, work in random_plans(bounds.space, draw, PLANS):
        least_s = bounds._even_s(candidate.stages, (candidate.micro_batches,))
        assert simulate(work).step_s >= least_s > 0.0


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_filling_and_draining_cannot_be_cut_away(order: Order) -> None:
    """However the work of a micro-batch is cut among the stages, equally or not."""
    draw = random.Random(order)
    for _ in range(400):
        stages = draw.randint(2, 6)
        micro_batches = draw.randint(1, 3 * stages)
        pipeline = Pipeline(stages, 1, micro_batches, order)
        passes = [[draw.choice((1.0, draw.random())) for _ in range(stages)] for _ in range(2)]
        chunks = [Durations(forward, backward, backward) for forward, backward in zip(*passes, strict=True)]
        sends = Sends([0] * (stages - 1), [0] * (stages - 1))
        line = compose(pipeline, chunks, sends, blocking=False, record=False)
        least = least_rounds(stages, micro_batches, order) / stages * sum(map(sum, passes))
        assert max(line.ends) >= least * (1 - 1e-12)
        if micro_batches > stages or order == "gpipe":
            each = [sum(one) for one in zip(*passes, strict=True)]
            alone = slowest_rounds(stages, micro_batches) * max(each)
            assert max(line.ends) >= (sum(each) + alone) * (1 - 1e-12)


def test_the_slowest_of_some_stages_is_bounded() -> None:
    """However pieces are cut into runs behind one another."""
    draw = random.Random(0)
    for _ in range(100):
        seconds = [draw.choice((1.0, draw.random())) for _ in range(draw.randint(1, 9))]
        stages = draw.randint(1, len(seconds))
        cuts = itertools.combinations(range(1, len(seconds)), stages - 1)
        best = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *cut, len(seconds)])) for cut in cuts)
        assert best * (1 - 1e-9) <= least_slowest(seconds, stages) <= best * (1 + 1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_pieces_take_what_is_said_at_least(model: str) -> None:
    """Each piece of a free inside, and the slowest stage of the best cut."""
    bounds = bounds_of(model)
    insides = Insides(bounds.space, bounds.space.graph, backtrack, Budget(), rules=False)
    for stages, count in ((2, 4), (4, 8)):
        mesh = bounds.space.meshes(stages)[0]
        least = bounds._inside(stages, count, mesh)
        inside = insides.free(bounds.space.candidate(stages, mesh, count))
        assert least is not None
        assert inside is not None
        floors = least._piece_floors
        taken = inside.timing.forward_s + inside.timing.backward_s
        assert len(floors) == inside.pieces.count
        assert 0.0 < sum(floors) <= least.at(0.0) * (1 + 1e-9)
        assert all(taken[at] * (1 + 1e-9) >= floors[at] for at in range(1, len(floors) - 1))
        assert least.slowest_of(stages) >= sum(floors) / stages * (1 - 1e-9)


def test_a_bound_grows_with_what_is_known() -> None:
    """Compute alone; the inside; the inside within memory."""
    bounds = bounds_of(MODELS[0])
    mesh = bounds.space.meshes(1)[0]
    even_s, free_s = bounds._even_s(1, (1,)), bounds._free_s(1, mesh, (1,))
    assert 0 < even_s <= free_s <= bounds._within_s(1, mesh, 1)
