"""Ids that several operators read are drawn so that all take them, undeclared ones too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from ir.evaluation.id_ranges import narrower, ranges_of
from pdv.frontend import load_program
from tests.pdv.worlds import cluster


class Pooled(nn.Module):
    """Sums by cluster, of which there are ``count``, beside elements of six positions."""

    def __init__(self, count: int, least: int = 0) -> None:
        super().__init__()
        self.linear, self.count, self.least = nn.Linear(16, 12), count, least

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        z = self.linear(x)
        ids = (i + self.least)[..., None].expand(-1, -1, 12)
        pooled = torch.zeros(x.size(0), self.count, 12).scatter_add(1, ids, z)
        return pooled + z.gather(1, i[:, : self.count, None].expand(-1, -1, 12))


INPUTS = (torch.randn(4, 6, 16), torch.randint(3, (4, 6)))


@pytest.mark.filterwarnings("ignore:no declaration of")
def test_ids_are_drawn_that_an_undeclared_function_takes() -> None:
    pdv.optimize(Pooled(3), INPUTS, cluster=cluster(2))


def test_ranges_become_narrower_with_each_size() -> None:
    found = load_program(Pooled(3), INPUTS).graph
    assert ranges_of(found) == {"i": (0, 6)}
    assert [ranges["i"] for ranges in narrower(found, ranges_of(found))] == [(0, 4), (0, 3)]


@pytest.mark.filterwarnings("ignore:no declaration of")
def test_no_ids_are_no_fault_of_a_type() -> None:
    ids = torch.from_numpy(np.zeros((4, 6), np.int64))
    with pytest.raises(ModelError, match=r"no ids were found that .*scatter_add.* takes together"):
        pdv.optimize(Pooled(3, least=-2), (INPUTS[0], ids + 2), cluster=cluster(2))
