"""Parity of an emitted package with the module it came from: forward, gradients, steps of AdamW.

``reference`` trains a benchmark model on one process; ``observe_package`` trains an emitted one on each of its ranks
(or alone: degree one); ``compare`` says how far apart they are.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.models import Size, build
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.frontend.program import Program

LEARNING_RATE = 1e-4
# AdamW's first steps are as long for a gradient that is all rounding as for any other, and batch normalisation over few
# points amplifies them: at 1e-4 another number of threads alone moves 20 losses of the small ResNet by up to 1.6e-4,
# at 2e-5 by less than 1e-6.
BATCH_NORM_LEARNING_RATE = 2e-5
# Below this share of the model's largest gradient a gradient is rounding: that of an attention key's bias is exactly 0.
SCALE_FLOOR = 1e-5
TIED = " = "  # joins the names of one parameter
Frontend = Literal["export", "onnx"]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Observed:
    """What one run gave. ``gradients`` are by stored name, whole; ``output`` is this rank's rows of the first batch."""

    output: Tensor
    gradients: dict[str, Tensor]
    losses: list[float]
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Difference:
    """Largest relative differences: of the output and of each gradient by its largest element, of any loss."""

    forward: float
    gradient: float
    loss: float


def observe_module(module: nn.Module, batches: list[Batch], targets: list[Tensor]) -> Observed:
    """Train ``module`` on one process."""
    output = module(*batches[0])
    torch.autograd.backward(mse_loss(output, targets[0]))  # never near 0: relative errors mean something
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    gradients = {TIED.join(names[p]): p.grad.clone() for p in names if p.grad is not None}
    module.zero_grad()
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate(module))
    losses = []
    for batch, target in zip(batches, targets, strict=True):
        loss = mse_loss(module(*batch), target)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Observed(output.detach(), gradients, losses)


def learning_rate(module: nn.Module) -> float:
    """The step for a module or what was emitted of it: running statistics are the buffers that only batch norm has."""
    normalized = any(name.endswith(("running_mean", "running_var")) for name, _ in module.named_buffers())
    return BATCH_NORM_LEARNING_RATE if normalized else LEARNING_RATE


@dataclass(frozen=True)
class Reference:
    """What training the module itself gives, and on what."""

    batches: list[Batch]
    targets: list[Tensor]
    observed: Observed


def reference(name: str, size: Size = "small", *, steps: int = 20) -> Reference:
    """A benchmark model on one process, trained on shifted copies of its first batch."""
    module, inputs = build(name, size)
    with torch.no_grad():
        shape = build(name, size)[0](*inputs).shape
    generator = torch.Generator().manual_seed(5)
    batches = [tuple(x.roll((step, step), (0, -1)) for x in inputs) for step in range(steps)]
    targets = [torch.randn(shape, generator=generator) for _ in range(steps)]
    return Reference(batches, targets, observe_module(module, batches, targets))


def load_model(name: str, frontend: Frontend, folder: Path, size: Size = "small") -> Program:
    """A benchmark model's graph and weights through one frontend; ONNX files are written to ``folder``."""
    module, inputs = build(name, size)
    if frontend == "export":
        return load_program(module, inputs)
    path = folder / f"{name}.onnx"
    export_onnx(module, inputs, path)
    return load_program(path)


def load_package(directory: Path) -> Any:
    """The emitted package, imported under its directory's name."""
    sys.path.insert(0, str(directory.parent))
    try:
        for name in [name for name in sys.modules if name.split(".")[0] == directory.name]:
            del sys.modules[name]
        return importlib.import_module(directory.name)
    finally:
        sys.path.pop(0)


def observe_package(directory: Path, batches: list[Batch], targets: list[Tensor]) -> Observed:
    """Train the emitted model on the ranks that run this, or on this process alone."""
    model = load_package(directory).build(device="cpu")
    with torch.no_grad():  # stages of a pipeline go backward in training steps alone
        output = model(*batches[0])
    count, index = 1, 0
    for axis in model.batch_axes:
        count, index = count * axis.size, index * axis.size + axis.rank
    rows = targets[0].size(0) // count
    model.train_step(batches[0], targets[0], mse_loss)
    gradients = model.full_gradients()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(model))
    losses = []
    for batch, target in zip(batches, targets, strict=True):
        losses.append(model.train_step(batch, target, mse_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return Observed(output, gradients, losses, (index * rows, (index + 1) * rows))


def compare(expected: Observed, found: Observed) -> Difference:
    """How far ``found`` is from ``expected``."""
    start, stop = found.rows
    output = expected.output[start:stop] if stop else expected.output
    forward = relative(found.output, output)
    scale = SCALE_FLOOR * max(grad.abs().max().item() for grad in expected.gradients.values())
    gradient = max(relative(gradient_of(names, found), grad, scale) for names, grad in expected.gradients.items())
    loss = max(abs(a - b) / abs(a) for a, b in zip(expected.losses, found.losses, strict=True))
    return Difference(forward, gradient, loss)


def gradient_of(names: str, found: Observed) -> Tensor:
    """The gradient of a parameter, the same under all names that it has; zeros are not an answer."""
    known = [found.gradients[name] for name in names.split(TIED) if name in found.gradients]
    assert known, f"{names} has no gradient"
    assert all(torch.equal(known[0], other) for other in known), f"{names}: tied weights are split"
    return known[0]


def relative(found: Tensor, expected: Tensor, scale: float = 1e-30) -> float:
    """Largest difference over the largest element, or over ``scale`` if that is larger."""
    assert found.shape == expected.shape, f"{found.shape} is not {expected.shape}"
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(scale)).item()


def tell_distance(found: Tensor, wanted: Tensor, tolerance: float, scale: float) -> str:
    """How far, if further than ``tolerance`` of the largest element, or of ``scale``; "" if not."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)} for {wanted.dtype} {list(wanted.shape)}"
    if not wanted.numel():
        return ""
    wide = torch.promote_types(wanted.dtype, torch.float32)
    largest, distance = float(wanted.abs().max()), float((found.to(wide) - wanted.to(wide)).abs().max())
    return "" if distance <= tolerance * max(largest, scale) else f"off by {distance:.1e}, of at most {largest:.1e}"
