"""Every type that ``--dtype`` takes: emitted programs err no more than twice as much as the module in that type.

Against the module in float64, with the same weights and data: outputs, gradients, and weights after steps of AdamW, on
one process and on two, of a float32 program converted (``--dtype``) and of the module exported in the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import build
from benchmarks.models.techniques import TP_SP, ZERO2, Technique, forced_plan
from ir.types import DType
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.passes.precision import with_dtype
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMES = 2.0  # the module's own error
FLOOR = 1e-7  # relative, of errors: float32 rounds in an order of its own
STEPS = 3
CASES: list[tuple[str, Technique]] = [
    ("gpt2", TP_SP), ("llama", TP_SP), ("llama", ZERO2), ("bert", ZERO2), ("vit", ZERO2), ("resnet50", ZERO2),
]  # fmt: skip
RARELY = [*CASES[1:4], CASES[5]]


@dataclass(frozen=True)
class Observed:
    """Outputs of the first pass; gradients, and weights after the last step, by name."""

    output: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def distance(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows, large enough that gradients are no subnormal numbers in float16."""
    return (output - target).square().flatten(1).sum(1).mean()


def term(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """The same as a sum and its weight, as ``train_step`` takes it."""
    return (output - target).square().sum(), float(len(output))


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Its eps is none in float16 by default."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def converted(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


@cache
def observe_module(name: str, dtype: torch.dtype) -> Observed:
    module, inputs = build(name)
    module, inputs = module.to(dtype), converted(inputs, dtype)
    target = targets(name).to(dtype)
    adam = optimizer(module)
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        output = module(*inputs)
        torch.autograd.backward(distance(output, target))
        if step == 0:
            first = output.detach()
            named = module.named_parameters(remove_duplicate=False)  # tied ones go by any of their names
            gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        adam.step()
        adam.zero_grad()
    weights = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    return Observed(first, gradients, weights)


@cache
def targets(name: str) -> Tensor:
    module, inputs = build(name)
    with torch.no_grad():
        shape = module(*inputs).shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def observe(packages: dict[str, Path], inputs: tuple[Tensor, ...], target: Tensor) -> dict[str, Observed]:
    """Of each package, in the type that it is called after."""
    found = {}
    for what, package in packages.items():
        dtype = TYPES[what.split()[0]]
        model = import_package(package).build(device="cpu")
        given, wanted = converted(inputs, dtype), target.to(dtype)
        output = model(*given).detach()
        adam = optimizer(model)
        for step in range(STEPS):
            model.train_step(given, wanted, term)
            if step == 0:
                gradients = model.full_gradients()
            adam.step()
            adam.zero_grad()
        found[what] = Observed(output, gradients, model.full_state_dict())
    return found


def errors(found: Observed, exact: Observed) -> list[float]:
    """Of outputs, gradients and weights: relative, of all elements together."""
    pairs = [
        ([found.output], [exact.output]),
        (list(found.gradients.values()), [exact.gradients[name] for name in found.gradients]),
        ([found.weights[name] for name in found.gradients], [exact.weights[name] for name in found.gradients]),
    ]
    return [relative(*(torch.cat([x.double().flatten() for x in side]) for side in pair)) for pair in pairs]


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("name", "technique"), mark_slow(CASES, RARELY), ids=[f"{name}-{technique.name}" for name, technique in CASES]
)
def test_errors_are_those_of_the_type(name: str, technique: Technique, tmp_path: Path) -> None:
    exact = observe_module(name, torch.float64)
    module, inputs = build(name)
    program = load_program(module, inputs)
    packages = {}
    for text, dtype in TYPES.items():
        graphs = {text: with_dtype(program.graph, DType.from_name(text))}
        if dtype is not torch.float32:
            graphs[f"{text} exported"] = load_program(build(name)[0].to(dtype), converted(inputs, dtype)).graph
        for what, graph in graphs.items():
            packages[what] = tmp_path / what.replace(" ", "_")
            packages[what].mkdir()
            emit_package(forced_plan(graph, technique), technique.mesh, {}, program.weights, packages[what])
    ranks = run_ranks(observe, technique.mesh.num_devices, packages, inputs, targets(name), timeout_s=240)
    alone = observe(packages, inputs, targets(name))
    for what in packages:
        allowed = errors(observe_module(name, TYPES[what.split()[0]]), exact)
        outputs = [rank[what].output for rank in ranks]
        rows = sum(len(output) for output in outputs) == len(exact.output)
        together = Observed(
            torch.cat(outputs) if rows else outputs[0], ranks[0][what].gradients, ranks[0][what].weights
        )
        for found in (alone[what], together):
            assert found.output.dtype == TYPES[what.split()[0]]
            for error, most in zip(errors(found, exact), allowed, strict=True):
                assert error <= TIMES * max(most, FLOOR), f"{what}: {errors(found, exact)}, the module {allowed}"
