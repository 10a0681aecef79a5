"""Sums over links of different speeds: what the text says of them, and that a saved plan says it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdv
from pdv.verification import verify

MADE = 'mesh = make_mesh({"dp": 4}, device'


def plan_on(network: str) -> pdv.Plan:
    node: dict[str, Any] = {"count": 2, "devices": 2, "device": "cpu-core", "link": "loopback-gloo"}
    cluster = {"nodes": [node], "network": {"name": "net", "bandwidth": network, "latency": "750 us"}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    pins = {"mesh": {"dp": 4}, "techniques": {"dp": "ddp"}}
    return pdv.optimize(model, (torch.randn(8, 16),), cluster=cluster, pins=pins, pipelines="never")


@pytest.mark.parametrize(("network", "text"), [("100 Mb/s", ', levels={"dp": (2, 2)})'), ("100 Gb/s", ")")])
def test_the_text_says_the_levels_that_sums_take(network: str, text: str, tmp_path: Path) -> None:
    plan_on(network).save(tmp_path / "mlp")
    assert f"{MADE}{text}\n" in (tmp_path / "mlp" / "model.py").read_text()
    verify(tmp_path / "mlp")
