"""Parameters that several blocks read: each decided by all, by one or by each block alone, the bound holds."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv import config
from pdv.rewrite.algebra import RULES
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution, search_mesh
from pdv.search.solver import ties
from pdv.search.solver.tables import TooWideError, table_of
from tests.pdv.search.oracle import Oracle, TooManyPlansError, decided
from tests.pdv.worlds import f32, problem, random_graph

MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=2))


def repeated(times: int, weights: int = 4, rows: int = 12, width: int = 12) -> Graph:
    """A residual block of as many weights, applied so often."""
    k = Builder()
    params = [k.param(f"w{i}", f32(width, width)) for i in range(weights)]
    x = k.input("x", f32(rows, width))
    for _ in range(times):
        h = x
        for w in params:
            h = k.relu(k.linear(h, w))
        x = k.add(x, h)
    return k.graph({"y": x}, name="repeated")


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize("start", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_the_bound_holds_however_ties_are_decided(start: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "ENTRIES", room)
    monkeypatch.setattr(ties, "ALL_ENTRIES", room)
    checked = loose = 0
    for seed in range(start, start + (100 if start == 0 else 900)):
        graph = random_graph(seed, 2 + seed % 4)
        if not any(len(graph.users[param]) > 1 for param in graph.params):
            continue
        of = decided(problem(graph, MESHES[seed % len(MESHES)]))[0]
        solver = ChainSolver(of)
        try:
            best = Oracle(of).fastest()
        except TooManyPlansError:
            continue
        solution = solver.solve()
        assert solution.lower_bound_s <= best * (1 + 1e-9) <= solution.cost_s * (1 + 2e-9)
        pcg = realize_solution(solution).derived.pcg
        verify_equal(of.graph, pcg, of.mesh, gradients=True)
        checked += 1
        loose += not solver.exact
    assert checked >= 3
    assert loose


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_one_block_alone_reads_is_decided_there_exactly(mesh: Mesh) -> None:
    k = Builder()
    x, w = k.input("x", f32(6, 12)), k.param("w", f32(12, 12))
    of = problem(k.graph({"y": k.add(k.linear(x, w), k.tanh(k.linear(x, w)))}), mesh)
    solver = ChainSolver(of)
    solution = solver.solve()
    assert solver.exact
    assert solution.cost_s == pytest.approx(Oracle(of).fastest(), rel=1e-9)


@pytest.mark.parametrize("mesh", [Mesh.of(a=2), Mesh.of(a=2, b=4)], ids=str)
def test_a_block_applied_often_is_planned_with_a_small_gap(mesh: Mesh) -> None:
    """All states of all weights together would be a table of petabytes."""
    found = search_mesh(problem(repeated(6), mesh, rules=RULES))
    assert found.gap < 0.02
    verify_equal(repeated(6), found.pcg, mesh, gradients=True, trials=1)


def test_a_limit_of_memory_is_kept_with_ties_apart() -> None:
    of = problem(repeated(4), Mesh.of(a=2, b=2))
    free = search_mesh(of)
    tight = search_mesh(problem(repeated(4), Mesh.of(a=2, b=2), memory_limit=0.9 * free.cost.peak_bytes))
    assert tight.cost.peak_bytes <= 0.9 * free.cost.peak_bytes
    assert tight.lower_bound_s <= tight.cost.seconds


def test_no_table_is_made_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MAX_TABLE_BYTES", 800)
    assert table_of((10, 10)).nbytes == 800
    with pytest.raises(TooWideError, match="10 x 11"):
        table_of((10, 11))
    with pytest.raises(TooWideError):
        table_of((1,) * 61)
