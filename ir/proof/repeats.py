"""Stretches of a sequence that repeat: layers among blocks, steps and bottlenecks, by whatever tells two items alike.

What is alike is the caller's business, as a key for each item, or a predicate over places.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

FEWEST = 2  # turns that make a repeat


@dataclass(frozen=True)
class Repeat:
    """``count`` equal turns of ``period`` items each, behind each other, from item ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The item behind the last turn."""
        return self.start + self.period * self.count


def find_stretches(start: int, stop: int, period: int, same: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Maximal [first, last) within [start, stop) of two turns or more.

    Each item from ``first + period`` on is the same as the one a period before.
    """
    first: int | None = None
    for at in range(start + period, stop + 1):
        if at < stop and same(at - period, at):
            first = at - period if first is None else first
        elif first is not None:
            if at - first >= FEWEST * period:
                yield first, at
            first = None


def find_repeats(keys: Sequence[Hashable], widest: int | None = None) -> Iterator[Repeat]:
    """All of every period (up to ``widest``), the shortest period first; items without a key (None) never repeat."""

    def same(a: int, b: int) -> bool:
        return keys[a] == keys[b] and keys[a] is not None

    most = len(keys) // FEWEST
    for period in range(1, (most if widest is None else min(widest, most)) + 1):
        for first, last in find_stretches(0, len(keys), period, same):
            yield Repeat(first, period, (last - first) // period)
