"""``self.head.to(x.dtype)`` within forward, of a part that is of this type already. Entry point: ``unconverted``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def unconverted() -> Iterator[None]:
    """While this lasts, a part of a module that a conversion leaves as it is keeps its tensors.

    ``Module.to`` sets each of them anew even so, which tracing refuses.
    """
    plain: Callable[..., nn.Module] = nn.Module._apply  # noqa: SLF001  # by which all conversions go

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        stored = [*self.parameters(recurse), *self.buffers(recurse)]
        return self if all(fn(tensor) is tensor for tensor in stored) else plain(self, fn, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]  # noqa: SLF001
