"""Prices say which plans may have the shortest step, and simulated steps which has it."""

from __future__ import annotations

import pytest

from ir.mesh import Mesh
from ir.sharding import Invariant, Shard
from ir.transition import STAYS
from pdv.problem.problem import idle
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh, search_meshes
from tests.pdv.worlds import mlp, problem

WIDE = mlp(batch=64, width=256, hidden=1024, layers=2)
MESHES = (Mesh.of(a=4), Mesh.of(a=2, b=2))


def calls(found: BestPlan) -> int:
    """Operators of a plan that move values."""
    return sum(node.op.transition != STAYS for node in found.pcg.nodes)


def waits_for_hosts(found: BestPlan) -> float:
    """A step in which each collective takes a host far longer than anything takes a device."""
    return found.cost.seconds + 10.0 * calls(found) + 1.0


@pytest.mark.parametrize("of_step", [True, False])
def test_where_steps_wait_for_hosts_axes_may_be_idle(of_step: bool) -> None:
    problems = [problem(WIDE, mesh) for mesh in MESHES]
    found = search_meshes(problems, step_s=waits_for_hosts, of_step=of_step)
    assert (calls(found) == 0) == of_step
    assert found.lower_bound_s <= min(search_mesh(one).cost.seconds for one in problems)


def test_where_nothing_waits_the_cheapest_is_taken() -> None:
    problems = [problem(WIDE, mesh) for mesh in MESHES]
    found = search_meshes(problems, step_s=lambda plan: plan.cost.seconds, of_step=True)
    assert found.cost.seconds == min(search_mesh(one).cost.seconds for one in problems)


def test_idle_axes_cut_nothing() -> None:
    of = problem(WIDE, Mesh.of(a=2, b=2))
    found = search_mesh(idle(of, ["b"])).solution.assignment
    states = [storage.sharding for storage in found.storage.values()]
    states += [tuple(way.result for way in ways) for ways in found.splits.values()]
    assert {state for _, state in states} == {Invariant()}
    assert any(isinstance(state, Shard) for state, _ in states)
