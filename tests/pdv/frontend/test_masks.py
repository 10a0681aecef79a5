"""Attention under masks that repeat, or hide whole rows; what lookups do besides looking up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdv
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from tests.pdv.worlds import cluster

COLUMNS = torch.arange(6) < 3


class Masked(nn.Module):
    """Attention of a sequence to itself: [b, 6, 8]."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        return functional.scaled_dot_product_attention(q, x[:, None], x[:, None], attn_mask=self.mask)


def said(module: nn.Module, *inputs: Tensor) -> str:
    source = copy_of(module, inputs, train=True)
    return check_reading(load_program(module, inputs).graph, source, train=True)


@pytest.mark.parametrize(
    "mask",
    [
        COLUMNS.expand(6, 6),
        COLUMNS[:, None].expand(6, 6),
        torch.zeros(6, 6, dtype=torch.bool),
        torch.ones(6, 6).tril(-1).bool(),
        torch.arange(6.0).expand(1, 1, 6, 6),
    ],
    ids=["columns", "rows", "nothing seen", "a row that sees nothing", "additive"],
)
def test_attention_under_a_mask_is_torchs(mask: Tensor) -> None:
    assert "same" in said(Masked(mask), torch.randn(2, 6, 8))


@pytest.mark.parametrize("mask", [COLUMNS.expand(6, 6), torch.zeros(6, 6, dtype=torch.bool)])
def test_what_is_emitted_for_a_mask_runs(mask: Tensor) -> None:
    plan = pdv.optimize(Masked(mask), (torch.randn(4, 6, 8),), cluster=cluster(2))
    assert plan.document["run"]["ranks"] == 2


def test_multi_head_attention_takes_its_masks() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            later = torch.ones(6, 6).triu(1).bool()
            result: tuple[Any, ...] = self.attention(x, x, x, hidden, attn_mask=later, need_weights=False)
            return result[0]  # type: ignore[no-any-return]

    assert "same" in said(Heads(), torch.randn(2, 6, 8), (torch.arange(6) > 4).expand(2, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(10, 4, scale_grad_by_freq=True),
        lambda: nn.EmbeddingBag(10, 4, mode="max", padding_idx=0),
    ],
)
def test_lookups_with_gradients_of_their_own_are_torchs(make: Callable[[], nn.Module]) -> None:
    ids = torch.randint(0, 10, (4, 3))
    assert "embedding" in load_program(make(), (ids,)).opaque[0]
    assert "are the same" in said(make(), ids)
