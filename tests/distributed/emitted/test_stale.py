"""A pipeline that no step empties trains as one process whose gradients are of weights one step old (PipeDream-2BW)."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.models.techniques import Technique
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
STEPS, LONGEST = 8, 1.0
PARITY = 1e-4  # relative, float32
NONE: tuple[tuple[str, int], ...] = ()

WAYS: dict[str, tuple[tuple[tuple[str, int], ...], dict[str, Any]]] = {
    "pp2 x dp2, recomputed": ((("dp", 2),), {"stages": 2, "micro_batches": 4, "recompute": "full"}),
    "pp4": (NONE, {"stages": 4, "micro_batches": 4}),
    "pp2 x tp2": ((("tp", 2),), {"stages": 2, "micro_batches": 2}),
}


def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over tokens, and how many."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = ids(8, 8).roll((step % 3, step), (0, 1))
    return x, x.roll(-1, 1)


def optimizer_of(model: Any) -> tuple[Any, Any]:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)


def update(model: Any, optimizer: Any, rates: Any) -> float:
    norm = model.clip_grad_norm_(LONGEST).item()
    optimizer.step()
    rates.step()
    optimizer.zero_grad()
    return float(norm)


def train(folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of the batches, and weights; half-way the pipeline runs empty, and the model is called."""
    model = import_package(folder).build(device="cpu")
    optimizer, rates = optimizer_of(model)
    losses, norms = [], []
    for start in (0, STEPS // 2):
        for step in range(start, start + STEPS // 2):
            losses.append(model.train_step(*batch(step), loss_of).item())
            if step > start:
                norms.append(update(model, optimizer, rates))
            else:
                assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            model(batch(0)[0])
        losses.append(model.drain().item())
        norms.append(update(model, optimizer, rates))
    assert torch.isnan(model.drain())
    model.check_in_sync()
    return losses, norms, model.full_state_dict()


def reference(folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """w(t + 1) = w(t) - step(gradient of batch t at w(t - 1)); behind an empty pipeline, of the newest weights."""
    model = import_package(folder).build(device="cpu")
    optimizer, rates = optimizer_of(model)
    losses, norms = [], []
    for start in (0, STEPS // 2):
        old = deepcopy(model)
        losses.append(float("nan"))
        for step in range(start, start + STEPS // 2):
            then, old = old, deepcopy(model)
            losses.append(then.train_step(*batch(step), loss_of).item())
            for parameter, of_old in zip(model.parameters(), then.parameters(), strict=True):
                parameter.grad = of_old.grad
            norms.append(update(model, optimizer, rates))
    return losses, norms, model.full_state_dict()


@pytest.mark.parametrize("way", mark_slow(WAYS, set(WAYS) - {"pp2 x dp2, recomputed"}))
def test_gradients_are_of_weights_one_step_old(way: str, tmp_path: Path) -> None:
    mesh, how = WAYS[way]
    technique = Technique(way, mesh)
    processes = how["stages"] * technique.mesh.num_devices
    pins = technique.pins if mesh else None
    plan = plan_pipeline(
        settled(Gpt(4)), (ids(8, 8),), cluster(processes), mesh=dict(mesh), order="2bw", pins=pins, **how
    )
    folder = plan.save(tmp_path / "gpt_pdv")
    exact = reference(folder)
    assert exact[0][-1] < exact[0][1]
    for found in run_ranks(train, processes, folder):
        for ours, theirs in zip(found[:2], exact[:2], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=PARITY, atol=0, equal_nan=True)
        distance = sum(float((found[2][name] - x).square().sum()) for name, x in exact[2].items()) ** 0.5
        assert distance <= PARITY * sum(float(x.square().sum()) for x in exact[2].values()) ** 0.5


def attend(folder: Path, checkpoint: Path) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of a run that is copied, checked and resumed, its weights, and those of the copy, trained by itself.

    Both have seen batches 0 and 1, with gradients of batch 0 alone; then the copy fills anew and the model goes on.
    """
    model = import_package(folder).build(device="cpu")
    optimizer, rates = optimizer_of(model)
    model.self_check(*batch(0), loss_of)
    model.train_step(*batch(0), loss_of)
    losses = [model.train_step(*batch(1), loss_of).item()]
    update(model, optimizer, rates)
    with pytest.raises(RuntimeError, match="batch-under-way"):
        model.self_check(*batch(2), loss_of)
    copied = deepcopy(model)
    for name, x in model.full_state_dict().items():
        assert copied.full_state_dict()[name].equal(x), name
    own, its_rates = optimizer_of(copied)
    assert torch.isnan(copied.train_step(*batch(2), loss_of))
    copied.train_step(*batch(3), loss_of)
    update(copied, own, its_rates)
    copied.drain()
    update(copied, own, its_rates)
    copied.self_check(*batch(4), loss_of)
    losses.append(model.drain().item())
    update(model, optimizer, rates)
    save_checkpoint(checkpoint, model, optimizer)
    model, trained = import_package(folder).build(device="cpu"), model
    optimizer, its_rates = optimizer_of(model)
    load_checkpoint(checkpoint, model, optimizer)
    rates.optimizer = optimizer
    for step in (2, 3):
        model.train_step(*batch(step), loss_of)
        if step > 2:
            update(model, optimizer, rates)
    losses.append(model.drain().item())
    update(model, optimizer, rates)
    assert not any(a.equal(b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    return losses, model.full_state_dict(), copied.full_state_dict()


def attended(folder: Path) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same on one process, by the equation."""
    model = import_package(folder).build(device="cpu")
    optimizer, rates = optimizer_of(model)
    losses: list[float] = []

    def pair(model: Any, optimizer: Any, rates: Any, numbers: tuple[int, int], middle: Any = None) -> Any:
        """Two batches from an empty pipeline, at the same weights; ``middle`` is called between the updates."""
        old, found = deepcopy(model), None
        for number in numbers:
            then = deepcopy(old)
            losses.append(then.train_step(*batch(number), loss_of).item())
            for parameter, of_old in zip(model.parameters(), then.parameters(), strict=True):
                parameter.grad = of_old.grad
            update(model, optimizer, rates)
            found = middle() if middle is not None and number == numbers[0] else found
        return found

    copied = pair(model, optimizer, rates, (0, 1), lambda: deepcopy(model))
    seen = losses[:2]
    pair(copied, *optimizer_of(copied), (2, 3))
    losses.clear()
    pair(model, optimizer, rates, (2, 3))
    return [*seen, losses[-1]], model.full_state_dict(), copied.full_state_dict()


def test_copies_checks_and_checkpoints_of_a_pipeline_under_way(tmp_path: Path) -> None:
    plan = plan_pipeline(settled(Gpt(2)), (ids(8, 8),), cluster(2), mesh={}, order="2bw", stages=2, micro_batches=2)
    folder = plan.save(tmp_path / "gpt_pdv")
    exact = attended(folder)
    for found in run_ranks(attend, 2, folder, tmp_path / "checkpoint"):
        torch.testing.assert_close(found[0], exact[0], rtol=PARITY, atol=0)
        for ours, theirs in zip(found[1:], exact[1:], strict=True):
            distance = sum(float((ours[name] - x).square().sum()) for name, x in theirs.items()) ** 0.5
            assert distance <= PARITY * sum(float(x.square().sum()) for x in theirs.values()) ** 0.5
