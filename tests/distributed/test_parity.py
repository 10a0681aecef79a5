"""Emitted packages train as the module they came from: forward, gradients, AdamW; each plan mixes techniques.

Every model goes through both frontends; every mesh runs a plan that mixes techniques, forced by pins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import build
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.frontend.export_onnx import export_onnx
from pdv.frontend.program import Program
from tests.distributed.harness import run_ranks
from tests.distributed.parity import Batch, Observed, compare, observe_module, observe_package
from tests.distributed.techniques import (
    CONTEXT,
    DP_TP,
    DP_TP_SP,
    TP_SP,
    ZERO4,
    ZERO_TP,
    ZERO_TP_8,
    Technique,
    forced_plan,
)

pytestmark = pytest.mark.distributed
Frontend = Literal["export", "onnx"]
STEPS = 20
FORWARD, GRADIENT, LOSS = 1e-5, 1e-4, 1e-4  # relative, float32

# model, frontend, technique: every model through both frontends, on meshes of 2, 4, 2x2 and 2x4
CASES: list[tuple[str, Frontend, Technique]] = [
    ("gpt2", "export", TP_SP), ("gpt2", "onnx", ZERO4), ("gpt2", "export", ZERO_TP), ("gpt2", "onnx", ZERO_TP_8),
    ("llama", "onnx", TP_SP), ("llama", "export", ZERO4), ("llama", "onnx", DP_TP_SP), ("llama", "export", ZERO_TP_8),
    ("bert", "export", TP_SP), ("bert", "onnx", ZERO4), ("bert", "export", ZERO_TP), ("bert", "onnx", ZERO_TP_8),
    ("vit", "onnx", ZERO4), ("vit", "export", DP_TP), ("vit", "onnx", ZERO_TP), ("vit", "export", ZERO_TP_8),
    ("resnet50", "export", ZERO4), ("resnet50", "onnx", DP_TP), ("resnet50", "export", ZERO_TP),
    ("resnet50", "onnx", ZERO_TP_8), ("gpt2", "onnx", CONTEXT),
]  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """What training the module itself gives, and on what."""

    batches: list[Batch]
    targets: list[Tensor]
    observed: Observed


def example(name: str) -> tuple[nn.Module, Batch]:
    """A fresh module and its first batch."""
    return build(name, "small")


@lru_cache
def reference(name: str) -> Reference:
    """The module on one process, trained on shifted copies of one batch."""
    module, inputs = example(name)
    with torch.no_grad():
        shape = example(name)[0](*inputs).shape
    generator = torch.Generator().manual_seed(5)
    batches = [tuple(x.roll((step, step), (0, -1)) for x in inputs) for step in range(STEPS)]
    targets = [torch.randn(shape, generator=generator) for _ in range(STEPS)]
    return Reference(batches, targets, observe_module(module, batches, targets))


@lru_cache
def program(name: str, frontend: Frontend, folder: Path) -> Program:
    """The model's graph and weights through one frontend."""
    module, inputs = example(name)
    if frontend == "export":
        return load_program(module, inputs)
    path = folder / f"{name}.onnx"
    export_onnx(module, inputs, path)
    return load_program(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("name", "frontend", "technique"), CASES, ids=[f"{name}-{frontend}-{t.name}" for name, frontend, t in CASES]
)
def test_training_equals_the_module(
    name: str, frontend: Frontend, technique: Technique, folder: Path, tmp_path: Path
) -> None:
    expected = reference(name)
    loaded = program(name, frontend, folder)
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
