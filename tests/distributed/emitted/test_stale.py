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
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
STEPS, LONGEST = 20, 1.0
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
