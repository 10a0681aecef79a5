"""What a training loop does with a sharded model beside its steps: rows of a batch, clipping, checks.

Entry points: the methods of ``ParallelModule`` of the same names.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .calls import check_divisible, check_ranks, checksum
from .gradients import Leaves
from .kernels.dtensors import mend_distributed_tensors
from .kernels.exits import wait_at_exit
from .kernels.launched import join, own_gpu
from .kernels.meetings import meet
from .kernels.refused import axes_alike, nothing_trained, read_inputs
from .kernels.scaled import passes
from .kernels.states import check_loaded_states, check_pieces
from .kernels.steps import cut, is_same_on
from .losses import LossFn, batch_loss, begin_weight, reduction_of
from .optimizers import look_at_steps
from .parallel import Axis, combine, own_block, partition
from .stored import Held, Weights, cut_over, local_piece

if TYPE_CHECKING:
    from .runtime import Mesh, ParallelModule

Batch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Target = Batch | None
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def start_processes(kind: torch.device) -> torch.device:
    """Join the processes that torchrun started, where no group is there; the device of this one.

    NCCL starts the kernels of all groups of a device in the order in which they are issued, which is one on all ranks:
    kernels that have no room beside each other then wait for none that waits for them.
    """
    if kind.type == "cuda":
        kind = own_gpu(kind)
        torch.cuda.set_device(kind)
    if not dist.is_initialized():
        join("nccl" if kind.type == "cuda" else "gloo")
    wait_at_exit()
    _watch_steps()
    check_loaded_states()
    mend_distributed_tensors(kind.type)
    seed = torch.tensor(torch.initial_seed() % 2**63, device=kind if kind.type == "cuda" else "cpu")
    dist.broadcast(seed, 0)
    seed_draws(int(seed))
    return kind


def seed_draws(seed: int) -> None:
    """Masks of dropout, and noise, of this package's programs are drawn by a seed, the same on all ranks."""
    if (operators := _operators()) is not None:
        operators.seed[0] = seed


def _operators() -> Any:  # Any: a module, as it stands beside programs that need it; None beside others
    return sys.modules.get(f"{__package__}.operators")


def apply_to_all(model: nn.Module, fn: Callable[[nn.Module], None], apply: Callable[[Any], Any]) -> Any:
    """As ``ParallelModule.apply``, which is ``apply``."""

    def state() -> list[Any]:
        held = [
            (id(x), x.requires_grad, int(checksum(local_piece(x)))) for x in (*model.parameters(), *model.buffers())
        ]
        named = [(name, x) for each in model.modules() for name, x in vars(each).items() if isinstance(x, dict)]
        hooks = [len(x) for name, x in named if name.endswith("_hooks")]
        return [held, [each.training for each in model.modules()], hooks]

    before = state()
    apply(fn)
    if state() == before:
        raise RuntimeError(
            "nothing-applied: apply changed no parameter, buffer or mode. This program has none of the source's "
            "modules (nn.Linear, …), only their parameters. Apply it to the source, and call "
            "load_full_state_dict(source.state_dict()); to look at modules alone, walk model.modules()."
        )
    return model


def check_names(model: nn.Module, state: Mapping[str, Any], *, assign: bool) -> None:
    """Whether a state has a name of this program's own, and of what is cut the pieces of this rank.

    Raises:
        ValueError: if not; without a name torch would list all, or with ``strict=False`` load nothing.
    """
    if assign:
        raise ValueError(
            "assigned-state: load_state_dict(assign=True) would put other tensors in place of parameters, whose "
            "gradients nobody sums. Allowed: assign=False, which copies. Leave it out."
        )
    own = model.state_dict().keys()
    if own and not own & state.keys():
        raise ValueError(
            f"other-names: a state of {next(iter(state), 'nothing')}, … and no name of this program's. Allowed: what "
            "state_dict() of this model gave. Call model.load_full_state_dict(state) for the source's names."
        )
    check_pieces(state, model.parameters())


@contextmanager
def losses_add_up(model: Any, given: Any, own: Any = None) -> Iterator[None]:  # Any: any module; see ``map_tensors``
    """Context of a step, which takes the loss of the whole batch.

    given: what all ranks must be given alike. own: rows of this rank, which those have that differ along other axes.
    """
    if not torch.is_grad_enabled():
        raise nothing_trained("train_step runs where gradients are off (torch.no_grad(), torch.inference_mode())")
    before, model.own_loss = getattr(model, "own_loss", None), "sum"
    watched = getattr(model, "evaluation", None)
    try:
        if watched is not None:
            check_ranks(model, tensors_in(given), tensors_in(own), "train_step")
            watched.is_step = True  # its passes are of what was compared
        yield
    finally:
        model.own_loss = before
        if watched is not None:
            watched.is_step = False


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
        own.kept, own.sources = parameter.kept, parameter.sources  # type: ignore[attr-defined]
        if (leaves := getattr(parameter, "leaves", None)) is not None:
            own.leaves = Leaves(copied.mesh.sums, leaves.cuts)  # type: ignore[attr-defined]
    return copied


def train_step(
    model: nn.Module,
    inputs: Batch,
    target: Target,
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
    given, wanted = read_batch(model, inputs, target)
    if rows == "local":
        check_rows(given, batch_axes)
        given = [combine_rows(x, batch_axes) for x in given]
    else:
        check_divisible(tensors_in(wanted), batch_axes)
    with losses_add_up(model, given, wanted) if rows == "local" else losses_add_up(model, (given, wanted)):
        own = wanted if rows == "local" else shard_batch(wanted, batch_axes)
        summed = reduction_of(loss_fn, reduction)
        weigh = begin_weight(loss_fn, own, batch_axes, summed)
        mesh: Mesh | None = getattr(model, "mesh", None)
        sums, alike = None if mesh is None else mesh.sums, axes_alike(mesh, batch_axes)
        shows = bool if sums is None else partial(sums.shows, model, given, batch_axes)
        share, whole = batch_loss(loss_fn, model(*given), own, batch_axes, summed, weigh, sums, alike, shows=shows)
        with nullcontext() if sums is None else sums.only_pass():
            share.backward()  # type: ignore[no-untyped-call]
    try:
        return whole()
    except Exception:  # of a loss, on some rank: the others' gradients are of another batch
        model.zero_grad()
        raise


# ---- Rows of the batch, cut along axes slow to fast ----


def read_batch(model: nn.Module, inputs: Batch, target: Target) -> tuple[list[Tensor], Any]:
    """The inputs in the program's order, and a target as ``loss_fn`` gets rows of it, in the form that it has.

    Raises:
        ValueError: if inputs are not as many as the program's, of other names, or no tensors.
    """
    wanted = target if target is None or isinstance(target, Tensor | Mapping | list | tuple) else list(target)
    if not isinstance(inputs, Mapping) and not getattr(model, "takes", ()):
        return [inputs] if isinstance(inputs, Tensor) else list(inputs), wanted
    return read_inputs(inputs, getattr(model, "takes", ()) or tuple(signature(model.forward).parameters)), wanted


def own_rows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The rows of this rank, of those of the whole batch."""
    for axis in axes:
        if axis.size > 1 and x.dim():  # a number is the same of all rows
            x = partition(x, 0, axis) if x.requires_grad else own_block(x, 0, axis)
    return x


def map_tensors(batch: Any, take: Callable[[Tensor], Any]) -> Any:  # Any: tensors in dicts, lists, tuples, and others
    """The same, of each tensor what ``take`` gives."""
    if isinstance(batch, Tensor):
        return take(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: map_tensors(x, take) for key, x in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(x, take) for x in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(x, take) for x in batch)
    return batch


def tensors_in(batch: Any) -> list[Tensor]:  # Any: as of ``map_tensors``
    """All of them, in order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def shard_batch(batch: Any, axes: Sequence[Axis]) -> Any:  # Any: as of ``map_tensors``
    """The same, of each tensor the rows of this rank."""
    return map_tensors(batch, partial(own_rows, axes=axes))


def combine_rows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The whole batch from the rows of all ranks."""
    for axis in reversed(axes):
        x = combine(x, 0, axis)
    return x


def check_rows(inputs: Sequence[Tensor], axes: Sequence[Axis]) -> None:
    """Whether all ranks were given equally many rows.

    Raises:
        ValueError: if they were not.
    """
    rows = torch.tensor([[x.size(0) for x in inputs]], device=inputs[0].device)
    given = combine_rows(rows, axes)
    if (given != rows).any():
        raise ValueError(
            f"uneven-rows: the ranks along {', '.join(axis.name for axis in axes)} were given {given.tolist()} rows "
            "of the inputs. Each must get as many as the others. Fill up, or drop, the last, smaller batch."
        )


# ---- Over all ranks ----


@torch.no_grad()
def clip_grad_norm(model: ParallelModule, max_norm: float, norm_type: float, *, must_be_finite: bool) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; the norm before. RuntimeError as torch's."""
    by_axes: dict[tuple[Axis, ...], list[Tensor]] = {}
    for p in model.own_parameters():
        if p.grad is not None:
            by_axes.setdefault(cut_over(model.mesh.axes, p.grad), []).append(local_piece(p.grad))
    is_max = math.isinf(norm_type)
    powers = [torch.zeros((), device=model.mesh.device)]
    for axes, grads in by_axes.items():
        norms = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]).to(model.mesh.device)
        powers.append(_sum_over(norms.amax() if is_max else (norms**norm_type).sum(), axes, is_max=is_max))
    power = torch.stack(powers).amax() if is_max else torch.stack(powers).sum()
    # In one type: a stage that has no gradients, all frozen, cannot tell that of the others'.
    power = _sum_over(power.double(), (model.mesh.stage,), is_max=is_max).to(power.dtype)
    total = power if is_max else power ** (1 / norm_type)
    if must_be_finite and not total.isfinite():  # on all ranks alike
        raise RuntimeError(f"no-finite-norm: the norm of all gradients is {total.item()}. Leave this batch out.")
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


@cache
def _watch_steps() -> None:
    look_at_steps(_check_own_parameters)


@torch.no_grad()
def _check_own_parameters(optimizer: Optimizer) -> None:
    """Before steps 1, 2, 4, 8, …: whether ranks with other rows have the same in parameters that are no program's.

    Raises:
        RuntimeError: if they do not, or have other gradients of them.
    """
    given = [x for group in optimizer.param_groups for x in group["params"]]
    own = [x for x in given if x.requires_grad and not isinstance(x, DTensor)]  # leaves' shards need no gradient
    # An optimizer of its own need not step on every rank, unless it trains what stands behind a model's rows.
    if not own or not cut or not (any(isinstance(x, DTensor) for x in given) or _reached(own)):
        return
    _steps[optimizer] = count = _steps.get(optimizer, 0) + 1
    if count & (count - 1):
        return
    found = torch.stack(
        [checksum(x).to(own[0].device) for p in own for x in (p, p.new_zeros(0) if p.grad is None else p.grad)]
    )
    for axis in cut:
        for at in (~is_same_on(axis, found)).nonzero()[:1].flatten().tolist():
            raise RuntimeError(
                f"own-parameters-apart: {'the gradient of ' if at % 2 else ''}a parameter {list(own[at // 2].shape)} "
                f"that is not the model's, such as a head's, differs between the ranks along {axis.name}, each of "
                "which has other rows. Seed ranks alike before you make it, and call model.sum_over_data("
                "head.parameters()) once, before training; or sum these gradients before the step."
            )


def _reached(own: Sequence[Tensor]) -> bool:
    """Whether a backward pass that went on into a cut batch gave some of them their gradients; told from step 2 on."""
    for parameter in own:
        if not hasattr(parameter, "last_pass"):
            parameter.last_pass = -1  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_note_pass)  # type: ignore[no-untyped-call]
    return any(parameter.last_pass in passes for parameter in own)  # type: ignore[attr-defined]


def _note_pass(parameter: Tensor) -> None:
    parameter.last_pass = torch._C._current_graph_task_id()  # type: ignore[attr-defined]  # noqa: SLF001


def self_check(
    model: ParallelModule, inputs: Batch, target: Target, loss_fn: LossFn, tolerance: float
) -> dict[str, float]:
    """As ``ParallelModule.self_check``."""
    meet(model, "self_check")
    if any(p.grad is not None for p in model.parameters()):
        raise RuntimeError("gradients-present: self_check makes gradients and drops them. Call zero_grad before it.")
    if getattr(model, "is_under_way", False):
        raise RuntimeError("batch-under-way: self_check would end it. Call drain, and step, before it.")
    before = [b.clone() for b in model.buffers()]
    stored = model.mesh.origins[0][1]
    state = model.whole(lambda tensor: tensor.detach(), rest=True)
    whole = Weights(Held(state, stored.file), stored.dtype)
    alone = type(model)(model.mesh.alone(), whole).train(model.training)  # type: ignore[arg-type]  # the model that build makes
    runs = []
    training = model.training
    held = getattr(_operators(), "steady", [False])
    held[0] = True
    try:
        for each in (model, alone):
            each.eval()  # masks of dropout would differ, and noise would
            each.evaluation.is_checked = True
            begun = each.train_step(inputs, target, loss_fn)
            loss = float(each.drain() if getattr(each, "is_under_way", False) else begun)  # type: ignore[operator]  # of it
            runs.append((loss, each.whole(lambda tensor: tensor.grad, rest=False)))
            each.zero_grad()
            each.train(training).evaluation.is_checked = False
    finally:
        held[0] = False
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
