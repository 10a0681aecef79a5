"""Bags of rows of several sizes, which offsets tell apart, are summed as torch sums them, by whichever parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.frontend import load_program
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.frontend.test_masks import said
from tests.pdv.worlds import cluster

ROWS, BAGS = 20, 8
WAYS: Mapping[str, dict[str, Any]] = {
    "sums": {"mode": "sum"},
    "means": {"mode": "mean"},
    "sums without padding": {"mode": "sum", "padding_idx": 3},
    "means without padding": {"mode": "mean", "padding_idx": 3},
    "the last offset as well": {"mode": "sum", "include_last_offset": True},
    "means, the last offset as well": {"mode": "mean", "include_last_offset": True, "padding_idx": 3},
    "weighted": {"mode": "sum", "weighted": True},
    "weighted, without padding": {"mode": "sum", "padding_idx": 3, "weighted": True, "include_last_offset": True},
}

SLOW = {"sums", "means", "sums without padding", "the last offset as well"}  # each is part of another one, too


class Recommender(nn.Module):
    """ids [n], offsets [b], weights [n] -> [b, 4]."""

    def __init__(self, *, weighted: bool = False, **how: Any) -> None:  # Any: as torch takes them
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head, self.weighted = nn.EmbeddingBag(ROWS, 6, **how), nn.Linear(6, 4), weighted
        nn.init.normal_(self.bag.weight)  # torch starts the row of padding at zero

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(ids, offsets, weights if self.weighted else None)))  # type: ignore[no-any-return]


def batch(sizes: list[int], *, last: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of bags of these sizes, of which the second has padding alone if it has any."""
    drawn = torch.Generator().manual_seed(seed)
    ids, ends = torch.randint(0, ROWS, (sum(sizes),), generator=drawn), torch.tensor(sizes).cumsum(0)
    ids[sizes[0] : sizes[0] + sizes[1]] = 3
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends if last else ends[:-1]])
    return ids, offsets, torch.rand(ids.shape, generator=drawn)


RAGGED = [3, 2, 0, 7, 1, 0, 6, 0]


@pytest.mark.parametrize("way", WAYS)
def test_bags_are_read_as_torch_trains_them(way: str) -> None:
    module = Recommender(**WAYS[way])
    inputs = batch(RAGGED, last=module.bag.include_last_offset)
    assert load_program(module, inputs).opaque == ()
    assert "are the same" in said(module, *inputs)


def steps_on_rank(folder: Path, batches: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and what was learned."""
    model = import_package(folder).build(device="cpu")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for given in batches:
        optimizer.zero_grad()
        losses.append(model.train_step(list(given), [], lambda y, _: (y.square().sum(), float(len(y)))).item())
        optimizer.step()
    return losses, model.full_state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
@pytest.mark.parametrize(
    ("mesh", "techniques"),
    [({"a": 2}, {"a": "ddp"}), ({"a": 2, "b": 2}, {"a": "ddp", "b": "megatron"})],
    ids=["data", "data and tables"],
)
def test_bags_are_trained_on_ranks(way: str, mesh: dict[str, int], techniques: dict[str, str], tmp_path: Path) -> None:
    """Twenty steps, of other numbers of ids than were planned."""
    module, ranks = Recommender(**WAYS[way]), math.prod(mesh.values())
    last = module.bag.include_last_offset
    planned = batch(RAGGED, last=last)
    if last:  # one more offset than bags: data is not cut
        techniques = dict.fromkeys(mesh, "megatron")
    plan = pdv.optimize(module, planned, cluster=cluster(ranks), mesh=mesh, pins={"techniques": techniques})
    folder = plan.save(tmp_path / "bags")
    sizes = [RAGGED, [0, 0, 9, 1, 1, 1, 0, 4], [5, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 2]] * 5
    batches = [batch(each, last=last, seed=seed) for seed, each in enumerate(sizes)]
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for given in batches:
        optimizer.zero_grad()
        loss = module(*given).square().sum() / (len(given[1]) - last)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, state in run_ranks(steps_on_rank, ranks, folder, batches):
        assert found == pytest.approx(losses, rel=1e-4)
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)
