"""Batches of a loop that is not ours: rows that divide, the same on all ranks, and outputs put together again.

Entry points: ``check_rows``, ``check_alike``, ``CausalLoss``; what is told of rows without gradients: ``evaluate.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ir.errors import UsageError
from pdv.loops.pieces import pieces_of

IGNORED = -100
"""A label that counts for nothing, as torch's losses have it."""
LossFn = Callable[[Any, Any], Any]  # as train_step of a package takes it


def shapes_of(model: Any) -> Mapping[str, Sequence[int | str]]:  # Any: an emitted model
    """The whole shape of each input by name, in order, a name in place of a size that may be any.

    Raises:
        UsageError: if it is no emitted model.
    """
    return _checked(model)[0]


def trained_shapes_of(model: Any) -> Mapping[str, Sequence[int | str]]:  # Any: an emitted model
    """The same of a model that a trainer steps, which takes the loss of a step for that of its batch.

    Raises:
        UsageError: if it is no emitted model, or a step of it ends the batch before.
    """
    if getattr(model, "two", None) is not None:
        what = "a pipeline that no step empties (2bw) in a trainer: a step of it gives the loss of the batch before"
        raise UsageError(what, "Loops of your own, with model.drain()", "Plan the model with another --schedule")
    return shapes_of(model)


def bounds_of(model: Any, size: str) -> tuple[int, int | None]:  # Any: an emitted model
    """What a size that may be any must be a multiple of, and the largest that it may be, if there is one."""
    _, ways, most = _checked(model)
    return ways.get(size, 1), most.get(size)


def _checked(model: Any) -> tuple[Mapping[str, Sequence[int | str]], Mapping[str, int], Mapping[str, int]]:
    pieces_of(model)
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001  # public in effect: what the package checks by
        if isinstance(hook, partial) and hook.func.__name__ == "check_inputs":
            shapes, ways, most = hook.args
            return shapes, ways, most
    return dict.fromkeys(inspect.signature(model.forward).parameters, ()), {}, {}


def rows_of(model: Any) -> int:
    """What the number of rows of a batch must be a multiple of."""
    return int(model.data_world * model.micro_batches)


def check_rows(model: Any, rows: int) -> None:
    """Whether the plan can cut a batch of so many rows.

    Raises:
        UsageError: if it cannot.
    """
    if rows % (least := rows_of(model)):
        raise UsageError(
            f"a batch of {rows} rows",
            f"A multiple of {least}, which the plan cuts it into",
            "Drop the last, smaller batch (dataloader_drop_last, drop_last), or take batches of another size",
        )


def check_alike(given: Sequence[Tensor]) -> None:
    """Whether all ranks were given the same batch.

    Raises:
        UsageError: on all ranks, if they were not: each would train another model.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sums = torch.stack([x.detach().double().sum() + x.detach().double().square().sum() for x in given])
    ends = torch.cat([sums, -sums])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if not torch.equal(ends[: len(sums)], -ends[len(sums) :]):
        raise UsageError(
            "ranks were given different batches",
            "The whole batch on every rank",
            "Take loaders that are not cut by ranks, with one seed",
        )


class CausalLoss:
    """Cross-entropy of a language model whose labels are its inputs: what stands at ``i + 1`` is told at ``i``.

    shift: False where labels are shifted already.
    """

    def __init__(self, *, shift: bool = True) -> None:
        self.shift = shift

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the tokens that count, and how many these are."""
        if self.shift:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return summed, (labels != IGNORED).sum()

    def weigh(self, labels: Tensor) -> Tensor:
        """How many tokens count."""
        return (labels[:, 1:] if self.shift else labels).ne(IGNORED).sum()
