"""Masks of dropout: the same where ranks hold the same, others where a value is cut, and none outside of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import UsageError
from pdv.emit.emission import shapes_in
from pdv.emit.templates import operators
from tests.pdv.worlds import cluster


class Dropping(nn.Module):
    """Attention and a perceptron, each with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(y)
        return x + self.down(self.drop(F.gelu(self.up(x))))  # type: ignore[no-any-return]


def test_a_model_with_dropout_is_planned_and_its_text_tells_parts_apart() -> None:
    plan = pdv.optimize(Dropping(), torch.randn(4, 6, 16), cluster=cluster(2), mesh={"dp": 2})
    assert "both without dropout" in plan.document["reading"]
    assert "was run on 2 simulated ranks" in plan.document["run"]["statement"]
    text = plan.emission.body(shapes_in(plan.weights))
    assert text.count("dropout(") == 3
    assert text.count("self.training, dp.rank") == 3


def test_pipelines_of_it_are_refused() -> None:
    with pytest.raises(UsageError, match="with dropout"):
        pdv.optimize(Dropping(), torch.randn(4, 6, 16), cluster=cluster(2), micro_batches=2)


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
        monkeypatch.setattr(operators, "_drawn", iter(range(100)))
        return [operators.dropout(torch.ones(32), 0.5, True, block) for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(drawn(0), drawn(1), strict=True))
