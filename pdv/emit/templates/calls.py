"""What is looked at in each call of a model, and each step of its optimizers. Entry point: ``watch_calls``.

Ranks are given the same batch, or rows differ silently: now and then their checksums are compared. ``training.py`` and
``accumulate.py`` run steps; here is what is refused before and behind passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels.meetings import meet
from .kernels.refused import input_gradients_apart, warn_of_means
from .kernels.scaled import asked_scale, check_scales, hand_out
from .kernels.steps import check_changes, check_steps, cut, is_same_on, watch_steps
from .parallel import Axis
from .stored import cut_over, local_piece

if TYPE_CHECKING:
    from .runtime import ParallelModule

_APART = 1e-3  # of a norm, by which gradients of one value are rounded otherwise on other devices at most
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BESIDE = torch.zeros((), requires_grad=True).view(())  # what ``backward`` reaches, and nobody asks for
_DIFFER = "ranks-differ: {} should be the same on several ranks, and is not: a rank alone drew, clipped or changed it. "
_FIRST = 8  # passes of which each is compared: loops repeat in periods, few of which a power of two is a multiple of
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def check_inputs(
    wanted: Mapping[str, Sequence[int | str]],
    ways: Mapping[str, int],
    most: Mapping[str, int],
    model: ParallelModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, in the type that the program computes in, whose sizes are those that it names.

    Raises:
        ValueError: if an input has others.
    """
    named: dict[str, int] = {}
    given = {**dict(zip(wanted, args, strict=False)), **kwargs}
    for name, shape in wanted.items():
        sizes = list(given[name].shape) if name in given else []
        for size, found in zip(shape, sizes, strict=False):
            if isinstance(size, str):
                named.setdefault(size, found)
        allowed = [named.get(str(size), size) for size in shape]
        if name in given and sizes != allowed:
            form = f"[{', '.join(map(str, shape))}]"
            values = ", ".join(f"{size} = {found}" for size, found in named.items() if size in shape)
            raise ValueError(
                f"wrong-size: input {name} has shape {sizes}. This program takes {form}"
                + (f", and {values} here" if values else "")
                + ". Pass inputs of these sizes, or plan the model again at others."
            )
    for name, found in named.items():
        if found % ways.get(name, 1) or found > most.get(name, found):
            what = (
                f"up to {most[name]}" if found > most.get(name, found) else f"in multiples of {ways[name]}: it is cut"
            )
            raise ValueError(
                f"wrong-size: {name} = {found} in the shapes of the inputs. This program takes {name} {what}."
            )
    cast = cast_inputs(model, given)
    return tuple(cast.get(name, x) for name, x in zip_longest(list(wanted)[: len(args)], args)), {
        name: cast[name] for name in kwargs
    }


def check_divisible(target: Sequence[Tensor], axes: Sequence[Axis], count: int = 1) -> None:
    """Whether rows of a batch divide into ``count`` micro-batches, and each over the ranks: a fact on all ranks alike.

    Raises:
        ValueError: if they do not.
    """
    parts = [f"{count} micro-batches"] if count > 1 else []
    parts += [f"{axis.name} {axis.size}" for axis in axes if axis.size > 1]
    ways = count * math.prod(axis.size for axis in axes)
    for x in target:
        if x.dim() and x.size(0) % ways:
            slug = "uneven-micro-batches" if x.size(0) % count else "uneven-cut"
            raise ValueError(
                f"{slug}: {x.size(0)} rows in {' x '.join(parts)}. Their number must be a multiple of {ways} = "
                f"{' x '.join(parts)}. Pass batches of another size; drop the last, smaller one."
            )


def cast_inputs(model: ParallelModule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Floating-point inputs in the type that a model computes in, but those that it takes in one of their own.

    That is the type in which it reads its parameters, where these have one; a model without any takes all as it is.
    """
    own = model.own_types
    floats = {name for name, x in given.items() if isinstance(x, Tensor) and x.dtype in _FLOATS and name not in own}
    first = next(model.parameters(), None)  # of whose type most inputs are: all need not be looked at
    if first is not None and model.mesh.rounding is None and all(given[name].dtype == first.dtype for name in floats):
        return dict(given)
    to = _type_of(model) if floats else None
    return {name: x.to(to) if name in floats and to is not None else x for name, x in given.items()}


def _type_of(model: ParallelModule) -> torch.dtype | None:
    if model.mesh.rounding is not None and model.mesh.rounding.dtype is not None:
        return model.mesh.rounding.dtype
    tensors: list[Tensor] = [*model.parameters()] or [x for x, _ in model.mesh.origins]
    found = {x.dtype for x in tensors if x.is_floating_point()}
    return found.pop() if len(found) == 1 else None


# ---- What is looked at in a call ----


@dataclass
class Evaluation:
    """Of a model in evaluation: its buffers, and their values before the pass that runs.

    is_checked: whether it may move buffers, and whoever calls it knows that ranks were given the same; is_safe: whether
    a pass did not move them. calls: how many there were, and in training of those with inputs whose gradients are
    asked for (asked_calls); is_step: whether passes are of a step, which compared ranks.
    """

    is_checked: bool = False
    is_safe: bool = False
    calls: int = 0
    asked_calls: int = 0
    is_step: bool = False
    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def watch_calls(model: ParallelModule) -> Evaluation:
    """Compare ranks before its forward passes and steps, and hand its outputs out for losses of the caller's own."""
    watch_steps()
    model.register_forward_pre_hook(_before_call, with_kwargs=True)
    model.register_forward_hook(_after_call)
    if model.mesh.ranks is not None:
        cut[:] = [axis for axis in model.batch_axes if axis.size > 1]
    return Evaluation()


def _before_call(
    model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    model.evaluation.kept = _kept_buffers(model)
    if not model.evaluation.is_step:
        check_ranks(model, [*args, *(kwargs[name] for name in sorted(kwargs))])
    axes = [axis for axis in model.mesh.axes if axis.size > 1]
    if not axes or not torch.is_grad_enabled() or not any(map(_is_asked, (*args, *kwargs.values()))):
        return None
    warn_of_means((*args, *kwargs.values()))
    ask = partial(_ask, axes=axes, scale=asked_scale(model))
    return tuple(map(ask, args)), {name: ask(x) for name, x in kwargs.items()}


def _is_asked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _ask(x: Any, axes: Sequence[Axis], scale: int) -> Any:  # Any: a tensor, or what a program ignores
    return _Asked.apply(x, _BESIDE, axes, scale) if _is_asked(x) else x  # type: ignore[no-untyped-call]


def _after_call(model: ParallelModule, args: tuple[Any, ...], outputs: Any) -> Any:
    del args
    _check_buffers(model)
    return hand_out(outputs, model, model.own_loss)


class _Asked(torch.autograd.Function):
    """An input whose gradient is asked for: the same tensor.

    No program sums what its ranks have of an input's gradient, so some have a part of it where ranks use it apart.
    ``torch.autograd.grad`` gives the derivative of what it is given, as of a sum of outputs; a penalty of it is that of
    all rows, on every rank. What ``backward`` adds to ``x.grad`` is of the loss that parameters have gradients of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, axes: Sequence[Axis], scale: int) -> Tensor:
        del beside
        ctx.axes, ctx.scale = axes, scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        with torch.no_grad():
            norm = grads[0].norm(dtype=torch.float64 if grads[0].device.type == "cpu" else torch.float32)
            for axis in ctx.axes:
                ends = torch.stack([norm, -norm])
                dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
                if ends[0] + ends[1] > _APART * ends[0]:
                    raise input_gradients_apart(grads[0].shape, axis.name)
        is_of_all = torch._C._will_engine_execute_node(ctx.next_functions[1][0])  # noqa: SLF001  # False in autograd.grad
        return grads[0] if is_of_all else grads[0] * ctx.scale, None, None, None


def _kept_buffers(model: ParallelModule) -> dict[str, tuple[Tensor, Tensor]]:
    """Buffers of floats, and their values before a pass in evaluation, unless an earlier one left them alone."""
    now = model.evaluation
    if model.training or now.is_checked or now.is_safe or torch.compiler.is_compiling():
        return {}
    return {name: (x, x.clone()) for name, x in model.named_buffers() if x.is_floating_point()}


@torch.no_grad()
def _check_buffers(model: ParallelModule) -> None:
    """Whether a pass in evaluation left them alone; then no later one is looked at.

    Raises:
        RuntimeError: if it did not; they are as they were then.
    """
    kept, model.evaluation.kept = model.evaluation.kept, {}
    # torch's batch norm counts no version
    moved = [name for name, (x, old) in kept.items() if not torch.equal(x.nan_to_num(), old.nan_to_num())]
    for x, before in kept.values():
        x.copy_(before) if moved else None
    model.evaluation.is_safe = bool(kept) and not moved
    if moved:
        raise _moved(model, moved)


def _moved(model: ParallelModule, names: Sequence[str]) -> RuntimeError:
    """Of buffers that a pass in evaluation moved, by their names in the program; those of the source tell norms."""
    what = f"a pass in evaluation (model.eval()) moved {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    own = {id(x) for name, x in model.named_buffers() if name in names}
    sources = [name for x, stored in model.mesh.origins if id(x) in own for name in stored.names()]
    mend = (
        'To evaluate, plan module.eval() with mode="infer" and call '
        "load_full_state_dict(this_model.full_state_dict()) of that program"
    )
    if any(name.rpartition(".")[2] in {"running_mean", "running_var"} for name in sources):
        return RuntimeError(
            f"batch-statistics: {what}: this program takes the statistics of the batch in its batch norms, whatever "
            f"the mode. Allowed: model.train(). {mend}; to train by statistics that stay as they are, plan "
            "module.eval()."
        )
    return RuntimeError(
        f"moved-buffers: {what}: this program was read of a module that trains, and sets in every pass what that one "
        f"does, whatever the mode. Allowed: model.train(). {mend}; to train without such changes, plan module.eval()."
    )


# ---- Ranks, compared ----


def check_ranks(
    model: ParallelModule, given: Sequence[Any], own: Sequence[Tensor] = (), what: str = "a forward pass"
) -> None:
    """Before passes or steps 1 to 8, 16, 32, … of training or of evaluation: whether ranks were given the same.

    Those with inputs through which gradients go back, as to another model, are counted by themselves, too. Before 1, 2,
    4, 8, … of training also whether ranks have the same weights, of which behind the first the first rank's are taken,
    with a warning, and whether their optimizers stepped alike.

    Raises:
        RuntimeError: if they do not.
    """
    in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # a pass of ``checkpoint``, done again
    now = model.evaluation
    if model.mesh.ranks is None or now.is_checked or torch.compiler.is_compiling() or in_backward:
        return
    is_training = model.training and torch.is_grad_enabled()
    counts: Any = model if is_training else now
    counts.calls += 1
    count: int = counts.calls
    is_asked = is_training and any(map(_is_asked, given))
    now.asked_calls += is_asked
    if count <= _FIRST or _is_power_of_two(count) or (is_asked and _is_power_of_two(now.asked_calls)):
        meet(model, f"{what} (number {count} of {'training' if is_training else 'evaluation'})")
        check_same(model, given, own)
        if is_training:
            check_trained(model)
        if is_training and _is_power_of_two(count):
            compare_weights(model, go_on=count > 1)


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


@torch.no_grad()
def check_same(model: ParallelModule, given: Sequence[Any], own: Sequence[Tensor] = ()) -> None:
    """Whether ranks have the same in ``given``, and those of the same rows in ``own``: a small all-reduce an axis.

    Raises:
        RuntimeError: if they do not, on all ranks.
    """
    found = torch.cat([_sums_of(given, model.mesh.device), _sums_of(own, model.mesh.device)])
    differs = torch.zeros_like(found[:1])
    for axis in sorted((*model.mesh.axes, model.mesh.stage), key=lambda axis: axis in model.batch_axes):
        if axis.size > 1:  # along the batch's last, which tell of ``own`` of the others
            numbers = found[:2] if axis in model.batch_axes else found
            differs |= ~is_same_on(axis, torch.cat([numbers, differs])).all()
    if differs:
        shapes = [list(x.shape) for x in (*given, *own) if isinstance(x, Tensor)]
        raise RuntimeError(
            f"other-rows: ranks were given different inputs or targets (here of shapes {shapes}), or only some called "
            "the model, as in evaluation on rank 0 alone. Every rank calls it with the whole batch, drawn in one order "
            'on all (one seed, no DistributedSampler), or passes its own rows to train_step(..., rows="local").'
        )


@torch.no_grad()
def check_trained(model: ParallelModule) -> None:
    """Whether ranks train the same parameters: a small all-reduce an axis.

    Raises:
        RuntimeError: if they do not, on all ranks: gradients that one does not have the others would wait for.
    """
    trained = torch.tensor([crc32(bytes(p.requires_grad for p in model.parameters()))], device=model.mesh.device)
    for axis in model.mesh.axes:
        if axis.size > 1 and not is_same_on(axis, trained).all():
            raise RuntimeError(
                f"frozen-apart: parameters are frozen on some of the ranks along {axis.name} alone, which sum their "
                "gradients, or hold other parts of them. Freeze and thaw on all alike: by a number that all ranks "
                "have, such as the loss that train_step returns (one of your own is of a rank's rows)."
            )


def _sums_of(given: Sequence[Any], device: torch.device) -> Tensor:
    """[2]: of sizes and of checksums, so weighed that their order counts; as many numbers of any number of tensors."""
    found = torch.zeros(2, dtype=torch.int64, device=device)
    for x in given:
        if isinstance(x, Tensor) and x.element_size() in _BITS:
            found = 3 * found + torch.stack([torch.tensor(x.numel() + 1, device=device), checksum(x).to(device)])
    return found


def check_in_sync(model: ParallelModule) -> None:
    """As ``ParallelModule.check_in_sync``."""
    meet(model, "check_in_sync")
    compare_weights(model)


@torch.no_grad()
def compare_weights(model: ParallelModule, *, go_on: bool = False) -> None:
    """Whether ranks that hold the same parameter or buffer hold the same bits: two small all-reduces an axis.

    Before whole weights are handed out, too: behind the last comparison of a training, a rank alone may step.

    Raises:
        RuntimeError: naming those that differ, on all ranks; to ``go_on`` all take the first one's, with a warning.
            Or if ranks that hold other parts stepped otherwise, of which no comparison of weights tells; with a warning
            if they were changed otherwise.
    """
    if (tied := getattr(model, "tied", None)) is not None:
        tied.check(model.mesh, checksum, go_on=go_on)  # first: what is raised below one stage's ranks alone may raise
    check_scales(model)
    whole = {id(tensor) for tensor, _ in model.mesh.origins}  # constants may be cut, and nothing sets them
    held = [*model.named_parameters(), *((name, x) for name, x in model.named_buffers() if id(x) in whole)]
    if model.mesh.ranks is None or not held:
        return
    axes = model.mesh.axes
    along = [(axis, [axis not in cut_over(axes, x) for _, x in held]) for axis in axes if axis.size > 1]
    cutting = [axis for axis, same in along if not all(same)]
    check_steps(model.mesh.sums, cutting, model.mesh.device)
    parts = [x for number, (_, x) in enumerate(held) if not all(same[number] for _, same in along)]
    check_changes(model, parts, cutting, model.mesh.device)
    sums = torch.stack([checksum(local_piece(x)).to(model.mesh.device) for _, x in held])
    differ = torch.zeros_like(sums)
    for axis, same in along:
        differ += ~is_same_on(axis, sums) & torch.tensor(same, device=sums.device)
    for axis, _ in along:
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=axis.group)
    names = [name for (name, _), other in zip(held, differ.tolist(), strict=True) if other]
    told = _DIFFER.format(", ".join(names))
    if names and not go_on:
        raise RuntimeError(told + "Load a checkpoint.")
    if names:
        warnings.warn(told + "All go on with the first one's.", stacklevel=2)
    for axis, same in along:
        for (name, x), holds in zip(held, same, strict=True):
            if holds and name in names:
                first = local_piece(x).contiguous()
                dist.broadcast(first, group=axis.group, group_src=0)
                local_piece(x).data.copy_(first)  # passes that backward waits for may hold it


def checksum(x: Tensor) -> Tensor:
    """Of the bits, so that no two roundings are the same; int64."""
    x = x.to_dense() if x.is_sparse else x
    if not x.numel():
        return x.new_zeros((), dtype=torch.int64)
    return x.contiguous().view(-1).view(_BITS[min(x.element_size(), 8)]).sum(dtype=torch.int64)
