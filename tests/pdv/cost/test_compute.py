"""The roofline: arithmetic or traffic, whichever is slower, on the slowest class of device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.cost_model import Work
from ir.types import DType
from pdv.cost.compute import ADAMW_PASSES, ADAMW_REACHED, ComputeModel
from tests.pdv.worlds import DEVICE

WORK = Work(flops=1e6, bytes_moved=1e3, kernels=2)


def test_the_slower_of_arithmetic_and_traffic_decides() -> None:
    model = ComputeModel((DEVICE,))
    assert model.seconds(WORK, DType.F32) == pytest.approx(1e6 / 1e9 + 2e-7)
    assert model.seconds(replace(WORK, bytes_moved=1e8), DType.F32) == pytest.approx(1e8 / 1e9 + 2e-7)
    assert model.seconds(Work(0.0, 0.0, 0), DType.F32) == 0.0


def test_the_slowest_class_decides() -> None:
    slow_memory = replace(DEVICE, memory_bandwidth_bytes_per_s=1e6)
    slow_arithmetic = replace(DEVICE, peak_flops={"float32": 1e8})
    mixed = ComputeModel((DEVICE, slow_memory, slow_arithmetic))
    for work in (WORK, replace(WORK, bytes_moved=1e8)):
        alone = [ComputeModel((device,)).seconds(work, DType.F32) for device in mixed.devices]
        assert mixed.seconds(work, DType.F32) == max(alone)
    assert mixed.optimizer_seconds(1e3) == pytest.approx(ADAMW_PASSES * 1e3 / 1e6 / ADAMW_REACHED[4])
    assert mixed.optimizer_seconds(1e3, 2) > mixed.optimizer_seconds(1e3)


def test_a_type_that_a_device_does_not_list_runs_as_float32() -> None:
    half = replace(DEVICE, peak_flops={"float32": 1e9, "bfloat16": 4e9})
    assert ComputeModel((DEVICE,)).seconds(WORK, DType.BF16) == ComputeModel((DEVICE,)).seconds(WORK, DType.F32)
    assert ComputeModel((half,)).seconds(WORK, DType.BF16) < ComputeModel((half,)).seconds(WORK, DType.F32)


def test_a_process_that_has_a_share_of_a_device_takes_longer() -> None:
    whole, half = ComputeModel((DEVICE,)), ComputeModel((replace(DEVICE, share=0.5),))
    assert half.seconds(WORK, DType.F32) == 2 * whole.seconds(WORK, DType.F32)
    assert half.optimizer_seconds(1e3) == 2 * whole.optimizer_seconds(1e3)
