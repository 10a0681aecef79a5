"""Steps of pipelines on real processes that an error or an interrupt ends: what ranks are told, and what may follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def fail(folder: Path) -> list[str]:
    """What a rank is told where an interrupt ends a step half-way, and of the step behind that."""
    model = import_package(folder).build(device="cpu")
    x, told = torch.ones(4, 16), list[str]()

    def loss_fn(_: Tensor, target: Tensor) -> tuple[Tensor, int]:
        raise Interrupted(f"{len(target)} rows")

    for _ in range(4):  # 2bw's first step has nothing to go back with
        try:
            model.train_step(x, x, loss_fn)
        except (Interrupted, RuntimeError) as error:
            told.append(str(error))
    return told


def leave_out(folder: Path, order: str) -> tuple[list[str], list[dict[str, Tensor]]]:
    """What a rank is told of a batch whose loss fails on some ranks; weights with it left out so, and beforehand."""
    told, weights = list[str](), list[dict[str, Tensor]]()
    for fails in (True, False):
        model = import_package(folder).build(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

        def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
            if target[0, 0] == 1:
                raise ArithmeticError(f"{len(target)} rows")
            return (output - target).square().sum(), output.numel()

        for number in (0, 1, 2, 3) if fails else (0, 2, 3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            x[:, 0] = number  # a mark
            try:
                model.train_step(x, x, loss_fn)
                optimizer.step()
            except (ArithmeticError, RuntimeError) as error:
                told.append(str(error))
            optimizer.zero_grad()
        if order == "2bw":
            model.drain()
        weights.append(model.full_state_dict())
    return told, weights


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "interleaved", "2bw"])
def test_a_batch_whose_loss_fails_is_left_out_on_all_ranks(order: Any, tmp_path: Path) -> None:
    plan = plan_pipeline(
        Blocks(), (torch.ones(8, 16),), cluster(2 if order == "interleaved" else 4),
        stages=2, micro_batches=2, mesh={} if order == "interleaved" else {"dp": 2}, order=order,
        virtual=2 if order == "interleaved" else 1,
    )  # fmt: skip
    folder = plan.save(tmp_path / "plan")
    found = run_ranks(leave_out, 2 if order == "interleaved" else 4, folder, order)
    own = [told == ["4 rows"] for told, _ in found]
    assert sum(own) == len(found) // 2, [told for told, _ in found]
    assert all(is_own or told[0].startswith("loss-failed") for is_own, (told, _) in zip(own, found, strict=True))
    assert all(len(told) == 1 for told, _ in found)
    for _, (left_out, without) in found if order != "2bw" else []:  # whose weights are of one batch more ago
        for name, weight in without.items():
            torch.testing.assert_close(left_out[name], weight, msg=name)


@pytest.mark.parametrize("order", ["1f1b", "eager-1f1b", "gpipe", "interleaved", "2bw"])
def test_no_step_follows_one_that_did_not_end(order: Any, tmp_path: Path) -> None:
    plan = plan_pipeline(
        Blocks(), (torch.ones(4, 16),), cluster(2),
        stages=2, micro_batches=2, mesh={}, order=order, virtual=2 if order == "interleaved" else 1,
    )  # fmt: skip
    first, last = run_ranks(fail, 2, plan.save(tmp_path / "plan"))
    assert last[0] == "2 rows"
    assert len(first) > 1
    assert len(last) > 1
    assert all(text.startswith("step-not-ended") for told in (first, last) for text in told[1:])
