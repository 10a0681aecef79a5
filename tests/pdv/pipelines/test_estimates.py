"""What is estimated from a short program is what the whole one takes, simulated and walked."""

from __future__ import annotations

from functools import cache

import pytest

from ir.types import DType
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.pipelines.candidates import Space
from pdv.pipelines.estimates import Estimate, Estimates
from pdv.pipelines.pinned import Pinned
from pdv.pipelines.priced import Pricer
from pdv.planning.problems import plan_problems
from pdv.problem.problem import ungathered
from pdv.problem.workload import Order
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget


@cache
def nodes() -> Cluster:
    """Two nodes of four GPUs."""
    node = {"count": 2, "devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}
    return load_cluster({"name": "nodes", "nodes": [node], "network": "ib-hdr"})


@cache
def space(schedule: Order | None = None) -> Space:
    """A GPT of ten layers that is deep rather than wide."""
    model = graph(arch("gpt:layers=10,hidden=1024,heads=16,seq=512,vocab=8192"), 64, DType.BF16)
    problem = plan_problems(model, nodes(), mode="train", memory_limit=2.5 * 2**30, rules=())[0]
    return Space(problem if schedule is None else ungathered(problem), nodes(), Pinned(schedule=schedule))


@cache
def estimates(schedule: Order | None = None) -> Estimates:
    """Of the space."""
    return Estimates(space(schedule), backtrack, Budget())


CELLS: list[tuple[int, int, Order | None]] = [(1, 4, None), (2, 4, None), (2, 8, None), (4, 16, None), (2, 8, "2bw")]


@pytest.mark.parametrize(("stages", "count", "schedule"), CELLS)
def test_an_estimate_is_what_is_simulated(stages: int, count: int, schedule: Order | None) -> None:
    """Seconds and bytes of each that fits, by stages, micro-batches and order, recomputed or not."""
    candidate = space(schedule).candidate(stages, space(schedule).meshes(stages)[0], count)
    pricer = Pricer(space(schedule), estimates(schedule).insides, estimates(schedule).short)
    compared = 0
    for one in estimates(schedule).of(candidate, float("inf")):
        if not one.fits:
            continue
        found = next(iter(pricer.found(one)))
        assert found.needed_bytes == pytest.approx(one.needed_bytes, rel=0.05)
        if found.fits:
            assert found.step_s == pytest.approx(one.step_s, rel=0.03)
            compared += 1
    assert compared


def test_less_memory_never_makes_an_estimate_hold_more() -> None:
    """The limits that insides are solved for end at one that fits."""
    candidate = space().candidate(2, space().meshes(2)[0], 8)
    found: list[Estimate] = list(estimates().of(candidate, float("inf")))
    assert found
    assert any(one.fits for one in found)
    for one in found:
        assert one.fits == (one.needed_bytes <= space().problem.memory_limit)


def test_an_inside_holds_what_a_limit_counts() -> None:
    """Whatever part of a micro-batch's activations is held: what just fits is found under that limit, not under less.

    A fastest inside is found with as many in flight as there are stages; where layers run again it holds far fewer.
    """
    candidate = space().candidate(4, space().meshes(4)[0], 16)
    free = estimates().insides.free(candidate)
    assert free is not None
    for flight in (0.3, 1.0, 4.0):
        most = free.held_bytes(flight)
        same = estimates().insides.within(candidate, most * (1 + 1e-9), flight)
        less = estimates().insides.within(candidate, most * 0.9, flight)
        assert same is not None
        assert same.plan.pcg.digest == free.plan.pcg.digest
        assert less is None or less.held_bytes(flight) <= most * 0.9 * (1 + 1e-9)
