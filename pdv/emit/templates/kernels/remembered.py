"""Values that autograd does not keep for backward: each is got again when backward reads it, of what is kept.

Gathered weights and activations are gathered again, what is cheap to compute is computed again: ``again``. Inside
``saved_tensors_hooks(pack, unpack)``. Entry points: ``remember``, ``pack``, ``unpack``, ``again``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .compiled import outside


class Recipe(Protocol):
    """How to get a tensor again."""

    def again(self) -> Tensor:
        """All of it, laid out as it was."""


class Shared:
    """A recipe of what several keep: it is made for the first of them to read it, and stays until the last."""

    waiting = 0
    here: Tensor | None = None

    def again(self) -> Tensor:
        """See Recipe."""
        made = self.here
        if made is None:
            made = self.make()
        self.waiting -= 1
        self.here = made if self.waiting > 0 else None
        return made

    def make(self) -> Tensor:
        """All of it, laid out as it was."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Saved:
    """A value, or a view of one, as autograd keeps it: the recipe, and what is seen of the value's memory."""

    source: Recipe
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def remember(values: Sequence[tuple[Tensor, Recipe]]) -> None:
    """Note how to get tensors again: with the memory of each, for as long as that is there.

    What is changed in place from here on is another value, which its version tells.
    """
    for whole, recipe in values:
        whole.untyped_storage().recipe = recipe, whole._version  # type: ignore[attr-defined]  # noqa: SLF001


def check_version(now: int, version: int) -> None:
    """Whether what a value is made of is as it was.

    Raises:
        RuntimeError: if not, as autograd would of what it saves.
    """
    if now != version:
        raise RuntimeError(
            "stale-weight: a weight, or another value, of which backward makes what it reads again was changed in "
            "place between forward and backward. Its gradient would be that of other values. Step the optimizer, and "
            "change values in place, after backward."
        )


@outside
def pack(x: Tensor) -> Tensor | _Saved:
    """Of a tensor that autograd saves: itself, or how to get it again."""
    recipe, version = getattr(x.untyped_storage(), "recipe", (None, None))
    if recipe is None or x._version != version or x.is_conj() or x.is_neg():  # noqa: SLF001  # which strides do not say
        return x
    if isinstance(recipe, Shared):
        recipe.waiting += 1
    return _Saved(recipe, x.dtype, x.size(), x.stride(), int(x.storage_offset()))


@outside
def unpack(saved: Tensor | _Saved) -> Tensor:
    """What was packed."""
    if isinstance(saved, Tensor):
        return saved
    whole, seen = saved.source.again(), (saved.size, saved.stride, saved.offset)
    if whole.dtype == saved.dtype:
        return whole.as_strided(*seen)
    size, stride, offset = seen
    return whole.new_empty(0, dtype=saved.dtype).set_(whole.untyped_storage(), offset, size, stride)  # as complex ones


# ---- What is computed again ----


def again(function: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """``function(*given, **options)``, not kept for backward: who reads it there makes it again, of what it takes.

    function: gives the same each time, and keeps for its own backward what it takes.
    """
    made = function(*given, **options)
    if made.requires_grad and not torch.compiler.is_compiling() and not _lies_in(made, given):
        kept = [(pack(x.detach()), x._version) if isinstance(x, Tensor) else (x, None) for x in given]  # noqa: SLF001
        remember([(made, _Made(partial(function, **options), kept, _cast(made.device.type)))])
    return made


@dataclass(eq=False)
class _Made(Shared):
    """Of ``given``: tensors as they were packed, with their versions, and what is none."""

    function: Callable[..., Tensor]
    given: Sequence[tuple[Any, int | None]]
    cast: Callable[[], AbstractContextManager[Any]]  # Any: as torch.autocast has it

    def make(self) -> Tensor:
        """See ``Shared``."""
        for x, version in self.given:
            if isinstance(x, Tensor) and version is not None:
                check_version(x._version, version)  # noqa: SLF001
        given = [x if version is None else unpack(x) for x, version in self.given]
        with torch.no_grad(), self.cast():
            return self.function(*given)


def _lies_in(made: Tensor, given: Sequence[Any]) -> bool:
    """Whether a result is what it was made of, or a view of it: its memory would be kept by its own recipe."""
    memory = made.untyped_storage()._cdata  # noqa: SLF001
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata == memory for x in given)  # noqa: SLF001


def _cast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Contexts that cast as is done now, on or off: backward may run in another one."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, dtype=dtype, enabled=enabled)
