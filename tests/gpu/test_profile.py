"""Profiling on the device: forward and backward are timed, on a GPU as replayed graphs; a GPU has a record."""

from __future__ import annotations

import pytest
import torch

from ir.types import DType, TensorType
from learned_cost.profile.detect import detect
from learned_cost.profile.programs.pieces import Piece, jobs
from learned_cost.profile.timing import Stopwatch

PIECES = (
    Piece("linear", (TensorType((64, 128), DType.F32), TensorType((32, 128), DType.F32)), (), (True, True)),
    Piece("layer_norm", (TensorType((64, 128), DType.F32), *(TensorType((128,), DType.F32),) * 2), (("eps", 1e-5),),
          (True, True, True)),
    Piece("gelu", (TensorType((64, 128), DType.F32),), (("approximate", "tanh"),), (True,)),
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.op)
def test_forward_and_backward_are_timed(piece: Piece, device: torch.device) -> None:
    watch = Stopwatch(device, 1 << 20, limit_s=0.01)
    for job in jobs(piece):
        warm, cold = watch.measure(job.prepare(device)), watch.measure(job.prepare(device), "cold")
        assert warm.stack == cold.stack == ("cudagraph" if device.type == "cuda" else "")
        assert 0 < warm.median_s < 0.1
        assert 0 < cold.median_s < 0.1


def test_a_gpu_has_a_record() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = detect(torch.device("cuda"))
    told = torch.cuda.get_device_properties(0)
    assert found.sm_count == told.multi_processor_count
    assert abs(found.memory_bytes / told.total_memory - 1) < 0.1
