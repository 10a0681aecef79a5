"""The search over pipelines on small models: what it finds fits, is what was simulated, and no plan beats its bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest

from ir.errors import NoPlanFitsError
from ir.types import DType
from ir.verify import check_returned, infer_shardings
from pdv.cluster import Cluster, load_cluster
from pdv.config import Pipelines
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.memory import step_memory
from pdv.pcg.plan_cost import plan_cost
from pdv.pipelines.bounding.bounds import Bounds
from pdv.pipelines.candidates import Space
from pdv.pipelines.estimates import NEARLY, Estimate, Estimates
from pdv.pipelines.inside import Insides, workload
from pdv.pipelines.lengthen import lengthen
from pdv.pipelines.pinned import Pinned
from pdv.pipelines.pipeline import Mode, stages_of
from pdv.pipelines.priced import Found, Pricer
from pdv.pipelines.search import MADE, Search, may_fit_whole, search_pipelines
from pdv.pipelines.shorten import shorten
from pdv.planning.problems import plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.prices import cost_model
from pdv.problem import Problem, Solution
from pdv.schedule.pieces import pieces
from pdv.search.best import BestPlan
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget
from pdv.simulate.step import simulate

GPT = "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=512"
MODES = (Mode(), Mode("none", "gpipe"), Mode("full"), Mode("full", "gpipe"))


@cache
def hosts() -> Cluster:
    """Two hosts of two cores."""
    link = {"name": "port", "bandwidth": "200 Mb/s", "latency": "750 us"}
    node = {"count": 2, "devices": 2, "device": "cpu-core", "link": "loopback-gloo"}
    return load_cluster({"name": "hosts", "nodes": [node], "network": link})


@cache
def problem(limit: float | None = None, batch: int = 16) -> Problem:
    """A small GPT on the hosts."""
    model = graph(arch(GPT), batch, DType.F32)
    return plan_problems(model, hosts(), mode="train", memory_limit=limit, rules=())[0]


@cache
def found() -> BestPlan:
    """The plan found for it."""
    best = search_pipelines(problem(), hosts(), float("inf"), backtrack)
    assert best is not None
    return best


def searched(one: Problem) -> Search:
    """The search, run."""
    space = Space(one, hosts())
    search = Search(space, Estimates(space, backtrack, Budget()), backtrack, float("inf"))
    search.run()
    return search


def test_slow_hosts_get_a_pipeline() -> None:
    """The plan speaks of the program of one micro-batch on the mesh of one stage."""
    best, inner = found(), found().solution.problem
    assert best.stages.count > 1
    assert inner.mesh.num_devices * best.stages.count == hosts().num_devices
    rows = problem().graph.inputs[0].type.shape[0]
    assert inner.graph.inputs[0].type.shape[0] * best.execution.micro_batches == rows
    check_returned(best.pcg, infer_shardings(best.pcg, inner.mesh))
    assert set(best.stages.chunk_of) == {node for node in best.solution.graph.nodes if not node.is_leaf}
    assert sum(best.stages.layers) == 6
    assert (inner.once, inner.resting) == (1.0, 1.0)
    assert best.cost.seconds == plan_cost(replace(inner, graph=best.solution.graph), best.pcg).seconds
    assert best.step_s is not None
    assert 0 < best.lower_bound_s <= best.step_s


def test_no_inside_takes_all_the_time_there_is() -> None:
    """An exact search of a wide graph would: recurrent layers, whose weights are read at each step."""
    asked: list[float] = []

    def noted(one: Problem, budget: Budget) -> Solution:
        asked.append(budget.seconds)
        return backtrack(one, budget)

    search_pipelines(problem(), hosts(), 30.0, noted)
    assert asked
    assert max(asked) <= 0.2 * 30.0


@pytest.mark.parametrize(("share", "quota", "orders"), [(0.5, False, 0), (0.5, True, 2), (1.0, False, 2)])
def test_stages_take_no_turns_where_processes_share_cores(share: float, quota: bool, orders: int) -> None:
    """What one process leaves of a core, another computes in: there is no time to be filled."""
    device = {"preset": "cpu-core", "share": share, "quota": quota}
    cluster = load_cluster({"name": "cores", "nodes": [{"devices": 4, "device": device, "link": "loopback-gloo"}]})
    model = graph(arch("gpt:layers=8,hidden=256,heads=4,seq=64,vocab=512"), 8, DType.F32)
    (one, *_) = plan_problems(model, cluster, mode="train", rules=())
    space = Space(one, cluster)
    candidate = space.candidate(2, space.meshes(2)[0], 4)
    assert len(space.in_turns(candidate, "none")) == orders
    assert Space(one, cluster, Pinned(schedule="interleaved")).in_turns(candidate, "none")


def test_stages_take_turns_where_that_fills_a_pipeline() -> None:
    """Few micro-batches on fast links: the plan is faster than any with one stage on each rank, by what is said."""
    node = {"count": 4, "devices": 1, "device": "a100-80gb-sxm", "link": "nvlink4"}
    link = {"name": "port", "bandwidth": "100 Gb/s", "latency": "10 us"}
    cluster = load_cluster({"name": "hosts", "nodes": [node], "network": link})
    model = graph(arch("gpt:layers=8,hidden=2048,heads=16,seq=512,vocab=4096"), 8, DType.F32)
    (one, *_) = plan_problems(model, cluster, mode="train", rules=())
    best = search_pipelines(one, cluster, float("inf"), backtrack)
    plain = search_pipelines(one, cluster, float("inf"), backtrack, Pinned(virtual_stages=1))
    assert best is not None
    assert plain is not None
    assert (best.stages.count, best.stages.virtual, best.execution.order) == (4, 2, "interleaved")
    assert best.step_s is not None
    assert plain.step_s is not None
    assert best.lower_bound_s <= best.step_s < 0.95 * plain.step_s


def test_no_operator_reads_what_a_later_stage_makes() -> None:
    """Chunks follow the program."""
    chunk_of = found().stages.chunk_of
    for node, chunk in chunk_of.items():
        assert all(chunk_of[operand] <= chunk for operand in node.operands if operand in chunk_of)


def test_what_is_found_fits() -> None:
    """Under a limit that the fastest plan does not keep."""
    free = searched(problem()).best
    assert free is not None
    limit = 0.5 * free.needed_bytes
    best = searched(problem(limit)).best
    assert best is not None
    assert best.fits
    assert step_memory(best.work).worst.least_bytes == best.needed_bytes
    assert best.needed_bytes <= limit
    assert best.step_s >= free.step_s


def test_no_random_plan_beats_the_bound() -> None:
    """Other stages, meshes, micro-batches, orders and cuts."""
    space, draw = Space(problem(), hosts()), random.Random(1)
    insides = Insides(space, space.graph, backtrack, Budget(), rules=False)
    options = [(p, m, c) for p in space.stages for m in space.meshes(p) for c in (2, 4, 16)]
    floors, tried = Estimates(space, backtrack, Budget()).floors, 0
    for stages, mesh, count in draw.sample(options, 6):
        candidate = space.candidate(stages, mesh, count)
        inside = insides.free(candidate)
        assert inside is not None
        for mode in MODES:
            ends = [0, *sorted(draw.sample(range(1, inside.pieces.count), stages - 1)), inside.pieces.count]
            sizes = [stop - start for start, stop in itertools.pairwise(ends)]
            chosen = stages_of(inside.pieces, stages, sizes, layered=True)
            step_s = simulate(workload(space, candidate, inside.plan, chosen, mode), draws=0).step_s
            assert step_s >= floors.least_s(stages, count)
            assert step_s >= found().lower_bound_s
            tried += 1
    assert tried == 24


def test_a_short_program_stands_for_the_whole_one() -> None:
    """Its plan, carried over, is legal, and has all layers."""
    one = problem()
    short = shorten(one.graph, one.rules)
    assert short.times > 1
    assert pieces(short.graph).count + (short.times - 1) * (short.stop - short.start) == pieces(one.graph).count
    space = Space(one, hosts())
    insides = Insides(space, lambda _: short.graph, backtrack, Budget(), rules=False)
    inside = insides.free(space.candidate(1, space.meshes(1)[1], 1))
    assert inside is not None
    whole = lengthen([inside.plan.solution], [], one.graph, short.middle)
    assert whole.realized is not None
    pcg = whole.realized.derived.pcg
    check_returned(pcg, infer_shardings(pcg, whole.problem.mesh))
    assert whole.graph.digest == one.graph.digest
    assert set(whole.assignment.splits) == {node for node in whole.graph.nodes if not node.is_leaf}


def test_what_is_due_once_a_step_counts_once() -> None:
    """Search and price agree on what a micro-batch among several costs."""
    one = replace(problem(), once=0.125, resting=0.5)
    solution = backtrack(one, Budget())
    assert solution.realized is not None
    pcg = solution.realized.derived.pcg
    cost = plan_cost(replace(one, graph=solution.graph), pcg)
    whole = plan_cost(replace(problem(), graph=solution.graph), pcg)
    assert solution.lower_bound_s == pytest.approx(cost.seconds, rel=1e-3)
    assert cost.optimizer_s == pytest.approx(0.125 * whole.optimizer_s)
    assert cost.communication_s < whole.communication_s
    assert cost.memory["gradients"] == pytest.approx(0.5 * whole.memory["gradients"])


def test_nothing_is_found_where_the_batch_cannot_be_cut() -> None:
    """A batch of one."""
    assert search_pipelines(problem(batch=1), hosts(), float("inf"), backtrack) is None


def test_pipelines_are_searched_where_the_whole_batch_does_not_fit() -> None:
    """A limit below what an even cut of the whole batch takes; never is never."""
    space = Space(problem(), hosts())
    one = problem(0.9 * space.least_bytes(1, 1))
    assert not may_fit_whole(one, hosts())
    effort = Effort("backtrack", 600.0)

    def ask(ways: Pipelines) -> BestPlan:
        again = partial(plan_problems, mode="train", memory_limit=one.memory_limit)
        return search_problems((one,), hosts(), effort, None, lambda *_: None, again, pipelines=ways).found

    best = ask("where-needed")
    assert best.execution.micro_batches > 1
    assert best.step_s is not None
    with pytest.raises(NoPlanFitsError):
        ask("never")


def test_few_plans_are_made_where_all_need_far_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest is said, of which at most a few are made; nor is the whole batch searched, which cannot fit."""
    one = problem(0.3 * Space(problem(), hosts()).least_bytes(4, 16))
    made: list[float] = []
    plain = Pricer.found

    def counted(self: Pricer, estimate: Estimate) -> Iterator[Found]:
        made.append(estimate.needed_bytes)
        return plain(self, estimate)

    monkeypatch.setattr(Pricer, "found", counted)
    monkeypatch.setattr("pdv.planning.search._search", lambda *_, **__: pytest.fail("the whole batch was searched"))
    with pytest.raises(NoPlanFitsError, match="the smallest plan found"):
        search_problems((one,), hosts(), Effort("backtrack", 600.0), None, lambda *_: None, None, pipelines="always")
    assert made
    assert len(set(made)) <= MADE
    assert min(made) > NEARLY * one.memory_limit


@pytest.mark.parametrize(("taken", "left"), [(6.0, 2.0), (8.0, 1.0)])
def test_all_searches_share_one_budget(taken: float, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search behind one that took all of it has a second, so that there is a plan."""
    now, given = [0.0], []

    def search(budget_s: float) -> BestPlan | None:
        given.append(budget_s)
        now[0] += taken
        return None if len(given) == 1 else found()

    monkeypatch.setattr("time.thread_time", lambda: now[0])
    monkeypatch.setattr("pdv.planning.search.search_pipelines", lambda _, __, budget_s, *___, **____: search(budget_s))
    monkeypatch.setattr("pdv.planning.search.search_meshes", lambda _, __, budget_s, *___, **____: search(budget_s))
    search_problems((problem(),), hosts(), Effort("backtrack", 8.0), None, lambda *_: None, None, pipelines="always")
    assert given == [8.0, left]


@pytest.mark.parametrize(("over", "complete"), [(6.0, True), (11.0, False)])
def test_only_what_was_left_out_makes_it_incomplete(
    over: float, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a budget of ten seconds the search's part may be over once it is done; a bound that is stopped is said so."""
    now = [0.0]

    def least_s(_: Bounds, enough_s: float, stopped: Callable[[], bool]) -> float:
        now[0] = over
        return 0.0 if stopped() else 0.5 * enough_s

    monkeypatch.setattr("time.thread_time", lambda: now[0])
    monkeypatch.setattr(Bounds, "least_s", least_s)
    found = search_pipelines(problem(), hosts(), 8.0, backtrack)
    assert found is not None
    assert found.complete == complete


@pytest.mark.parametrize("complete", [True, False])
def test_an_inside_cut_short_makes_it_incomplete(complete: bool) -> None:
    """However much of all the time is left."""

    def cut_short(problem: Problem, budget: Budget) -> Solution:
        return replace(backtrack(problem, budget), complete=complete)

    found = search_pipelines(problem(), hosts(), float("inf"), cut_short)
    assert found is not None
    assert found.complete == complete


def test_pipelines_are_searched_on_unequal_devices() -> None:
    """A walk of two stages has more ranks than a cluster, of which every one may be another device."""
    cluster = load_cluster("examples/clusters/mixed-a100-v100.yaml")
    problems = plan_problems(graph(arch(GPT), 32, DType.F32), cluster, mode="train")
    found = search_pipelines(problems[0], cluster, 20.0, backtrack)
    if found is not None:
        assert found.stages.count * found.solution.problem.mesh.num_devices == cluster.num_devices


def unequal(*shares: float) -> Cluster:
    """Hosts of two cores, of which a process has so much."""
    nodes = [
        {"devices": 2, "device": {"preset": "cpu-core", "share": share, "quota": True}, "link": "loopback-gloo"}
        for share in shares
    ]
    link = {"name": "port", "bandwidth": "1 Gb/s", "latency": "750 us"}
    return load_cluster({"name": "unequal", "nodes": nodes, "network": link})


@pytest.mark.parametrize("cost", [None, pytest.param("measured", marks=pytest.mark.slow)])
def test_the_order_in_which_hosts_are_listed_does_not_matter(cost: str | None) -> None:
    """Fast devices get the large stages, wherever they stand: a plan may have its first stage on the last host."""

    def ask(cluster: Cluster) -> BestPlan:
        compute = cost_model(cost or "analytic", [entry.device for entry in cluster.classes])
        wide = graph(arch("gpt:layers=4,hidden=128,heads=4,seq=64,vocab=8192"), 8, DType.F32)
        again = partial(plan_problems, mode="train", compute=compute)
        problems = again(wide, cluster, rules=())
        effort, fixed = Effort("backtrack", 600.0), Pinned(stages=2, micro_batches=4)
        return search_problems(
            problems, cluster, effort, None, lambda *_: None, again, pipelines="always", pinned=fixed
        ).found

    slow_last, slow_first = ask(unequal(0.8, 0.2)), ask(unequal(0.2, 0.8))
    assert {slow_last.places, slow_first.places} == {(), (2, 3, 0, 1)}
    assert slow_last.seconds == pytest.approx(slow_first.seconds, rel=1e-6)
    assert slow_last.lower_bound_s == pytest.approx(slow_first.lower_bound_s, rel=1e-6)


@pytest.mark.parametrize(("rows", "counts"), [(60, [10, 12]), (40, [8]), (36, [9]), (20, [10, 4])])
def test_one_of_the_first_guesses_has_rows_for_each_device(rows: int, counts: list[int]) -> None:
    """Two stages of five devices: rows that these cannot share are worked on by all, and the stages look slow."""
    node = {"count": 10, "devices": 1, "device": "cpu-core", "link": "loopback-gloo"}
    cluster = load_cluster({"name": "ten", "nodes": [node], "network": {"preset": "ethernet-10g"}})
    model = graph(arch("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=64"), rows, DType.F32)
    space = Space(plan_problems(model, cluster, mode="train", rules=())[0], cluster)
    (mesh,) = space.meshes(2)
    assert space.first_counts(2, mesh) == counts
