"""A step in parts of a program whose rows are not apart is refused when it runs, as it is when it is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pdv
from tests.pdv.worlds import cluster

ROWS, WIDTH = 8, 16
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Centred(nn.Module):
    """Less the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def net(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (nn.BatchNorm1d(WIDTH), "buffers that a step overwrites"),
        (Centred(), "a value, .*"),
        (nn.LayerNorm(WIDTH), ""),
        (nn.BatchNorm1d(WIDTH).eval(), ""),
    ],
    ids=["statistics kept", "statistics not kept", "of a row", "of earlier batches"],
)
def test_parts_are_refused_as_they_are_by_a_plan(norm: nn.Module, why: str, tmp_path: Path) -> None:
    module = net(norm)
    plan = pdv.optimize(module, (X,), cluster=cluster(2), batch=ROWS)
    assert ("joined=" in (plan.save(tmp_path / "net_pdv") / "model.py").read_text()) == bool(why)
    pdv.verify(tmp_path / "net_pdv")
    model = plan.build(device="cpu")
    whole = float(model.train_step(X, X, mse_loss))
    if not why:
        assert float(model.train_step(X, X, mse_loss, micro_batches=2)) == pytest.approx(whole, rel=1e-5)
        return
    with pytest.raises(ValueError, match=f"batch-in-parts: 2 micro-batches of a program that has {why}. Each would"):
        model.train_step(X, X, mse_loss, micro_batches=2)
    with pytest.raises(pdv.UsageError, match=f"cannot be taken in parts: it has {why}"):
        pdv.optimize(module, (X,), cluster=cluster(2), batch=ROWS, micro_batches=2)
