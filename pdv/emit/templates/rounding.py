"""Parameters that rest in float32 and are read rounded, to bfloat16: mixed precision with master weights.

``parameters()`` are the float32 ones, so optimizers, their moments, clipping and checkpoints know no others. A forward
pass reads them rounded; gradients come back through that in float32, in which they are added up over micro-batches, and
summed over ranks (Micikevicius et al., ICLR'18; FSDP2's ``MixedPrecisionPolicy(torch.bfloat16, torch.float32)``).
In bfloat16 are activations and what autograd adds up of one backward pass: the uses of one parameter, and the sums over
ranks of what ``all_gather`` gathered by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Rounding:
    """From the type in which parameters rest to that of compute, ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: dict[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """A parameter, or what this rank holds of it, rounded."""
        if self._kept is None or not torch.is_grad_enabled():
            return x.to(self.dtype)
        if x not in self._kept:
            self._kept[x] = x.to(self.dtype)
        return self._kept[x]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Pieces, [n] each, rounded, one behind another."""
        sizes = [part.numel() for part in parts]
        flat = parts[0].new_empty(sum(sizes), dtype=self.dtype)
        torch._foreach_copy_(list(torch.split(flat, sizes)), parts)
        return flat

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Context of a step: what its first micro-batch rounds, the others read."""
        before, self._kept = self._kept, {}
        try:
            yield
        finally:
            self._kept = before

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Have parameters read rounded that do not say so yet."""
        for parameter in parameters:
            if not hasattr(parameter, "rounding"):
                parameter.rounding = self  # type: ignore[attr-defined]

    def mark_others(self, model: nn.Module, *_: object) -> None:
        """Before a forward pass: have those read rounded that are in the place of parameters.

        ``torch.func.functional_call`` and ``copy.deepcopy`` exchange all, so one tells.
        """
        first = next(model.parameters(), None)
        if first is not None and not hasattr(first, "rounding"):
            self.mark(model.parameters())
