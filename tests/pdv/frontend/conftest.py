"""The small models, each built, exported and lowered once per test run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.models import build
from pdv.frontend import Program, load_program
from pdv.frontend.onnx.export import export_onnx


@dataclass(frozen=True, slots=True)
class Lowered:
    """A small model, and its program through either frontend."""

    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    from_torch: Program
    from_onnx: Program
    onnx_path: Path


@pytest.fixture(scope="session")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lowered]:
    """lowered(name) for a name in `benchmarks.models.MODELS`."""

    @cache
    def lower(name: str) -> Lowered:
        module, inputs = build(name)
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        export_onnx(module, inputs, path)
        return Lowered(module, inputs, load_program(module, inputs), load_program(path), path)

    return lower
