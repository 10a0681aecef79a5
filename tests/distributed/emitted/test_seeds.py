"""Masks of dropout by torch's seed: that of the first rank, when the model is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pdv
from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.pdv.emit.test_dropout import Dropping
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed


def outputs(folder: Path) -> list[Tensor]:
    """Of a first pass in training, by seeds; the last time the second rank's is another."""
    found, x = [], torch.ones(4, 6, 16)
    for seed, others in ((1, 1), (2, 2), (1, 3)):
        torch.manual_seed(others if dist.is_initialized() and dist.get_rank() else seed)
        package = import_package(folder)
        sys.modules[f"{package.__name__}.operators"]._drawn[0] = 0  # as in a new process
        with torch.no_grad():
            found.append(package.build("cpu")(x))
    return found


def test_masks_are_by_the_seed_of_the_first_rank(tmp_path: Path) -> None:
    pins = {"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}}
    plan = pdv.optimize(Dropping(), torch.randn(4, 6, 16), cluster=cluster(2), pins=pins)
    folder = plan.save(tmp_path / "plan")
    runs = [outputs(folder), *run_ranks(outputs, 2, folder)]
    for first, second, third in runs:
        assert torch.equal(first, third)
        assert not torch.equal(first, second)
    assert torch.equal(torch.stack(runs[1]), torch.stack(runs[2]))
