"""Plans of compiled programs: priced by groups of operators that are one kernel, everywhere alike, and written so."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdv
from benchmarks.models import build
from pdv.cluster.presets import DEVICES
from pdv.frontend.load import load_program
from pdv.pcg.fused import fused_of
from pdv.plan.package import Plan
from pdv.prices import cost_model, priced_by
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.simulate.step import simulate

LAPTOP = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    """Of a small GPT: eager, compiled."""
    module, inputs = build("gpt2", "small")
    eager, compiled = (
        pdv.optimize(module, inputs, cluster=LAPTOP, check=False, pipelines="never", compiled=one)
        for one in (False, True)
    )
    return eager, compiled


def test_it_is_predicted_faster_and_bounded_so(plans: tuple[Plan, Plan]) -> None:
    eager, compiled = (plan.document for plan in plans)
    assert compiled["predicted"]["step_time_s"]["mean"] < eager["predicted"]["step_time_s"]["mean"]
    assert compiled["search"]["lower_bound"] < eager["search"]["lower_bound"]
    assert compiled["search"]["gap"] < 0.01
    assert {"kind": "running", "rule": "compile", "bindings": {}, "sites": ["parts"]} in compiled["derivation"]


def test_it_is_read_and_simulated_as_it_was_written(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    package = plans[1].save(tmp_path / "gpt_pdv")
    loaded = load_plan(package, priced_by(plans[1].document, None))
    step_s = simulate(workload_of_plan(loaded)).step_s
    assert step_s == plans[1].document["predicted"]["step_time_s"]["mean"]
    assert "    model.compile()" in (package / "model.py").read_text()
    pdv.verify(package)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_micro_batches_are_priced_as_their_own_program_is_compiled(stages: int, tmp_path: Path) -> None:
    module, inputs = build("gpt2", "small")
    plan = pdv.optimize(module, inputs, cluster=LAPTOP, check=False, compiled=True, stages=stages, micro_batches=2)
    package = plan.save(tmp_path / "of_stages_pdv")
    loaded = load_plan(package, priced_by(plan.document, None))
    assert simulate(workload_of_plan(loaded)).step_s == plan.document["predicted"]["step_time_s"]["mean"]
    pdv.verify(package)


@pytest.mark.parametrize("cost", ["analytic", "learned"])
def test_what_is_one_kernel_takes_less_and_products_take_what_they_took(cost: str) -> None:
    module, inputs = build("llama", "small")
    graph = load_program(module, inputs).graph
    shares = fused_of(graph, cost_model(cost, [DEVICES["cpu-core"]])).shares
    names = {str(kind[0]) for kind in shares}  # type: ignore[index]  # of a tuple
    assert {"mul", "add", "rms_norm"} <= names
    assert names.isdisjoint({"linear", "attention", "embedding", "reshape"})
    assert all(0 < share <= 1 for share in shares.values())
    assert min(shares.values()) < 0.8
