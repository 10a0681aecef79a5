"""Collectives measured between processes become rows that the reader takes; run again, only what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from learned_cost.data.dataset import read_folder
from learned_cost.data.measured import Measurements
from learned_cost.devices.device import record
from learned_cost.profile import collectives
from learned_cost.profile.rows import Setting
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
SMALL = (256, 4096)


def measure(folder: str) -> int:
    """On each rank: everything at two small sizes."""
    collectives.SIZES = SMALL
    setting = Setting.here(torch.device("cpu"), record("cpu-core"))
    return collectives.run(Path(folder), setting, torch.device("cpu"), budget_s=30.0, per_node=4, system="test")


def test_rows_of_two_processes(tmp_path: Path) -> None:
    assert run_ranks(measure, 2, str(tmp_path)) == [10, 10]
    assert run_ranks(measure, 2, str(tmp_path)) == [0, 0]
    table = read_folder(tmp_path).collectives
    assert table is not None
    assert len(table) == 5 * len(SMALL)
    assert set(table.text("collective")) == set(collectives.FACTORS)
    assert set(table["bytes"]) == set(SMALL)
    assert set(table.text("algo_lib")) == {"gloo"}
    assert set(table["n_devices"]) == {2}
    assert (table["latency_us"] > 0).all()


def test_groups_of_processes_that_share_cores(tmp_path: Path) -> None:
    """Two of four are unlike two alone, and what a plan of four asks for."""
    assert run_ranks(measure, 4, str(tmp_path)) == [20] * 4
    assert run_ranks(measure, 4, str(tmp_path)) == [0] * 4
    assert run_ranks(measure, 2, str(tmp_path)) == [10] * 2
    cores = len(os.sched_getaffinity(0))
    half, whole = (round(min(cores / processes, 1.0), 2) for processes in (4, 2))
    read = Measurements.read([tmp_path], "mine").collectives
    assert {place[2:]: len(rows) for place, rows in read.items()} == {(2, half): 10, (4, half): 10, (2, whole): 10}
    table = read_folder(tmp_path).collectives
    assert table is not None
    assert set(table.text("system")) == {"test", "test-by-2"}
