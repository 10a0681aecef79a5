"""Plans that pages are drawn of, and what such a page holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pdv
from pdv.plan.package import Plan
from pdv.problem.workload import Order
from tests.pdv import miniatures
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

OPEN, CLOSE = '<script type="application/json" id="data">', "</script>"


def data_of(page: str) -> dict[str, Any]:
    """The facts in a page."""
    start = page.index(OPEN) + len(OPEN)
    return dict(json.loads(page[start : page.index(CLOSE, start)]))


def read(folder: Path) -> str:
    """A package's page."""
    return (folder / "report.html").read_text(encoding="utf-8")


@cache
def sharded() -> Plan:
    """A GPT on two axes."""
    module = miniatures.settled(miniatures.Gpt())
    pins = {"mesh": {"dp": 2, "tp": 2}, "techniques": {"dp": "ddp", "tp": "tensor"}}
    return pdv.optimize(module, (miniatures.ids(8, 8),), cluster=cluster(4), mesh=pins["mesh"], pins=pins)


@cache
def piped() -> Plan:
    """The same on two stages."""
    return _on_stages(miniatures.Gpt(), "1f1b")


@cache
def stale() -> Plan:
    """A Llama, whose stages share no weight, on two stages that no step empties."""
    return _on_stages(miniatures.Llama(), "2bw")


def _on_stages(module: Any, order: Order) -> Plan:
    return plan_pipeline(
        miniatures.settled(module),
        (miniatures.ids(8, 8),),
        cluster(4),
        stages=2,
        micro_batches=4,
        mesh={"dp": 2},
        order=order,
    )


@cache
def plain(mode: str = "train", devices: int = 1) -> Plan:
    """Two layers, on one device or a few."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).train(mode == "train")
    return pdv.optimize(
        module, (torch.zeros(8, 8),), cluster=cluster(devices), mode="train" if mode == "train" else "infer"
    )


def total(nodes: Mapping[str, Any]) -> float:
    """Seconds of a section's nodes."""
    return math.fsum(node["forward_s"] + node["backward_s"] for node in nodes["nodes"])
