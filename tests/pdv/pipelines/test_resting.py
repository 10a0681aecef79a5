"""Parameters that rest cut and are gathered once a step: exchanged for whole ones, priced, held, proved, simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdv.memory import step_memory
from pdv.pcg.plan_cost import realize
from pdv.pcg.resting import exchanged
from pdv.pcg.techniques import techniques
from pdv.pcg.units import gathered_once, gathered_units
from pdv.pipelines.candidates import Candidate
from pdv.pipelines.inside import Insides, workload
from pdv.pipelines.pipeline import Mode, stages_of
from pdv.problem import Problem, Solution
from pdv.problem.problem import ungathered
from pdv.problem.workload import Workload
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget
from pdv.simulate.step import simulate
from tests.pdv.pipelines.test_bounds import MODELS, bounds_of

SHARES = (0.8, 0.5)  # of what the fastest inside holds


def solved() -> tuple[Insides, Candidate]:
    """Of a small GPT on four GPUs."""
    space = bounds_of(MODELS[0]).space
    candidate = space.candidate(2, space.meshes(2)[0], 4)
    return Insides(space, space.graph, backtrack, Budget(), rules=False), candidate


def test_tables_add_up_to_what_a_plan_costs() -> None:
    """Of several micro-batches, too: seconds and bytes, tied parameters included."""
    priced: list[tuple[float, float, float, float]] = []

    def strategy(problem: Problem, budget: Budget) -> Solution:
        found = backtrack(problem, budget)
        made = realize(replace(problem, graph=found.graph), found.assignment).cost
        priced.append((found.cost_s, made.seconds, found.memory_bytes, made.memory_bytes))
        return found

    insides, candidate = solved()
    insides.strategy = strategy
    free = insides.free(candidate)
    assert free is not None
    flight = float(candidate.stages)  # as the fastest inside is found
    less = [insides.within(candidate, share * free.held_bytes(flight), flight) for share in SHARES]
    assert any(gathered_once(move, several=True) for one in less if one for move in one.plan.pcg.nodes)
    for cost_s, made_s, num_bytes, made_bytes in priced:
        assert cost_s == pytest.approx(made_s, rel=1e-9)
        assert num_bytes == pytest.approx(made_bytes, rel=1e-9)


def test_gathered_once_a_step_takes_less_memory_and_sends_as_much() -> None:
    insides, candidate = solved()
    free = insides.free(candidate)
    assert free is not None
    found = [free.plan.solution, *exchanged(free.plan.solution, free.plan.pcg)]
    whole, cut = min(found, key=lambda one: kept(one, insides)), max(found, key=lambda one: kept(one, insides))
    assert kept(cut, insides) > kept(whole, insides) == 0
    works = [run(insides, candidate, one) for one in (whole, cut)]
    (much, less), (alone, once) = (step_memory(one).worst for one in works), (simulate(one) for one in works)
    moments, weights = (less.by_kind[kind] / much.by_kind[kind] for kind in ("optimizer", "weights"))
    assert moments == pytest.approx(0.5, abs=0.02)
    assert weights == pytest.approx(0.5, abs=0.02)
    assert less.peak_bytes < much.peak_bytes
    assert once.step_s == pytest.approx(alone.step_s, rel=0.05)


def test_what_may_not_be_gathered_is_not_exchanged_for_cut() -> None:
    """Nor by a schedule with several versions of weights, which are of what is used as it rests."""
    insides, candidate = solved()
    free = insides.free(candidate)
    assert free is not None
    solution, pcg = free.plan.solution, free.plan.pcg
    assert any(kept(made, insides) for made in exchanged(solution, pcg))
    pinned = replace(solution, problem=ungathered(solution.problem))
    assert not any(kept(made, insides) for made in exchanged(pinned, pcg))


def kept(solution: Solution, insides: Insides) -> int:
    """How many copies a step keeps."""
    return sum(gathered_once(move, several=True) for move in insides.make_plan(solution).pcg.nodes)


def run(insides: Insides, candidate: Candidate, solution: Solution) -> Workload:
    """In two equal stages."""
    plan = insides.make_plan(solution)
    free = insides.free(candidate)
    assert free is not None
    count = free.pieces.count
    stages = stages_of(free.pieces, 2, (count // 2, count - count // 2), layered=True)
    return workload(insides.space, candidate, plan, stages, Mode())


def test_its_name_is_that_of_the_step() -> None:
    """Kept for one micro-batch a copy is ZeRO-2's, for several ZeRO-1's; each is a unit of its own."""
    insides, candidate = solved()
    free = insides.free(candidate)
    assert free is not None
    cut = [insides.make_plan(made) for made in exchanged(free.plan.solution, free.plan.pcg) if kept(made, insides)]
    for several, name in ((False, "ZeRO-2"), (True, "ZeRO-1")):
        assert name in techniques(cut[0].pcg, candidate.mesh, several=several)["gpu"]
        units = gathered_units(cut[0].pcg.nodes, several=several)
        assert {once for *_, once in units.values()} == ({True} if several else set())
