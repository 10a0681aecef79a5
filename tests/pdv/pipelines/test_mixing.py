"""Stages whose insides differ where memory is short: the plan does piece by piece what was chosen, and is faster."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from ir.types import DType
from ir.verify import check_returned, infer_shardings
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.pipelines.candidates import Space
from pdv.pipelines.estimates import Estimates, Mixing
from pdv.pipelines.lengthen import lengthen
from pdv.pipelines.priced import Pricer
from pdv.planning.problems import plan_problems
from pdv.schedule.pieces import pieces
from pdv.search.strategies.backtrack import backtrack
from pdv.search.strategies.budget import Budget


@cache
def nodes() -> Cluster:
    """Two nodes of four GPUs."""
    node = {"count": 2, "devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}
    return load_cluster({"name": "nodes", "nodes": [node], "network": "ib-hdr"})


@cache
def mixing(limit: float | None = None) -> tuple[Estimates, Mixing]:
    """Four stages of a GPT on the nodes, with eight micro-batches."""
    model = graph(arch("gpt:layers=12,hidden=2048,heads=16,seq=1024,vocab=8192"), 32, DType.BF16)
    space = Space(plan_problems(model, nodes(), mode="train", memory_limit=limit, rules=())[0], nodes())
    estimates = Estimates(space, backtrack, Budget())
    free = estimates.free(space.candidate(4, space.meshes(4)[0], 8))
    assert free is not None
    found = estimates.mixed(free, math.inf)
    assert found is not None
    return estimates, found


def short_of_memory() -> tuple[Estimates, Mixing]:
    """With less than the fastest inside needs on all stages, and more than that which holds least."""
    needed = [max(whole.held(whole.cut(math.inf) or ())) for whole in mixing()[1].wholes]
    return mixing((needed[0] + 2 * min(needed)) / 3)


def test_stages_that_differ_are_faster_than_stages_that_are_alike() -> None:
    """The first holds less than the last; at the limit at which all stages alike have to hold less."""
    estimates, one = short_of_memory()
    alike = [(whole, whole.cut(estimates.limit)) for whole in one.wholes]
    assert one.mixture.mixes
    assert one.mixture.step_s < min(whole.step_s(sizes) for whole, sizes in alike if sizes is not None)
    assert max(one.mixture.whole.held(one.mixture.sizes)) <= 1.01 * estimates.limit


def test_pieces_of_the_busiest_stage_are_given_away_as_long_as_that_is_faster() -> None:
    """From a cut that gives one stage two pieces more than the best, where memory allows any."""
    estimates, one = mixing()
    pricer = Pricer(estimates.space, estimates.insides, estimates.short)
    best_s = min(found.step_s for found in pricer.mixed(one))
    first, second, *others = one.mixture.sizes
    worse = replace(one, mixture=replace(one.mixture, sizes=(first - 2, second + 2, *others)))
    steps_s = [found.step_s for found in pricer.mixed(worse)]
    assert len(steps_s) >= 3
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] == pytest.approx(best_s, rel=1e-9)


def test_each_piece_is_as_its_inside_has_it() -> None:
    """The plan is legal, takes what was estimated, and fits."""
    estimates, one = short_of_memory()
    found = next(iter(Pricer(estimates.space, estimates.insides, estimates.short).mixed(one)))
    pcg, solution = found.plan.pcg, found.plan.solution
    check_returned(pcg, infer_shardings(pcg, solution.problem.mesh))
    assert found.fits
    assert found.step_s == pytest.approx(one.mixture.step_s, rel=0.03)
    whole = estimates.space.graph(8)
    assert whole is not None
    alone = [lengthen([of.plan.solution], [], whole, estimates.short.middle) for of in one.insides]
    of = pieces(solution.graph).of
    for at, node in enumerate(solution.graph.nodes):
        if not node.is_leaf:
            other = alone[one.mixture.inside_of[of[node]]]
            assert solution.assignment.splits[node] == other.assignment.splits[other.graph.nodes[at]]
