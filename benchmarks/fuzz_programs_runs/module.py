"""The module of a spec, and its data. Entry points: ``Module``, ``example``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.fuzz_programs_runs import elementwise, layers, movement, reduction
from benchmarks.fuzz_programs_runs.pool import Operation
from benchmarks.fuzz_programs_runs.spec import ModuleSpec, Step

OPERATIONS: Mapping[str, Operation] = {
    **elementwise.OPERATIONS,
    **movement.OPERATIONS,
    **reduction.OPERATIONS,
    **layers.OPERATIONS,
}


def generator(*words: object) -> torch.Generator:
    """Random numbers that depend on ``words`` alone."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def example(spec: ModuleSpec, rows: int, salt: str = "data") -> tuple[Tensor, ...]:
    """The module's inputs at a batch of ``rows``."""
    found = []
    for entry in spec.inputs:
        numbers, shape = generator(spec.seed, entry.name, salt, rows), (rows, *entry.shape)
        if entry.upto:
            found.append(torch.randint(0, entry.upto, shape, generator=numbers))
        else:
            found.append(torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype_of(spec)))
    return tuple(found)


def dtype_of(spec: ModuleSpec) -> torch.dtype:
    """What it computes in."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


class Module(nn.Module):
    """Runs the steps of a spec one after another; the first run, here, makes what they own."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__()
        self.spec = spec
        self.making = True
        self.first: dict[int, Tensor] = {}
        with torch.no_grad():
            self(*example(spec, spec.batch))
        self.making = False
        for buffer in self.buffers():  # the first run moved running statistics
            if id(buffer) in self.first:
                buffer.copy_(self.first[id(buffer)])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """All outputs: a tensor, or several in a tuple."""
        values = dict(zip([entry.name for entry in self.spec.inputs], inputs, strict=True))
        for step in self.spec.steps:
            values[step.id] = self.step(step, [values[name] for name in step.of])
        found = tuple(values[name] for name in self.spec.outputs)
        return found if len(found) > 1 else found[0]

    def step(self, step: Step, xs: list[Tensor]) -> Tensor:
        """One step's result."""
        return OPERATIONS[step.op].apply(_Owned(self, step), step.attrs, xs)

    def holder(self, scope: str) -> nn.Module:
        """The submodule that holds a step's tensors."""
        held: nn.Module = self
        for part in scope.split(".") if scope else ():
            if not hasattr(held, part):
                held.add_module(part, nn.Module())
            held = getattr(held, part)
        return held


class _Owned:
    """The tensors of one step, or of the step whose weights it uses."""

    def __init__(self, module: Module, step: Step) -> None:
        self.module = module
        steps = {other.id: other for other in module.spec.steps}
        self.owner = steps[step.weights] if step.weights else step

    def __call__(self, name: str, *shape: int, kind: str = "param", scale: float = 0.0) -> Tensor:
        holder, full = self.module.holder(self.owner.scope), f"{self.owner.id}_{name}"
        if self.module.making and not hasattr(holder, full):
            self._make(holder, name, shape, kind, scale)
        tensor: Tensor = getattr(holder, full)
        assert not shape or tuple(tensor.shape) == shape, f"{full} has shape {tuple(tensor.shape)}, not {shape}"
        return tensor

    def _make(self, holder: nn.Module, name: str, shape: tuple[int, ...], kind: str, scale: float) -> None:
        spec, full = self.module.spec, f"{self.owner.id}_{name}"
        numbers = generator(spec.seed, self.owner.scope, full)
        match kind:
            case "mask":
                value = torch.rand(shape, generator=numbers) < 0.7
                if value.dim() > 1:
                    value[..., 0] = True  # a row that sees nothing has no softmax
            case "ids":
                value = torch.randint(0, int(scale), shape, generator=numbers)
            case "cos" | "sin":
                rate = 10 ** -(torch.arange(shape[1], dtype=torch.float64) % (shape[1] // 2) / shape[1])
                angle = torch.arange(shape[0], dtype=torch.float64)[:, None] * rate
                value = (torch.cos(angle) if kind == "cos" else torch.sin(angle)).to(dtype_of(spec))
            case _:
                drawn = torch.randn(shape, generator=numbers, dtype=torch.float64)
                value = (drawn * (scale or 1 / math.sqrt(max(1, math.prod(shape[1:])))) * 0.7).to(dtype_of(spec))
        if kind == "param":
            holder.register_parameter(full, nn.Parameter(value))
        else:
            if name == "running_var":
                value = value.abs() + 0.5
            holder.register_buffer(full, value, persistent=kind == "buffer")
            self.module.first[id(value)] = value.clone()
