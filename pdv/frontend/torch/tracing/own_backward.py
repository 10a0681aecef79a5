"""``torch.autograd.Function``s with a backward of their own, as programs of torch's operators.

Traced is a function's forward, whose gradient autograd makes. Where that is not the function's own, each result is

    y + s - detach(s),    y = forward(detach(x)),    s = transpose(backward)(x)

with the value of y, and the gradient that backward gives, as far as this is linear in what it is given. The transpose
of a linear map is its gradient, which autograd makes of backward. Torch's own are left to torch, but for the one that
computes a part again in backward. Entry points: ``functions_called``, ``same_gradients``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

MOST_ELEMENTS = 1 << 28  # of parameters of a module that is run: some seconds at most
TOLERANCE = 1e-3  # of the largest element of a gradient: both are computed by the same kernels, in the same order
_FLOOR = 1e-6  # of the largest gradient: what is smaller may be rounding alone


@contextmanager
def functions_called(*, own: bool) -> Iterator[dict[str, None]]:
    """While this lasts, functions that are not torch's are noted, and (``own``) have the gradients that they define."""
    called: dict[str, None] = {}
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:  # Any: what its forward takes and gives
        if cls is CheckpointFunction:
            return _as_computed_once(*args)
        by_torch = plain.__get__(None, cls)
        if cls.__module__.partition(".")[0] == "torch":
            return by_torch(*args, **kwargs)
        called[cls.__qualname__] = None
        trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        found = _with_own_gradient(cls, args) if own and trained and not kwargs else None
        return by_torch(*args, **kwargs) if found is None else found

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield called
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


def _as_computed_once(function: Callable[..., Any], keeps_state: bool, *args: Any) -> Any:  # Any: what it takes
    """What ``checkpoint(..., use_reentrant=True)`` gives, without computing it again in backward.

    Torch traces its forward, which has no gradients. They are those of the function, where one of its own arguments is
    trained: else what the function holds is not trained either.
    """
    del keeps_state
    trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(trained):
        return function(*args)


class _Context:
    """What torch hands to a function's forward and backward."""

    def __init__(self, needed: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needed)
        self.saved_tensors: tuple[Any, ...] = ()
        self.without: tuple[Tensor, ...] = ()
        self.overwritten = False
        self.materialized = True

    def save_for_backward(self, *values: Any) -> None:
        self.saved_tensors = values

    def save_for_forward(self, *values: Any) -> None:
        """What only derivatives forward ask for."""

    def mark_non_differentiable(self, *values: Tensor) -> None:
        self.without = values

    def mark_dirty(self, *values: Tensor) -> None:
        self.overwritten = bool(values)

    def set_materialize_grads(self, value: bool) -> None:
        self.materialized = value


def _with_own_gradient(cls: Any, args: Sequence[Any]) -> Any:  # Any: a class, and what it takes and gives
    """What a function gives, with the gradient that it defines; None where that cannot be said.

    What follows from the results of backward that are no linear function of its operands is seen by comparison.
    """
    trained = [isinstance(x, Tensor) and x.requires_grad for x in args]
    context, found = _run_forward(cls, args, trained)
    results = found if isinstance(found, tuple) else (found,)
    if context.overwritten or not all(isinstance(y, Tensor) for y in results):
        return None
    given = [y.is_floating_point() and not any(y is one for one in context.without) for y in results]
    with torch.enable_grad():
        cotangents = [torch.zeros_like(y).requires_grad_(is_given) for y, is_given in zip(results, given, strict=True)]
        backward = getattr(cls.backward, "__wrapped__", cls.backward)  # ``once_differentiable`` forbids its gradient
        back = backward(context, *cotangents)
        back = back if isinstance(back, tuple) else (back,)
        asked = [cotangent for cotangent, is_given in zip(cotangents, given, strict=True) if is_given]
        sums: list[Any] = [None] * len(asked)
        for x, gradient, is_trained in zip(args, back, trained, strict=False):
            if not is_trained or gradient is None or not gradient.requires_grad:
                continue
            if gradient.shape != x.shape:
                return None
            weighed = x.to(gradient.dtype)
            parts: Any = torch.autograd.grad(  # Any: some may be None
                gradient, asked, weighed, create_graph=True, allow_unused=True
            )
            sums = [a if b is None else b if a is None else a + b for a, b in zip(sums, parts, strict=True)]
    left = iter(sums)
    final = tuple(
        y.detach() if not is_given or (s := next(left)) is None else y.detach() + (s - s.detach()).to(y.dtype)
        for y, is_given in zip(results, given, strict=True)
    )
    return final if isinstance(found, tuple) else final[0]


def _run_forward(cls: Any, args: Sequence[Any], trained: Sequence[bool]) -> tuple[_Context, Any]:  # Any: as above
    context = _Context(trained)
    still = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    if cls.setup_context is torch.autograd.Function.setup_context:
        return context, cls.forward(context, *still)
    found = cls.forward(*still)
    cls.setup_context(context, still, found)
    return context, found


def same_gradients(
    module: torch.nn.Module, traced: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool | None:  # Any: what a forward takes and gives
    """Whether what was traced of a module has its gradients on example inputs; None where that was not seen."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    if not parameters or size > MOST_ELEMENTS or any(x.is_meta for x in (*parameters, *module.buffers())):
        return None
    try:
        wanted = _gradients(copy.deepcopy(module), args, kwargs)
        found = _gradients(traced, args, kwargs)
    except Exception:  # noqa: BLE001  # whatever a module's own code raises, which its reading reports
        return None
    if wanted.keys() != found.keys():
        return None
    largest = max((float(x.abs().max()) for x in wanted.values() if x.numel()), default=0.0)
    return all(
        float((found[name] - x).abs().max()) <= TOLERANCE * max(float(x.abs().max()), _FLOOR * largest)
        for name, x in wanted.items()
        if x.numel()
    )


def _gradients(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:  # Any: as above
    """Of a random function of all that it gives, by name of the parameter; zeros where there is none."""
    given, named = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, dict(kwargs)))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # so that both drop out the same
        results = tree_leaves(module(*given, **named))
    outputs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=drawn).to(y) for y in outputs]
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found: Any = torch.autograd.grad(outputs, list(parameters.values()), weights, allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient.to_dense()
        for (name, p), gradient in zip(parameters.items(), found, strict=True)
    }
