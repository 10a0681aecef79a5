"""Emitted packages train as the module they came from: the rest of the model set, too long for every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measured.parity import Frontend
from benchmarks.models.techniques import DP_TP, TP_SP, ZERO2, ZERO_TP, Technique
from tests.distributed.test_parity import check_training

pytestmark = pytest.mark.slow

CASES: list[tuple[str, Frontend, Technique]] = [
    ("mixtral", "onnx", ZERO_TP), ("dlrm", "export", DP_TP), ("xdl", "export", DP_TP),
    ("candle-uno", "onnx", ZERO_TP), ("mlp", "onnx", DP_TP), ("nasrnn", "export", TP_SP),
    ("squeezenet", "onnx", DP_TP), ("resnext50", "export", ZERO_TP), ("inception-v3", "onnx", ZERO2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "frontend", "technique"), CASES, ids=[f"{name}-{frontend}-{t.name}" for name, frontend, t in CASES]
)
def test_training_equals_the_module(name: str, frontend: Frontend, technique: Technique, tmp_path: Path) -> None:
    check_training(name, frontend, technique, tmp_path, tmp_path)
