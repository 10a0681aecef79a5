"""How a tensor lies in memory: which operators give a view of what they read, and which must copy.

As torch does it: a view merges only dims that lie one behind the other (``at::detail::computeStride``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ir.graph import Node

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


def viewed(node: Node, before: Layout, shape: Sequence[int]) -> Layout | None:
    """What a moving operator makes of ``before`` without touching memory; None where it has to copy.

    shape: the local result's.
    """
    after = tuple(shape)
    match node.op.name:
        case "permute":
            return Layout(after, tuple(before.strides[dim] for dim in node.attr("perm")))
        case "chunk" | "slice":
            return Layout(after, before.strides)
        case "expand":
            same = zip(before.shape, after, before.strides, strict=True)
            return Layout(after, tuple(stride if size == new else 0 for size, new, stride in same))
        case "reshape":
            strides = merged(before, after)
            return None if strides is None else Layout(after, strides)
    raise AssertionError(f"{node.op.name} is no view")


def merged(before: Layout, after: Sizes) -> Sizes | None:
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
