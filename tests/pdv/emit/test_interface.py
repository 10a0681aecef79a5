"""The program takes what the module takes, by the module's names, whatever its lines need for themselves."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.plan.package import import_package
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster


class Named(nn.Module):
    """Its arguments are called as loops, axes and modules of the program are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, i: Tensor, F: Tensor, mesh: Tensor, local: Tensor, type: Tensor) -> Tensor:  # noqa: A002
        """All: [b, 8]"""
        return self.second(self.first(x + i).relu()) * F + mesh * local - type  # type: ignore[no-any-return]


NAMES = ["x", "i", "F", "mesh", "local", "type"]


def _inputs() -> list[Tensor]:
    return [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(len(NAMES))]


OPTIONS: list[dict[str, Any]] = [
    {"mesh": {"x": 2}}, {"mesh": {"i": 2}}, {}, {"mesh": {"local": 2}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_arguments_are_the_modules(options: dict[str, Any], tmp_path: Path) -> None:
    module, given = Named(), _inputs()
    pdv.optimize(module, tuple(given), cluster=cluster(2), **options).save(str(tmp_path / "package"))
    model = import_package(tmp_path / "package").build(device="cpu")
    assert list(signature(model.forward).parameters) == NAMES
    named = dict(zip(NAMES, given, strict=True))
    torch.testing.assert_close(model(**named), module(*given))

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.numel()

    loss = model.train_step(dict(reversed(named.items())), torch.zeros(8, 8), loss_fn)
    torch.testing.assert_close(loss, module(*given).square().mean())


def test_a_pipelines_arguments_are_the_modules(tmp_path: Path) -> None:
    plan = plan_pipeline(Named(), tuple(_inputs()), cluster(2), stages=2, micro_batches=2, mesh={})
    plan.save(str(tmp_path / "package"))
    model = import_package(tmp_path / "package").build(device="cpu")
    assert list(model.takes) == NAMES
