"""Steps that say how a plan runs are refused where they do not hold."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.mesh import Mesh
from pdv.cluster import load_cluster
from pdv.plan.running import read_running, running_steps
from pdv.problem.workload import EMITTED, Stages
from tests.pdv.worlds import cluster, f32, problem


def test_a_stage_without_parameters_is_refused() -> None:
    """torch's optimizers take no empty list."""
    k = Builder()
    h = k.linear(k.input("x", f32(4, 8)), k.param("w", f32(8, 8)))
    ends = [k.softmax(h, dim=-1), k.linear(h, k.param("v", f32(8, 8)))]
    for end, holds in zip(ends, (False, True), strict=True):
        graph = k.graph({"y": end})
        stages = Stages(2, chunk_of={h: 0, end: 1}, layers=(0, 0))
        steps = running_steps(graph, stages, EMITTED)

        def read() -> Stages:
            return read_running(problem(graph, Mesh.of(dp=2)), graph, steps, lambda: load_cluster(cluster(4)))[0]  # noqa: B023

        if holds:
            assert read().chunk_of == stages.chunk_of
        else:
            with pytest.raises(ValueError, match=r"stages \[1\] without parameters"):
                read()
