"""What programs draw on a device: masks and noise of their distribution, the same again by the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from benchmarks.measured.devices import one_device

STEPS = 3


class Drawing(nn.Module):
    """Dropout, drawn noise and drawn places."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.25)
        self.rows = nn.Embedding(10, 16)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.randint(0, 10, (x.shape[0],), device=x.device)
        hidden = self.drop(self.into(x + torch.randn_like(x) + self.rows(step)))
        return self.out(hidden.relu() * torch.rand_like(hidden))  # type: ignore[no-any-return]


def losses(plan: Any, device: torch.device, seed: int) -> list[float]:
    """Of some steps without an optimizer: they differ by what is drawn alone."""
    torch.manual_seed(seed)
    model: Any = plan.build(device=str(device))
    x = torch.ones(256, 16, device=device)
    return [float(model.train_step(x, x, lambda y, t: ((y - t).square().sum(), t.numel()))) for _ in range(STEPS)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_draws_follow_the_seed(device: torch.device, micro_batches: int) -> None:
    plan = pdv.optimize(
        Drawing(), torch.randn(256, 16), cluster=one_device(torch.device("cpu")), micro_batches=micro_batches
    )
    first, again, other = (losses(plan, device, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 2 * STEPS, "drawn anew for each step, and by another seed"
    assert max(first) < 1.2 * min(first), "the same but for what is drawn"


def test_evaluation_drops_nothing(device: torch.device) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.net(x))  # type: ignore[no-any-return]

    module = Dropping()
    model: Any = pdv.optimize(module, torch.randn(64, 16), cluster=one_device(torch.device("cpu"))).build(
        device=str(device)
    )
    x = torch.randn(64, 16, device=device)
    dropped = model(x)
    assert 0.3 < float((dropped == 0).float().mean()) < 0.7
    model.eval()
    module.eval().to(device)
    assert torch.allclose(model(x), module(x), atol=1e-5)
