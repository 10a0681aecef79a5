"""How a step is run, in words: no kind of step that a plan may have goes unsaid."""

from __future__ import annotations

import pytest

from pdv.plan.running import RUNNING
from pdv.report.axes import run_text

BINDINGS = {
    "accumulate": {"micro_batches": 8},
    "stage": {"stage": 0, "of": 8, "order": "interleaved", "ranks": 4},
    "slice": {"slices": 4},
    "scale": {"format": "fp8"},
}
SAID = {
    "accumulate": "8 micro-batches",
    "stage": "4 stages (interleaved, 2 chunks each)",
    "slice": "in 4 slices in time",
    "recompute": "recomputation",
    "offload-activations": "activations on the host",
    "round": "mixed precision",
    "offload": "optimizer on the host",
    "scale": "products in fp8",
    "compile": "compiled",
}


@pytest.mark.parametrize("rule", RUNNING)
def test_every_step_of_a_run_is_said(rule: str) -> None:
    step = {"kind": "running", "rule": rule, "bindings": BINDINGS.get(rule, {}), "sites": []}
    assert run_text({"derivation": [step]}) == SAID[rule]


def test_a_step_of_the_whole_batch_says_nothing() -> None:
    assert run_text({"derivation": []}) == ""
