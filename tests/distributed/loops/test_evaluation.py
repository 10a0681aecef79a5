"""An evaluation is the same under every plan, however rows lie in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import UsageError
from pdv.loops.evaluate import Mean, evaluate
from tests.distributed.harness import run_ranks
from tests.distributed.loops.plans import LENGTH, build, loss_fn, package
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
ROWS = 13


def told(built: Path, sizes: tuple[int, ...]) -> tuple[float, Tensor]:
    """Of the same rows, in batches of some sizes."""
    model, mean, outputs = build(built).eval(), Mean(), []
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 48, (ROWS, LENGTH), generator=generator)
    y = x.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.4, -100)
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        terms, output = evaluate(model, [part], target, loss_fn)
        assert terms is not None
        mean.add(terms)
        outputs.append(output)
        assert evaluate(model, [part], target, nn_loss, outputs=False)[1] is None
    return mean.value(), torch.cat(outputs)


def nn_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return logits.square().sum(), logits.size(0)


@pytest.mark.parametrize(
    "how", ["pipeline", *(pytest.param(how, marks=pytest.mark.slow) for how in ("ddp", "tensor", "zero-3"))]
)
def test_an_evaluation_is_of_rows_not_of_batches(how: str, tmp_path: Path) -> None:
    built = package(how, tmp_path, devices=4 if how == "pipeline" else 2)
    (loss, whole), *_ = run_ranks(told, 1, built, (ROWS,))
    for sizes in ((8, 5), (1, 2, 3, 7)):
        for found, output in run_ranks(told, 4 if how == "pipeline" else 2, built, sizes):
            assert found == pytest.approx(loss, abs=1e-5)
            torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)


def evaluate_statistics(built: Path) -> Any:
    model = build(built).eval()
    before = [x.clone() for x in model.buffers()]
    with pytest.raises(UsageError, match='mode="infer"'):
        evaluate(model, [torch.randn(8, 3, 4, 4)], None, None)
    return all(torch.equal(x, y) for x, y in zip(model.buffers(), before, strict=True))


@pytest.mark.slow
def test_a_program_that_counts_batches_is_not_evaluated(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)).train()
    plan = pdv.optimize(module, (torch.randn(8, 3, 4, 4),), cluster=cluster(2), pins={"mesh": {"dp": 2}})
    assert run_ranks(evaluate_statistics, 2, plan.save(tmp_path / "norm_pdv")) == [True, True]
