"""Memory is a hard limit, pins are hard constraints; an impossible demand is one error that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.errors import NoPlanFitsError
from ir.graph import Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.proof.exact import verify_equal
from ir.sharding import Invariant, Shard, State
from pdv.cluster.units import MEMORY
from pdv.problem import Pins, Problem
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh, search_meshes
from pdv.search.solver.configs import ConfigTable
from pdv.search.timed import shortest
from tests.pdv.worlds import DEVICE, attention_block, mlp, problem

MESH = Mesh.of(a=2)
TWO = Mesh.of(a=2, b=2)

# Few bytes of activations, many of weights: what ZeRO is for.
HEAVY = mlp(batch=8, width=48, hidden=96, layers=2)


def data_parallel(node: Node, axis: str, split: Split) -> bool:
    """Only samples may be cut: what is left to save memory is how weights rest."""
    return split.result == Shard(0) and all(
        state == Shard(0) or x.is_leaf for x, state in zip(node.operands, split.operands, strict=True)
    )


SAMPLES = Pins(split=data_parallel, name="samples only")


def whole(param: Node, axis: str, state: State) -> bool:
    return isinstance(state, Invariant)


def stored_cut(found: BestPlan) -> int:
    storages = found.solution.assignment.storage.values()
    return sum(isinstance(state, Shard) for storage in storages for state in storage.sharding)


def regathered(found: BestPlan) -> int:
    return sum(storage.regather for storage in found.solution.assignment.storage.values())


def plan(of: Problem) -> BestPlan:
    found = search_mesh(of)
    verify_equal(of.graph, found.pcg, of.mesh, trials=1)
    return found


def test_a_limit_makes_weights_rest_cut() -> None:
    of = problem(HEAVY, MESH, pins=Pins(split=data_parallel, storage=whole, name="plain data parallel"))
    plain = plan(of)
    assert stored_cut(plain) == 0
    free = replace(of, pins=SAMPLES)
    tight = plan(replace(free, memory_limit=0.75 * plain.cost.peak_bytes))
    assert stored_cut(tight) > 0
    assert tight.cost.peak_bytes <= 0.75 * plain.cost.peak_bytes


def test_a_tighter_limit_makes_them_gathered_again() -> None:
    of = problem(HEAVY, MESH, pins=SAMPLES)
    loose = plan(of)
    kept = plan(replace(of, pins=replace(SAMPLES, regather="never")))
    assert regathered(loose) == 0, "gathering again costs time, and saves nothing that is short"
    tight = plan(replace(of, memory_limit=0.8 * kept.cost.peak_bytes))
    assert regathered(tight) > 0
    assert tight.cost.seconds >= loose.cost.seconds


def test_a_looser_limit_never_costs_more() -> None:
    of = problem(attention_block(batch=2), MESH)
    most = plan(of).cost.peak_bytes
    seconds = []
    for share in (0.9, 0.95, 1.0):
        found = plan(replace(of, memory_limit=share * most))
        assert found.cost.peak_bytes <= share * most
        assert found.lower_bound_s <= found.cost.seconds * (1 + 1e-9)
        seconds.append(found.cost.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_what_fits_nowhere_is_refused_with_numbers() -> None:
    with pytest.raises(NoPlanFitsError, match=r"needs .*B per device, the limit is .*B \(.*B too much\)") as error:
        search_mesh(problem(HEAVY, MESH, memory_limit=1000.0))
    assert error.value.needed_bytes > 1000.0
    assert "times as many devices" in error.value.mend


def test_of_several_meshes_the_one_that_comes_nearest_is_named() -> None:
    problems = [problem(HEAVY, mesh, memory_limit=1000.0) for mesh in (Mesh.of(a=2), Mesh.of(a=4))]
    with pytest.raises(NoPlanFitsError, match="a=4"):
        search_meshes(problems)
    best = search_meshes([replace(p, memory_limit=float("inf")) for p in problems])
    assert best.meshes == 2
    assert best.cost.seconds == min(search_mesh(replace(p, memory_limit=float("inf"))).cost.seconds for p in problems)


def test_a_forbidden_split_is_not_taken() -> None:
    graph = attention_block(batch=2)
    loops = [
        split.loop for splits in plan(problem(graph, MESH)).solution.assignment.splits.values() for split in splits
    ]
    assert any(loops)
    for forbidden in set(loops) - {None}:

        def allowed(node: Node, axis: str, split: Split, loop: str = str(forbidden)) -> bool:
            return split.loop != loop

        found = plan(problem(graph, MESH, pins=Pins(split=allowed, name=f"no {forbidden}")))
        taken = {split.loop for splits in found.solution.assignment.splits.values() for split in splits}
        assert forbidden not in taken
        assert found.cost.seconds >= plan(problem(graph, MESH)).cost.seconds


def test_a_pinned_axis_is_used_as_pinned() -> None:
    def heads_inside(node: Node, axis: str, split: Split) -> bool:
        return axis != "b" or split.loop is not None or node.op.name not in ("linear", "attention")

    found = plan(problem(attention_block(batch=2, fused=False), TWO, pins=Pins(split=heads_inside, name="cut inside")))
    for node, splits in found.solution.assignment.splits.items():
        if node.op.name in ("linear", "attention"):
            assert splits[1].loop is not None


def test_pins_on_storage_and_regathering_are_kept() -> None:
    def cut(param: Node, axis: str, state: State) -> bool:
        return isinstance(state, Shard) or param.type.shape[0] % 2 == 1

    found = plan(problem(HEAVY, MESH, pins=Pins(split=data_parallel, storage=cut, regather="always", name="zero")))
    assert stored_cut(found) == len(HEAVY.params)
    assert regathered(found) == len(HEAVY.params)


@pytest.mark.parametrize("graph", [HEAVY, attention_block()], ids=lambda graph: graph.name)
def test_pins_that_leave_nothing_are_named(graph: object) -> None:
    def nothing(node: Node, axis: str, split: Split) -> bool:
        return node.op.name != "add"

    def nowhere(param: Node, axis: str, state: State) -> bool:
        return False

    for pins in (Pins(split=nothing, name="add is not computed"), Pins(storage=nowhere, name="weights rest nowhere")):
        with pytest.raises(NoPlanFitsError, match=pins.name):
            search_mesh(problem(graph, MESH, pins=pins))  # type: ignore[arg-type]


def test_a_limit_counts_the_working_set() -> None:
    """What stays allocated would fit, and no node can run on top of it: the peak is named, and the limit as given."""
    found = plan(problem(HEAVY, MESH))
    assert found.cost.peak_bytes > found.solution.memory_bytes
    limit = (found.cost.peak_bytes + found.solution.memory_bytes) / 2
    with pytest.raises(NoPlanFitsError, match="the peak of the smallest plan found") as error:
        search_mesh(problem(HEAVY, MESH, memory_limit=limit))
    assert f"the limit is {MEMORY.format(limit)}" in error.value.what
    assert error.value.needed_bytes > limit


def test_a_slower_device_changes_the_time_not_the_choice() -> None:
    slow = replace(DEVICE, peak_flops={"float32": 1e8}, memory_bandwidth_bytes_per_s=1e8)
    assert plan(problem(HEAVY, MESH, device=slow)).cost.compute_s > plan(problem(HEAVY, MESH)).cost.compute_s


def test_a_graph_too_wide_for_tables_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdv.config.MAX_TABLE_BYTES", 32)
    with pytest.raises(NoPlanFitsError, match=r"too many values alive at once .* Pin a mesh"):
        search_mesh(problem(attention_block(), TWO))


def test_an_axis_of_one_device_changes_no_choice() -> None:
    """All splits along it are alike: they would only square the configurations."""
    one, two = (problem(attention_block(), mesh) for mesh in (Mesh.of(a=1, b=2), Mesh.of(b=2)))
    assert plan(one).cost.seconds == pytest.approx(plan(two).cost.seconds)
    tables = [ConfigTable(of) for of in (one, two)]
    for node, alone in zip(one.graph.nodes, two.graph.nodes, strict=True):
        if not node.is_leaf:
            assert len(tables[0].of(node)) == len(tables[1].of(alone))


@pytest.mark.parametrize(("called_s", "axes"), [(0.0, 2), (2e-3, 1)])
def test_of_plans_about_as_fast_that_with_fewer_axes_is_taken_where_calls_take_time(called_s: float, axes: int) -> None:
    """Two axes cost 1 % less by the simulator, which is less than it knows of calls."""

    def plan(mesh: Mesh) -> BestPlan:
        found = search_mesh(problem(mlp(), mesh))
        links = tuple(replace(link, called_s=called_s) for link in found.solution.problem.axes)
        return replace(found, solution=replace(found.solution, problem=replace(found.solution.problem, axes=links)))

    plans = [plan(Mesh.of(a=2, b=2)), plan(Mesh.of(a=4))]
    seconds = {2: 0.99, 1: 1.0}
    best = shortest(plans, lambda one: seconds[len(one.solution.problem.mesh.axes)])
    assert len(best.solution.problem.mesh.axes) == axes
