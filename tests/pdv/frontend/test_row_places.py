"""One place of each row, whose number depends on values: where its tokens end. It leaves the batch open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.planning.sizes import sizes_document

ROWS, LENGTH, WIDTH = 6, 7, 4


def last_token(x: Tensor, ends: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]), ends - 1]


def up_to_its_end(x: Tensor, ends: Tensor) -> Tensor:
    """As Wav2Vec2 and its kind hide padding."""
    mask = torch.zeros(x.shape[:2], dtype=torch.long)
    mask[torch.arange(x.shape[0]), ends - 1] = 1
    hidden = ~mask.flip([-1]).cumsum(-1).flip([-1]).bool()
    x = x.clone()
    x[hidden.unsqueeze(-1).repeat(1, 1, WIDTH)] = 0.5
    x[:, :, 0][hidden] = 2.0
    return x


def overwritten(x: Tensor, ends: Tensor) -> Tensor:
    x = x.clone()
    x[torch.arange(x.shape[0]), ends - 1] = x.mean(1)
    return x


def time_first(x: Tensor, ends: Tensor) -> Tensor:
    """As pytorch-crf reads tags and emissions, whose rows are their second dim."""
    turned, rows = x.transpose(0, 1), torch.arange(x.shape[0])
    return x * turned[ends - 1, rows].unsqueeze(1) + turned[0, rows, ends.clamp(0, 3)].reshape(-1, 1, 1)


def several_in_each(x: Tensor, ends: Tensor) -> Tensor:
    """As models of points take neighbours (``index_points``), and others their best tokens."""
    places = torch.stack([ends - 1, ends - 2, (ends * 2).clamp(0, LENGTH - 1), -ends], 1).reshape(-1, 2, 2)
    rows = torch.arange(x.shape[0])
    one = x[rows[:, None], places[:, 0]]
    every = x[rows.view(-1, 1, 1).repeat(1, 2, 2), places.clamp(min=0)]
    return torch.cat([one, every.flatten(1, 2), (x > 0)[rows[:, None], places[:, 1]].to(x.dtype)], 1)


class Ending(nn.Module):
    """A layer around what looks at the rows' ends."""

    def __init__(self, inside: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inside, self.first, self.last = inside, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.last(self.inside(self.first(x), ends))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inside", [last_token, up_to_its_end, overwritten, time_first, several_in_each])
def test_a_place_of_each_row_is_of_its_row(inside: Callable[[Tensor, Tensor], Tensor]) -> None:
    inputs = torch.randn(ROWS, LENGTH, WIDTH), torch.tensor([3, 1, LENGTH, 0, 2, 5])  # 0: the last one, from the end
    module = Ending(inside)
    program = load_program(module, inputs)
    assert check_reading(program.graph, copy_of(module, inputs, train=True), train=True).endswith("are the same")
    assert sizes_document(program)["b"]["fixed_by"] == ""
    assert not [node for node in program.graph.nodes if node.op.is_foreign]
