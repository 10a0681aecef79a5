"""Constants that are the same in each row say nothing of how many rows there are: masks and biases of no input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.rows import rows_apart
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.planning.sizes import sizes_document
from tests.pdv.worlds import cluster

ROWS, LENGTH, HEADS, WIDTH = 6, 5, 2, 8


class Attending(nn.Module):
    """One layer of attention, whose scores get what ``bias`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).reshape(b, s, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Masked(Attending):
    """T5's: learned scores by distance, hidden by a mask that has as many rows as the batch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        bias = self.table(places[None] - places[:, None] + LENGTH).permute(2, 0, 1)[None]
        shown = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().expand(q.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, torch.where(shown, bias, -1e9))


class Merged(Attending):
    """BLOOM's: slopes of heads by place, of a mask of ones, rows and heads in one dim."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        places = torch.ones(b, s).cumsum(1)
        slopes = torch.tensor([0.5, 0.25])
        bias = (slopes[None, :, None] * places[:, None]).reshape(b * h, 1, s)
        q, k, v = (x.reshape(b * h, s, d) for x in (q, k, v))
        return (torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1) @ v).view(b, h, s, d)


@pytest.mark.parametrize("kind", [Masked, Merged])
def test_constants_of_equal_rows_leave_the_batch_open_and_apart(kind: type[Attending]) -> None:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(ROWS, LENGTH, WIDTH)
    program = load_program(module, x)
    assert check_reading(program.graph, copy_of(module, x, train=True), train=True).endswith("are the same")
    assert sizes_document(program)["b"]["fixed_by"] == ""
    assert rows_apart(program.graph)
    plan = pdv.optimize(module, x, cluster=cluster(2), stages=1, micro_batches=3)
    assert plan.document["proof"]["statement"].startswith("equal to its source")


class Everywhere(nn.Module):
    """A mask as transformers makes it for encoders: of a column that is true throughout, and of what is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        shown = (torch.arange(x.shape[1])[:, None] >= 0) & kept[:, None, None, :]
        y = self.layer(x)[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=shown)


def test_a_length_that_divides_by_the_rows_is_none_of_rows_and_more() -> None:
    inputs = torch.randn(ROWS, 2 * ROWS, WIDTH), torch.rand(ROWS, 2 * ROWS) > 0.2
    assert sizes_document(load_program(Everywhere(), inputs))["b"]["fixed_by"] == ""
