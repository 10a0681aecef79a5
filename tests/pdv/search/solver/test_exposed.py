"""What nothing hides of gradients' sums: no more than a simulated step has of them, and along one axis as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ir.builder import Builder
from ir.graph import Node
from ir.sharding import Invariant, Replicate, Shard, Sharding, State
from ir.types import DType, TensorType
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.planning.problems import plan_problems
from pdv.problem import Problem
from pdv.problem.workload import workload_of_pcg
from pdv.search.solver.exposed import Exposed, last_reader
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import PICO
from pdv.simulate.lowering.links import Links

WHOLE, CUT, EACH = Invariant(), Shard(0), Replicate()
SIZES = (256, 65_536, 1 << 24)  # of rows, two bytes each


def cluster() -> Cluster:
    node = {"count": 2, "devices": 4, "device": "a100-80gb-sxm", "link": "nvlink3"}
    port = {"name": "port", "bandwidth": "100 Gb/s", "latency": "5 us"}
    return load_cluster({"name": "two", "nodes": [node], "network": port})


@pytest.fixture(scope="module")
def asked() -> tuple[Problem, Links]:
    """A problem on two axes, with links as a step has them, and these links."""
    source = graph(arch("gpt:layers=1,hidden=64,heads=4,seq=32,vocab=512"), 16, DType.BF16)
    problems = plan_problems(source, cluster(), mode="train", rules=())
    problem = next(one for one in problems if one.mesh.shape == (2, 4))
    links = Links.of(workload_of_pcg(problem, source, cluster()), 0, CALIBRATION)
    return replace(problem, axes=links.axes[:2], slowed=0.5), links


@pytest.mark.parametrize("rows", SIZES)
def test_sums_are_bounded_by_those_of_a_step(asked: tuple[Problem, Links], rows: int) -> None:
    problem, links = asked
    exposed, num_bytes = Exposed(problem), 2.0 * rows
    joint = next(at for at, span in enumerate(problem.mesh.spans) if len(problem.mesh.positions(span)) == 2)
    steps: dict[Sharding, list[int]] = {  # by how the parameter rests
        (WHOLE, WHOLE): [links.sum_gradients((0, 1), num_bytes), links.sum_gradients((joint,), num_bytes)],
        (CUT, CUT): [links.scatter_gradients((0, 1), num_bytes), links.scatter_gradients((joint,), num_bytes)],
        (WHOLE, CUT): [links.scatter_gradients((1,), num_bytes) + links.sum_gradients((0,), num_bytes / 4)],
    }
    for rests, taken in steps.items():
        last_s, beside_s = (
            exposed.seconds(TensorType((rows,), DType.BF16), rests, (EACH, EACH), last=last) for last in (True, False)
        )
        assert 0.0 < 2 * beside_s <= last_s <= min(taken) / PICO * (1 + 1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sum_along_one_axis_is_as_it_is(asked: tuple[Problem, Links], axis: int) -> None:
    problem, links = asked
    rows = SIZES[-1]
    need: list[State] = [WHOLE, WHOLE]
    need[axis] = EACH
    found = [
        Exposed(problem).seconds(TensorType((rows,), DType.BF16), (WHOLE, WHOLE), tuple(need), last=last)
        for last in (True, False)
    ]
    assert found[0] == pytest.approx(links.sum_gradients((axis,), 2.0 * rows) / PICO)
    assert found[1] == pytest.approx(found[0] / 2, rel=0.06)


def test_nothing_is_summed_of_what_ranks_use_alike(asked: tuple[Problem, Links]) -> None:
    param = TensorType((1024,), DType.BF16)
    for rests, need in (((WHOLE, WHOLE), (WHOLE, WHOLE)), ((CUT, WHOLE), (CUT, WHOLE)), ((WHOLE, CUT), (CUT, CUT))):
        assert Exposed(asked[0]).seconds(param, rests, need, last=True) == 0.0
    for other in (replace(asked[0], mode="infer"), replace(asked[0], once=0.0)):
        assert Exposed(other).seconds(param, (WHOLE, WHOLE), (EACH, EACH), last=True) == 0.0


def beginnings() -> tuple[Sequence[Node], Sequence[Node]]:
    """Two products of a program, in either order."""
    k = Builder()
    x = k.input("x", TensorType((4, 8), DType.F32))
    one, other = (k.linear(x, k.param(name, TensorType((8, 8), DType.F32))) for name in "vw")
    return [one, other], [other, one]


def test_the_last_reader_is_the_first_in_every_way_to_write_it() -> None:
    one, other = beginnings()
    assert last_reader([one]) is one[0]
    assert last_reader([one, one]) is one[0]
    assert last_reader([one, other]) is None
    assert last_reader([[]]) is None
