"""Losses of alignments (CTC) in a module that is exported. Entry points: ``Alignments``, ``HANDLERS``.

How much torch's ``ctc_loss`` keeps for its gradient depends on the longest target, a value that tracing has not; what
it gives does not: a number for each row. It is run as it is, row by row; what is made of these numbers is written out.
Targets that a mask chose, one behind the other (``labels.masked_select(mask)``, of lengths ``mask.sum(-1)``), are moved
to the front of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ir.graph import Node
from ir.ops import OPERATORS
from pdv.frontend.lowering import Lowering
from pdv.frontend.torch.scalars import Handler

_LOOPS = "t* n c*, n s*, n, n -> n"
_FUNCTION = "torch.ops.aten.ctc_loss.Tensor"
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's own numbers of reductions


@torch.library.custom_op("pdv::ctc_loss", mutates_args=())
def _losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """[n], of log_probs [t, n, c], targets [n, s] and lengths [n]."""
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _NONE, zero_infinity)


@_losses.register_fake
def _(log_probs: Tensor, targets: Tensor, *_: Any) -> Tensor:  # Any: lengths and options
    return log_probs.new_empty(targets.shape[:1])


class Alignments(TorchFunctionMode):
    """In this mode ``ctc_loss`` is an operator of rows, where its targets are such."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakIdKeyDictionary()
        self._counted: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        kwargs = kwargs or {}
        if function in (F.ctc_loss, torch.ctc_loss) and (found := self._loss(*args, **kwargs)) is not None:
            return found
        result = function(*args, **kwargs)
        match getattr(function, "__name__", ""), args:
            case "masked_select" | "__getitem__", (Tensor() as x, Tensor() as mask) if _is_mask(mask, x):
                self._chosen[result] = x, mask
            case "sum", (Tensor() as mask, *dims) if _is_mask(mask, mask):
                if [*dims, *kwargs.values()] in ([1], [-1], [(1,)], [(-1,)]):
                    self._counted[result] = mask
        return result

    def _loss(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int],
        blank: int = 0,
        reduction: str | int = "mean",
        zero_infinity: bool = False,
    ) -> Tensor | None:
        """What torch's function gives; None of targets that are not rows."""
        of_x, of_targets = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths))
        if targets in self._chosen:
            x, mask = self._chosen[targets]
            if self._counted.get(of_targets) is not mask:
                return None
            targets = x.masked_fill(~mask, blank).gather(1, (~mask).long().argsort(dim=1, stable=True))
        if log_probs.dim() != 3 or targets.dim() != 2:
            return None
        losses: Tensor = _losses(log_probs, targets, of_x, of_targets, blank, zero_infinity)
        if reduction in ("mean", _MEAN):
            return (losses / of_targets.to(losses.dtype).clamp(min=1)).mean()
        return losses.sum() if reduction in ("sum", _SUM) else losses


def _is_mask(mask: Tensor, x: Tensor) -> bool:
    """Whether it chooses elements of rows."""
    return mask.dtype == torch.bool and mask.dim() == 2 and mask.shape == x.shape


def _read(k: Lowering, *args: Any) -> Node:  # Any: nodes, and options
    operands, (blank, zero_infinity) = args[:4], args[4:]
    given = ", ".join([*(f"{{{place}}}" for place in range(4)), str(blank), str(_NONE), str(zero_infinity)])
    attrs = {"function": _FUNCTION, "arguments": given, "loops": _LOOPS, "output": -1, "gives": "0"}
    k.foreign[f"aten.ctc_loss.Tensor for {k.name!r} (each row as it is)"] = None
    return k.builder.apply(OPERATORS["opaque"], operands, {**attrs, "sizes": operands[1].type.shape[:1]}, k.name)


HANDLERS: Mapping[str, Handler] = {"pdv.ctc_loss.default": _read}
