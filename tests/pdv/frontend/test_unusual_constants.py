"""Constants that are infinite or no numbers, padding wider than a kernel, tensors without dims or elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from tests.pdv.worlds import cluster

D = 8
INF, NAN = float("inf"), float("nan")
FUTURE = torch.ones(4, 4).triu(1).bool()


class After(nn.Module):
    """A function of a linear layer, and of a buffer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], buffer: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.function = function
        self.register_buffer("c", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.c)  # type: ignore[arg-type]


def heads(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), attn_mask=mask)


NONE = torch.zeros(1)
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "a mask of infinities": (heads, torch.zeros(4, 4).masked_fill(FUTURE, -INF)),
    "infinite scores": (lambda x, c: x.masked_fill(x < 0, -INF).softmax(-1), NONE),
    "an infinite bound": (lambda x, c: x.clamp(max=INF) + x.clamp(min=-INF, max=0.5), NONE),
    "bounds that leave nothing": (lambda x, c: x.clamp(min=INF) * 0 + x.clamp(max=-INF), NONE),
    "no numbers": (lambda x, c: x + c, torch.tensor([1.0, NAN] * 4)),
    "a quotient of infinities": (lambda x, c: x / c, torch.tensor([INF, -INF, 1.0, 0.5] * 2)),
    "padded with infinities": (lambda x, c: F.max_pool1d(F.pad(x, (4, 4), value=-INF), 3, 1), NONE),
    "padded with no numbers": (lambda x, c: F.pad(x, (1, 1), value=NAN), NONE),
    "a convolution padded by more than its kernel": (lambda x, c: F.conv1d(x, c, padding=5), torch.randn(3, 4, 3)),
    "in two dims": (lambda x, c: F.conv2d(x.unsqueeze(1), c, padding=(4, 3)), torch.randn(2, 1, 3, 3)),
    "an infinite factor": (lambda x, c: (x * -INF + INF).clamp(-1, 1), NONE),
    "a number": (lambda x, c: x * c + 2.0, torch.tensor(3.0)),
    "a sum of all": (lambda x, c: (x * c).sum(), torch.tensor(3.0)),
    "nothing": (lambda x, c: torch.cat([x, c.expand(4, 4, 0), x[..., :0]], -1), torch.zeros(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_unusual_constants_are_as_in_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = After(*CASES[name]), torch.randn(4, 4, D)
    plan = pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2}, rules="none")
    plan.save(tmp_path / "plan")  # whose numbers are JSON
    program: Any = plan.build("cpu")
    torch.testing.assert_close(program(x), module(x), equal_nan=True)
    module.load_state_dict(program.full_state_dict())
