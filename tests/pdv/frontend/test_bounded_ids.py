"""Rows that are chosen by numbers computed of floats, where the model bounds them, and of ids in floats between."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.frontend import load_program
from tests.pdv.as_modules import TOLERANCE, gap_of, plan_for_two


class Rows(nn.Module):
    """Of a table of ``count`` rows those that ``of`` says."""

    def __init__(self, of: Callable[[Tensor], Tensor], count: int) -> None:
        super().__init__()
        self.table, self.out, self._of = nn.Embedding(count, 8), nn.Linear(8, 4), of

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.table(self._of(x)))
        return y


def binned(x: Tensor) -> Tensor:
    """Numbers in sixteen bins."""
    return ((x + 3) / 6 * 16).long().clamp(0, 15)


def hashed(x: Tensor) -> Tensor:
    """Places of a grid, as Instant-NGP has them."""
    cell = torch.floor(x * 8).long()
    return (cell * 73856093 + 5) % 64


def t5_buckets(positions: Tensor) -> Tensor:
    """Distances of positions that are passed in, as LayoutLMv3 and T5 have them: the further the coarser."""
    far = (positions[:, None] - positions[:, :, None]).abs()
    steps = 4 + (torch.log(far.float() / 4) / math.log(8) * 4).long()
    return torch.where(far < 4, far, torch.min(steps, torch.full_like(steps, 7)))


def levels(counts: Tensor) -> Tensor:
    """Counts by their logarithm."""
    return torch.log2(counts.float() + 1).floor().long()


FLOATS, IDS = torch.randn(4, 6), torch.randint(0, 40, (4, 6))


@pytest.mark.parametrize(
    ("of", "count", "given"), [(binned, 16, FLOATS), (hashed, 64, FLOATS), (t5_buckets, 8, IDS), (levels, 8, IDS)]
)
def test_they_are_planned_and_cut(of: Callable[[Tensor], Tensor], count: int, given: Tensor) -> None:
    torch.manual_seed(0)
    module = Rows(of, count)
    plan = plan_for_two(module, [given])
    assert plan.document["run"]["ranks"] == 2
    assert gap_of(plan, module, [given]) < TOLERANCE


@pytest.mark.parametrize("of", [torch.abs, torch.relu, lambda x: nn.functional.pad(x.abs(), (0, 2))])
def test_functions_of_ids_give_ids(of: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, given = Rows(lambda x: of(x - 2), 8), torch.randint(0, 5, (4, 6))
    assert gap_of(plan_for_two(module, [given]), module, [given]) < TOLERANCE


def test_those_that_may_lie_beyond_the_table_are_refused_with_what_bounds_them() -> None:
    with pytest.raises(ModelError, match=r"may lie beyond the 15 rows .*\.clamp\(0, 14\)"):
        load_program(Rows(binned, 15), (FLOATS,))
