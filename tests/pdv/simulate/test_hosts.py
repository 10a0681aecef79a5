"""What a host issues: groups of fused kernels, what runs again, scores that no fused kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdv.problem.workload import Workload
from pdv.simulate.engine.task import COMPUTE
from pdv.simulate.stage import Lowered
from pdv.simulate.step import simulate
from tests.pdv.simulate.workloads import PLAIN, gpt

FORWARD_S = 3.0  # longer than any kernel, so that a step is what its host does
HOST = replace(PLAIN, host_forward_s=FORWARD_S, host_backward_s=1.0)
MODEL = "gpt:layers=2,hidden=256,heads=8,seq=128,vocab=1024"


def alone(spec: str, devices: int) -> Workload:
    """One sample a data-parallel rank, on one node."""
    return gpt(f"micro_batch=1,{spec}", model=MODEL, nodes=1, devices=devices)


def launches(workload: Workload) -> list[str]:
    """Kernels of compute that the host issues in a forward pass, in order."""
    program = Lowered(workload, HOST).stages[0].programs[0].forward
    return [task.name for placed in program for task in placed.segment.tasks if task.issue and task.part == COMPUTE]


@pytest.mark.parametrize(("more", "ranks"), [("zero=0", 2), ("zero=0", 4), ("zero=3", 2)])
def test_data_parallelism_leaves_groups_of_fused_kernels_as_they_are(more: str, ranks: int) -> None:
    """A norm's weight that is summed or gathered over data ranks is no kernel between the norm and the sum before."""
    one = launches(alone("tp=2,fused=1,batch=1", 2))
    assert one == launches(alone(f"tp=2,fused=1,dp={ranks},batch={ranks},{more}", 2 * ranks))
    assert len(one) < len(launches(alone("tp=2,fused=0,batch=1", 2)))


def test_what_runs_again_is_issued_as_the_forward_pass_is() -> None:
    plain, again = (
        simulate(alone(f"batch=1,recompute={kind}", 1), calibration=HOST, draws=0).step_s for kind in ("none", "full")
    )
    more = (again - plain) / FORWARD_S
    assert more == pytest.approx(round(more), abs=0.01)
    assert more >= 2 * 10  # two layers of more than ten kernels


@pytest.mark.parametrize(("rows", "fused"), [(1, False), (2, True)])
def test_scores_are_fused_by_fours(rows: int, fused: bool) -> None:
    """Two heads of one sample are no four matrices: Megatron-LM's softmax is then composed of several kernels."""
    spec = f"tp=4,micro_batch={rows},batch={rows},flash=0,fused=1"
    lowered = Lowered(gpt(spec, model=MODEL, nodes=1, devices=4), HOST)
    prices = lowered.stages[0].kind.prices[0].entries
    issued = {prices[entry.number].kernels[0] for entry in lowered.nodes.entries.all if entry.name == "attention"}
    assert issued == {3} if fused else min(issued) > 3
