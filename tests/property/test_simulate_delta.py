"""Delta simulation: the same as a full one, to the last picosecond, for any program and any change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from ir.graph import Node
from ir.mesh import Mesh
from pdv.cluster import Device
from pdv.cost.compute import ComputeModel
from pdv.pcg.realize import realize
from pdv.problem import Assignment, Problem
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.delta import Delta
from pdv.simulate.result import Ran
from pdv.simulate.setup import EMITTED
from pdv.simulate.stage import Lowered
from pdv.simulate.step import run
from tests.pdv.search.oracle import Oracle
from tests.pdv.simulate.workloads import flat, of_pcg
from tests.pdv.worlds import DEVICE, attention_block, mlp, problem, random_graph

MESHES = (Mesh.of(a=2), Mesh.of(a=2, b=3), Mesh.of(a=3, b=2))
SLOW_HOST = replace(CALIBRATION, host_forward_s=2e-7, host_backward_s=1e-7)  # about as slow as the toy's kernels


def device_of(of: Problem) -> Device:
    assert isinstance(of.compute, ComputeModel)
    return of.compute.devices[0]


def full(of: Problem, assignment: Assignment) -> Ran:
    devices = [device_of(of)] * of.mesh.num_devices
    return run(Lowered(of_pcg(of, realize(of, assignment).derived.pcg, EMITTED, devices), SLOW_HOST))


def check_changes(of: Problem, seed: int, changes: int) -> int:
    """Walk through plans by changes of one choice; how many segments a change simulated, at most."""
    oracle, rng = Oracle(of), np.random.default_rng(seed)
    chosen = legal(oracle, rng)
    device, decided = device_of(of), bool(rng.random() < 0.5)

    def plan(chosen: Mapping[Node, int]) -> Assignment:
        made = oracle.assignment(chosen)
        return made if decided else replace(made, leaving=None)

    delta = Delta.of(
        of, plan(chosen), flat([device] * of.mesh.num_devices), compute_of=lambda d: ComputeModel((d,)),
        calibration=SLOW_HOST,
    )  # fmt: skip
    assert delta.ran.end == full(of, plan(chosen)).end
    free = [key for key, size in oracle.sizes.items() if size > 1]
    most = 0
    for _ in range(changes if free else 0):
        key = free[int(rng.integers(len(free)))]
        other = {**chosen, key: int(rng.integers(oracle.sizes[key]))}
        if not np.isfinite(oracle.price(other)[0]):
            continue
        assignment, before = plan(other), delta.tables.engine.runs
        after = one_change(delta, assignment, key)
        expected = full(of, assignment)
        assert after.ran.end == expected.end
        assert after.ran.parts == expected.parts
        most = max(most, delta.tables.engine.runs - before)
        if rng.random() < 0.7:  # else the change is not taken, and the plan before it must be as it was
            delta, chosen = after, other
        else:
            assert delta.ran.end == full(of, plan(chosen)).end
    return most


def one_change(delta: Delta, assignment: Assignment, key: Node) -> Delta:
    if key.is_leaf:
        return delta.changed(storage={key: assignment.storage[key]})
    return delta.changed(splits={key: assignment.splits[key]})


def legal(oracle: Oracle, rng: np.random.Generator) -> dict[Node, int]:
    """A random plan that can be made: choices are drawn again until it is one."""
    chosen = dict.fromkeys(oracle.sizes, 0)
    assert np.isfinite(oracle.price(chosen)[0])
    for key, size in oracle.sizes.items():
        other = {**chosen, key: int(rng.integers(size))}
        if np.isfinite(oracle.price(other)[0]):
            chosen = other
    return chosen


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("seed", range(12))
def test_of_random_programs(seed: int, kind: Literal["gpu", "cpu"]) -> None:
    device = replace(DEVICE, kind=kind)
    of = problem(random_graph(seed, 8), MESHES[seed % 3], device=device)
    check_changes(of, seed, 8)


def test_of_longer_programs() -> None:
    """Several segments, of which a change leaves most alone."""
    of = problem(mlp(layers=24), Mesh.of(a=2, b=3))
    assert check_changes(of, 1, 10) <= 24
    check_changes(problem(attention_block(), Mesh.of(a=2, b=3)), 2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_of_many_programs(seed: int) -> None:
    check_changes(problem(random_graph(seed, 14), MESHES[seed % 3]), seed, 12)
