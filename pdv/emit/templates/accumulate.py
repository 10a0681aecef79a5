"""A training step in several micro-batches. Entry points: ``train_in_parts``, ``Given``.

Gradients of micro-batches add up, are summed over ranks once, and divided by the weight of the batch, then known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .calls import check_divisible
from .kernels.refused import axes_alike, nothing_trained, told
from .losses import LossFn, batch_terms, reduction_of
from .optimizers import look_at_steps
from .parallel import Axis
from .stored import local_piece
from .training import (
    Batch,
    Target,
    check_rows,
    combine_rows,
    losses_add_up,
    map_tensors,
    read_batch,
    shard_batch,
    tensors_in,
)

if TYPE_CHECKING:
    from .runtime import ParallelModule

Loss = Callable[[Any, Tensor], Tensor]
"""The loss to go backward from, of what the model gives for a micro-batch, and the number of that."""


class Given:
    """A batch in micro-batches, with its targets, and what their losses came to.

    axes: along which outputs are cut by rows; that of the stages, of which the last one has the losses; and those
    along which ranks have the same rows.

    Raises:
        ValueError: if ``loss_fn`` returns several pairs, several means, or rows do not divide by ``count``.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        target: Any,  # as of ``map_tensors``
        loss_fn: LossFn,
        reduction: str,
        axes: tuple[Sequence[Axis], Axis, Sequence[Axis]],
        count: int,
    ) -> None:
        check_divisible(tensors_in(target), axes[0], count)
        self.batches = [list(parts) for parts in zip(*(_split_rows(x, count) for x in inputs), strict=True)]
        self._wanted = [map_tensors(target, partial(_part, count=count, number=number)) for number in range(count)]
        self._loss_fn, self._reduction, self._count = loss_fn, reduction_of(loss_fn, reduction), count
        self._axes, self._stage, self._alike = axes
        self._cut = [axis for axis in self._axes if axis.size > 1]
        self._terms: list[Tensor] = []
        self._failed: list[Exception] = []  # what ``loss_fn`` raised, of which others learn with the loss

    def kinds(self, model: nn.Module) -> tuple[object, ...]:
        """What shapes and types of values between stages depend on: inputs, and in what the model computes."""
        kind = self.batches[0][0].device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        types = frozenset(parameter.dtype for parameter in model.parameters())
        return types, cast, *((tuple(x.shape), x.dtype) for x in self.batches[0])

    def loss_of(self, output: Any, number: Tensor) -> Tensor:
        """See ``Loss``."""
        target, reduction = shard_batch(self._wanted[int(number)], self._axes), self._reduction
        loss_fn = _nothing if self._failed else self._loss_fn
        failed = self._failed if self._cut or self._alike or self._stage.size > 1 else None
        found = batch_terms(loss_fn, output, target, self._cut, reduction, self._count, failed, self._alike)
        found = found if found.dim() == 2 else torch.stack([found, torch.ones_like(found)])[:, None]
        if found.size(1) > 1 and reduction == "mean":
            error = ValueError(
                f"several-means: loss_fn returned {found.size(1)} pairs, each a mean of its own, and a step runs in "
                f"{self._count} micro-batches. Their weights are known behind the last one, and the gradient is one "
                "sum by then, which several weights cannot divide. Return one pair: the sums, scaled by what you know "
                'of the whole batch, added up. Or say reduction="sum", and return sums so scaled.'
            )
            self._failed.append(error)
            found = 0 * found[:, :1]
        self._terms.append(found.detach().sum(1))
        return found[0].sum()

    def go_through(self, model: nn.Module, number: int) -> None:
        """Forward and backward of one micro-batch."""
        self.loss_of(model(*self.batches[number]), torch.tensor(number)).backward()  # type: ignore[no-untyped-call]

    def run(self, model: nn.Module, run: Callable[[], None], source: int | None = None) -> Tensor:
        """The loss of the whole batch, the same on every rank; gradients are those of the whole batch.

        run: forward and backward of each micro-batch. source: the rank of the last stage, if it is not to wait for the
        others, which get from it what they divide by.
        """
        scales: Scales | None = getattr(model, "scales", None) if source is None else None
        with _hooks_at_end(model, self._count), _new_gradients(model) as divide:
            run()
            total, weight = self._total(source, scales)
            if self._reduction == "mean":
                divide(weight)
        if scales is not None:
            scales.begin()
        return total / weight if self._reduction == "mean" else total

    def _total(self, source: int | None, scales: Scales | None) -> tuple[Tensor, Tensor]:
        """Sum and weight of the losses of the whole batch, on every rank."""
        device = self.batches[0][0].device
        found = torch.zeros(3, device=device, dtype=torch.float64)  # one type, whatever a stage computes in
        for pair in self._terms:
            found[:2] += pair
        found[2] = len(self._failed)
        if scales is not None:
            found = torch.cat([found, scales.found().to(found)])
        for axis in (*self._cut, *([self._stage] if source is None else [])):
            if axis.size > 1:
                dist.all_reduce(found, group=axis.group)
        if source is not None:
            sent = dist.broadcast(found, source, group=self._stage.group, async_op=True)
            if source != dist.get_rank():
                sent.wait()
        total, weight = told(found[:3], 2, self._failed)
        if scales is not None:
            scales.check(found[3:] / math.prod(axis.size for axis in self._cut))
        return total, weight


def _nothing(*_: Any) -> tuple[float, int]:
    """In place of a loss that ended in an error: the other micro-batches pass, as other ranks wait for them."""
    return 0.0, 0


def train_in_parts(
    model: ParallelModule,
    inputs: Batch,
    target: Target,
    loss_fn: LossFn,
    count: int,
    *,
    reduction: Literal["mean", "sum"],
    rows: Literal["global", "local"],
) -> Tensor:
    """As ``ParallelModule.train_step``, in ``count`` micro-batches."""
    given = read_batch(model, inputs, target)
    if rows == "local":
        check_rows(given[0], model.batch_axes)
        given = map_tensors(given, partial(combine_rows, axes=model.batch_axes))
    axes = (model.batch_axes, model.mesh.stage, axes_alike(model.mesh, model.batch_axes))
    rounding = model.mesh.rounding
    with rounding.keep() if rounding else nullcontext(), losses_add_up(model, given):
        batch = Given(*given, loss_fn, reduction, axes, count)
        for part in batch.batches if model.mesh.stage.size > 1 else ():  # else each call looks at its own
            model.check_sizes(model, tuple(part), {})
        return model.run_given(batch)


def check_count(model: ParallelModule, count: int, rows: str) -> None:
    """Whether a step may take its batch, of ``rows`` as ``train_step`` has them, in so many micro-batches.

    Raises:
        ValueError: if a pipeline was planned for others, what the model has of the batch would be of a part of it, or
            there are no such rows or numbers.
        RuntimeError: if there are gradients that were not summed.
    """
    if rows not in {"global", "local"}:
        raise ValueError(f"bad-rows: {rows!r}. Allowed: 'global', the whole batch on every rank, or 'local', own rows.")
    if count < 1:
        raise ValueError(f"bad-micro-batches: {count}. Allowed: numbers from 1 on. Leave it out for the plan's.")
    if model.mesh.stage.size > 1 and count != model.micro_batches:
        raise ValueError(
            f"planned-micro-batches: {count} micro-batches of a pipeline planned for {model.micro_batches}. "
            f"Allowed: {model.micro_batches}. Leave the number out, or plan the model again."
        )
    if count > 1 and model.joined:
        raise ValueError(
            f"batch-in-parts: {count} micro-batches of a program that has {model.joined}. Each would see rows of its "
            "own alone, and the loss be another than that of the whole batch. Allowed: 1. Leave the number out; or, if "
            "each part may stand for a batch, call train_step for each and step the optimizer behind the last."
        )
    if count > 1 and (model.mesh.sums.is_waiting or model.mesh.sums.is_held):
        raise RuntimeError(
            "unsummed-gradients: a step of micro-batches while gradients wait for their sum over ranks. It makes "
            "its own mean. Call it outside of no_sync, after flush or zero_grad of the model."
        )


def _split_rows(x: Tensor, parts: int) -> list[Tensor]:
    if x.dim() == 0:  # a number is the same of all rows
        return [x] * parts
    if x.size(0) % parts:
        raise ValueError(
            f"uneven-micro-batches: {x.size(0)} rows in {parts} micro-batches. Their number must be a multiple of "
            f"{parts}. Pass batches of another size; drop the last, smaller one."
        )
    return list(x.chunk(parts))


def _part(x: Tensor, count: int, number: int) -> Tensor:
    return _split_rows(x, count)[number]


@contextmanager
def _new_gradients(model: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    """Context of a step: gradients of earlier ones are added to its own, or left alone if it fails.

    Gives a function that divides its own.
    """
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    def divide(weight: Tensor) -> None:
        found = [local_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if found:
            zero = [] if weight else [grad == 0 for grad in found]
            torch._foreach_div_(found, float(weight))  # as torch's own optimizers do
            for grad, is_zero in zip(found, zero, strict=False):  # as of torch's losses where all labels are ignored
                grad.masked_fill_(is_zero, 0)

    try:
        yield divide
    except BaseException:
        model.zero_grad()  # with what waits for its sum
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


@contextmanager
def _hooks_at_end(model: nn.Module, count: int) -> Iterator[None]:
    """Context of a step of ``count`` micro-batches, behind which gradients are final: then their hooks are called.

    Raises:
        RuntimeError: if a hook would see gradients that are not.
    """
    parameters = list(model.parameters())
    summed = getattr(model, "summed", ())  # by ``sum_over_data``; no step knows those that the model has not
    if count > 1 and (summed or any(parameter._backward_hooks for parameter in parameters)):  # noqa: SLF001
        raise RuntimeError(
            f"hooks-of-parts: a parameter has a hook of register_hook or sum_over_data, and a step runs in {count} "
            "micro-batches, of each of which it would see a part of the gradient. Use "
            "register_post_accumulate_grad_hook, which is called when the gradient is final, or change gradients "
            "behind train_step; of parameters of your own, take a step of one micro-batch."
        )
    hooked = [(parameter, parameter._post_accumulate_grad_hooks) for parameter in parameters]  # noqa: SLF001
    waiting = [(parameter, hooks, dict(hooks)) for parameter, hooks in hooked if hooks]
    for _, hooks, _ in waiting:
        hooks.clear()
    try:
        yield
    finally:
        for _, hooks, kept in waiting:
            hooks.update(kept)
    for parameter, _, kept in waiting:
        for hook in kept.values() if parameter.grad is not None else ():
            hook(parameter)


class Scales:
    """By what gradients of a pipeline's stage are scaled between a step and the optimizer's: on all stages the same.

    Told by sums over a few gradients, and exchanged with the next step's loss. What is not one factor is not compared.
    """

    def __init__(self, model: ParallelModule) -> None:
        self._stage, self._model = model.mesh.stage, ref(model)
        held = list(model.parameters())
        self._parameters, self._held = held[:: max(1, len(held) // 8)], set(map(id, held))
        self._before = torch.zeros(len(self._parameters), dtype=torch.float64)
        self._factors, self._waiting, self._stepped = torch.zeros(0), set[int](), set[int]()
        look = WeakMethod(self._look)
        look_at_steps(lambda optimizer: (method := look()) and method(optimizer))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model has none."""

    @torch.no_grad()
    def _sizes(self) -> Tensor:
        """On the CPU, in one transfer: a device is waited for once."""
        pieces = [local_piece(p if p.grad is None else p.grad).flatten()[:4096] for p in self._parameters]
        given = torch.tensor([p.grad is not None for p in self._parameters])
        sums = [piece.abs().sum(dtype=torch.float64) for piece in pieces]
        return (torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.float64)).where(given, 0.0)

    def begin(self) -> None:
        """Gradients of a step are there."""
        self._before, self._factors, self._stepped = self._sizes(), torch.zeros(0), set()
        model = self._model()
        self._waiting = {id(p) for p in model.parameters() if p.grad is not None} if model is not None else set()

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps; RuntimeError if it takes products of all gradients, or its options were lost."""
        wanted = optimizer.defaults.keys() - {"differentiable"}  # which torch adds to any that loads a state
        if lost := sorted({name for group in optimizer.param_groups for name in wanted - group.keys()}):
            raise RuntimeError(
                f"lost-options: {type(optimizer).__name__} has no {lost[0]} in a group of parameters. A state of "
                "torch.distributed.checkpoint that is not flat has the groups of one stage of a pipeline. Save and "
                "load with StateDictOptions(flatten_optimizer_state_dict=True), or by pdv.loops.checkpoint."
            )
        its = map(id, optimizer.param_groups[0]["params"])
        if isinstance(optimizer, torch.optim.LBFGS) and not self._held.isdisjoint(its):
            raise RuntimeError(
                "stages-apart: LBFGS takes products of all gradients, and each stage of a pipeline has its own alone. "
                "Take an optimizer that treats elements one by one, such as AdamW, or a plan without stages."
            )
        known = self._before > 0
        factors = self._sizes()[known] / self._before[known]
        self._stepped |= self._waiting & {id(p) for group in optimizer.param_groups for p in group["params"]}
        if len(factors) and factors.max() > 0:  # else they are dropped, and another model's optimizer steps
            self._factors = factors

    def found(self) -> Tensor:
        """[4, stages], flat: this stage's factor, 0 if unknown or not one; if what has gradients stepped, if nothing
        of it did, neither if some did or nothing has; if it trains.
        """
        found = torch.zeros(4, self._stage.size)
        least, most = (self._factors.min(), self._factors.max()) if len(self._factors) > 1 else (0.0, 1.0)
        if most - least < 1e-2 * most:
            found[0, self._stage.rank] = float(most)
        if self._waiting:
            found[1, self._stage.rank] = self._stepped == self._waiting
            found[2, self._stage.rank] = not self._stepped
        model = self._model()
        assert model is not None, "which runs"
        found[3, self._stage.rank] = any(p.requires_grad for p in model.parameters()) or any(
            module._forward_hooks  # noqa: SLF001  # of an adapter
            for module in model.modules()
            if module is not model
        )
        return found.flatten()

    def check(self, found: Tensor) -> None:
        """Compare what all stages found.

        Raises:
            RuntimeError: if stages scaled by different factors, or only some stepped; or none trains anything.
        """
        factors, stepped, left_out, trained = found.cpu().view(4, -1)
        if not trained.any():
            raise nothing_trained("all parameters of all stages are frozen")
        known = factors[factors > 0]
        if (stepped.any() and left_out.any()) or (len(known) > 1 and known.max() - known.min() > 1e-2 * known.max()):
            raise RuntimeError(
                f"stages-apart: behind the last step gradients were scaled by {factors.tolist()} on the stages of this "
                f"pipeline (0: not told), and {[not each for each in left_out.tolist()]} stepped. A norm that torch's "
                "clip_grad_norm_ or a loop takes, or an infinity that a GradScaler finds, is of one stage. Call "
                "model.clip_grad_norm_, decide about steps on all ranks alike, and load a checkpoint. Of optimizers "
                "that step in turns, call zero_grad and then step of those whose turn it is not."
            )
