"""The text of a simulated step and of a difference, from fixed documents; and the figures that are worked out."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ir.cost_model import model_flops
from ir.types import DType
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.report.diff import diff_document, diff_text
from pdv.report.simulated import count_text, order_shares, seconds_text, simulated_text
from tests.conftest import Golden

GIB = 2.0**30


def stage(number: int, bubble_s: float, held: float) -> dict[str, Any]:
    parts = {"compute": 6.0, "tp": 1.5, "dp": 0.5, "optimizer": 0.25, "bubble": bubble_s, "host": 1.75 - bubble_s}
    return {
        "stage": number,
        "device": "a100-80gb-sxm",
        "count": 16,
        "breakdown_s": parts,
        "memory": {
            "total_bytes": held,
            "device_bytes": 80 * GIB,
            "peak_bytes": held - GIB,
            "when": "backward 0",
            "by_kind_bytes": {"optimizer": held / 2, "weights": held / 4, "activations": held / 4 - GIB},
            "fits": held <= 80 * GIB,
        },
    }


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "simulation_version": 1,
        "model": {"name": "gpt3-175b", "parameters": 174_604_259_328},
        "cluster": {"name": "pod", "num_devices": 32},
        "configuration": "tp=8,pp=2,batch=64",
        "mode": "train",
        "mesh": {"dp": 2, "tp": 8},
        "pipeline": {
            "stages": 2, "chunks": 2, "layers": [48, 48], "micro_batches": 32, "order": "1f1b",
            "recompute": "full", "zero": 1,
        },
        "step_s": 10.0,
        "std_s": 0.5,
        "samples_per_s": 6.4,
        "tokens_per_s": 13107.2,
        "model_flops": 4.2e16,
        "flops_per_s_per_device": 1.3125e14,
        "mfu": 0.42,
        "breakdown_s": {"bubble": 1.0, "compute": 6.0, "dp": 0.5, "host": 0.75, "optimizer": 0.25, "tp": 1.5},
        "sources_s": {"analytic": 2.0, "learned": 6.0},
        "stages": [stage(0, 0.5, 60 * GIB), stage(1, 1.5, 90 * GIB)],
        "fits": False,
        "peak_bytes": 90 * GIB,
        "operators": [
            {"op": "linear", "name": "h.*.mlp.c_fc", "sharding": "S0,S2", "count": 96},
            {"op": "layer_norm", "name": "h.*.ln_1", "sharding": "S0,I", "count": 96},
        ],
    }  # fmt: skip


def test_the_text_of_a_step(document: dict[str, Any], golden: Golden) -> None:
    golden("reports/simulated.txt", simulated_text(document) + "\n")


def test_the_text_of_a_difference(document: dict[str, Any], golden: Golden) -> None:
    other = copy.deepcopy(document)
    other["configuration"] = "tp=8,pp=2,batch=64,sp=1,recompute=selective"
    other["pipeline"]["recompute"] = "selective"
    other |= {"step_s": 8.0, "mfu": 0.525, "fits": True, "peak_bytes": 70 * GIB}
    other["breakdown_s"] |= {"compute": 4.0, "recomputation": 0.25, "tp": 1.25}
    other["stages"] = [stage(0, 0.5, 60 * GIB), stage(1, 1.5, 70 * GIB)]
    other["operators"][1]["sharding"] = "S0,S1"
    golden("reports/diff.txt", diff_text(diff_document(document, other), ("first", "second")) + "\n")


def test_a_plan_does_not_differ_from_itself(document: dict[str, Any]) -> None:
    same = diff_document(document, copy.deepcopy(document))
    assert (same["settings"], same["operators"], same["ratio"]) == ({}, [], 1.0)
    assert all(a == b for a, b in same["breakdown_s"].values())


def test_communication_stands_behind_compute() -> None:
    parts = {"bubble": 1.0, "dp": 1.0, "tp": 2.0, "optimizer": 1.0, "compute": 1.0, "recomputation": 1.0}
    assert list(order_shares(parts)) == ["compute", "recomputation", "tp", "dp", "optimizer", "bubble"]


@pytest.mark.parametrize(("seconds", "text"), [(12.34, "12.3 s"), (2e-3, "2 ms"), (5e-7, "0.5 µs"), (1234.0, "1234 s")])
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_counts() -> None:
    assert [count_text(number) for number in (1.746e11, 5e12, 12.0, 3.2e4)] == ["174.6 B", "5 T", "12", "32 k"]


def test_model_flops_are_those_of_the_papers() -> None:
    """24 b s h² (1 + s / 6h) a layer and 2 b s h v for the head (Narayanan et al., SC'21, section 3, forward)."""
    b, s, h, v, layers = 2, 128, 64, 512, 3
    made = graph(arch(f"gpt:layers={layers},hidden={h},heads=8,seq={s},vocab={v}"), b, DType.BF16)
    assert model_flops(made) == layers * 24 * b * s * h * h * (1 + s / (6 * h)) + 2 * b * s * h * v
