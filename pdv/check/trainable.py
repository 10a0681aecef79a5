"""What of a module's training lies outside its forward, and so outside every plan. Entry point: ``check_trainable``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.export import ExportedProgram

from ir.errors import ModelError
from pdv.frontend.torch.exported_state import storage_of
from pdv.frontend.torch.shared_memory import overlap

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_trainable(model: object) -> None:
    """Parameters have no hooks, and memory of their own: what an optimizer writes to one changes no other tensor.

    model: a module, or an exported program; others, which their reader refuses, are not looked at.

    Raises:
        ModelError: naming a parameter that has a hook, or two tensors that share memory.
    """
    module = model.module() if isinstance(model, ExportedProgram) else model
    if not isinstance(module, nn.Module):
        return
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in _HOOKS):
            raise ModelError(
                f"the gradient of {name} is given to a hook, which no plan would call",
                "Parameters without hooks",
                "Change gradients in the training loop, between train_step and the optimizer's step",
            )
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors_of(module):
        by_memory.setdefault(storage_of(tensor), []).append((name, tensor))
    for group in by_memory.values():
        for name, tensor in group:
            others = [other for other, x in group if x is not tensor and overlap(x, tensor)]
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and others:
                raise ModelError(
                    f"the parameter {name} shares memory with {others[0]}, which would not be trained with it",
                    "Parameters with memory of their own, and one parameter under several names",
                    "Take torch.nn.utils.parametrizations in place of torch.nn.utils.spectral_norm and weight_norm"
                    if name.endswith("_orig")
                    else f"Assign the parameter itself, or compute {others[0]} from {name} in forward",
                )


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter, buffer and plain attribute that is a tensor, once."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        kept = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, value in (*kept, *vars(part).items()):
            if isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
