"""Gradients at points where a function has no derivative, or torch takes another one: those of the module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.pdv.as_modules import gap_of, plan_for_two

ROWS = torch.tensor([[-1.0, 0, 1, 1, 0, -1], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0.5, -0.5, 3, -3, 6, 0]]).repeat(
    2, 1
)
FLOAT32 = 1e-8  # programs round constants (1e-12) to the model's type, which is float32 here
TARGET = torch.tensor([0.0, 1, 0, 1, 0, 1])

KINKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda h: torch.maximum(h, h.flip(1)),
    lambda h: torch.minimum(h, torch.ones_like(h)),
    F.logsigmoid,
    lambda h: F.binary_cross_entropy_with_logits(h, TARGET.to(h).expand_as(h), reduction="none"),
    lambda h: F.binary_cross_entropy(h.clamp(0, 1), TARGET.to(h).expand_as(h), reduction="none"),
    lambda h: h.std(-1),
    lambda h: h.clamp(-1, 1),
    F.relu6,
    F.hardtanh,
    torch.abs,
    F.relu,
    lambda h: h.amax(-1),
    lambda h: F.huber_loss(h, TARGET.to(h).expand_as(h), reduction="none"),
)


class Kinks(nn.Module):
    """x [b, 6] -> each function of it and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(6)) for _ in KINKS])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(kink(x + shift) for kink, shift in zip(KINKS, self.shifts, strict=True))


def test_gradients_at_kinks_are_the_modules() -> None:
    module = Kinks()
    plan = plan_for_two(module, [ROWS], {"mesh": {"a": 2}, "techniques": {"a": "ddp"}})
    assert gap_of(plan, module, [ROWS]) < FLOAT32
