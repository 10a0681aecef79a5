"""Parameters that are read otherwise than they rest: rounded, from float32 to bfloat16, and from the host's memory.

Rounded is mixed precision with master weights:

``parameters()`` are the float32 ones, so optimizers, their moments, clipping and checkpoints know no others. A forward
pass reads them rounded; gradients come back through that in float32, in which they are added up over micro-batches, and
summed over ranks (Micikevicius et al., ICLR'18; FSDP2's ``MixedPrecisionPolicy(torch.bfloat16, torch.float32)``).
In bfloat16 are activations and what autograd adds up of one backward pass: the uses of one parameter, and the sums over
ranks of what ``all_gather`` gathered by itself.

What rests in the host's memory (``make_mesh(..., offload=True)``) is updated there, by any optimizer of torch: there
are parameters, in float32 where they are rounded, gradients behind their sum over ranks, and moments. A device has a
copy of its parameters to compute with (ZeRO-Offload, Ren et al., ATC'21; FSDP2's ``CPUOffloadPolicy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Rounding:
    """From the type in which parameters rest to that of compute, ``dtype``, and from the host to ``device``.

    Each is None where parameters rest as they are read.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None = None) -> None:
        self.dtype, self.device = dtype, device
        self._kept: dict[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, device: torch.device | None) -> Rounding | None:
        """None where nothing is read otherwise than it rests."""
        return None if dtype is None and device is None else cls(dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """A parameter, or what this rank holds of it, as it is computed with."""
        if self._kept is None or not torch.is_grad_enabled():
            return x.to(device=self.device, dtype=self.dtype)
        if x not in self._kept:
            self._kept[x] = x.to(device=self.device, dtype=self.dtype)
        return self._kept[x]

    @property
    def rests(self) -> torch.dtype | None:
        """The type in which parameters rest, where that is not as they are stored."""
        return None if self.dtype is None else torch.float32

    def on_host(self, x: Tensor) -> Tensor:
        """What rests there, in pages that the device reads and writes by itself (``wait``); else itself."""
        if self.device is None:
            return x
        there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return there.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Until what was sent to the host is there."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

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


class DeviceCopy:
    """What a device has of a parameter that rests on the host, in the type of compute.

    rests: this rank's piece, there.
    """

    def __init__(self, rests: Tensor, rounding: Rounding) -> None:
        self._rests, self._version = rests, -1
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.empty(rests.shape, dtype=rounding.dtype or rests.dtype, device=rounding.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what changed since; waited for, so that whoever changes it next cannot be ahead."""
        version = self._rests._version  # noqa: SLF001
        if version != self._version:
            self.tensor.copy_(self._rests)
            self._version = version


class Versions:
    """The memory of a parameter of two versions, in turns: what reads the one is not done when the other is there.

    Autograd counts changes of each by itself.
    """

    def __init__(self, rests: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.of = [rests.data, torch.empty_like(rests)]

    @torch.no_grad()
    def move(self, turn: int) -> Tensor:
        """Where the parameter goes on: its next change leaves what it was in this turn."""
        return self.of[1 - turn].copy_(self.of[turn])
