"""Masks of dropout: the same for the same part, drawn again where it runs again, and none outside of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import UsageError
from pdv.emit.emission import shapes_in
from pdv.emit.templates.kernels import operators
from pdv.plan.package import import_package
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster


class Dropping(nn.Module):
    """Attention and a perceptron, each with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = 0.25 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(y)
        return x + self.down(self.drop(F.gelu(self.up(x))))  # type: ignore[no-any-return]


def test_a_model_with_dropout_is_planned_and_its_text_tells_parts_apart() -> None:
    plan = pdv.optimize(Dropping(), torch.randn(4, 6, 16), cluster=cluster(2), mesh={"dp": 2})
    assert "both without dropout" in plan.document["reading"]
    assert "was run on 2 simulated ranks" in plan.document["run"]["statement"]
    text = plan.emission.body(shapes_in(plan.weights))
    assert text.count("dropout(") == 3
    assert text.count("self.training, dp.rank") == 3


class Deep(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OfWeights(nn.Module):
    """Dropout of a weight: one mask for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, F.dropout(self.weight, 0.25, self.training)))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.slow
def test_what_runs_again_draws_its_masks_again(micro_batches: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, x = Deep(), torch.randn(4, 6, 16)
    found = []
    for recompute in ("none", "full", "hosted", "full-hosted"):
        plan = plan_pipeline(
            source, (x,), cluster(2), stages=2, micro_batches=micro_batches, mesh={}, recompute=recompute
        )
        model = import_package(plan.save(tmp_path / recompute)).build("cpu", torch.float64)
        losses = [float(model.train_step(x.double(), x.double(), F.mse_loss)) for _ in range(2)]
        found.append((losses, model.full_gradients()))
    (kept, gradients), *again = found
    assert kept[0] != kept[1]
    assert gradients
    for losses, others in again:
        assert losses == kept
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name])


def test_a_mask_for_all_rows_is_not_drawn_for_parts_of_them() -> None:
    with pytest.raises(UsageError, match=r"a value, .*, that is not known to be row by row"):
        pdv.optimize(OfWeights(), torch.randn(4, 16), cluster=cluster(2), micro_batches=2)


def test_masks() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    y = operators.dropout(x, 0.25, True)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.7 < (y > 0).float().mean() < 0.8
    assert not torch.equal(y, operators.dropout(x, 0.25, True))
    assert operators.dropout(x, 0.25, False) is x


def test_masks_are_of_the_part_and_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(block: int) -> list[Any]:
        monkeypatch.setattr(operators, "_drawn", [0])
        return [operators.dropout(torch.ones(32), 0.5, True, block) for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(drawn(0), drawn(1), strict=True))


def test_masks_are_by_the_seed_and_do_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int, count: int) -> Tensor:
        monkeypatch.setattr(operators, "seed", [seed])
        monkeypatch.setattr(operators, "_drawn", [count])
        return operators.dropout(torch.ones(64), 0.5, True)

    masks = [drawn(*each) for each in ((0, 0), (1, 0), (2**63 - 1, 0), (0, 4096), (0, 1))]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    assert torch.equal(drawn(1, 0), masks[1])
