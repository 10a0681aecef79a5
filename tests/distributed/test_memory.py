"""What a step of an emitted program is said to hold is what it holds, rank by rank, allocation by allocation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.measured.parity import load_model, load_package
from benchmarks.memory import predict
from benchmarks.models.techniques import DP_TP, TP_SP, ZERO2, ZERO_TP, Technique, forced_plan
from learned_cost.profile.allocations import training_peak
from pdv.emit.analysis.staged import Running
from pdv.emit.package import emission_of, emit_package, write_package
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed
TOLERANCE = 0.05
CASES = [
    ("gpt2", ZERO_TP), ("llama", TP_SP), ("bert", DP_TP), ("vit", ZERO2), ("resnet50", ZERO2), ("mixtral", ZERO2),
]  # fmt: skip


def peak(package: Path, inputs: list[tuple[tuple[int, ...], bool]], output: tuple[int, ...]) -> int:
    torch.manual_seed(0)
    given = tuple(torch.randn(shape) if floating else torch.randint(1, 8, shape) for shape, floating in inputs)
    target = torch.randint(0, output[-1], output[:-1])
    return training_peak(load_package(package).build(device="cpu"), given, target)


@pytest.mark.parametrize(
    ("name", "technique"), mark_slow(CASES, CASES[1:4]), ids=[f"{name}-{technique.name}" for name, technique in CASES]
)
def test_the_peak_is_the_one_predicted(name: str, technique: Technique, tmp_path: Path) -> None:
    program = load_model(name, "export", tmp_path)
    pcg = forced_plan(program.graph, technique)
    package = tmp_path / "emitted_pdv"
    package.mkdir()
    emit_package(pcg, technique.mesh, {}, program.weights, package)
    inputs = [(node.type.shape, node.type.dtype.is_floating) for node in pcg.inputs]
    output = pcg.outputs[0][1].type.shape
    measured = run_ranks(peak, technique.mesh.num_devices, package, inputs, output, timeout_s=240)
    # Ranks hold the same; gloo's threads, where they are late to let go of a collective's tensors, only add to it.
    assert predict(program, technique, pcg).peak_bytes == pytest.approx(min(measured), rel=TOLERANCE)


def test_the_peak_without_light_values_is_the_one_predicted(tmp_path: Path) -> None:
    """And less than with them."""
    program, technique = load_model("llama", "export", tmp_path), TP_SP
    pcg = forced_plan(program.graph, technique)
    package = tmp_path / "emitted_pdv"
    package.mkdir()
    write_package(emission_of(pcg, technique.mesh, {}, Running(light=True)), {}, program.weights, package)
    inputs = [(node.type.shape, node.type.dtype.is_floating) for node in pcg.inputs]
    measured = run_ranks(peak, technique.mesh.num_devices, package, inputs, pcg.outputs[0][1].type.shape, timeout_s=240)
    assert predict(program, technique, pcg, "light").peak_bytes == pytest.approx(min(measured), rel=TOLERANCE)
    assert predict(program, technique, pcg).peak_bytes > 1.1 * min(measured)
