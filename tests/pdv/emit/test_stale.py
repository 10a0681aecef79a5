"""Pipelines that no step empties: what a plan says of them, what they take and hold, and what does not go with them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pdv
from ir.errors import UsageError, VerificationError
from pdv.memory import step_memory
from pdv.plan.package import Plan
from pdv.problem.workload import Workload
from pdv.report.axes import strategy_text
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import picoseconds
from pdv.simulate.step import simulate
from pdv.simulate.trace import trace
from pdv.verification.package import verify
from tests.pdv.packages import Document, change_plan
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

STAGES, MICRO_BATCHES = 4, 8


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_pipeline(
        Blocks(), (torch.randn(8, 4, 16),), cluster(STAGES), stages=STAGES, micro_batches=MICRO_BATCHES, mesh={},
        order="2bw",
    )  # fmt: skip


@pytest.fixture(scope="module")
def package(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan.save(tmp_path_factory.mktemp("stale") / "layers_pdv")


def test_it_says_how_old_weights_are(plan: Plan, package: Path) -> None:
    staged = [step["bindings"] for step in plan.document["derivation"] if step["rule"] == "stage"]
    assert {bindings["staleness"] for bindings in staged} == {1}
    assert "gradients of weights one step old" in (package / "model.py").read_text()
    assert "gradients of weights one step old" in strategy_text(plan.document)
    assert len((package / "model.py").read_text().splitlines()) <= 200
    assert verify(package)


@pytest.mark.parametrize("change", ["drop", "two", "other"])
def test_another_age_is_refused(change: str, package: Path, tmp_path: Path) -> None:
    def other(document: Document) -> None:
        for step in (step for step in document["derivation"] if step["rule"] == "stage"):
            if change == "drop":
                del step["bindings"]["staleness"]
            elif change == "two":
                step["bindings"]["staleness"] = 2
            else:
                step["bindings"]["order"] = "1f1b"

    folder = Path(shutil.copytree(package, tmp_path / "layers_pdv", ignore=shutil.ignore_patterns("__pycache__")))
    with pytest.raises(VerificationError):
        verify(change_plan(folder, other))


def in_order(work: Workload, order: Any) -> Workload:
    return replace(work, execution=replace(work.execution, order=order))


def test_there_is_no_bubble_between_steps_and_one_more_copy_of_weights(package: Path) -> None:
    work = workload_of_plan(load_plan(package))
    stale, flushed = (simulate(in_order(work, order), draws=0) for order in ("2bw", "1f1b"))
    passes = [sum(end - start for _, start, end in own) for own in stale.ran.timeline.passes]
    outside = picoseconds(CALIBRATION.host_step_s)
    assert max(passes) <= stale.ran.end <= max(p + t for p, t in zip(passes, stale.ran.tail, strict=True)) + outside
    assert stale.step_ps < flushed.step_ps * (MICRO_BATCHES + 1) / (MICRO_BATCHES + STAGES - 1)
    for share in stale.breakdown:
        assert sum(share.parts.values()) == stale.step_ps
        assert min(share.parts.values()) >= 0
    held = [step_memory(in_order(work, order)) for order in ("2bw", "1f1b")]
    weights = [[one.by_kind["weights"] for one in each.stages] for each in held]
    assert weights[0] == [2 * size for size in weights[1]]
    assert [one.peak_bytes >= other.peak_bytes for one, other in zip(*(each.stages for each in held), strict=True)]
    assert trace(stale, held[0])["traceEvents"]


def test_what_does_not_go_with_it_is_refused() -> None:
    def made(**given: Any) -> Plan:
        options: dict[str, Any] = {"cluster": cluster(2), "rules": "none", "stages": 2, "schedule": "2bw", **given}
        return pdv.optimize(Blocks(), (torch.randn(8, 4, 16),), **options)

    with pytest.raises(UsageError, match="master weights"):
        made(precision="mixed")
    with pytest.raises(UsageError, match="host's memory"):
        made(offload="optimizer")
    with pytest.raises(UsageError, match="1 micro-batches in the order 2bw"):
        made(micro_batches=1)


def test_it_is_searched_where_it_is_asked_for() -> None:
    def made(**given: Any) -> Document:
        return pdv.optimize(
            Blocks(), (torch.randn(8, 4, 16),), cluster=cluster(4), rules="none", stages=2, **given
        ).document

    asked, unasked = made(schedule="2bw"), made()
    orders = [
        {step["bindings"]["order"] for step in one["derivation"] if step["rule"] == "stage"} for one in (asked, unasked)
    ]
    assert orders[0] == {"2bw"} != orders[1]
