"""Modules that draw by Python's random or numpy's: what comes of it is said, or refused; others' numbers stay."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from pdv.frontend import load_program
from pdv.frontend.torch.tracing.chance import DRAWN
from tests.pdv.worlds import cluster

X = torch.arange(32.0).reshape(4, 8).sin()
DRAW: dict[str, Callable[[], float]] = {"random": lambda: 2 * random.random(), "numpy": lambda: 2 * np.random.rand()}


class Skipping(nn.Module):
    """A layer that a part of all steps leaves out."""

    def __init__(self, draw: Callable[[], float], part: float) -> None:
        super().__init__()
        self.layer, self.draw, self.part = nn.Linear(8, 8), draw, part

    def forward(self, x: Tensor) -> Tensor:
        return x if self.draw() < self.part else self.layer(x)


@pytest.mark.parametrize("draw", DRAW)
def test_a_draw_without_effect_is_said(draw: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    program = load_program(Skipping(DRAW[draw], 0.0), X)
    assert DRAWN in program.notes
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_nothing_is_said_of_what_torch_draws() -> None:
    assert load_program(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), X).notes == ()


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.tensor(np.random.rand(8) < 0.5))


def test_an_effect_is_refused_by_its_cause() -> None:
    with pytest.raises(ModelError, match=r"is not the module.*Draw by torch"):
        pdv.optimize(Masking(), X, cluster=cluster(2))
