"""What is in the host's memory, copied on streams of their own: steps are those of a device that keeps all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from benchmarks.measured.devices import one_device
from benchmarks.models import build
from pdv.plan.package import Plan

OFFLOADS = ("activations", "optimizer", "all")
STEPS = 6
PARITY = 1e-4  # of losses, relative: a host's optimizer rounds otherwise than a GPU's


@cache
def plan(offload: str, size: Any = "small", device: str = "cpu") -> Plan:
    """GPT-2 on one device."""
    module, (ids,) = build("gpt2", size)
    cluster = one_device(torch.device(device))
    return pdv.optimize(module, (ids,), cluster=cluster, offload=offload, check=size == "small")


def ids_of(size: Any, device: torch.device) -> Tensor:
    """The example's ids [b, s]."""
    (ids,) = build("gpt2", size)[1]
    return ids.to(device)


def trainer(made: Plan, ids: Tensor) -> tuple[Any, Callable[[], float]]:
    """The model, and a clipped step of AdamW."""
    model: Any = made.build(device=str(ids.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model.train_step(ids, ids.roll(-1, 1), loss_of)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return model, step


def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum over tokens, and how many."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


@pytest.mark.parametrize(
    "offload", [pytest.param(one, marks=[] if one == "all" else [pytest.mark.slow]) for one in OFFLOADS]
)
def test_steps_are_those_of_a_device_that_keeps_all(offload: str, device: torch.device) -> None:
    ids = ids_of("small", device)
    losses = {}
    for way in ("none", offload):
        _, step = trainer(plan(way), ids)
        losses[way] = [step() for _ in range(STEPS)]
    assert losses["none"][-1] < losses["none"][0]
    assert losses[offload] == pytest.approx(losses["none"], rel=PARITY)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which counts its memory")
def test_activations_leave_the_device(record_property: Callable[[str, object], None]) -> None:
    """Peak and time of a step with and without, printed beside what was predicted; the peak falls."""
    device = torch.device("cuda", torch.cuda.current_device())
    ids, peaks = ids_of("full", device), {}
    for way in ("none", "activations"):
        made = plan(way, "full", str(device))
        before = torch.cuda.memory_allocated(device)
        model, step = trainer(made, ids)
        step()  # the optimizer makes its state
        torch.cuda.reset_peak_memory_stats(device)
        started = time.monotonic()
        for _ in range(STEPS):
            step()
        took = (time.monotonic() - started) / STEPS
        peaks[way] = torch.cuda.max_memory_allocated(device) - before
        (predicted,) = made.document["predicted"]["memory_bytes"].values()
        seconds = made.document["predicted"]["step_time_s"]["mean"]
        figures = f"peak {peaks[way]}, predicted {predicted:.0f} bytes; step {took:.4f}, predicted {seconds:.4f} s"
        print(f"GPT-2, on the host: {way}: {figures}")
        record_property(way, figures)
        del model, step
    assert peaks["activations"] < peaks["none"]
