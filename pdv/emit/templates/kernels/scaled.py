"""By what gradients are scaled: by ranks before a step, all by the same; and of losses outside of ``train_step``.

A norm of ``x.to_local()`` is that of a part, and a loop that clips by it scales each part otherwise. Of a few gradients
a few elements are kept when sums over ranks are there, and when an optimizer steps, or gradients are dropped. Where all
of a part were multiplied by one factor, it is compared where ranks compare weights; what treats elements otherwise
(noise, bounds of values, norms of rows) is not. Where a batch's weight was guessed, sums are scaled, too. Entry points:
``Scaling``, ``Guess``; of losses of the caller's own ``hand_out``, ``sum_gradients``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pdv.emit.templates.kernels.refused import unknown_own_loss
from pdv.emit.templates.stored import cut_over, local_piece

if TYPE_CHECKING:
    from pdv.emit.templates.kernels.buckets import Beside
    from pdv.emit.templates.parallel import Axis
    from pdv.emit.templates.runtime import ParallelModule

_FIRST = 8  # sums that are looked at; then the 16th, 32nd, …
_KEPT, _PARAMETERS, _ELEMENTS = 4, 8, 64  # between two comparisons: steps; of each, how many parameters, and elements
_LEAST = 4  # elements of a part that tell of one factor
_ROUNDED = 1e-3  # by which factors that are the same differ at most
_SAME_WEIGHT = 1e-6  # of a weight, by which sums in another order differ at most
passes: deque[int] = deque(maxlen=64)
"""Autograd's numbers of the last backward passes through outputs of which each rank has rows of its own."""


@dataclass(eq=False)
class _Step:
    """Gradients when they were summed, and as optimizers took them, of a few parameters.

    number: which sum over ranks it was.
    """

    number: int
    parameters: Sequence[Tensor]
    before: list[Tensor] = field(default_factory=list)
    after: dict[int, Tensor] = field(default_factory=dict)

    def factors(self) -> list[float]:
        """Of each parameter, by what its gradient was multiplied; 0 if that is not told, or not one number."""
        empty = torch.zeros(0)
        found = [(before, self.after.get(number, empty)) for number, before in enumerate(self.before)]
        pairs = [pair if pair[0].shape == pair[1].shape else (empty, empty) for pair in found]
        flat = torch.cat([x.double().cpu() for pair in pairs for x in pair])
        parts = torch.split(flat, [len(x) for pair in pairs for x in pair])
        return [_factor(*both, self.rounded) for both in zip(parts[::2], parts[1::2], strict=True)]

    @property
    def rounded(self) -> float:
        """By how much factors that are the same may differ, relative."""
        return max(_ROUNDED, *(2 * torch.finfo(x.dtype).eps for x in self.before))


class Scaling:
    """Of one model, what was done to gradients behind sums 1 to 8, 16, 32, …"""

    def __init__(self) -> None:
        self._number, self._steps = 0, list[_Step]()

    @torch.no_grad()
    def begin(self, given: Iterable[Tensor]) -> None:
        """These parameters have gradients that were summed."""
        known = {id(p): p for p in given}.values()  # a parameter may have several leaves
        cut = [p for p in known if isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements)]
        if not cut:
            return
        self._number += 1
        is_open = bool(self._steps) and not self._steps[-1].after  # no step was taken: gradients of passes add up
        if is_open:
            self._steps.pop()
        is_looked_at = self._number <= _FIRST or self._number & (self._number - 1) == 0
        if (is_open or is_looked_at) and len(self._steps) < _KEPT:
            few = cut[:: -(-len(cut) // _PARAMETERS)]
            self._steps.append(_Step(self._number, few, [_sample(p) for p in few]))

    @torch.no_grad()
    def look(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer of these steps; or their gradients are dropped, as behind a step that is made by hand."""
        if not self._steps:
            return
        step, its = self._steps[-1], set(map(id, parameters))
        for number, p in enumerate(step.parameters):
            if id(p) in its and p.grad is not None:
                step.after.setdefault(number, _sample(p))

    def take(self) -> list[_Step]:
        """What was seen of steps since the last time."""
        done = [step for step in self._steps if step.after]
        self._steps = [step for step in self._steps if not step.after]
        return done


def _sample(parameter: Tensor) -> Tensor:
    """[n]: elements of this rank's part of a gradient; none where it has one row or column of several, as its own."""
    grad: Any = parameter.grad  # has placements as its parameter has
    piece = local_piece(grad)
    is_alone = any(here == 1 < of for here, of in zip(piece.shape, parameter.shape, strict=False))
    if is_alone or getattr(grad, "placements", ()) != getattr(parameter, "placements", ()):
        return piece.new_zeros(0)
    stride = max(1, piece.numel() // _ELEMENTS) | 1  # odd: else all may be of one column
    return piece.reshape(-1)[::stride][:_ELEMENTS].clone()


def _factor(before: Tensor, after: Tensor, rounded: float) -> float:
    ratios = (after / before)[before != 0]
    if len(ratios) < _LEAST or not ratios.min() > 0:
        return 0.0
    least, most = float(ratios.min()), float(ratios.max())
    return float(ratios.mean()) if most - least <= rounded * most else 0.0


@torch.no_grad()
def check_scales(model: ParallelModule) -> None:
    """Whether ranks that hold other parts of parameters scaled all their gradients alike: a small all-reduce an axis.

    Raises:
        RuntimeError: on all ranks, if they did not.
    """
    mesh = model.mesh
    cutting = {axis.name for p in model.parameters() for axis in cut_over(mesh.axes, p)}
    if mesh.ranks is None or not (cutting or mesh.stage.size > 1):
        return
    steps = mesh.sums.scaling.take()
    axes = [axis for axis in mesh.axes if axis.size > 1]
    apart = torch.tensor([axis.name in cutting and _are_apart(steps, axis, mesh) for axis in axes], device=mesh.device)
    apart = apart.to(torch.int32)
    for axis in (*axes, mesh.stage):
        if axis.size > 1 and axes:
            dist.all_reduce(apart, dist.ReduceOp.MAX, group=axis.group)
    if apart.any():
        along = ", ".join(axis.name for axis, is_so in zip(axes, apart.tolist(), strict=True) if is_so)
        own = sorted({round(factor, 6) for step in steps for factor in step.factors() if factor})
        raise RuntimeError(
            f"scales-apart: the ranks along {along}, each of which holds another part of parameters, multiplied their "
            f"gradients by other factors before a step, this one by {own[:4]}: a norm of each rank's own part "
            "(x.to_local()), or a number of its own rows, is not the model's. Clip by model.clip_grad_norm_; let a "
            "norm of your own be of DTensors, or sum its squares over ranks; and load a checkpoint."
        )


def _are_apart(steps: list[_Step], axis: Axis, mesh: Any) -> bool:  # Any: a Mesh
    """Whether all parameters that the axis cuts, two at least, were scaled otherwise on some of its ranks in a step."""
    found = torch.zeros(_KEPT, 2 + _PARAMETERS, dtype=torch.float64)
    for row, step in enumerate(steps):
        is_cut = [axis in cut_over(mesh.axes, p) for p in step.parameters]
        factors = [factor * here for factor, here in zip(step.factors(), is_cut, strict=True)]
        found[row, : 2 + len(factors)] = torch.tensor([step.number, step.rounded, *factors])
    ends = torch.cat([found, -found]).to(mesh.device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
    most, least = (x.cpu() for x in (ends[:_KEPT], -ends[_KEPT:]))
    told = (least[:, 2:] > 0) & (most[:, :1] == least[:, :1])
    differ = told & (most[:, 2:] - least[:, 2:] > most[:, 1:2] * most[:, 2:])
    return bool(((told.sum(1) > 1) & (differ == told).all(1)).any())


class Guess:
    """What a batch weighs, guessed as what the last two did where these weighed the same.

    Ranks need not wait for one another between forward and backward then. They learn what it does weigh beside the
    gradients, and scale these where it is something else.
    """

    def __init__(self) -> None:
        self._last: list[float] = []  # of the last two steps
        self._is_watched = False  # whether any rank's gradients were seen before they could have been scaled
        self._open: tuple[float, Beside] | None = None

    def begin(self, beside: Beside) -> float | None:
        """The guess, if there is one; beside: [the loss, whether it failed, its weight, whether gradients are seen]."""
        is_known = len({*self._last}) == 1 and len(self._last) == 2 and self._last[0] > 0 and not self._is_watched
        self._open = (self._last[0], beside) if is_known else None
        return self._last[0] if is_known else None

    def scale(self, gradients: list[Tensor]) -> None:
        """Those of a step that was guessed, as they would be of the weight that the batch has.

        Raises:
            RuntimeError: on all ranks, if some had let anything see gradients.
        """
        if self._open is None:
            return
        (guess, beside), self._open = self._open, None
        _, failed, weight, seen = beside.wait().tolist()
        if failed or abs(guess - weight) <= _SAME_WEIGHT * abs(weight):
            return
        if seen:
            self._last = []
            raise RuntimeError(
                f"seen-too-early: this batch weighs {weight:g}, where the last two weighed {guess:g}, and a hook of "
                "gradients or of modules, or an input that has a gradient, which no step before this one had, saw "
                "gradients by the old weight. No rank has gradients of this step. Take it again."
            )
        torch._foreach_mul_(gradients, guess / weight if weight else math.inf)

    def note(self, numbers: Tensor) -> float:
        """The weight of the batch, of the numbers beside its gradients."""
        _, _, weight, seen = numbers.tolist()
        self._last, self._is_watched = [*self._last[-1:], weight], seen > 0
        return float(weight)

    def drop(self) -> None:
        """Forget a step that failed."""
        self._open = None


# ---- Losses of the caller's own ----


def hand_out(outputs: Any, model: Any, way: str | None) -> Any:  # Any: a tensor or several; a ParallelModule
    """Outputs for a loss outside of ``train_step``, whose gradients are taken ``way``: ``ParallelModule.own_loss``.

    Raises:
        ValueError: if there is no such way.
    """
    if way not in {None, "mean", "sum"}:
        raise ValueError(f"bad-own-loss: {way!r}. Allowed of own_loss: 'mean', 'sum', None.")
    cut = {axis.name: axis.size for axis in model.batch_axes if axis.size > 1}
    if not cut or not torch.is_grad_enabled():
        return outputs
    if isinstance(outputs, tuple):
        return tuple(hand_out(x, model, way) for x in outputs)
    if not torch.compiler.is_compiling() and outputs.requires_grad:
        outputs.register_hook(_note_pass)
    if way == "sum":
        return outputs
    return _Handed.apply(outputs, cut, way) if outputs.requires_grad else outputs  # type: ignore[no-untyped-call]


def _note_pass(_: Tensor) -> None:
    passes.append(torch._C._current_graph_task_id())  # noqa: SLF001


class _Handed(torch.autograd.Function):
    """The same tensor. Gradients of a mean of each rank's rows are divided by the ranks, over which they are summed.

    ``asked_scale`` undoes that for those of inputs that ``torch.autograd.grad`` asks for.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: dict[str, int], way: str | None) -> Tensor:
        ctx.cut, ctx.way = cut, way
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.way is None:
            raise unknown_own_loss(ctx.cut)
        return _Share.apply(grads[0], math.prod(ctx.cut.values())), None, None  # type: ignore[no-untyped-call]


class _Share(torch.autograd.Function):
    """A gradient, divided. What is behind ``_Handed`` has gradients that are not, derivatives of gradients too."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, world: int) -> Tensor:
        del ctx
        return grad / world

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


def asked_scale(model: Any) -> int:  # Any: a ParallelModule
    """By what gradients of inputs are multiplied where ``torch.autograd.grad`` asks for them: see ``_Handed``."""
    return int(model.data_world) if model.own_loss == "mean" else 1


def sum_gradients(model: Any, parameters: Iterable[Tensor]) -> None:  # Any: a ParallelModule
    """As ``ParallelModule.sum_over_data``."""
    axes = [axis for axis in model.batch_axes if axis.size > 1]

    def sum_over_ranks(grad: Tensor) -> Tensor:
        if model.own_loss is None:
            raise unknown_own_loss({axis.name: axis.size for axis in axes})
        whole = grad.clone(memory_format=torch.contiguous_format)
        for axis in axes:
            dist.all_reduce(whole, group=axis.group)
        return whole / model.data_world if model.own_loss == "mean" else whole

    given = list(parameters)
    model.summed = [*getattr(model, "summed", ()), *given]
    for parameter in given if axes else ():
        parameter.register_hook(sum_over_ranks)  # type: ignore[no-untyped-call]  # of what one pass adds
