"""Values that autograd does not keep for backward: each is got again when backward reads it, of what is kept.

Gathered weights and activations are gathered again, what is cheap to compute is computed again: ``again``. Inside
``saved_tensors_hooks(pack, unpack)``. Entry points: ``remember``, ``pack``, ``unpack``, ``again``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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
        made = self.make() if self.here is None else self.here
        self.waiting -= 1
        self.here = made if self.waiting > 0 else None
        return made

    def make(self) -> Tensor:
        """All of it, laid out as it was."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Saved:
    """A value, or a view of one, as autograd keeps it: the recipe and the view's geometry."""

    source: Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


# By address of a value's memory, with a weak reference to it: whoever has that address later is another value.
_live: dict[int, tuple[Recipe, StorageWeakRef]] = {}


def remember(values: Sequence[tuple[Tensor, Recipe]]) -> None:
    """Note how to get tensors again."""
    for address in [address for address, (_, memory) in _live.items() if _is_gone(memory)]:
        del _live[address]
    for whole, recipe in values:
        storage = whole.untyped_storage()
        _live[storage.data_ptr()] = recipe, StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def check_version(now: int, version: int) -> None:
    """Whether what a value is made of is as it was.

    Raises:
        RuntimeError: if not, as autograd would of what it saves.
    """
    if now != version:
        raise RuntimeError(
            "stale-weight: a gathered weight's shard was changed in place between forward and backward. "
            "Its gradient would be that of other values. Step the optimizer after backward."
        )


def _is_gone(memory: StorageWeakRef | None) -> bool:
    return memory is None or bool(memory.expired())  # type: ignore[no-untyped-call]


@outside
def pack(x: Tensor) -> Tensor | _Saved:
    """Of a tensor that autograd saves: itself, or how to get it again."""
    source, memory = _live.get(x.untyped_storage().data_ptr(), (None, None))
    if source is None or _is_gone(memory):
        return x
    if isinstance(source, Shared):
        source.waiting += 1
    return _Saved(source, x.size(), x.stride(), int(x.storage_offset()))


@outside
def unpack(saved: Tensor | _Saved) -> Tensor:
    """What was packed."""
    if isinstance(saved, Tensor):
        return saved
    return saved.source.again().as_strided(saved.size, saved.stride, saved.offset)


# ---- What is computed again ----


def again(function: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """``function(*given, **options)``, not kept for backward: who reads it there makes it again, of what it takes.

    function: gives the same each time, and keeps for its own backward what it takes.
    """
    made = function(*given, **options)
    if made.requires_grad and not torch.compiler.is_compiling():
        kind = made.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        kept = [(pack(x.detach()), x._version) if isinstance(x, Tensor) else (x, None) for x in given]  # noqa: SLF001
        remember([(made, _Made(partial(function, **options), kept, kind, cast))])
    return made


@dataclass(eq=False)
class _Made(Shared):
    """Of ``given``: tensors as they were packed, with their versions, and what is none."""

    function: Callable[..., Tensor]
    given: Sequence[tuple[Any, int | None]]
    kind: str
    cast: torch.dtype | None

    def make(self) -> Tensor:
        """See ``Shared``."""
        for x, version in self.given:
            if isinstance(x, Tensor) and version is not None:
                check_version(x._version, version)  # noqa: SLF001
        given = [x if version is None else unpack(x) for x, version in self.given]
        with torch.no_grad(), torch.autocast(self.kind, self.cast) if self.cast else nullcontext():
            return self.function(*given)
