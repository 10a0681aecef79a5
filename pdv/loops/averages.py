"""A running average of a sharded model's parameters (EMA; Polyak and Juditsky, 1992): each rank averages what it holds.

Entry point: ``Average``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ir.errors import UsageError
from pdv.loops.pieces import local_of


class Average:
    """``average = decay * average + (1 - decay) * parameter``, at each ``update``, behind the optimizer's step.

    warm: of the first steps fewer are averaged: the decay is at most ``(1 + step) / (10 + step)``.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warm: bool = False) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"decay is {decay}", "From 0 to below 1", "0.999 is usual")
        self.model, self.decay, self.warm, self.steps = model, decay, warm, 0
        with torch.no_grad():
            self._held = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now."""
        self.steps += 1
        decay = min(self.decay, self.steps / (9 + self.steps)) if self.warm else self.decay
        averages = [local_of(average) for _, average in self._held]
        torch._foreach_lerp_(averages, [local_of(p) for p, _ in self._held], 1 - decay)  # as torch.optim

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averages in place of its parameters: to evaluate, or to save weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in self._held:
            mine, other = local_of(parameter), local_of(average)
            before = mine.clone()
            mine.copy_(other)
            other.copy_(before)

    # ---- In checkpoints ----

    def by_parameter(self) -> dict[int, Tensor]:
        """The average of each parameter, placed as this is, by the parameter's ``id``."""
        return {id(parameter): average for parameter, average in self._held}

    def said(self) -> dict[str, Any]:  # Any: JSON
        """What is kept beside tensors."""
        return {"steps": self.steps}
