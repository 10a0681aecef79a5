"""Sums of gradients beside other collectives along their axis: a group of their own in the text, a stream in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdv
from pdv.report.saved import saved_workload
from pdv.simulate.step import simulate
from pdv.verification import verify


class Twins(nn.Module):
    """Wide layers, and narrow ones of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def plan_of(technique: str) -> pdv.Plan:
    torch.manual_seed(0)
    pins = {"mesh": {"dp": 4}, "techniques": {"dp": technique}}
    node: dict[str, Any] = {"count": 4, "devices": 1, "device": "cpu-core", "link": "loopback-gloo"}
    slow = {"nodes": [node], "network": {"name": "net", "bandwidth": "1 Gb/s", "latency": "50 us"}}
    return pdv.optimize(Twins(), (torch.randn(8, 64),), cluster=slow, pins=pins, pipelines="never")


@pytest.mark.parametrize(("technique", "text"), [("fsdp", ', own_sums=("dp",))'), ("ddp", ")")])
def test_a_group_is_made_where_something_else_runs_along_the_axis(technique: str, text: str, tmp_path: Path) -> None:
    plan_of(technique).save(tmp_path / "mlp")
    assert f'mesh = make_mesh({{"dp": 4}}, device{text}\n' in (tmp_path / "mlp" / "model.py").read_text()
    verify(tmp_path / "mlp")


@pytest.mark.parametrize("technique", ["fsdp", "ddp"])
def test_what_is_waited_for_does_not_wait_for_sums(technique: str, tmp_path: Path) -> None:
    """One step on two streams, and with sums and all else on one; where nothing else runs it is the same."""
    plan_of(technique).save(tmp_path / "mlp")
    workload = saved_workload(tmp_path / "mlp")
    overlap = workload.execution.overlap
    assert overlap.apart
    one = replace(workload, execution=replace(workload.execution, overlap=replace(overlap, apart=False)))
    apart, together = (simulate(found, draws=0) for found in (workload, one))
    assert apart.step_ps < together.step_ps if technique == "fsdp" else apart.step_ps == together.step_ps
