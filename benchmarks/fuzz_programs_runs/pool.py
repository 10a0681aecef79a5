"""The values that a module has made so far, from which the next step is drawn, and how a step is described."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Attrs = Mapping[str, Any]  # Any: JSON
Drawn = tuple[tuple[str, ...], dict[str, Any]]
"""Operands and attributes of a step."""


class Weights(Protocol):
    """The tensors that a step owns; the first call makes them."""

    def __call__(self, name: str, *shape: int, kind: str = "param", scale: float = 0.0) -> Tensor:
        """``kind``: param, buffer (saved), const (not saved), mask (booleans), or ids below ``scale``."""


@dataclass(frozen=True)
class Operation:
    """``apply`` computes it; ``draw`` finds operands and attributes for it, or None; ``often`` is relative."""

    apply: Callable[[Weights, Attrs, Sequence[Tensor]], Tensor]
    draw: Callable[[Pool], Drawn | None]
    often: float = 1.0


@dataclass
class Pool:
    """Values by name, each at the planned batch and at twice that; steps by name, with their parameters' shapes."""

    rng: random.Random
    batch: int
    values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    owners: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Steps that own a matrix "w": the operation, and the matrix's shape."""

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True, *, floating: bool = True) -> str | None:
        """A value that fits; late ones more often."""
        found = [
            name for name, (x, _) in self.values.items() if x.is_floating_point() == floating and x.numel() and fits(x)
        ]
        if not found:
            return None
        return found[max(self.rng.randrange(len(found)) for _ in range(2))]

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name][0]

    def sizes(self, name: str) -> tuple[int, ...]:
        """Shape of a value, with -1 for what grows with the batch."""
        x, twice = self.values[name]
        return tuple(n if n == m else -1 for n, m in zip(x.shape, twice.shape, strict=True))

    def fixed(self, name: str, least: int = 1) -> list[int]:
        """Dims of a value that do not depend on the batch, of at least a size."""
        return [dim for dim, size in enumerate(self.sizes(name)) if size >= least]

    def constant_shape(self, name: str) -> list[int]:
        """A shape that broadcasts over a value at any batch."""
        sizes = [1 if n < 0 or self.rng.random() < 0.3 else n for n in self.sizes(name)]
        start = next((i for i, n in enumerate(sizes) if n > 1), len(sizes))
        return sizes[self.rng.randint(0, start) :]

    def chance(self, p: float) -> bool:
        """True with probability ``p``."""
        return self.rng.random() < p


def one_of(pool: Pool, fits: Callable[[Tensor], bool] = lambda x: True) -> tuple[tuple[str, ...], Tensor] | None:
    """An operand as a step names it, and its value."""
    name = pool.pick(fits)
    return None if name is None else ((name,), pool[name])


def rank(*allowed: int) -> Callable[[Tensor], bool]:
    """Whether a value has one of these ranks."""
    return lambda x: x.dim() in allowed


def at_least(count: int) -> Callable[[Tensor], bool]:
    """Whether a value has that many dims."""
    return lambda x: x.dim() >= count


__all__ = ["Attrs", "Drawn", "Operation", "Pool", "Weights", "at_least", "one_of", "rank", "torch"]
