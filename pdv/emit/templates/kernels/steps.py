"""What is looked at when optimizers step: their kind, and whether all ranks do the same. Entry: ``watch_steps``.

Ranks that hold other parts of a parameter have no value in common that tells whether they stepped alike. So each notes
its steps, their options among them, in one number, which ranks compare where they compare weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pdv.emit.templates.parallel import Axis
from pdv.emit.templates.stored import local_piece

if TYPE_CHECKING:
    from pdv.emit.templates.gradients import GradientSums
    from pdv.emit.templates.runtime import ParallelModule

cut: list[Axis] = []  # over which the batch of the last model on several ranks is cut
_ROUNDED = 1e-4  # of a loss, by which it is rounded otherwise on other ranks at most
_steps: WeakKeyDictionary[GradientSums, int] = WeakKeyDictionary()  # of each model: what its optimizers did
_changes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of its parts, as they were compared last
_loads: WeakKeyDictionary[GradientSums, int] = WeakKeyDictionary()  # states that optimizers of each model loaded
_OF_MATRICES = ("Adafactor", "Muon", "Shampoo", "SOAP")
_OF_NORMS = ("LAMB", "Lamb", "LARS", "Lars")

Step = tuple[tuple[Any, ...], dict[str, Any]]  # Any: the arguments of an optimizer's step


@cache
def watch_steps() -> None:
    """From now on, look at steps of optimizers."""
    register_optimizer_step_pre_hook(_check_whole)
    register_optimizer_step_pre_hook(_compare_losses)


def is_same_on(axis: Axis, found: Tensor) -> Tensor:
    """Of each whole number, whether the ranks of an axis have the same."""
    ends = torch.cat([found, -found])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
    largest, least = ends.chunk(2)
    return largest == -least


# ---- Ranks, compared ----


def note_step(optimizer: Optimizer, models: Iterable[GradientSums]) -> None:
    """An optimizer of these models' parameters steps."""
    done = repr([[len(group["params"]), *_options(group)] for group in optimizer.param_groups])
    for sums in models:
        sums.scaling.look(p for group in optimizer.param_groups for p in group["params"])
        _steps[sums] = crc32(done.encode(), _steps.get(sums, 0))


def note_load(optimizer: Optimizer) -> None:
    """An optimizer loads a state."""
    every = (getattr(p, "leaves", None) for group in optimizer.param_groups for p in group["params"])
    for sums in {leaves.sums for leaves in every if leaves is not None}:
        _loads[sums] = _loads.get(sums, 0) + 1


def _options(group: dict[str, Any]) -> list[str]:  # Any: as torch has them
    """Those that are numbers, or several; in few digits, for hosts may round otherwise. No device is waited for."""
    numbers = [
        float(number)
        for name, value in group.items()
        if name != "params"
        for number in (value if isinstance(value, tuple | list) else [value])
        if isinstance(number, int | float) or (isinstance(number, Tensor) and number.device.type == "cpu")
    ]
    return [f"{number:.6g}" for number in numbers]


def check_steps(sums: GradientSums, axes: Sequence[Axis], device: torch.device) -> None:
    """Whether the ranks along ``axes``, which hold other parts of parameters, stepped alike: an all-reduce an axis.

    Raises:
        RuntimeError: if they did not.
    """
    done = torch.tensor([_steps.get(sums, 0)], device=device)
    for axis in axes:
        if not is_same_on(axis, done).all():
            raise RuntimeError(
                f"steps-apart: optimizers did other things on the ranks along {axis.name}, each of which holds another "
                "part of parameters: only some stepped, or with other options, such as the learning rate. Decide about "
                "steps, and schedule, by a number that all ranks have, such as the loss that train_step returns (one "
                "of your own is of a rank's rows), and load a checkpoint."
            )


def check_changes(model: ParallelModule, parts: Sequence[Tensor], axes: Sequence[Axis], device: torch.device) -> None:
    """Warn where ranks along ``axes`` changed what they hold of ``parts`` unequally often since they were asked last.

    Told by autograd's counts of changes in place: ``load_state_dict`` and ``copy_`` are counted, ``x.data`` is not.
    States that optimizers of the model loaded are counted, too.
    """
    counted = [x for x in parts if not x.is_inference()]
    now = sum(_count(x) for x in counted) + _loads.get(model.mesh.sums, 0)
    made = torch.tensor([now - _changes.get(model, 0)], device=device)
    _changes[model] = now
    for axis in axes:
        if not is_same_on(axis, made).all():
            warnings.warn(
                f"parts-apart: parameters of which the ranks along {axis.name} hold parts, or an optimizer's state of "
                "them, were changed on some of them alone, as by load_state_dict of earlier ones where a rank's own "
                "loss says so. Decide by a number "
                "that all ranks have, such as the loss that train_step returns, and load a checkpoint.",
                stacklevel=2,
            )


def _count(x: Tensor) -> int:
    held, leaves = local_piece(x), getattr(x, "leaves", None)
    several = [x, *([] if held is x else [held]), *([] if leaves is None else [leaves.shard(x)])]
    return sum(each._version for each in several)  # noqa: SLF001


def _compare_losses(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Of LBFGS, which decides by what its closure returns: a closure that compares this over ranks.

    Raises:
        RuntimeError: in the closure, if ranks return different losses.
    """
    first = optimizer.param_groups[0]["params"][:1]
    if not isinstance(optimizer, LBFGS) or not cut or not any(hasattr(parameter, "leaves") for parameter in first):
        return None
    if len(args) > 1:
        return (args[0], _agreed(args[1], first[0].device), *args[2:]), kwargs
    return args, {**kwargs, "closure": _agreed(kwargs.get("closure"), first[0].device)}


def _agreed(closure: Any, device: torch.device) -> Any:  # Any: what a caller gives for a closure
    if not callable(closure):
        return closure

    def agreed() -> Any:
        loss = closure()
        number = float(loss.detach() if isinstance(loss, Tensor) else loss)
        for axis in cut:
            ends = torch.tensor([number, -number], dtype=torch.float64, device=device)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
            most, least = ends[0].item(), -ends[1].item()
            if most - least > _ROUNDED * max(abs(most), abs(least)):
                raise RuntimeError(
                    f"other-losses: LBFGS decides by the loss of its closure, which is from {least:.6g} to {most:.6g} "
                    f"on the ranks along {axis.name}: a loss of your own is that of a rank's rows. Return what "
                    "train_step returns, or the mean over these ranks."
                )
        return loss

    return agreed


# ---- Optimizers of whole parameters ----


def _check_whole(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether one that treats matrices, or all parameters, as wholes, by its name, has those of the source.

    Raises:
        RuntimeError: if it has others. A matrix that is turned has other updates only of Muon, by its longer side.
    """
    del args, kwargs
    if (name := type(optimizer).__name__) not in (*_OF_MATRICES, *_OF_NORMS):
        return
    least = 0 if name in _OF_NORMS else 2  # dims of what is treated as a whole
    for group in optimizer.param_groups:
        by_sides = name == "Muon" and group.get("adjust_lr_fn") != "match_rms_adamw"
        for p in group["params"]:
            kept = getattr(p, "kept", "whole") if p.dim() >= least else "whole"
            wanted = "!= 'whole'" if by_sides else "== 'parts'"
            if kept == "parts" or (kept == "turned" and by_sides and p.size(0) != p.size(1)):
                raise RuntimeError(
                    f"whole-parameters-wanted: {name} treats a {'matrix' if least else 'parameter'} as a whole, and "
                    f"this program keeps one of the source's {'in parts or joined' if kept == 'parts' else 'turned'}: "
                    f"a parameter {list(p.shape)}. Give such parameters (p.kept {wanted}) to another optimizer, such "
                    "as AdamW" + ("; or say adjust_lr_fn='match_rms_adamw'." if kept == "turned" else ".")
                )
