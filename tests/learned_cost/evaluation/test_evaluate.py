"""Scores of predictions whose errors are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from learned_cost.data.dataset import read_folder
from learned_cost.data.kernel import family
from learned_cost.data.table import Table
from learned_cost.evaluation.evaluate import Answer, Floats, score_collectives, score_kernels
from tests.learned_cost.measurements import kernel_columns, write

pytest.importorskip("scipy.stats")  # loaded here, so that no test is charged for it


def guess(table: Table, factor: float | Floats, std: float = 0.1) -> Answer:
    """Measured times a factor."""
    rows = len(table)
    return Answer(np.log(table.latency_s * factor), np.full(rows, std), np.ones(rows, dtype=bool))


@pytest.fixture
def table(tmp_path: Path) -> Table:
    suspect = [row == 0 for row in range(60)]
    kernels = read_folder(write(tmp_path, columns=kernel_columns() | {"suspect": suspect})).kernels
    assert kernels is not None
    return kernels


def test_errors_are_what_they_are(table: Table) -> None:
    report = score_kernels(table, guess(table, 1.1))
    assert (report["rows"], report["suspect"]) == (59, 1)
    for figures in (
        report["all"],
        *report["by_op"].values(),
        *report["by_device"].values(),
        *report["by_fold"].values(),
    ):
        assert figures["mape"] == pytest.approx(0.1)
        assert figures["median"] == pytest.approx(0.1)
        assert figures["bias"] == pytest.approx(0.1)
        assert figures["coverage_90"] == 1.0  # log 1.1 = 0.095 lies within 1.64 · 0.1
    assert score_kernels(table, guess(table, 1.1, std=0.05))["all"]["coverage_90"] == 0.0
    assert sum(figures["rows"] for figures in report["by_op"].values()) == 59
    measured = table.latency_s[1:]
    roofline = np.mean(np.abs(table["roofline_us"][1:] * 1e-6 / measured - 1.0))
    assert report["all"]["roofline_mape"] == pytest.approx(roofline)


def test_rows_that_are_suspect_do_not_count(table: Table) -> None:
    factor = np.ones(60)
    factor[0] = 1e6
    assert score_kernels(table, guess(table, factor))["all"]["mape"] == pytest.approx(0.0, abs=1e-9)


def test_rows_of_cold_caches_do_not_count(tmp_path: Path) -> None:
    columns = kernel_columns() | {"l2": ["cold"] * 20 + ["warm"] * 20 + [None] * 20, "suspect": [True] + [False] * 59}
    kernels = read_folder(write(tmp_path, columns=columns)).kernels
    assert kernels is not None
    factor = np.where(np.arange(60) < 20, 1e6, 1.0)
    report = score_kernels(kernels, guess(kernels, factor))
    assert (report["rows"], report["suspect"], report["cold"]) == (40, 1, 19)
    assert report["all"]["mape"] == pytest.approx(0.0, abs=1e-9)


def test_intervals_of_the_right_width_hold_ninety_percent(tmp_path: Path) -> None:
    kernels = read_folder(write(tmp_path, columns=kernel_columns(rows=4000))).kernels
    assert kernels is not None
    noise = np.exp(np.random.default_rng(0).normal(0.0, 0.3, 4000))
    report = score_kernels(kernels, guess(kernels, noise, std=0.3))
    assert report["all"]["coverage_90"] == pytest.approx(0.9, abs=0.015)
    assert report["by_family"]["rows"]["coverage_90"] == pytest.approx(0.9, abs=0.03)


def test_ranks_see_order_only(table: Table) -> None:
    report = score_kernels(table, guess(table, table.latency_s**0.5))
    assert report["ranks"]["kendall"] == pytest.approx(1.0)
    assert report["ranks"]["spearman"] == pytest.approx(1.0)
    assert score_kernels(table, guess(table, table.latency_s**-2.0))["ranks"]["kendall"] == pytest.approx(-1.0)
    assert score_kernels(table, Answer(np.zeros(60), np.ones(60), np.ones(60, dtype=bool)))["ranks"] == {"groups": 0}


def test_unseen_devices_are_told_apart(table: Table) -> None:
    factor = np.where(table.is_text("gpu", "T4"), 2.0, 1.0)
    report = score_kernels(table, guess(table, factor), seen={"A100-SXM4-80GB", "L40S"})
    assert report["unseen_devices"]["mape"] == pytest.approx(1.0)
    assert report["by_device"]["T4"]["seen"] is False
    assert report["by_device"]["L40S"]["seen"] is True
    assert "unseen_devices" not in score_kernels(table, guess(table, factor), seen={"A100-SXM4-80GB", "L40S", "T4"})


def test_reports_are_json(table: Table) -> None:
    assert json.loads(json.dumps(score_kernels(table, guess(table, 1.2)), allow_nan=False))
    empty = table.take(np.zeros(60, dtype=bool))
    assert json.loads(json.dumps(score_kernels(empty, guess(empty, 1.0)), allow_nan=False))["all"] == {"rows": 0}


def test_collectives_are_scored_by_system(tmp_path: Path) -> None:
    collectives = read_folder(write(tmp_path, "collectives")).collectives
    assert collectives is not None
    report = score_collectives(collectives, np.log(collectives.latency_s * 0.8), np.full(30, 0.2))
    assert report["by_system"]["a100_sxm"]["mape"] == pytest.approx(0.2)
    assert report["by_devices"]["8"]["rows"] == 30
    assert report["all"]["coverage_90"] == 1.0
    assert math.isclose(report["all"]["bias"], -0.2)


def test_families() -> None:
    assert [family(op) for op in ("linear", "attn_decode", "mla_prefill", "frobnicate")] == [
        "product", "attention", "attention", "other",
    ]  # fmt: skip
