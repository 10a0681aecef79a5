"""What is allocated and freed, in order: the sum of the changes so far is what is allocated; its largest, the peak.

Decides who counts as the holder of bytes. Entry points: ``Heap``, whose storages are counted references as torch's are,
and ``Log``, which it writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

Kind = Literal[
    "weights",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "activation gradients",
    "temporaries",
    "collectives",
    "pipeline",
    "loss",
]


class Holder(NamedTuple):
    """Who holds bytes: a kind, the operator that made them, and the layer that it is in (None: in no layer)."""

    kind: Kind
    op: str = ""
    layer: int | None = None


class Log:
    """Changes of allocated bytes, each with its holder and the moment when it happens."""

    __slots__ = ("deltas", "holders", "moments")

    def __init__(self) -> None:
        self.deltas: list[float] = []
        self.holders: list[Holder] = []
        self.moments: list[str] = []

    def add(self, num_bytes: float, holder: Holder, moment: str) -> None:
        """``num_bytes`` more (less, if negative)."""
        self.deltas.append(num_bytes)
        self.holders.append(holder)
        self.moments.append(moment)

    @property
    def end(self) -> float:
        """Bytes that stay."""
        return sum(self.deltas)

    def peak(self) -> tuple[float, int]:
        """(most bytes at once, how many changes lead there); (0, 0) if it is never above where it began."""
        best, at = 0.0, 0
        for number, now in enumerate(accumulate(self.deltas), 1):
            if now > best:
                best, at = now, number
        return best, at

    def held(self, upto: int | None = None) -> Mapping[Holder, float]:
        """By holder, after the first ``upto`` changes (None: all)."""
        found: dict[Holder, float] = defaultdict(float)
        for delta, holder in zip(self.deltas[:upto], self.holders, strict=False):
            found[holder] += delta
        return {holder: num_bytes for holder, num_bytes in found.items() if num_bytes}


@dataclass(slots=True, eq=False)
class Storage:
    """Memory with a count of who refers to it; ``again``: (bytes, bytes beside it) to gather it once more."""

    num_bytes: float
    holder: Holder
    references: int = 1
    again: tuple[float, float] | None = None


def exactly(num_bytes: float) -> float:
    """No rounding: what a CPU's allocator counts."""
    return num_bytes


@dataclass
class Heap:
    """Storages in use; ``rounded`` is what the allocator makes of a size, ``moment`` what happens now."""

    rounded: Callable[[float], float] = exactly
    log: Log = field(default_factory=Log)
    moment: str = ""

    def allocate(self, num_bytes: float, holder: Holder) -> Storage:
        """A new storage, referred to once."""
        storage = Storage(self.rounded(num_bytes), holder)
        if storage.num_bytes:
            self.log.add(storage.num_bytes, holder, self.moment)
        return storage

    def keep(self, storage: Storage) -> Storage:
        """One more reference."""
        assert storage.references > 0, storage
        storage.references += 1
        return storage

    def drop(self, storage: Storage) -> None:
        """One less; the last one frees it."""
        assert storage.references > 0, storage
        storage.references -= 1
        if not storage.references and storage.num_bytes:
            self.log.add(-storage.num_bytes, storage.holder, self.moment)

    def hand_over(self, storage: Storage, holder: Holder) -> None:
        """The same memory, held by another."""
        if storage.num_bytes:
            self.log.add(-storage.num_bytes, storage.holder, self.moment)
            self.log.add(storage.num_bytes, holder, self.moment)
        storage.holder = holder
