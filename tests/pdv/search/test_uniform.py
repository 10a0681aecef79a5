"""Equal layers do alike where that costs little: on ties, within a stated share of a step, and in two ways at most."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.repeats import Repeat
from ir.sharding import Invariant, Partial, Shard
from pdv.config import UNIFORM_GAP
from pdv.search.blocks import repeats
from pdv.search.chain import ChainSolver
from pdv.search.memory import fitting
from pdv.search.solver.alike import cheapest_alike
from pdv.search.solver.min_plus import Path, PathBlock
from tests.pdv.search.test_limits import SAMPLES
from tests.pdv.worlds import f32, mlp, problem

STATES = ((Shard(0),), (Invariant(),), (Partial(),))


def stack(batch: int, width: int, layers: int, out: int) -> Graph:
    """x + W₂ relu(W₁ x), ``layers`` times, and a head: [batch, width] -> [batch, out]."""
    k = Builder()
    h = k.input("x", f32(batch, width))
    for i in range(layers):
        inner = k.relu(k.linear(h, k.param(f"{i}.up", f32(width, width))))
        h = k.add(h, k.linear(inner, k.param(f"{i}.down", f32(width, width))))
    return k.graph({"y": k.linear(h, k.param("head", f32(out, width)))}, name="stack")


def test_all_stretches_that_repeat_are_found_in_order() -> None:
    assert repeats("xababababycccz") == (Repeat(1, 2, 4), Repeat(10, 1, 3))
    assert repeats("abc") == ()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("entered", [False, True])
def test_the_cheapest_path_that_does_alike_is_that_of_all_of_them(seed: int, *, entered: bool) -> None:
    rng = np.random.default_rng(seed)
    first = PathBlock("first", ((),), STATES, rng.random((1, 3)))
    one = PathBlock("one", STATES, STATES[:2], rng.random((3, 2)))
    other = PathBlock("other", STATES, STATES, rng.random((3, 3)))
    last = PathBlock("last", STATES, ((),), rng.random((3, 1)))
    path = Path([first, *[one, other] * 3, last], np.zeros(()))
    value, steps = cheapest_alike(path, (), [Repeat(1, 2, 3)], entered=entered)
    cycles = [
        first.table[0, start]
        + one.table[start, middle]
        + 2 * one.table[end, middle]
        + 3 * other.table[middle, end]
        + last.table[end, 0]
        for start, middle, end in product(range(3), range(2), range(3))
        if middle == min(range(2), key=lambda m: one.table[end, m] + other.table[m, end]) and (entered or start == end)
    ]
    assert value == pytest.approx(min(cycles))
    assert sum(entry.table[step] for entry, step in zip(path.entries, steps, strict=True)) == pytest.approx(value)
    assert steps[3:5] == steps[5:7]
    assert steps[1] == steps[3] or entered


def test_layers_do_alike_where_that_costs_little_more_and_only_there() -> None:
    solver = ChainSolver(problem(stack(4, 64, 4, 8), Mesh.of(a=2, b=2)))
    free, dear = solver.at_price(0.0), solver.at_price(1.0)
    at = solver.repeats[0].start + 1
    odd = replace(free, parts=(*free.parts[:at], dear.parts[at], *free.parts[at + 1 :]))
    assert odd.changes(solver.repeats), "one layer does as where memory is dear"
    near, far = (replace(odd, cost_s=free.cost_s * (1 - share * UNIFORM_GAP)) for share in (0.9, 1.1))
    alike = solver.alike(near)
    assert not alike.changes(solver.repeats)
    assert near.cost_s < alike.cost_s <= near.cost_s * (1 + UNIFORM_GAP)
    assert alike.value == near.value, "what every plan costs stays what it was"
    assert solver.alike(far) is far


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_within_a_limit_of_memory_layers_do_in_few_ways(share: float) -> None:
    of = problem(mlp(batch=8, width=48, hidden=96, layers=10), Mesh.of(a=2), pins=SAMPLES)
    solver = ChainSolver(of)
    free, small = solver.at_price(0.0), solver.at_price(1.0)
    limit = small.memory_bytes + share * (free.memory_bytes - small.memory_bytes)
    plan, bound = fitting(solver, limit)
    assert plan.memory_bytes <= limit
    assert bound <= plan.cost_s <= bound * (1 + 2 * UNIFORM_GAP)
    assert plan.changes(solver.repeats) == 1, "some layers one way, then all others another"
