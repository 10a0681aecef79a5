"""The lattice: what it admits, how near its estimates are, and that the best is found."""

from __future__ import annotations

import pytest

from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.manual.lattice import Lattice, best, estimate_lattice, points
from pdv.memory import step_memory
from pdv.simulate.step import simulate
from tests.pdv.manual.test_configuration import cluster, made

MODEL = "gpt:layers=12,hidden=1024,heads=16,seq=512,vocab=8192"
SMALL = Lattice(tp=(1, 2, 3), pp=(1, 2, 4), vp=(1, 2), micro_batch=(1, 2), recompute=("none", "full"))


def compute(device: object) -> ComputeModel:
    return ComputeModel((cluster(8).classes[0].device,))


def test_points_are_configurations_that_run() -> None:
    found = list(points(arch(MODEL), 8, 32, SMALL))
    assert all(given.tp != 3 and given.tp * given.pp * given.data == 8 for given in found)
    assert len(set(found)) == len(found)
    assert {given.vp for given in found if given.pp == 1} == {1}


def test_estimates_are_near_what_is_simulated() -> None:
    """At sizes where a micro-batch is more than host gaps: they order the lattice, so a fifth is near enough."""
    described = arch("gpt:layers=12,hidden=4096,heads=32,seq=2048,vocab=51200")
    lattice = Lattice(tp=(4,), pp=(2,), vp=(1,), micro_batch=(2,), recompute=("full",))
    (estimate,) = estimate_lattice(described, cluster, 8, 16, compute, stage_links, lattice)
    work = made(described.text(), estimate.given.text(), 8)
    assert estimate.step_s == pytest.approx(simulate(work).step_s, rel=0.2)
    assert estimate.memory_bytes == pytest.approx(step_memory(work).worst.total_bytes, rel=0.2)


@pytest.mark.slow
def test_the_best_is_found() -> None:
    described = arch(MODEL)
    found = best(described, cluster, 8, 32, compute, stage_links, SMALL, keep=3)
    everyone = [made(MODEL, given.text(), 8) for given in points(described, 8, 32, SMALL)]
    least = min(simulate(work).step_s for work in everyone if step_memory(work).fits)
    assert found[0].simulation.step_s <= 1.05 * least
    assert [choice.simulation.step_s for choice in found] == sorted(choice.simulation.step_s for choice in found)
