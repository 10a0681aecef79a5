"""What a torch module makes of its example inputs: outputs, gradients, and buffers, of two calls one after the other.

Entry points: ``copy_module``, before anything has run the module; ``run_module``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ir.dims import Shape
from ir.errors import ModelError, first_line
from pdv.frontend.torch.copies import copy_with, take_apart
from pdv.frontend.torch.draws import DROPPING, say_drop_paths
from pdv.frontend.torch.module import resize_inputs

MOST_WEIGHTS = 1 << 24  # of a module that is copied with its weights, in elements; a larger one shares them
_SPREAD = 0.1  # of what constant weights are moved by, so that no bias is zero and no scale is one

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


@dataclass(frozen=True)
class Source:
    """A module and the arguments of a call, both for this use alone."""

    module: nn.Module
    args: tuple[Any, ...]  # Any: what forward takes
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [x for x in tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor)]

    @property
    def held(self) -> dict[str, Tensor]:
        """Parameters and buffers, by every name that they have."""
        found = self.module.named_parameters(remove_duplicate=False), self.module.named_buffers(remove_duplicate=False)
        return {name: x for each in found for name, x in each}

    @property
    def first_names(self) -> dict[str, str]:
        """Each name of a parameter or buffer -> the first name of that tensor."""
        firsts: dict[int, str] = {}
        return {name: firsts.setdefault(id(x), name) for name, x in self.held.items()}

    def at(self, shapes: Sequence[Shape]) -> Source:
        """The same, its inputs repeated or cut to these shapes.

        Raises:
            ModelError: if there are other tensors than shapes.
        """
        found: Any = resize_inputs((self.args, dict(self.kwargs)), shapes)  # Any: the tree that was given
        return replace(self, args=found[0], kwargs=found[1])

    def in_float64(self) -> Source:
        """The same, of float64 throughout."""
        args, kwargs = tree_map(_widen, (self.args, dict(self.kwargs)))
        wide = copy_with(self.module, {}).double()
        held = dict(wide.named_buffers(remove_duplicate=False))
        for name, first in self.first_names.items():
            if first != name and name in held:  # torch makes two of a buffer with two names
                owner, _, own = name.rpartition(".")
                wide.get_submodule(owner)._buffers[own] = held[first]  # noqa: SLF001  # no setter is to see this
        return Source(wide, args, kwargs)


@dataclass(frozen=True)
class ModuleRun:
    """What came out; a tensor that has several names goes by the first.

    Attributes:
        outputs: of the first call.
        gradients: by parameter, of the sum of outputs times cotangents; empty if nothing was differentiated.
        state: parameters and buffers of floats, as the first call left them.
        second: the outputs of the second call.
    """

    outputs: list[Array]
    gradients: dict[str, Array]
    state: dict[str, Array]
    second: list[Array]


_ATEN = torch.ops.aten
_DROPPING: Mapping[Any, int] = {
    **DROPPING,
    _ATEN.dropout.default: 1,
    _ATEN.native_dropout.default: 1,
    _ATEN.feature_dropout.default: 1,
    _ATEN.alpha_dropout.default: 1,
    _ATEN.feature_alpha_dropout.default: 1,
    _ATEN.scaled_dot_product_attention.default: 4,
}
"""Which argument of a function is its share, operators of exported programs included."""


class Undropped(TorchFunctionMode):
    """While this lasts, torch's dropout drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func`` with a probability of zero."""
        options = dict(kwargs or {})
        if (place := _DROPPING.get(func)) is not None:
            name = "dropout_p" if place > 1 else "p"
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif name in options or place == 1:
                options[name] = 0.0
        return func(*args, **options)


def copy_module(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Source | str:
    """The module and its arguments, none of their values constant; or why there is no copy."""
    held = [*module.parameters(), *module.buffers()]
    if any(nn.parameter.is_lazy(x) for x in held):
        return "the module has parameters that its first call makes"
    if any(x.is_meta for x in held):
        return "the module is on the meta device"
    shared = dict[int, Tensor]()
    if sum(x.numel() for x in held) > MOST_WEIGHTS:
        shared = {id(p): _sharing(p) for p in module.parameters() if not _is_constant(p)}
    try:
        own = copy_with(module, shared)
    except Exception as error:  # noqa: BLE001  # whatever a module's attributes raise
        return f"the module cannot be copied: {first_line(error)}"
    say_drop_paths(own)
    take_apart(own)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = tree_map(_vary, (args, dict(kwargs)))
        for tensor in (*own.parameters(), *_kept_buffers(own)):
            if tensor.is_floating_point() and _is_constant(tensor):
                tensor.add_(_SPREAD * torch.rand_like(tensor))
    return Source(own, given[0], given[1])


def _sharing(parameter: nn.Parameter) -> Tensor:
    """A parameter of its own, with its own gradient, in the same memory: nothing that runs writes to it."""
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def run_module(
    source: Source, cotangents: Sequence[Array], *, train: bool, dtype: type[np.floating[Any]] = np.float64
) -> ModuleRun:
    """Two calls of a module that nobody else uses; floats come back as ``dtype``.

    Raises:
        ModelError: if it does not run, or its outputs have no gradients that could be had.
    """
    firsts = set(source.first_names.values())
    try:
        # fused attention takes rows of which all is masked for others in backward than in forward
        with torch.set_grad_enabled(train), sdpa_kernel(SDPBackend.MATH):
            outputs = _outputs(source)
            found = [array(x, dtype) for x in outputs]
            floats = {name: x for name, x in source.held.items() if name in firsts and x.is_floating_point()}
            state = {name: array(x, dtype) for name, x in floats.items()}
            if train:
                _backward(outputs, cotangents)
        gradients = {
            name: array(p.grad, dtype) for name, p in source.held.items() if name in firsts and p.grad is not None
        }
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            second = [array(x, dtype) for x in _outputs(source)]
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"{type(source.module).__name__} cannot be run on its example inputs: {first_line(error)}",
            "",
            "See that two calls of it work, and that its outputs can be differentiated",
        ) from error
    return ModuleRun(found, gradients, state, second)


def _backward(outputs: Sequence[Tensor], cotangents: Sequence[Array]) -> None:
    terms = [
        (x * torch.from_numpy(c).to(x)).sum()
        for x, c in zip(outputs, cotangents, strict=False)
        if x.requires_grad and tuple(x.shape) == c.shape
    ]
    if terms:
        torch.stack([term.double() for term in terms]).sum().backward()  # type: ignore[no-untyped-call]


def _outputs(source: Source) -> list[Tensor]:
    result = source.module(*source.args, **source.kwargs)
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _kept_buffers(module: nn.Module) -> list[Tensor]:
    stored = module.state_dict()
    return [x for name, x in module.named_buffers() if name in stored]


def array(tensor: Tensor, dtype: type[np.floating[Any]] = np.float64) -> Array:
    """A copy of a tensor's values, floats as ``dtype``; parameters of float32, which nothing overwrites, in place."""
    x = tensor.detach().cpu()
    x = x.to_dense() if x.layout is not torch.strided else x
    if not x.is_floating_point():
        return x.resolve_conj().numpy().copy()
    found: Array = (x.float() if dtype is np.float32 else x.double()).numpy()
    return found if dtype is np.float32 and isinstance(tensor, nn.Parameter) else found.copy()


def _is_constant(x: Tensor) -> bool:
    own = all(stride > 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))  # to be written to
    return own and x.numel() > 0 and bool((x == x.reshape(-1)[0]).all())


def _vary(value: Any) -> Any:  # Any: arguments need not be tensors
    """A copy; random in place of zeros or ones throughout, at which much that is wrong does not show."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point() and value.dim() and _is_constant(value):
        return (0.5 + torch.rand_like(value)).requires_grad_(value.requires_grad)
    return value.detach().clone().requires_grad_(value.requires_grad)


def _widen(value: Any) -> Any:  # Any: arguments need not be tensors
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else copy.deepcopy(value)
