"""A training step in several micro-batches. Entry point: ``Given``.

Gradients add up over micro-batches and are summed over ranks once. The weight of the whole batch is known behind the
last: only then is what they made divided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gradients import local_piece
from .losses import LossFn, batch_terms, own_rows
from .parallel import Axis

Loss = Callable[[Any, Tensor], Tensor]
"""The loss to go backward from, of what the model gives for a micro-batch, and the number of that."""


class Given:
    """A batch in micro-batches, with its targets, and what their losses came to.

    axes: along which outputs are cut by rows, and that of the stages, of which the last one has the losses.

    Raises:
        ValueError: if ``loss_fn`` returns several pairs, each with a mean of its own, or rows do not divide by
            ``count``.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_fn: LossFn,
        reduction: str,
        axes: tuple[Sequence[Axis], Axis],
        count: int,
    ) -> None:
        self.batches = [list(parts) for parts in zip(*(_split_rows(x, count) for x in inputs), strict=True)]
        split = [_split_rows(y, count) for y in targets]  # none, where the model has its loss inside
        self._wanted = [[parts[number] for parts in split] for number in range(count)]
        self._loss_fn, self._reduction, self._count = loss_fn, reduction, count
        self._axes, self._stage = axes
        self._cut = [axis for axis in self._axes if axis.size > 1]
        self._terms: list[Tensor] = []

    def loss_of(self, output: Any, number: Tensor) -> Tensor:
        """See ``Loss``."""
        target, reduction = [own_rows(y, self._axes) for y in self._wanted[int(number)]], self._reduction
        given = target[0] if len(target) == 1 else target
        found = batch_terms(self._loss_fn, output, given, self._cut, reduction, self._count)
        found = found if found.dim() == 2 else torch.stack([found, torch.ones_like(found)])[:, None]
        if found.size(1) > 1 and reduction == "mean":
            raise ValueError(
                f"several-means: loss_fn returned {found.size(1)} pairs, each a mean of its own, and a step runs in "
                f"{self._count} micro-batches. Their weights are known behind the last one, and the gradient is one "
                "sum by then, which several weights cannot divide. Return one pair: the sums, scaled by what you know "
                'of the whole batch, added up. Or say reduction="sum", and return sums so scaled.'
            )
        self._terms.append(found.detach().sum(1))
        return found[0].sum()

    def run(self, model: nn.Module, run: Callable[[], None], source: int | None = None) -> Tensor:
        """The loss of the whole batch, the same on every rank; gradients are those of the whole batch.

        run: forward and backward of each micro-batch. source: the rank of the last stage, if it is not to wait for the
        others, which get from it what they divide by.
        """
        with _new_gradients(model) as divide:
            run()
            total, weight = self._total(source)
            if self._reduction == "mean":
                divide(weight)
        return total / weight if self._reduction == "mean" else total

    def _total(self, source: int | None) -> tuple[Tensor, Tensor]:
        """Sum and weight of the losses of the whole batch, on every rank."""
        device = self.batches[0][0].device
        found = torch.zeros(2, device=device, dtype=torch.float64)  # one type, whatever a stage computes in
        for pair in self._terms:
            found += pair
        for axis in (*self._cut, *([self._stage] if source is None else [])):
            if axis.size > 1:
                dist.all_reduce(found, group=axis.group)
        if source is not None:
            sent = dist.broadcast(found, source, group=self._stage.group, async_op=True)
            if source != dist.get_rank():
                sent.wait()
        total, weight = found.unbind()
        return total, weight


def _split_rows(x: Tensor, parts: int) -> list[Tensor]:
    if x.size(0) % parts:
        raise ValueError(
            f"uneven-micro-batches: {x.size(0)} rows in {parts} micro-batches. Their number must be a multiple of "
            f"{parts}. Pass batches of another size; drop the last, smaller one."
        )
    return list(x.chunk(parts))


@contextmanager
def _new_gradients(model: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    """Context of a step: gradients of earlier ones are kept aside, and added to those that it made.

    Gives a function that divides the new ones.
    """
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    def divide(weight: Tensor) -> None:
        found = [local_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if found:
            torch._foreach_div_(found, float(weight))  # as torch's own optimizers do

    yield divide
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
