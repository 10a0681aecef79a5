"""Where collectives are priced by curves, chains cost what their steps do, at the sizes that they have on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.builder import Builder
from ir.mesh import Mesh
from ir.sharding import Invariant, Shard
from pdv.cost.comm import move_seconds
from pdv.cost.curves import Curves
from pdv.pcg.redistribute import Redistribution
from tests.pdv.worlds import f32, problem

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Far from a line: small messages cost nearly as much as large ones.
ROWS = [(name, size, size**0.25 * 1e-5) for name in NAMES for size in (1e2, 1e3, 1e4, 1e5, 1e6)]
BENT = Curves.of(ROWS, "learned", 0.1)
DEAR = Curves.of([(name, size, 1e3 * seconds) for name, size, seconds in ROWS], "learned", 0.1)
TENSOR = f32(64, 64)


def test_a_gather_costs_what_its_curve_says() -> None:
    mesh = Mesh.of(a=4)
    (axis,) = problem(Builder().graph({}), mesh).axes
    axes = (replace(axis, curves=BENT),)
    chain = Redistribution(mesh, axes).chain(TENSOR, (Shard(0),), (Invariant(),), gradient=False)
    assert chain is not None
    (step,) = chain.steps
    forward, _ = move_seconds(step.name, axes[0], TENSOR.num_bytes / 4)
    assert chain.forward_s == pytest.approx(forward, rel=1e-12)
    assert forward == pytest.approx(TENSOR.num_bytes**0.25 * 1e-5, rel=1e-9)


def test_an_axis_without_curves_keeps_its_line_beside_one_that_has_them() -> None:
    mesh = Mesh.of(a=2, b=2)
    plain, other = problem(Builder().graph({}), mesh).axes
    moves = Redistribution(mesh, (plain, replace(other, curves=DEAR)))
    chain = moves.chain(TENSOR, (Shard(0), Invariant()), (Invariant(), Invariant()), gradient=False)
    assert chain is not None
    assert [step.axis for step in chain.steps] == ["a"]
    assert chain.forward_s == pytest.approx(move_seconds("combine", plain, TENSOR.num_bytes / 2)[0], rel=1e-9)
