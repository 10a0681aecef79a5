"""Products in float8: on several processes as on one, and training as bfloat16 does.

Bounds are float8's own, as in ``test_precision``: several processes are as near to float32 as one process is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.techniques import Technique
from tests.distributed.emitted.test_precision import ALONE, DP, ROUNDED, TP, UNIT, ZERO_TP, apart, plan, train
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed
WAYS: dict[str, tuple[Technique, dict[str, Any]]] = {
    "tp+sp": (TP, {"stages": 1, "micro_batches": 2, "products": "fp8"}),
    "zero-3 x tp, again": (ZERO_TP, {"stages": 1, "micro_batches": 1, "recompute": "full", "products": "fp8"}),
    "pp2 x dp2": (DP, {"stages": 2, "micro_batches": 4, "products": "fp8-rowwise"}),
    "tp+sp, by rows": (TP, {"stages": 1, "micro_batches": 1, "products": "fp8-rowwise"}),
}
SLOW = {"zero-3 x tp, again", "tp+sp, by rows"}  # each of their parts is in another one, too
CURVE, APART = 50, 0.05
FEWER = 5e-3  # in steps of this rate losses fall from 3.9 to about 1, where curves can be told apart


@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
def test_several_processes_are_as_near_to_float32_as_one(way: str, tmp_path: Path) -> None:
    technique, how = WAYS[way]
    folder = plan(technique, how).save(tmp_path / "gpt_pdv")
    assert "float8_linear" in (folder / "model.py").read_text()
    exact, alone = train(folder, torch.float32), train(folder)
    bounds = [max(ROUNDED * one, UNIT) for one in apart(alone, exact)]
    for seen in run_ranks(train, technique.mesh.num_devices * how["stages"], folder):
        several = apart(seen, exact)
        assert all(one <= most for one, most in zip(several, bounds, strict=True)), (several, bounds)


@pytest.mark.parametrize("products", mark_slow(["fp8", "fp8-rowwise"], {"fp8"}))
def test_losses_fall_as_in_bfloat16(products: str, tmp_path: Path) -> None:
    curves = []
    for name, chosen in (("wide", "own"), ("narrow", products)):
        folder = plan(ALONE, {"stages": 1, "micro_batches": 1, "products": chosen}).save(tmp_path / name / "gpt_pdv")
        curves.append(torch.tensor(train(folder, steps=CURVE, lr=FEWER).losses))
    wide, narrow = curves
    assert wide[-1] < wide[0] / 3
    assert not wide.equal(narrow)
    assert float((narrow - wide).norm() / wide.norm()) < APART, (wide, narrow)
