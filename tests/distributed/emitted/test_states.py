"""States of one rank: each loads what it saved itself, and refuses what another did, of parameters and moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import optim

from tests.distributed.emitted.test_loop import CLASSES, WIDTH, batch, classifier, pair
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


def saved_and_loaded(path: Path, kind: type[optim.Optimizer]) -> tuple[float, float]:
    """The loss before and after each rank's own file is loaded; the other rank's is refused."""
    sizes = {"dp": 1, "tp": 2}
    model = classifier(path, sizes)
    optimizer = kind(model.parameters(), lr=0.1)
    model.train_step(*batch(), pair)
    optimizer.step()
    optimizer.zero_grad()
    rank = dist.get_rank()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_name(f"{rank}.pt"))
    dist.barrier()
    for other in range(dist.get_world_size()):
        state = torch.load(path.with_name(f"{other}.pt"), weights_only=other % 2 == 0)
        fresh = classifier(path, sizes)
        of_fresh = kind(fresh.parameters(), lr=0.1)
        if other != rank:
            with pytest.raises(ValueError, match=r"other-pieces: \w+ \[.*model.full_state_dict\(\)"):
                fresh.load_state_dict(state["model"])
            with pytest.raises(ValueError, match=r"other-pieces: .* of the optimizer's parameter 0"):
                of_fresh.load_state_dict(state["optimizer"])
            continue
        fresh.load_state_dict(state["model"])
        of_fresh.load_state_dict(state["optimizer"])
        of_fresh.load_state_dict(optimizer.state_dict())
        loaded = fresh
    return float(model.train_step(*batch(1), pair)), float(loaded.train_step(*batch(1), pair))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (8, WIDTH), "down": (CLASSES, 8), "cut": (WIDTH, WIDTH), "bias": (CLASSES,)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    save_file({**weights, "rows": torch.zeros((), dtype=torch.float64)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adamax])
def test_a_rank_loads_its_own_state_and_no_other(path: Path, kind: type[optim.Optimizer]) -> None:
    for before, after in run_ranks(saved_and_loaded, 2, path, kind):
        assert before == after
