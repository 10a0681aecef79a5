"""How tensors lie in memory, and what kernels hold beside them; the operators declare it in these terms.

As torch does it: a view merges only dims that lie one behind the other (``at::detail::computeStride``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Local shape and strides, in elements."""

    shape: Sizes
    strides: Sizes

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Row-major, without holes."""
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, row_major(self.shape), strict=True))

    @property
    def dense(self) -> bool:
        """No holes and no overlap, in whatever order of dims."""
        step = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride != step:
                return False
            step *= size
        return True


def row_major(shape: Sequence[int]) -> Sizes:
    """Strides of a tensor of its own."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 12)
def fresh(shape: Sizes) -> Layout:
    """A tensor of its own."""
    return Layout(shape, row_major(shape))


def like(shape: Sizes, operands: Sequence[Layout]) -> Layout:
    """The result of an element-wise operator: it lies as the first operand of its shape does, if that has no holes."""
    same = next((operand for operand in operands if operand.shape == tuple(shape)), None)
    return same if same is not None and same.dense else fresh(shape)


def merge_strides(before: Layout, after: Sizes) -> Sizes | None:
    """Strides under which the same memory reads as shape ``after``; None if there are none."""
    runs: list[list[int]] = []  # [elements, innermost stride] of dims that lie one behind the other
    for size, stride in zip(before.shape, before.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    strides: list[int] = []
    left, step = (runs.pop()) if runs else (1, 1)
    for size in reversed(after):
        if size == 1:
            strides.append(step)
            continue
        if left == 1 and runs:
            left, step = runs.pop()
        if left % size:
            return None
        strides.append(step)
        step, left = step * size, left // size
    return tuple(reversed(strides)) if left == 1 and not runs else None


Bytes = Callable[..., float]
"""Of an ``ir.memory.local.Local``."""


def _none(local: object) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What torch's kernels hold beside operands and result, read in its derivative formulas (derivatives.yaml).

    Attributes:
        keeps: bytes of its own values kept for backward: statistics, indices, intermediate results.
        forward: of work space while it runs.
        backward: the same of its backward.
        handed: operands whose gradient is the result's own, in the same memory.
        saved: operand numbers and/or "out" kept for backward, where ``Operator.saved`` counts one thing for another.
        layout: how the result lies, where that is not row-major (nor, of functions of elements, as their operands do).
        is_within: True of a statistic that torch takes, and differentiates, in the call that reads it.
    """

    keeps: Bytes = _none
    forward: Bytes = _none
    backward: Bytes = _none
    handed: tuple[int, ...] = ()
    saved: tuple[int | str, ...] | None = None
    layout: Callable[..., Layout] | None = None
    is_within: bool = False


NOTHING, HANDED_ON = Memory(), Memory(handed=tuple(range(64)))  # of all operands that there may be
