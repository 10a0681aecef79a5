"""A plan is its derivation: written to JSON and read back it gives the same graph, and damage is one error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from ir.builder import Builder
from ir.errors import PdvError, VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.plan.derivation import LEAVE, replay, to_steps
from pdv.problem import Problem
from pdv.rewrite.algebra import RULES
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from tests.conftest import Golden
from tests.pdv.worlds import attention_block, f32, mlp, problem

Steps = list[dict[str, Any]]  # Any: JSON
FOUR, TWO_TWO = Mesh.of(a=4), Mesh.of(a=2, b=2)


def planned(graph: Graph, mesh: Mesh, share: float | None = None) -> BestPlan:
    """A plan, with the given share of the memory that it would take if it could."""
    of = problem(graph, mesh, rules=RULES)
    if share is not None:
        of = problem(graph, mesh, rules=RULES, memory_limit=share * search_mesh(of).cost.peak_bytes)
    return search_mesh(of)


def steps_of(found: BestPlan) -> Steps:
    loaded: Steps = json.loads(json.dumps(to_steps(found.solution), allow_nan=False))
    return loaded


CASES: dict[str, Callable[[], BestPlan]] = {
    "mlp on 4": lambda: planned(mlp(width=24, batch=8), FOUR),
    "mlp on 2x2, little memory": lambda: planned(mlp(width=24, batch=8), TWO_TWO, share=0.96),
    "attention on 4": lambda: planned(attention_block(batch=4, heads=4), FOUR),
    "one sample of attention on 2": lambda: planned(attention_block(batch=1), Mesh.of(a=2)),
    "one sample of attention on 2x3": lambda: planned(attention_block(batch=1), Mesh.of(a=2, b=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_derivation_replays_to_the_graph_that_was_found(name: str) -> None:
    found = CASES[name]()
    of = found.solution.problem
    assert replay(of, steps_of(found)).digest == found.pcg.digest
    verify_equal(of.graph, found.pcg, of.mesh, trials=1)


def branches() -> Graph:
    """Two outputs, one read on, as the search may want to cut them differently."""
    k = Builder()
    h = k.relu(k.linear(k.input("x", f32(8, 24)), k.param("up", f32(24, 24))))
    return k.graph({"h": h, "y": k.linear(h, k.param("down", f32(24, 24)))})


def test_how_several_outputs_leave_is_a_step() -> None:
    of = problem(branches(), TWO_TWO)
    found = search_mesh(of)
    steps = steps_of(found)
    (leave,) = (step for step in steps if step["rule"] == LEAVE)
    assert leave["sites"] == ["h", "y"]
    assert replay(of, steps).digest == found.pcg.digest
    ways = {way: replay(of, [s if s is not leave else with_sharding(s, way) for s in steps]) for way in ("I,I", "S0,I")}
    assert {graph.digest for graph in ways.values()} != {found.pcg.digest}
    for pcg in ways.values():
        verify_equal(of.graph, pcg, of.mesh, trials=1)
    for way, sites in (("S1,I", ["h", "y"]), ("S0", ["h", "y"]), ("I,I", ["h"]), ("P,I", ["h", "y"])):
        with pytest.raises(VerificationError, match="does not replay"):
            replay(of, [s if s is not leave else {**with_sharding(s, way), "sites": sites} for s in steps])
    with pytest.raises(VerificationError, match="leave twice"):
        replay(of, [*steps, leave])


def with_sharding(step: dict[str, Any], sharding: str) -> dict[str, Any]:
    return {**step, "bindings": {"sharding": sharding}}


def text(found: BestPlan) -> str:
    lines = [f"{found.solution.problem.graph.name} on {found.solution.problem.mesh}"]
    for step in to_steps(found.solution):
        bindings = "".join(f" {key}={value}" for key, value in step["bindings"].items())
        lines.append(f"  {step['rule']}{bindings}: {' '.join(map(str, step['sites']))}")
    return "\n".join(lines) + "\n"


def test_a_fused_product_is_taken_apart_where_that_lets_heads_be_cut(golden: Golden) -> None:
    """Six heads: with one sample, on two or three devices their cut pays for the rewrite; five divide nothing."""
    plans = {
        (batch, degree): planned(attention_block(batch=batch), Mesh.of(a=degree))
        for batch, degree in ((1, 2), (1, 3), (1, 5), (6, 2), (6, 3))
    }
    rewritten = {case for case, found in plans.items() if found.solution.steps}
    assert rewritten == {(1, 2), (1, 3)}
    golden("plans/qkv.txt", "\n".join(f"batch {batch}: {text(found)}" for (batch, _), found in plans.items()))


@cache
def base() -> BestPlan:
    """A plan with steps of every kind."""
    return planned(attention_block(batch=1), Mesh.of(a=2))


def damaged(steps: Steps, rng: random.Random) -> Steps:
    """One thing changed."""
    steps = copy.deepcopy(steps)
    step = rng.choice(steps)
    values: list[Any] = [None, -1, 10_000, "", "split-nothing", [], {}, 1.5, True, "S9", ["x"], [None]]
    match rng.randrange(8):
        case 0:
            steps.remove(step)
        case 1:
            step["rule"] = rng.choice([*values, "split-linear-k", "move-chunk-past-add", "store-parameter"])
        case 2:
            step["sites"] = rng.choice(values)
        case 3:
            step["sites"] = [*step["sites"], rng.choice(values)]
        case 4:
            step["bindings"] = rng.choice([*values, {"axis": "z"}, {"sharding": "S0", "regather": False}])
        case 5:
            del step[rng.choice(list(step))]
        case 6:
            steps.insert(rng.randrange(len(steps)), rng.choice(values))
        case _:
            key = rng.choice(["axis", "sharding", "regather"])
            step["bindings"] = {**step["bindings"], key: rng.choice(values)}
    return steps


def outcome(of: Problem, steps: Steps) -> str:
    """Refused, or proved equal all the same."""
    try:
        pcg = replay(of, steps)
        verify_equal(of.graph, pcg, of.mesh, trials=1)
    except VerificationError:
        return "refused"
    except PdvError as error:
        return type(error).__name__
    return "equal"


def test_damaged_steps_are_refused_or_equal_never_a_traceback() -> None:
    rng = random.Random(0)
    steps = steps_of(base())
    outcomes = [outcome(base().solution.problem, damaged(steps, rng)) for _ in range(100)]
    assert set(outcomes) <= {"refused", "equal"}
    assert outcomes.count("refused") > 50


@pytest.mark.parametrize("steps", [[{}], [None], ["split"], [{"rule": "store-parameter"}], 7, None, {"rule": "x"}])
def test_what_is_no_list_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(VerificationError):
        replay(base().solution.problem, steps)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(VerificationError, match="does not replay"):
        replay(base().solution.problem, [{"rule": "associate-linear", "bindings": {}, "sites": [0]}])


def test_heads_of_several_outputs_are_joined_in_a_replay_as_in_the_search() -> None:
    """Each read twice, so that a joined parameter, which only a replay would make of them, moved what is tied.

    A product of both lets each output depend on both, of which training would tell.
    """
    k = Builder()
    heads = {name: k.param(name, f32(8, 32)) for name in "ab"}
    bodies = [k.tanh(k.input(name, f32(8, 32))) for name in "xy"]
    products = {name: [k.linear(body, head) for body in bodies] for name, head in heads.items()}
    graph = k.graph({name: k.add(*each) for name, each in products.items()})
    steps: Steps = []
    for number, body in enumerate(bodies):
        numbered = {node: place for place, node in enumerate(node for node in graph.nodes if not node.is_leaf)}
        sites = [numbered[products[name][number]] for name in "ab"]
        assert all(node.operands[0] is body for node in (products[name][number] for name in "ab"))
        steps = [{"rule": "fuse-linears", "bindings": {}, "sites": [*(steps[0]["sites"] if steps else []), sites]}]
    pcg = replay(problem(graph, FOUR, rules=RULES, mode="infer"), steps)
    assert {param.attr("name") for param in pcg.params} == {"a", "b"}
    verify_equal(graph, pcg, FOUR)
    with pytest.raises(VerificationError, match="lets outputs depend on parameters of others"):
        replay(problem(graph, FOUR, rules=RULES), steps)
