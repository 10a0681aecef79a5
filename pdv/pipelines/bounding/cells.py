"""What a bound is of: plans of some numbers of micro-batches, on one mesh or any. Entry point: ``Cell``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ir.mesh import Mesh


@dataclass(frozen=True)
class Cell:
    """Plans of ``stages``, of any of the numbers of micro-batches, on one mesh or (None) any.

    On one mesh all numbers are multiples of the first. ``by``: compute alone, an inside, ``kinds`` of whose blocks are
    solved, a whole one, or one within memory; the last at so many ``prices`` of it.
    """

    stages: int
    counts: tuple[int, ...]
    mesh: Mesh | None = None
    by: Literal["even", "part", "free", "within"] = "even"
    prices: int = 0
    kinds: int = 0

    @property
    def asks(self) -> bool:
        """Whether looking more closely asks for insides that may not be known."""
        return self.mesh is not None and (self.by == "even" or len(self.counts) > 1)


def multiples(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All numbers, in groups of multiples of their first."""
    left = list(counts)
    while left:
        yield tuple(m for m in left if m % left[0] == 0)
        left = [m for m in left[1:] if m % left[0]]
