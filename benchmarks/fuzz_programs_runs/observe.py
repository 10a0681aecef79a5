"""What a module does with two batches, and what an emitted package does with them; ``differences`` compares.

Each takes one training step at the planned batch and one at twice that: outputs, loss, gradients by stored name, and
buffers afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz_programs_runs.module import example, generator
from benchmarks.fuzz_programs_runs.spec import ModuleSpec
from benchmarks.measured.parity import load_package, tell_distance

TOLERANCE = {"float64": 1e-7, "float32": 2e-3}
"""Of the largest element of the same tensor. Differences are 1e-12 and 1e-5, or of order one."""
ZERO = 1e-5  # of the largest output, in float64: below, all gradients may be rounding alone
FLOOR = 1e-3  # of the largest of all gradients: below, a gradient may be rounding alone (a key's bias)
Batch = tuple[Tensor, ...]


@dataclass
class Step:
    """One batch. ``error``: what running it raised; then the rest is empty. ``place``: (index, count) of its rows.

    ``in_parts``: nobody has all outputs; loss and gradients tell of it.
    """

    outputs: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    place: tuple[int, int] = (0, 1)
    error: str = ""
    in_parts: bool = False


@dataclass
class Data:
    """Inputs and targets of both batches; ``train``: a step is taken, else outputs are all; ``in_parts``: of batches
    or of the program, of which no rank has all outputs.
    """

    batches: list[Batch]
    targets: list[Batch]
    train: bool
    in_parts: bool = False


def data_of(spec: ModuleSpec, module: nn.Module) -> Data:
    """At the planned batch, and at twice that."""
    batches = [example(spec, rows) for rows in (spec.batch, 2 * spec.batch)]
    targets = []
    with torch.no_grad():
        state = {name: value.clone() for name, value in module.named_buffers()}
        for number, batch in enumerate(batches):
            made = _several(module(*batch))
            targets.append(tuple(_noise(y, generator(spec.seed, "target", number, i)) for i, y in enumerate(made)))
        for name, value in module.named_buffers():
            value.copy_(state[name])
    return Data(batches, targets, train=True)


def _noise(like: Tensor, numbers: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=numbers, dtype=torch.float64).to(like.dtype)


def loss_of(outputs: Any, targets: Any) -> Tensor:  # Any: a tensor, or several
    """Of each output the mean of its squared distance, added up."""
    total: Tensor = torch.stack([distance / number for distance, number in terms_of(outputs, targets)]).sum()
    return total


def terms_of(outputs: Any, targets: Any) -> list[tuple[Tensor, int]]:
    """The same as ``train_step`` takes it: of each output the sum, and the number of its elements."""
    pairs = zip(_several(outputs), _several(targets), strict=True)
    return [((y - t).square().sum(), y.numel()) for y, t in pairs]


def _by_rows(terms: Sequence[tuple[Tensor, int]], rows: int) -> tuple[Tensor, int]:
    """The same as one sum and its weight, as a step in micro-batches takes it: each output has an element a row."""
    return torch.stack([distance * rows / number for distance, number in terms]).sum(), rows


def _several(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def observe_module(module: nn.Module, data: Data) -> list[Step]:
    """The module's own steps."""
    found = []
    for batch, target in zip(data.batches, data.targets, strict=True):
        step = Step()
        if data.train:
            module.zero_grad()
            outputs = module(*batch)
            loss = loss_of(outputs, target)
            torch.autograd.backward(loss)
            step.loss = loss.item()
            named = module.named_parameters(remove_duplicate=False)
            step.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        else:
            with torch.no_grad():
                outputs = module(*batch)
        step.outputs = [y.detach() for y in _several(outputs)]
        step.buffers = {n: b.clone() for n, b in module.named_buffers() if b.is_floating_point()}
        found.append(step)
    return found


def observe_package(directory: Path) -> list[Step]:
    """The package's steps, on the ranks that run this or on this process alone; data lies beside the package."""
    torch.manual_seed(0)
    data: Data = torch.load(directory.parent / "data.pt", weights_only=False)  # our own file
    model = load_package(directory).build(device="cpu")
    steps = []
    for batch, target in zip(data.batches, data.targets, strict=True):
        try:
            steps.append(_step(model, batch, target, train=data.train, in_parts=data.in_parts))
        except Exception as error:  # noqa: BLE001  # told apart by whoever compares
            steps.append(Step(error=f"{type(error).__name__}: {error}"))
            break
    return steps


def _step(model: Any, batch: Batch, target: Batch, *, train: bool, in_parts: bool) -> Step:
    step = Step()
    if train:

        def loss_fn(outputs: Any, wanted: Any) -> list[tuple[Tensor, int]]:
            step.outputs = [y.detach() for y in _several(outputs)]
            terms = terms_of(outputs, wanted)
            return terms if model.micro_batches == 1 else [_by_rows(terms, len(step.outputs[0]))]

        model.zero_grad()
        step.loss = model.train_step(batch, target if len(target) > 1 else target[0], loss_fn).item()
        step.gradients = model.full_gradients()
    else:
        with torch.no_grad():
            step.outputs = [y.detach() for y in _several(model(*batch))]
    step.in_parts = in_parts
    whole = model.full_state_dict() if train else {}  # a package for inference may hold what was computed of weights
    trained = {name for name, _ in model.named_parameters()}
    step.buffers = {name: value for name, value in whole.items() if name not in trained}
    index, count = 0, 1
    for axis in model.batch_axes:
        index, count = index * axis.size + axis.rank, count * axis.size
    step.place = index, count
    return step


@dataclass(frozen=True)
class Difference:
    """What differs: where (forward, loss, gradient, buffer, run), at which batch (once, twice), and how much."""

    where: str
    batch: str
    text: str


def differences(expected: Sequence[Step], found: Sequence[Step], dtype: str) -> Difference | None:
    """The first thing that a rank has otherwise than the module."""
    for batch, wanted, step in zip(("once", "twice"), expected, found, strict=False):
        if step.error:
            return Difference("run", batch, step.error)
        wrong = _different(wanted, step, TOLERANCE[dtype])
        if wrong is not None:
            return Difference(wrong[0], batch, wrong[1])
    assert len(found) == len(expected), f"{len(found)} of {len(expected)} batches were run"
    return None


def _different(wanted: Step, step: Step, tolerance: float) -> tuple[str, str] | None:
    pairs = [] if step.in_parts else list(zip(wanted.outputs, step.outputs, strict=False))
    if not step.in_parts and len(wanted.outputs) != len(step.outputs):
        return "forward", f"{len(step.outputs)} outputs, not {len(wanted.outputs)}"
    for number, (whole, y) in enumerate(pairs):
        index, count = step.place
        rows = whole.chunk(count)[index] if count > 1 else whole
        text = tell_distance(y, rows, tolerance, 1e-3)
        if text:
            return "forward", f"output {number}: {text}"
    if not math.isclose(wanted.loss, step.loss, rel_tol=tolerance, abs_tol=tolerance * 1e-3):
        return "loss", f"{step.loss} for {wanted.loss}"
    scale = FLOOR * max([float(g.abs().max()) for g in wanted.gradients.values()], default=0.0)
    if tolerance == TOLERANCE["float64"]:
        largest = max([float(y.abs().max()) for y in wanted.outputs if y.numel()], default=0.0)
        scale = max(scale, ZERO * largest)
    for name in sorted(wanted.gradients.keys() | step.gradients.keys()):
        found, want = step.gradients.get(name), wanted.gradients.get(name)
        if found is None or want is None:
            there = found if want is None else want
            zero = None if there is None else torch.zeros_like(there)
            text = "" if zero is None else tell_distance(there, zero, tolerance, max(scale, 1e-12))
            text = f"only {'the module' if found is None else 'the program'} has one, {text}" if text else ""
        else:
            text = tell_distance(found, want, tolerance, max(scale, 1e-12))
        if text:
            return "gradient", f"{name}: {text}"
    for name in sorted(wanted.buffers.keys() & step.buffers.keys()):
        text = tell_distance(step.buffers[name], wanted.buffers[name], tolerance, 1e-3)
        if text:
            return "buffer", f"{name}: {text}"
    return None


def says_fixed(error: str, batch: int) -> bool:
    """Whether an error tells that the program takes this batch alone."""
    return bool(re.search(rf"wrong-size: .* takes \[.*\b{batch}\b", error))
