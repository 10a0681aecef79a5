"""Numbers that a model of float64 makes by itself are of float64, not rounded to float32 on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from tests.pdv.worlds import cluster

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "lerp": lambda x: torch.lerp(x, x * x, 0.1),
    "full": lambda x: x * torch.full((8,), 0.1, dtype=x.dtype),
    "full_like": lambda x: x * torch.full_like(x, 0.3),
    "new_full": lambda x: (x.new_full((), 0.3) - 1).exp() * x,
    "fill_": lambda x: x + torch.empty_like(x).fill_(1 / 3),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "where": lambda x: torch.where(x > 0, 0.1, x),
    "pad": lambda x: F.pad(x, (1, 1), value=0.7),
    "a spectrum": lambda x: torch.view_as_real(torch.fft.rfft(x)).flatten(1),
    "a complex factor": lambda x: torch.view_as_real(torch.fft.rfft(x) * (0.1 + 0.3j)).flatten(1),
    "stretched": lambda x: F.interpolate(x[:, None], size=11, mode="linear")[:, 0],
}


class After(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("name", CASES)
def test_doubles_stay_doubles(name: str) -> None:
    torch.manual_seed(0)
    module, x = After(CASES[name]).double(), torch.randn(4, 8, dtype=torch.float64)
    program: Any = pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2}, rules="none").build("cpu")
    torch.testing.assert_close(program(x), module(x), rtol=1e-13, atol=1e-13)
