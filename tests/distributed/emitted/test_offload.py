"""The optimizer in the host's memory: steps are those of devices that have it, and a device keeps copies alone.

A CPU is its own host, so copies are copies of the same memory here; that forward reads them, and reads them anew behind
each change, is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

import pdv
from benchmarks.models.techniques import Technique
from pdv.frontend import load_program
from pdv.frontend.program import Program
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.plan.package import Plan, import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
STEPS, LEARNING_RATE, LONGEST = 8, 1e-3, 1.0
PARITY = 1e-4  # relative, float32
ROUNDED, UNIT = 1.5, 2.0**-9  # of bfloat16, as test_precision.py says

ALONE = Technique("alone", (("wire", 1),))
DP = Technique("dp", (("dp", 2),))
TP = Technique("tp", (("tp", 2),))
ZERO = Technique("zero", (("dp", 2),), zero=True)
ZERO_1 = Technique("zero-1", (("dp", 2),), zero=True, once=True)
ZERO_TP = Technique("zero+tp", (("dp", 2), ("tp", 2)), zero=True)
WAYS: dict[str, tuple[Technique, dict[str, Any]]] = {
    "zero-3 x tp": (ZERO_TP, {"stages": 1, "micro_batches": 2}),
    "tp": (TP, {"stages": 1, "micro_batches": 1}),
    "dp, recomputed": (DP, {"stages": 1, "micro_batches": 2, "recompute": "full"}),
    "pp2 x tp2": (TP, {"stages": 2, "micro_batches": 4}),
    "pp2 x zero-1": (ZERO_1, {"stages": 2, "micro_batches": 4}),
    "pp2, zero-bubble": (ALONE, {"stages": 2, "micro_batches": 4, "order": "zero-bubble"}),
}
SLOW = set(WAYS) - {"zero-3 x tp"}
MIXED_SLOW = set(WAYS) - {"pp2 x zero-1"}


SEARCHED: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2, the rest searched": (4, {"stages": 2, "pipelines": "always"}),
    "interleaved, recomputed": (2, {"schedule": "interleaved", "stages": 2, "micro_batches": 4, "recompute": "full"}),
    "zbv": (2, {"schedule": "zbv", "stages": 2, "micro_batches": 4}),
}
"""Processes, and what is fixed of a search."""


@dataclass(frozen=True)
class Seen:
    """Of the first step its gradients; of each step the loss and the norm."""

    gradients: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


def plan(technique: Technique, how: dict[str, Any], **options: Any) -> Plan:
    """Gpt, its embedding tied."""
    given = {"mesh": dict(technique.sizes), "pins": technique.pins, **how, **options}
    layers = given.pop("layers", 2)
    return plan_pipeline(gpt(layers), None, cluster(technique.mesh.num_devices * how["stages"]), **given)


@lru_cache
def gpt(layers: int) -> Program:
    """Of so many layers, read once, and taken to be the same program of other numbers of rows."""
    return replace(load_program(settled(Gpt(layers)), (ids(8, 8),)), again=None)


def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over tokens, and how many."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def train(folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> Seen:
    """Steps of torch's fused AdamW, clipped and scheduled; half-way a checkpoint is written, all spoilt, and read."""
    model = import_package(folder).build(device="cpu", dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    gradients: dict[str, Tensor] = {}
    losses, norms = [], []
    for step in range(STEPS):
        if checkpoint is not None and step == STEPS // 2:
            save_checkpoint(checkpoint, model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load_checkpoint(checkpoint, model, optimizer)
        x = ids(8, 8).roll((step % 3, step), (0, 1))
        losses.append(model.train_step(x, x.roll(-1, 1), loss_of).item())
        gradients = gradients or {name: x.clone() for name, x in model.full_gradients().items()}
        norms.append(model.clip_grad_norm_(LONGEST).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.check_in_sync()
    for parameter in model.parameters():
        assert {x.dtype for x in optimizer.state[parameter].values()} <= {parameter.dtype, torch.float32}
    return Seen(gradients, losses, norms)


def apart(found: Seen, exact: Seen) -> tuple[float, float, float]:
    """Relative: of all gradients of the first step, the worst of all losses, and of all norms."""
    flat = [torch.cat([seen.gradients[name].flatten() for name in sorted(exact.gradients)]) for seen in (found, exact)]
    pairs = [(found.losses, exact.losses), (found.norms, exact.norms)]
    loss, norm = (max(abs(a - b) / b for a, b in zip(*lists, strict=True)) for lists in pairs)
    return float((flat[0] - flat[1]).norm() / flat[1].norm()), loss, norm


@pytest.mark.parametrize("way", mark_slow(WAYS, SLOW))
def test_steps_on_the_host_are_those_of_devices(way: str, tmp_path: Path) -> None:
    technique, how = WAYS[way]
    exact = train(plan(technique, how).save(tmp_path / "plain" / "gpt_pdv"))
    folder = plan(technique, how, offload="optimizer").save(tmp_path / "gpt_pdv")
    assert exact.losses[-1] < exact.losses[0]
    for seen in run_ranks(train, technique.mesh.num_devices * how["stages"], folder, tmp_path / "checkpoint"):
        assert max(apart(seen, exact)) <= PARITY, apart(seen, exact)


@pytest.mark.parametrize("way", mark_slow(SEARCHED, set(SEARCHED) - {"interleaved, recomputed"}))
def test_what_a_search_finds_for_hosts_trains_as_one_device(way: str, tmp_path: Path) -> None:
    ranks, fixed = SEARCHED[way]
    found = pdv.optimize(settled(Gpt(4)), (ids(8, 8),), cluster=cluster(ranks), offload="optimizer", **fixed)
    assert {"stage", "offload"} <= {step["rule"] for step in found.document["derivation"]}
    folder = found.save(tmp_path / "gpt_pdv")
    exact = train(folder)
    assert exact.losses[-1] < exact.losses[0]
    for seen in run_ranks(train, ranks, folder, tmp_path / "checkpoint"):
        assert max(apart(seen, exact)) <= PARITY, apart(seen, exact)


NARROW = {"zero-3 x tp, by rows": ("zero-3 x tp", "fp8-rowwise"), "pp2 x tp2, fp8": ("pp2 x tp2", "fp8")}
ROUNDING = {**{way: (way, "own") for way in WAYS}, **NARROW}


@pytest.mark.parametrize("way", mark_slow(ROUNDING, {*MIXED_SLOW, "pp2 x tp2, fp8"}))
def test_master_weights_on_the_host_are_as_near_to_float32(way: str, tmp_path: Path) -> None:
    (technique, how), products = WAYS[ROUNDING[way][0]], ROUNDING[way][1]
    folder = plan(technique, how, precision="mixed", offload="optimizer", products=products).save(tmp_path / "gpt_pdv")
    exact, alone = train(folder, dtype=torch.float32), train(folder)
    bounds = [max(ROUNDED * one, UNIT) for one in apart(alone, exact)]
    ranks = technique.mesh.num_devices * how["stages"]
    for seen in run_ranks(train, ranks, folder, tmp_path / "checkpoint"):
        several = apart(seen, exact)
        assert several[0] > 0, "nothing was rounded"
        assert all(one <= most for one, most in zip(several, bounds, strict=True)), (several, bounds)


def look(folder: Path) -> list[tuple[int, set[torch.dtype]]]:
    """Of a step: bytes of copies that share memory with a parameter, and types of copies."""
    model = import_package(folder).build(device="cpu")
    x = ids(8, 8)
    model.train_step(x, x.roll(-1, 1), loss_of)
    shared, types = 0, set()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        for leaf in parameter.leaves.by_axes.values():
            shared += leaf.tensor.nbytes * (leaf.tensor.data_ptr() == parameter.to_local().data_ptr())
            types.add(leaf.tensor.dtype)
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
    return [(shared, types)]


@pytest.mark.slow
def test_a_device_has_copies_in_the_type_of_compute(tmp_path: Path) -> None:
    folder = plan(*WAYS["tp"], precision="mixed", offload="optimizer").save(tmp_path / "gpt_pdv")
    for ((shared, types),) in run_ranks(look, 2, folder):
        assert shared == 0
        assert types == {torch.bfloat16}


@torch.no_grad()
def outputs_between_changes(folder: Path) -> list[Tensor]:
    """Of a model that is read, changed by hand, and read, in each way that a loop has."""
    model = import_package(folder).build(device="cpu")
    held, before = list(model.parameters()), deepcopy(model.state_dict())
    changes: list[Callable[[], object]] = [
        lambda: [p.mul_(0.9) for p in held],
        lambda: [p.detach().mul_(0.9) for p in held],
        lambda: [p.data.mul_(0.9) for p in held],
        lambda: [setattr(p, "data", p * 0.9) for p in held],
        lambda: torch._foreach_mul_(held, 0.9),
        lambda: torch._foreach_lerp_(held, [p * 0.5 for p in held], 0.1),
        lambda: torch._foreach_copy_(held, [p * 1.1 for p in held]),
        lambda: model.load_state_dict(before),
    ]
    found = [model(ids(8, 8)).clone()]
    for change in changes:
        change()
        found.append(model(ids(8, 8)).clone())
    return found


@pytest.mark.parametrize("technique", [TP, pytest.param(ZERO, marks=pytest.mark.slow)])
def test_what_is_changed_without_a_step_is_read_anew(technique: Technique, tmp_path: Path) -> None:
    folder = plan(technique, {"stages": 1, "micro_batches": 1}, offload="optimizer").save(tmp_path / "gpt_pdv")
    exact = outputs_between_changes(folder)
    assert all((one - other).abs().max() > 1e-3 for one, other in pairwise(exact))
    for rank, seen in enumerate(run_ranks(outputs_between_changes, 2, folder)):
        for one, other in zip(seen, exact, strict=True):
            rows = other if one.size(0) == 8 else other.chunk(2)[rank]
            torch.testing.assert_close(one, rows, rtol=1e-4, atol=1e-5)
