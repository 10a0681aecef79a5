"""What a training loop does with a sharded model beside its steps: rows of a batch, clipping, checks.

Entry points: the methods of ``ParallelModule`` of the same names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .gradients import Leaves, local_piece
from .losses import LossFn, batch_loss, check_rows, combine_rows, own_rows
from .parallel import Axis
from .stored import Held, Weights

if TYPE_CHECKING:
    from .runtime import ParallelModule

Batch = Tensor | Sequence[Tensor]


def start_processes(kind: torch.device) -> torch.device:
    """Join the processes that torchrun started; the device of this one.

    NCCL starts the kernels of all groups of a device in the order in which they are issued, which is one on all ranks:
    kernels that have no room beside each other then wait for none that waits for them.
    """
    if kind.type == "cuda":
        kind = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(kind)
    if not dist.is_initialized():
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # from NCCL 2.26 on
        dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    return kind


def shard_batch(batch: Any, axes: Sequence[Axis]) -> Any:  # Any: tensors in dicts, lists, tuples, and what is none
    """The same, of each tensor the rows of this rank."""
    if isinstance(batch, Tensor):
        return own_rows(batch, axes)
    if isinstance(batch, Mapping):
        return type(batch)({key: shard_batch(x, axes) for key, x in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(shard_batch(x, axes) for x in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(shard_batch(x, axes) for x in batch)
    return batch


def check_inputs(
    wanted: Mapping[str, Sequence[int | str]],
    ways: Mapping[str, int],
    most: Mapping[str, int],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Sizes that a program names are those of its inputs.

    Raises:
        ValueError: if an input has others.
    """
    del model
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


def check_names(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Whether a state has a name of this program's own.

    Raises:
        ValueError: if it has none; torch would list all names, or with ``strict=False`` load nothing.
    """
    own = model.state_dict().keys()
    if own and not own & state.keys():
        raise ValueError(
            f"other-names: a state of {next(iter(state), 'nothing')}, … and no name of this program's. Allowed: what "
            "state_dict() of this model gave. Call model.load_full_state_dict(state) for the source's names."
        )


def copy_model(model: ParallelModule, memo: dict[int, Any]) -> ParallelModule:
    """What ``copy.deepcopy`` gives."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    copied = memo[id(model)] = type(model).__new__(type(model))
    try:
        for parameter, _ in held:
            parameter.grad = None  # torch cannot copy those that are DTensors
        copied.__setstate__(deepcopy(model.__getstate__(), memo))  # type: ignore[no-untyped-call]
    finally:
        for parameter, grad in held:
            parameter.grad = grad
    for (parameter, _), own in zip(held, copied.parameters(), strict=True):
        if (leaves := getattr(parameter, "leaves", None)) is not None:
            own.leaves = Leaves(copied.mesh.sums, leaves.cuts)  # type: ignore[attr-defined]
    return copied


def train_step(
    model: nn.Module,
    inputs: Batch,
    target: Batch,
    loss_fn: LossFn,
    batch_axes: Sequence[Axis],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    rows: Literal["global", "local"] = "global",
) -> Tensor:
    """As ``ParallelModule.train_step``, of any model.

    ``batch_axes``, slow to fast, are those along which its output is Shard(0); along the others it is Invariant. With
    ``rows="local"`` ranks that differ only along the others pass the same rows.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if rows == "local":
        check_rows(inputs, batch_axes)
        inputs = [combine_rows(x, batch_axes) for x in inputs]
    elif isinstance(target, Tensor):
        target = own_rows(target, batch_axes)
    else:
        target = [own_rows(y, batch_axes) for y in target]
    loss = batch_loss(loss_fn, model(*inputs), target, batch_axes, reduction)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# ---- Over all ranks ----


@torch.no_grad()
def clip_grad_norm(model: ParallelModule, max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; the norm before."""
    by_axes: dict[tuple[Axis, ...], list[Tensor]] = {}
    for p in model.own_parameters():
        if p.grad is not None:
            by_axes.setdefault(_cut_over(model, p.grad), []).append(local_piece(p.grad))
    is_max = math.isinf(norm_type)
    powers = [torch.zeros((), device=model.mesh.device)]
    for axes, grads in by_axes.items():
        norms = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]).to(model.mesh.device)
        powers.append(_sum_over(norms.amax() if is_max else (norms**norm_type).sum(), axes, is_max=is_max))
    power = torch.stack(powers).amax() if is_max else torch.stack(powers).sum()
    power = _sum_over(power, (model.mesh.stage,), is_max=is_max)
    total = power if is_max else power ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            piece = local_piece(p.grad)
            piece.mul_(scale.to(piece.device))
    return total


def _sum_over(x: Tensor, axes: Sequence[Axis], *, is_max: bool) -> Tensor:
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=axis.group)
    return x


def _cut_over(model: ParallelModule, x: Tensor) -> tuple[Axis, ...]:
    """The axes along which ranks hold different pieces."""
    placements = x.placements if isinstance(x, DTensor) else ()
    return tuple(a for a, placed in zip(model.mesh.axes, placements, strict=False) if isinstance(placed, Shard))


@torch.no_grad()
def check_in_sync(model: ParallelModule) -> None:
    """Whether ranks that hold the same parameter or buffer hold the same bits: one small all-reduce for each axis.

    Raises:
        RuntimeError: naming those that differ.
    """
    held = [*model.named_parameters(), *model.named_buffers()]
    for axis in model.mesh.axes:
        same = [(name, local_piece(x)) for name, x in held if axis not in _cut_over(model, x)]
        if axis.size == 1 or not same:
            continue
        found = torch.stack([_checksum(x).to(model.mesh.device) for _, x in same])
        ends = torch.cat([found, -found])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
        largest, least = ends[: len(same)], -ends[len(same) :]
        if names := [name for (name, _), differs in zip(same, (largest != least).tolist(), strict=True) if differs]:
            raise RuntimeError(
                f"ranks-differ: {', '.join(names)} should be the same on all ranks of axis {axis.name}, and is not. "
                "A random number, a hook or a change by hand was another on each. Load a checkpoint."
            )


def _checksum(x: Tensor) -> Tensor:
    """Of the bits, so that no two roundings are the same; int64."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (
        x.contiguous().view(-1).view(kinds[x.element_size()]).sum(dtype=torch.int64)
        if x.numel()
        else x.new_zeros((), dtype=torch.int64)
    )


def self_check(
    model: ParallelModule, inputs: Batch, target: Batch, loss_fn: LossFn, tolerance: float
) -> dict[str, float]:
    """As ``ParallelModule.self_check``."""
    if any(p.grad is not None for p in model.parameters()):
        raise RuntimeError("gradients-present: self_check makes gradients and drops them. Call zero_grad before it.")
    before = [b.clone() for b in model.buffers()]
    stored = model.mesh.origins[0][1]
    state = model.whole(lambda tensor: tensor.detach(), rest=True)
    whole = Weights(Held(state, stored.file), stored.dtype)
    alone = type(model)(model.mesh.alone(), whole).train(model.training)  # type: ignore[arg-type]  # the model that build makes
    runs = []
    training = model.training
    for each in (model, alone):
        each.eval()  # masks of dropout would differ
        begun = each.train_step(inputs, target, loss_fn)
        drain: Callable[[], Tensor] | None = getattr(each, "drain", None) if getattr(each, "two", None) else None
        loss = float(begun if drain is None else drain())
        runs.append((loss, each.full_gradients()))
        each.zero_grad()
        each.train(training)
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    (loss, gradients), (wanted, wanted_gradients) = runs
    norm, wanted_norm = (math.sqrt(sum(float(g.double().square().sum()) for g in all_.values())) for _, all_ in runs)
    largest = max((float(g.abs().max()) for g in wanted_gradients.values()), default=0.0)
    worst = max((float((gradients[name] - g).abs().max()) for name, g in wanted_gradients.items()), default=0.0)
    found = {
        "loss": abs(loss - wanted) / max(abs(wanted), 1e-30),
        "gradient_norm": abs(norm - wanted_norm) / max(wanted_norm, 1e-30),
        "gradient": worst / max(largest, 1e-30),
    }
    if not max(found.values()) <= tolerance:
        raise RuntimeError(
            f"self-check-failed: {found} from the model on one device, relative. Allowed: {tolerance}. Where that is "
            "rounding, as in bfloat16, pass a larger tolerance; else report it."
        )
    return found
