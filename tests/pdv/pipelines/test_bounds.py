"""Bounds of simulated steps: no plan beats that of its cell, whatever its mesh, micro-batches, order and cut."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest

from ir.cost_model import CostModel, NodeEstimate, Query
from ir.types import DType
from pdv.cluster import Cluster, Device, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.memory import step_memory
from pdv.pcg.resting import exchanged
from pdv.pipelines.bounding.bounds import PRICES as PRICES_OF_MEMORY
from pdv.pipelines.bounding.bounds import Bounds
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimates
from pdv.pipelines.inside import Inside, Insides, workload
from pdv.pipelines.pipeline import Mode, stages_of
from pdv.planning.problems import plan_problems
from pdv.prices import cost_model
from pdv.problem.workload import Workload
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget
from pdv.simulate.step import simulate
from tests.distributed.harness import mark_slow

MODELS = (
    "gpt:layers=4,hidden=1024,heads=8,seq=512,vocab=2048",
    "llama:layers=4,hidden=1024,heads=8,kv_heads=4,ffn=2816,seq=512,vocab=4096",
)
WITH_SUMS = (
    "gpt:layers=3,hidden=256,heads=4,seq=128,vocab=16384",  # its table is read at both ends
    "gpt:layers=2,hidden=512,heads=8,seq=64,vocab=8192,tied=0",
)
PLANS = 3  # stages, meshes and micro-batches of each model
PRICES = ("arithmetic", "learned", "jagged")  # of kernels
ONE_EACH = tuple(
    Mode(recompute, order) for recompute in ("none", "light", "full") for order in ("1f1b", "gpipe", "eager-1f1b")
)
MODES = (*ONE_EACH, Mode("none", "interleaved", 2), Mode("light", "interleaved", 2))


@cache
def nodes() -> Cluster:
    """Two nodes of two GPUs."""
    node = {"count": 2, "devices": 2, "device": "a100-80gb-sxm", "link": "nvlink3"}
    return load_cluster(
        {"name": "nodes", "nodes": [node], "network": {"name": "port", "bandwidth": "200 Gb/s", "latency": "5 us"}}
    )


@cache
def apart() -> Cluster:
    """Four GPUs behind links over which sends take long."""
    node = {"count": 4, "devices": 1, "device": "a100-80gb-sxm"}
    port = {"name": "port", "bandwidth": "5 Gb/s", "latency": "50 us"}
    return load_cluster({"name": "apart", "nodes": [node], "network": port})


@cache
def unequal(kinds: tuple[str, str]) -> Cluster:
    """Two nodes of two GPUs each, of two kinds."""
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
        self._model = model

    def on(self, devices: Collection[Device]) -> Prices:
        return Prices(self._model.on(devices))


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
    """Some stages, meshes and micro-batches; insides of some limits of memory; all modes, cut anywhere.

    In one mode with parameters that rest otherwise, too: whole, or gathered once a step.
    """
    insides = Insides(space, space.graph, backtrack, Budget(), rules=False)
    options = [(p, mesh, m) for p in space.stages for mesh in space.meshes(p) for m in space.counts]
    for stages, mesh, micro_batches in draw.sample(options, count):
        candidate = space.candidate(stages, mesh, micro_batches)
        free = insides.free(candidate)
        assert free is not None
        lean = micro_batches % 4 == 0
        less = insides.within(candidate, draw.uniform(0.3, 0.9) * free.held_bytes(1.0, lean=lean), 1.0, lean=lean)
        allowed = {*space.orders(candidate, "none"), *space.in_turns(candidate, "none")}
        modes = [mode for mode in MODES if (mode.order, mode.virtual) in allowed]
        for inside in filter(None, (free, less)):
            for mode in modes:
                yield candidate, _run(space, candidate, inside, mode, draw)
            for solution in exchanged(inside.plan.solution, inside.plan.pcg):
                other = replace(inside, plan=insides.make_plan(solution))
                yield candidate, _run(space, candidate, other, draw.choice(modes), draw)


def _run(space: Space, candidate: Candidate, inside: Inside, mode: Mode, draw: random.Random) -> Workload:
    borders = sorted(draw.sample(range(1, inside.pieces.count), candidate.stages * mode.virtual - 1))
    sizes = [stop - start for start, stop in itertools.pairwise([0, *borders, inside.pieces.count])]
    stages = stages_of(inside.pieces, candidate.stages, sizes, layered=True, virtual=mode.virtual)
    return workload(space, candidate, inside.plan, stages, mode)


@pytest.mark.parametrize(
    ("model", "priced"), mark_slow(itertools.product(MODELS, PRICES), [(MODELS[1], priced) for priced in PRICES[:2]])
)
def test_no_plan_beats_its_cell(model: str, priced: str) -> None:
    """Nor the least of all cells; where memory is short, none that fits."""
    free, draw = bounds_of(model, priced=priced), random.Random(model + priced)
    plans = list(random_plans(free.space, draw, PLANS))
    needed = [step_memory(work).worst.least_bytes for _, work in plans]
    free.one_each = False
    limit, least_s = statistics.median(needed), free.least_s(float("inf"))
    short = bounds_of(model, limit, priced)
    assert len(plans) >= 3 * PLANS
    for (candidate, work), num_bytes in zip(plans, needed, strict=True):
        stages, mesh, micro_batches = candidate.stages, candidate.mesh, candidate.micro_batches
        step_s = simulate(work).step_s
        free.one_each = short.one_each = work.stages.virtual == 1
        assert step_s >= free._even_s(stages, (micro_batches,)) > 0.0
        assert step_s >= free._even_s(stages, (micro_batches,), mesh)
        assert step_s >= free._within_s(stages, mesh, micro_batches)
        assert step_s >= least_s
        if num_bytes <= limit:
            assert step_s >= short._even_s(stages, (micro_batches,))
            assert step_s >= short._within_s(stages, mesh, micro_batches)


@pytest.mark.parametrize("priced", mark_slow(PRICES, PRICES[:2]))
def test_no_plan_beats_its_cell_where_sends_take_long(priced: str) -> None:
    """Eager 1F1B is among them."""
    free, draw, eager = bounds_of(MODELS[0], priced=priced, cluster=apart), random.Random(priced), 0
    free.one_each = False
    least_s = free.least_s(float("inf"))
    for candidate, work in random_plans(free.space, draw, 2 * PLANS):
        stages, micro_batches, step_s = candidate.stages, candidate.micro_batches, simulate(work).step_s
        free.one_each = work.stages.virtual == 1
        assert step_s >= max(least_s, free._even_s(stages, (micro_batches,))) > 0.0
        assert step_s >= free._within_s(stages, candidate.mesh, micro_batches)
        eager += work.execution.order == "eager-1f1b"
    assert eager > 3


@pytest.mark.parametrize("cluster", [nodes, apart])
@pytest.mark.parametrize("model", WITH_SUMS)
def test_no_plan_of_the_whole_batch_beats_its_cell(model: str, cluster: Callable[[], Cluster]) -> None:
    """Sums of gradients are counted by what they slow beside them, and the last as a whole: most of it, where slow."""
    bounds = bounds_of(model, cluster=cluster)
    space, draw = bounds.space, random.Random(model)
    insides = Insides(space, space.graph, backtrack, Budget(), rules=False)
    shares = []
    for mesh, micro_batches in itertools.product(space.meshes(1), (1, 4)):
        candidate = space.candidate(1, mesh, micro_batches)
        least_s = bounds._within_s(1, mesh, micro_batches)
        free = insides.free(candidate)
        assert free is not None
        lean = micro_batches % 4 == 0
        less = insides.within(candidate, draw.uniform(0.3, 0.9) * free.held_bytes(1.0, lean=lean), 1.0, lean=lean)
        for inside in filter(None, (free, less)):
            others = [insides.make_plan(solution) for solution in exchanged(inside.plan.solution, inside.plan.pcg)]
            for plan in (inside.plan, *others):
                work = _run(space, candidate, replace(inside, plan=plan), ONE_EACH[0], draw)
                shares.append(least_s / simulate(work).step_s)
    assert 0.8 < max(shares) <= 1.0


@pytest.mark.parametrize(
    ("priced", "kinds"),
    [
        ("arithmetic", ("a100-80gb-sxm", "h100-80gb-sxm")),
        ("learned", ("v100-32gb-sxm", "h100-80gb-sxm")),
        ("jagged", ("v100-32gb-sxm", "h100-80gb-sxm")),
    ],
)
def test_no_plan_on_unequal_devices_beats_its_cell(priced: str, kinds: tuple[str, str]) -> None:
    """In both orders; stages of each kind take what its devices do."""
    nearest = 0.0
    for ordered in (kinds, kinds[::-1]):
        bounds, draw = bounds_of(MODELS[0], priced=priced, cluster=partial(unequal, ordered)), random.Random(priced)
        bounds.one_each = False
        least_s = bounds.least_s(float("inf"))
        for candidate, work in random_plans(bounds.space, draw, PLANS):
            taken_s, mesh, counts = simulate(work).step_s, candidate.mesh, (candidate.micro_batches,)
            bounds.one_each = work.stages.virtual == 1
            even_s = bounds._even_s(candidate.stages, counts), bounds._even_s(candidate.stages, counts, mesh)
            within_s = bounds._within_s(candidate.stages, mesh, *counts)
            found = (least_s, *even_s, within_s)
            assert taken_s * (1 + 1e-9) >= max(found)
            assert min(found) > 0.0
            nearest = max(nearest, within_s / taken_s)
    assert nearest > 0.7 or priced != "arithmetic", "where any shape may be fast, random cuts are far from the best"


@pytest.mark.parametrize("model", MODELS)
def test_pieces_take_what_is_said_at_least(model: str) -> None:
    """Each run of pieces of a free inside; together they take no less than each by itself."""
    bounds = bounds_of(model)
    insides = Insides(bounds.space, bounds.space.graph, backtrack, Budget(), rules=False)
    for stages, count in ((2, 4), (4, 8)):
        mesh = bounds.space.meshes(stages)[0]
        candidate = bounds.space.candidate(stages, mesh, count)
        least, inside = (bounds._insides.of(candidate) or [None])[0], insides.free(candidate)
        assert least is not None
        assert inside is not None
        runs = least.runs(0.0)
        taken = inside.timings[0].forward_s + inside.timings[0].backward_s
        assert runs.shape == (inside.pieces.count, inside.pieces.count + 1)
        assert 0.0 < runs[0, -1] == least.at(0.0)
        rough = [least.roughly(kinds) for kinds in range(len(least.kinds) + 1)]
        assert rough == sorted(rough), "more that is known is no less"
        assert 0.0 < rough[0] <= rough[-1] <= least.at(0.0) * (1 + 1e-8), "but for parts of picoseconds, in kernels"
        assert all(taken[at] * (1 + 1e-9) >= runs[at, at + 1] for at in range(1, len(taken) - 1))
        for start, stop in itertools.combinations(range(len(taken)), 2):
            assert runs[start, stop] >= runs[start, stop - 1] + runs[stop - 1, stop] - 1e-12


def test_a_bound_grows_with_what_is_known() -> None:
    """Compute alone; the inside; the inside within memory, by more and more prices of it."""
    bounds = bounds_of(MODELS[0], 2e9)
    mesh = bounds.space.meshes(1)[0]
    within = [bounds._within_s(1, mesh, 1, prices) for prices in range(len(PRICES_OF_MEMORY) + 1)]
    assert within == sorted(within)
    bounds = bounds_of(MODELS[0])
    even_s, free_s = bounds._even_s(1, (1,)), bounds._free_s(1, mesh, (1,))
    assert 0 < even_s <= free_s <= bounds._within_s(1, mesh, 1)
