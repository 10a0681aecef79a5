"""A few steps of training, of a module by itself and of the package that was written from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.measured.parity import load_package, tell_distance
from benchmarks.strangers_runs.catalogue import made
from pdv.frontend.torch.module import call_arguments

STEPS = 5
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
LOSS, GRADIENT, WEIGHT = 1e-3, 2e-3, 1e-3
FLOOR = 1e-3  # of the largest gradient: below, one may be rounding alone


@dataclass
class Training:
    """What was seen. ``gradients``: of the first step; ``state``: parameters and buffers behind the last one.

    alike: each name of a parameter -> its first name.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)


def terms_of(outputs: Any) -> list[tuple[Tensor, int]]:
    """Of each output that is trained: the sum of its squared distances from a wave, and how many there are."""
    outputs = vars(outputs) if is_dataclass(outputs) else outputs
    floats = [y for y in tree_leaves(outputs) if isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad]
    found = []
    for y in floats:
        wave = torch.sin(1.7 * torch.arange(y.size(-1) if y.dim() else 0, device=y.device) + 0.3)
        found.append(((y.float() - wave).square().sum() if y.dim() else y.float(), max(1, y.numel())))
    return found


def draws(module: nn.Module) -> bool:
    """Whether it drops out, so that only its evaluation can be compared."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())


def train_module(name: str, optimizer: str, device: str = "cpu") -> Training:
    """The module's own steps; what is seen is on the CPU."""
    module, inputs = made(name)
    args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, call_arguments(inputs))
    module.to(device)
    module.eval() if draws(module) else None
    module(*args, **kwargs) if any(map(nn.parameter.is_lazy, module.parameters())) else None
    steps, found = OPTIMIZERS[optimizer]([p for p in module.parameters() if p.requires_grad]), Training()
    for number in range(STEPS):
        steps.zero_grad()
        loss = torch.stack([total / count for total, count in terms_of(module(*args, **kwargs))]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found.losses.append(loss.item())
        if not number:
            held = module.named_parameters(remove_duplicate=False)
            found.gradients = {n: p.grad.to_dense().cpu().clone() for n, p in held if p.grad is not None}
            firsts = {id(p): n for n, p in module.named_parameters()}
            found.alike = {n: firsts[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        steps.step()
    found.state = {n: x.detach().cpu().clone() for n, x in module.state_dict().items()}
    return found


def train_package(folder: Path, name: str, optimizer: str, device: str = "cpu") -> Training:
    """The package's steps, on the ranks that run this or on this process alone; what is seen is on the CPU."""
    torch.manual_seed(0)
    module, inputs = made(name)
    given = [x.to(device) for x in tree_leaves(call_arguments(inputs)) if isinstance(x, Tensor)]
    model = load_package(folder).build(device=device)
    model.eval() if draws(module) else None
    steps, found = OPTIMIZERS[optimizer](model.parameters()), Training()
    for number in range(STEPS):
        steps.zero_grad()
        loss = model.train_step(given, [], lambda outputs, _: terms_of(outputs))
        found.losses.append(loss.item())
        if not number:
            found.gradients = {n: g.cpu() for n, g in model.full_gradients().items()}
        steps.step()
    found.state = {n: x.cpu() for n, x in model.full_state_dict().items()}
    return found


def difference(wanted: Training, found: Training, tolerance: float = 1.0) -> str:
    """What is not the same; empty if all is. ``tolerance``: how many times the usual one."""
    for number, (one, other) in enumerate(zip(wanted.losses, found.losses, strict=True)):
        diverged = not (math.isfinite(one) or math.isfinite(other))
        if not diverged and not abs(one - other) <= tolerance * LOSS * max(abs(one), 1e-2):
            return f"loss of step {number}: {other} for {one}"
    largest = max([float(g.abs().max()) for g in wanted.gradients.values() if g.numel()], default=0.0)
    theirs = {wanted.alike.get(name, name): gradient for name, gradient in found.gradients.items()}
    for name, gradient in wanted.gradients.items():
        there = theirs.get(wanted.alike[name])
        if there is None:
            if gradient.abs().max() > FLOOR * largest:
                return f"no gradient of {name}"
        elif text := tell_distance(there, gradient, tolerance * GRADIENT, FLOOR * largest):
            return f"gradient of {name}: {text}"
    for name, value in wanted.state.items():
        if name not in found.state:
            return f"no {name} in the state"
        if value.is_floating_point() and (text := tell_distance(found.state[name], value, tolerance * WEIGHT, 1.0)):
            return f"state {name}: {text}"
    if extra := found.state.keys() - wanted.state.keys():
        return f"the state has {sorted(extra)}"
    return ""
