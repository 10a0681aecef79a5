"""What backward makes again, not kept: steps are those of devices that keep it, and of models of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from benchmarks.models.techniques import Technique
from tests.distributed.emitted.test_offload import DP, PARITY, TP, ZERO_TP, apart, plan, train
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed

WAYS: dict[str, tuple[Technique, dict[str, Any]]] = {
    "dp": (DP, {"stages": 1, "micro_batches": 2}),
    "tp": (TP, {"stages": 1, "micro_batches": 1}),
    "zero-3 x tp": (ZERO_TP, {"stages": 1, "micro_batches": 1}),
    "pp2 x tp2": (TP, {"stages": 2, "micro_batches": 4}),
}
SLOW = set(WAYS) - {"tp"}


@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
def test_steps_that_make_values_again_are_those_that_keep_them(way: str, tmp_path: Path) -> None:
    technique, how = WAYS[way]
    folder = plan(technique, {"recompute": "light", **how}).save(tmp_path / "gpt_pdv")
    assert "again(" in (folder / "model.py").read_text()
    exact = train(plan(technique, how).save(tmp_path / "plain" / "gpt_pdv"))
    for seen in run_ranks(train, technique.mesh.num_devices * how["stages"], folder, tmp_path / "checkpoint"):
        assert max(apart(seen, exact)) <= PARITY, apart(seen, exact)


class Gated(nn.Module):
    """A gated block, which no layer repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 16]."""
        x = self.norm(x)
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Normed(nn.Module):
    """Rows joined by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 3, h, w]."""
        y: Tensor = self.out(nn.functional.silu(self.norm(self.conv(x))).mean((2, 3)))
        return y


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("kind", "shape"), [(Gated, (16,)), (Normed, (3, 6, 6))])
def test_models_need_neither_layers_nor_rows_that_are_apart(
    kind: type[nn.Module], shape: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    found = pdv.optimize(kind().train(), (torch.randn(rows, *shape),), cluster=cluster(2), recompute="light")
    assert "recompute" in {step["rule"] for step in found.document["derivation"]}
    assert "again(" in (found.save(tmp_path / "kind_pdv") / "model.py").read_text()
