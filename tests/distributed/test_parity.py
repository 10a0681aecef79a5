"""Emitted packages train as the module they came from: forward, gradients, AdamW; each plan mixes techniques.

Every model goes through both frontends; every mesh runs a plan that mixes techniques, forced by pins.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.measured.parity import Frontend, compare, load_model, observe_package, reference
from benchmarks.models.techniques import (
    CONTEXT,
    DP_TP,
    DP_TP_SP,
    TP_SP,
    ZERO2,
    ZERO4,
    ZERO_TP,
    ZERO_TP_8,
    Technique,
    forced_plan,
)
from pdv.emit.package import emit_package
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed
FORWARD, GRADIENT, LOSS = 1e-5, 1e-4, 1e-4  # relative, float32

# five models through both frontends, on meshes of 2, 4, 2x2 and 2x4; experts and tables
CASES: list[tuple[str, Frontend, Technique]] = [
    ("gpt2", "export", TP_SP), ("gpt2", "onnx", ZERO4), ("gpt2", "export", ZERO_TP), ("gpt2", "onnx", ZERO_TP_8),
    ("llama", "onnx", TP_SP), ("llama", "export", ZERO4), ("llama", "onnx", DP_TP_SP), ("llama", "export", ZERO_TP_8),
    ("bert", "export", TP_SP), ("bert", "onnx", ZERO4), ("bert", "export", ZERO_TP), ("bert", "onnx", ZERO_TP_8),
    ("vit", "onnx", ZERO2), ("vit", "export", ZERO4), ("vit", "onnx", DP_TP), ("vit", "export", ZERO_TP_8),
    ("resnet50", "export", ZERO2), ("resnet50", "onnx", ZERO4), ("resnet50", "export", ZERO_TP),
    ("resnet50", "onnx", ZERO_TP_8), ("gpt2", "onnx", CONTEXT),
    ("mixtral", "export", TP_SP), ("dlrm", "onnx", ZERO2),
]  # fmt: skip
SHORT = {2, 4, 9, 14, 16}  # each model once
LONG = [case for number, case in enumerate(CASES[:20]) if number not in SHORT]

expected_of = lru_cache(reference)
program_of = lru_cache(load_model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("name", "frontend", "technique"),
    mark_slow(CASES, LONG),
    ids=[f"{name}-{frontend}-{t.name}" for name, frontend, t in CASES],
)
def test_training_equals_the_module(
    name: str, frontend: Frontend, technique: Technique, folder: Path, tmp_path: Path
) -> None:
    check_training(name, frontend, technique, folder, tmp_path)


def check_training(name: str, frontend: Frontend, technique: Technique, folder: Path, tmp_path: Path) -> None:
    """Emit a model under a technique, train it on one process and on the mesh, compare with the module."""
    expected = expected_of(name)
    loaded = program_of(name, frontend, folder)
    package = tmp_path / "emitted_pdv"
    package.mkdir()
    emit_package(forced_plan(loaded.graph, technique), technique.mesh, {}, loaded.weights, package)

    ranks = run_ranks(
        observe_package, technique.mesh.num_devices, package, expected.batches, expected.targets, timeout_s=240
    )
    alone = observe_package(package, expected.batches, expected.targets)
    for observed in (alone, *ranks):
        difference = compare(expected.observed, observed)
        assert difference.forward <= FORWARD, difference
        assert difference.gradient <= GRADIENT, difference
        assert difference.loss <= LOSS, difference
