"""Evaluation of an emitted model: a loss that is the same however rows lie in batches and on ranks, and outputs.

A mean of batches' means is another number for each size of a batch, so sums of losses and of weights are added up.
Entry points: ``evaluate``, ``Mean``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ir.errors import UsageError
from pdv.emit.templates.losses import batch_terms
from pdv.emit.templates.parallel import Axis, reduce
from pdv.emit.templates.training import combine_rows, own_rows
from pdv.loops.pieces import share
from pdv.loops.rows import LossFn, shapes_of


class Mean:
    """The loss of all rows so far."""

    def __init__(self) -> None:
        self.totals: Tensor | None = None

    def add(self, terms: Tensor) -> None:
        """terms: [2, terms], sums of losses and of weights."""
        self.totals = terms if self.totals is None else self.totals + terms

    def value(self) -> float:
        """Sums over weights; not a number where nothing counts."""
        return float("nan") if self.totals is None else float((self.totals[0] / self.totals[1]).sum())


@torch.no_grad()
def evaluate(
    model: Any,  # Any: an emitted model
    inputs: Sequence[Tensor],
    target: Tensor | None = None,
    loss_fn: LossFn | None = None,
    *,
    outputs: bool = True,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, Any]:  # Any: what the model gives
    """[2, terms], sums of losses and their weights of a whole batch, and its outputs; the same on every rank.

    inputs, target: the whole batch, on every rank, of any number of rows. Where the plan cannot cut it, copies of its
    last row fill it up, which no loss sees. A loss that is one number counts by rows. outputs: False leaves them out;
    keep: what of their rows is gathered (default: all).

    Raises:
        UsageError: if the program changes buffers, as a batch norm does that takes the statistics of the batch.
        ValueError: as ``train_step``, of a loss that does not determine that of the batch.
    """
    rows, step = inputs[0].size(0), rows_of_a_call(model) or inputs[0].size(0)
    total, found = Mean(), []
    for start in range(0, rows, max(step, 1)):
        part = slice(start, min(start + step, rows))
        wanted = None if target is None or loss_fn is None else target[part]
        terms, output = evaluate_call(
            model, [x[part] for x in inputs], wanted, loss_fn, step, (keep or _all) if outputs else None
        )
        if terms is not None:
            total.add(terms)
        found.append(output)
    return total.totals, _join(found) if outputs and found else None


def evaluate_call(
    model: Any,
    inputs: Sequence[Tensor],
    target: Tensor | None,
    loss_fn: LossFn | None,
    size: int,
    keep: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor | None, Any]:
    """As ``evaluate``, of rows that one call takes; size: how many it has to be given."""
    rows = inputs[0].size(0)
    more = size - rows if rows < size else -rows % model.data_world
    output = _forward(model, [torch.cat([x, x[-1:].expand(more, *x.shape[1:])]) if more else x for x in inputs])
    axes = [axis for axis in model.batch_axes if axis.size > 1]
    kept = None if keep is None else _map(output, partial(_whole, keep=keep, axes=axes, rows=rows))
    if target is None or loss_fn is None:
        return None, kept
    if more or not axes:
        return _terms(loss_fn, _map(output, partial(_whole, keep=_all, axes=axes, rows=rows)), target, axes, rows), kept
    terms = _terms(loss_fn, output, own_rows(target, axes), axes, rows)
    for axis in axes:
        terms = reduce(terms, axis)
    return terms, kept


def _all(x: Tensor) -> Tensor:
    return x


def _whole(x: Tensor, keep: Callable[[Tensor], Tensor], axes: Sequence[Axis], rows: int) -> Tensor:
    return combine_rows(keep(x), axes)[:rows]


def _forward(model: Any, inputs: Sequence[Tensor]) -> Any:
    before = [(x, x.clone()) for x in model.buffers()]
    watched = getattr(model, "evaluation", SimpleNamespace())  # those of earlier packages do not look themselves
    watched.is_checked = True
    try:
        output = model(*inputs)  # torch's batch norm counts no version of what it changes: values are compared
    finally:
        watched.is_checked = False
    changed = [(x, old) for x, old in before if not torch.equal(x, old)]
    for buffer, old in changed:
        buffer.copy_(old)
    count = sum(share(len(changed))) if model.mesh.stage.size > 1 else len(changed)  # a stage alone may have them
    if count:
        raise UsageError(
            f"evaluation of a program that changes {count} buffers, as a batch norm in training does",
            "A program of the module in eval mode, which takes the statistics that were kept",
            'Plan module.eval() with mode="infer", and load_checkpoint of this one into it',
        )
    return output


def _terms(loss_fn: LossFn, output: Any, target: Tensor, axes: Sequence[Axis], rows: int) -> Tensor:
    """[2, terms] of these rows."""
    with torch.enable_grad():  # a loss without a gradient would be refused as one that trains nothing
        output = _map(output, lambda x: x.detach().requires_grad_(x.is_floating_point()))
        terms = batch_terms(loss_fn, output, target, axes, "mean")
        if terms.dim() == 2:
            return terms.detach()
        try:  # a mean of torch's own, of which each row's share is known
            return batch_terms(loss_fn, output, target, axes, "mean", micro_batches=2).detach()
        except ValueError:
            return torch.stack([terms.detach().reshape(1) * rows, terms.new_full((1,), rows)])


def rows_of_a_call(model: Any) -> int | None:
    """How many rows a call takes, where the program names their number."""
    first = next(iter(shapes_of(model).values()), ())
    return first[0] if first and isinstance(first[0], int) else None


def _map(output: Any, take: Any) -> Any:
    return tuple(take(x) for x in output) if isinstance(output, tuple) else take(output)


def _join(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))
    return torch.cat(list(parts))
