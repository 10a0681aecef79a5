"""DTensor of a simulated rank: this rank's piece and its placements; computing with it is refused, as with a real one.

A real one would be mixed with plain tensors only by mistake: the emitted program reads pieces through ``to_local``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Placement:
    """What an axis of the device mesh does to a tensor."""


@dataclass(frozen=True)
class Shard(Placement):
    """Cut along a dim."""

    dim: int


@dataclass(frozen=True)
class Replicate(Placement):
    """Whole on each rank."""


_ALLOWED = {
    "__get__",
    "__set__",
    "__hash__",
    "as_subclass",
    "backward",
    "detach",
    "is_floating_point",
    "is_inference",
    "requires_grad_",
}
_GRAD: Any = Tensor.grad  # a property


class DTensor(Tensor):
    """A leaf that holds a rank's piece; its gradient has the same placements."""

    placements: tuple[Placement, ...]

    @staticmethod
    def from_local(
        piece: Tensor, device_mesh: object, placements: Sequence[Placement], *, run_check: bool = False
    ) -> DTensor:
        """A tensor of which this rank holds ``piece``."""
        del device_mesh, run_check
        made: DTensor = Tensor._make_subclass(DTensor, piece.detach())  # noqa: SLF001  # as nn.Parameter does
        made.placements = tuple(placements)
        return made

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The rank's piece, through which gradients flow.

        Raises:
            TypeError: if the gradient is to be placed otherwise.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise TypeError(f"a gradient placed as {grad_placements} of a parameter placed as {self.placements}")
        return self.as_subclass(Tensor)

    def detach(self) -> DTensor:
        """The same without gradient."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return DTensor.from_local(super().detach(), None, self.placements)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, placed alike."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            found: Tensor | None = super().grad
        return None if found is None else DTensor.from_local(found, None, self.placements)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        placements = getattr(value, "placements", None)
        if value is not None and placements != self.placements:
            raise TypeError(f"a gradient placed as {placements} of a parameter placed as {self.placements}")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            _GRAD.__set__(self, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _ALLOWED:
            raise TypeError(f"{getattr(func, '__name__', func)} of a DTensor: parameters are read through local()")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))
