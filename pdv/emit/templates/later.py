"""Gradients of weights that wait, so that a stage hands on gradients of values before it works out those of weights.

Schedules without bubbles (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24) run backward in two passes. The first
gives gradients of values, and leaves of every ``F.linear`` what it takes to work out the gradient of its weight; the
second does that. ``torch.distributed.pipelining`` asks for it by ``dw_builder``. Entry point: ``LaterWeights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

Product = tuple[GradientEdge, Tensor, Tensor]
"""Where the gradient of a weight goes, what the weight was multiplied with, and the gradient of the result."""


class LaterWeights(TorchFunctionMode):
    """Context of a stage's forward pass, whose backward pass leaves gradients of weights for later."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Product] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # Any: as the function
        if func is F.linear and not kwargs and _may_wait(*args[:2]):
            x, weight, bias = (*args, None)[:3]
            return _Linear.apply(x, bias, weight.detach(), get_gradient_edge(weight), self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def take(self) -> Callable[[], None]:
        """What the backward pass behind us has left to do."""
        left, self.left = self.left, []

        def finish() -> None:
            inner: list[tuple[GradientEdge, Tensor]] = []  # of weights that others are made of
            while left:
                edge, x, grad = left.pop(0)
                found = grad.flatten(0, -2).T @ x.flatten(0, -2)
                if edge.node.next_functions:
                    inner.append((edge, found))
                else:
                    torch.autograd.backward([edge], [found])
            if inner:
                edges, grads = zip(*inner, strict=True)
                torch.autograd.backward(edges, grads)

        return finish


def _may_wait(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a gradient to hand on meanwhile; under autocast types of results and gradients are not ours."""
    trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    return trained and not torch.is_autocast_enabled(x.device.type)


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward leaves the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, edge: GradientEdge, later: LaterWeights
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edge, ctx.later = edge, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.later.left.append((ctx.edge, x, grad))
        return grad @ weight, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None, None
