"""Programs under ``torch.compile`` train as they do without; blocks without collectives are compiled whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.techniques import Technique
from pdv.plan.package import import_package
from tests.distributed.emitted.test_precision import DP, TP, ZERO, batch, loss_of, plan
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed
STEPS = 3
WAYS: dict[str, tuple[Technique, dict[str, Any]]] = {
    "dp": (DP, {"stages": 1, "micro_batches": 1}),
    "zero-3, again": (ZERO, {"stages": 1, "micro_batches": 2, "recompute": "full"}),
    "pp2": (Technique("alone", (("wire", 1),)), {"stages": 2, "micro_batches": 2}),
    "tp+sp": (TP, {"stages": 1, "micro_batches": 2}),
}
SLOW = {"dp", "pp2", "zero-3, again"}
WHOLE = {"zero-3, again", "pp2"}  # others have collectives between what is compiled
SAME = 1e-5  # of losses and weights in float32, relative


def train(folder: Path, **options: Any) -> tuple[list[float], torch.Tensor]:
    """Losses of some steps and the weights behind the last."""
    torch.compiler.reset()
    model = import_package(folder).build(device="cpu")
    if options:
        model.compile(**options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        losses.append(model.train_step(*batch(step), loss_of).item())
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict()
    return losses, torch.cat([state[name].flatten().float() for name in sorted(state)])


@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
def test_compiled_programs_train_as_others(way: str, tmp_path: Path) -> None:
    technique, how = WAYS[way]
    folder = plan(technique, how, precision="as-emitted").save(tmp_path / "gpt_pdv")
    ranks = technique.mesh.num_devices * how["stages"]
    plain = run_ranks(train, ranks, folder)
    compiled = run_ranks(_compile_and_train, ranks, folder, way in WHOLE, timeout_s=240)
    for (losses, weights), (others, theirs) in zip(compiled, plain, strict=True):
        assert losses == pytest.approx(others, rel=SAME)
        assert float((weights - theirs).norm() / theirs.norm()) <= SAME


def _compile_and_train(folder: Path, whole: bool) -> tuple[list[float], torch.Tensor]:
    return train(folder, fullgraph=whole)
