"""Values that model.py lays out in rows: once, where several readers would, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from tests.pdv.emit.graphs import of_module

LAID_OUT = ".contiguous()"


class Patches(nn.Module):
    """Images [b, 3, 16, 16], or lists [b, 16, 24], as rows of features [b, 16, 24] in a residual stream."""

    def __init__(self, *, rows: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.positions = nn.Parameter(torch.randn(16, 24))
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.rows = rows

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.positions
        x = x.contiguous() if self.rows else x
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        out: Tensor = self.norm(x + self.down(F.relu(self.up(x))))
        return out


class OneReader(Patches):
    """The norm alone reads what has moved."""

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.norm(self.patch(image).flatten(2).transpose(1, 2) + self.positions)
        return out


class MovedBack(Patches):
    """Elements of channels that are moved back, as windows want them."""

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.positions
        gate = torch.sigmoid(x) * x
        back: Tensor = gate.transpose(1, 2) + x.transpose(1, 2)
        return back.unflatten(2, (4, 4))


class Heads(Patches):
    """Heads, of which rows stay rows."""

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.patch(image).flatten(2).transpose(1, 2) + self.positions)
        q, k = (part(x).unflatten(2, (4, -1)).transpose(1, 2) for part in (self.up, self.up))
        q = q * self.positions[:, :12] + q.relu()
        out: Tensor = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return out


def copies(model: nn.Module, x: Tensor) -> int:
    """How often a step copies, kernels' own copies of what they read among them."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(x).square().sum().backward()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::copy_")


def test_patches_are_laid_out_once(tmp_path: Path) -> None:
    source, by_hand = Patches(), Patches(rows=True)
    by_hand.load_state_dict(source.state_dict())
    model, text = of_module(source, torch.randn(4, 3, 16, 16), tmp_path / "written")
    assert text.count(LAID_OUT) == 1
    x = torch.randn(4, 3, 16, 16)
    assert torch.allclose(model(x), source(x), atol=1e-6)
    own, wanted, unmended = (copies(one, x) for one in (model, by_hand, source))
    assert own <= wanted < unmended


@pytest.mark.parametrize("module", [OneReader, MovedBack, Heads])
def test_what_is_read_as_it_lies_is_left(
    module: type[Patches], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = module()
    model, text = of_module(source, torch.randn(4, 3, 16, 16), tmp_path / "written")
    assert LAID_OUT not in text
    x = torch.randn(4, 3, 16, 16)
    assert torch.allclose(model(x), source(x), atol=1e-5)
