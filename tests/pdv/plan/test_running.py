"""Steps that say how a plan runs are refused where they do not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.cluster import load_cluster
from pdv.plan.running import read_running, running_steps
from pdv.problem.workload import EMITTED, Execution, Stages
from tests.pdv.worlds import cluster, f32, problem


def read_stages(graph: Graph, steps: Sequence[Any]) -> Stages:
    """Of steps on two stages of two devices."""
    return read_running(problem(graph, Mesh.of(dp=2)), graph, steps, lambda: load_cluster(cluster(4)))[0]


def test_a_stage_without_parameters_is_refused() -> None:
    """torch's optimizers take no empty list."""
    k = Builder()
    h = k.linear(k.input("x", f32(4, 8)), k.param("w", f32(8, 8)))
    ends = [k.softmax(h, dim=-1), k.linear(h, k.param("v", f32(8, 8)))]
    for end, holds in zip(ends, (False, True), strict=True):
        graph = k.graph({"y": end})
        stages = Stages(2, chunk_of={h: 0, end: 1}, layers=(0, 0))
        steps = running_steps(graph, stages, EMITTED)

        if holds:
            assert read_stages(graph, steps).chunk_of == stages.chunk_of
        else:
            with pytest.raises(ValueError, match=r"stages \[1\] without parameters"):
                read_stages(graph, steps)


def test_a_stage_of_what_its_reader_makes_of_a_parameter_is_refused() -> None:
    """Each stage makes its own of it, so that nothing is left of one that has no more."""
    k = Builder()
    h = k.linear(k.input("x", f32(4, 8)), k.param("w", f32(8, 8)))
    cut = k.slice(k.param("positions", f32(6, 8)), dim=0, start=0, stop=4)
    end = k.linear(k.add(h, cut), k.param("v", f32(8, 8)))
    graph = k.graph({"y": end})
    chunk_of = {h: 0, cut: 1, end.operands[0]: 2, end: 2}
    with pytest.raises(ValueError, match=r"stages \[1\] without parameters"):
        read_stages(graph, running_steps(graph, Stages(3, chunk_of=chunk_of, layers=(0, 0, 0)), EMITTED))


def test_interleaved_stages_are_read_back() -> None:
    """Their number is a multiple of the ranks, and so is that of the micro-batches."""
    k = Builder()
    nodes = [k.input("x", f32(4, 8))]
    for number in range(4):
        nodes.append(k.linear(nodes[-1], k.param(f"w{number}", f32(8, 8))))
    graph = k.graph({"y": nodes[-1]})
    stages = Stages(2, 2, chunk_of={node: number for number, node in enumerate(nodes[1:])}, layers=(0, 0, 0, 0))
    execution = replace(EMITTED, micro_batches=4, order="interleaved")

    def read(steps: list[dict[str, Any]]) -> tuple[Stages, Execution]:
        return read_running(problem(graph, Mesh.of(dp=2)), graph, steps, lambda: load_cluster(cluster(4)))

    steps = running_steps(graph, stages, execution)
    found, how = read(steps)
    assert (found.count, found.virtual, found.chunk_of, how.order) == (2, 2, stages.chunk_of, "interleaved")
    for changed, told in (
        ({"ranks": 3}, "4 stages on 3 ranks"),
        ({"order": "1f1b"}, "each of 2 ranks in the order 1f1b"),
    ):
        wrong = [
            {**step, "bindings": {**step["bindings"], **changed}} if step["rule"] == "stage" else step for step in steps
        ]
        with pytest.raises(ValueError, match=told):
            read(wrong)
    with pytest.raises(ValueError, match="3 micro-batches take turns on stages of 2 ranks"):
        read(running_steps(graph, stages, replace(execution, micro_batches=3)))
