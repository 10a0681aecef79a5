"""Which shape to measure next: the one farthest, in log sizes, from what was measured, more so where neighbours differ.

Entry points: ``Pool`` (the candidates of one operator) and ``Fair`` (operators take turns by the time they took).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import DIMS, Kernel
from learned_cost.profile.programs.pieces import Piece

Vector = NDArray[np.float64]
DISAGREEMENT = 2.0  # weight of what the nearest two measured shapes differ by, in log time over roofline


def place(kernel: Kernel) -> Vector:
    """A kernel in log2 sizes: its dims, arithmetic and traffic, and a step aside for another dtype."""
    sizes = [math.log2(1 + kernel.dims.get(name, 0)) for name in DIMS]
    work = [math.log2(1 + kernel.flops), math.log2(1 + kernel.bytes)]
    return np.array([*sizes, *work, {"fp32": 0.0, "bf16": 4.0, "fp16": 8.0}.get(kernel.dtype, 12.0)])


@dataclass
class Pool:
    """Candidates of one operator, and what is known of it.

    ``surprise`` of a measured shape is its log time over the roofline's: where neighbours differ in it, more is asked.
    Every other turn is a shape of a plan while there are any; with ``plans_first``, every turn is.
    """

    pieces: list[Piece]
    plans_first: bool = False
    places: list[Vector] = field(default_factory=list)  # of what was measured
    surprise: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._candidates = np.array([place(piece.forward) for piece in self.pieces]).reshape(
            len(self.pieces), len(DIMS) + 3
        )
        self._planned = np.array([bool(piece.plan) for piece in self.pieces])
        self._turns = 0

    def learn(self, kernel: Kernel, surprise: float) -> None:
        """Something was measured, now or by an earlier run."""
        self.places.append(place(kernel))
        self.surprise.append(surprise)

    def take(self) -> Piece | None:
        """The next piece, which leaves the pool; None when there are no more."""
        if not self.pieces:
            return None
        scores = self._scores()
        if self._planned.any() and (self.plans_first or self._turns % 2 == 0):
            scores[~self._planned] = -np.inf
        self._turns += 1
        index = int(np.argmax(scores))
        piece = self.pieces.pop(index)
        self._candidates = np.delete(self._candidates, index, axis=0)
        self._planned = np.delete(self._planned, index)
        return piece

    def _scores(self) -> Vector:
        if not self.places:
            middle = np.median(self._candidates, axis=0)
            central: Vector = -np.linalg.norm(self._candidates - middle, axis=1)
            return central
        known = np.array(self.places)
        distances = np.linalg.norm(self._candidates[:, None, :] - known[None, :, :], axis=2)
        nearest = np.argsort(distances, axis=1)[:, :2]
        gap = np.take_along_axis(distances, nearest, axis=1)[:, 0]
        seen = np.array(self.surprise)[nearest]
        differ = np.abs(seen[:, 0] - seen[:, -1])
        scores: Vector = gap * (1.0 + DISAGREEMENT * differ)
        return scores


class Fair:
    """Turns by time: next is whoever has had the least, by its weight."""

    def __init__(self, weights: Sequence[tuple[Any, float]]) -> None:
        self._weights = list(weights)
        self._spent = [0.0] * len(self._weights)

    def turn(self) -> Any:
        """Whose turn it is; None when nobody is left."""
        if not self._weights:
            return None
        order = [spent / weight for spent, (_, weight) in zip(self._spent, self._weights, strict=True)]
        return self._weights[order.index(min(order))][0]

    def is_new(self, who: Any) -> bool:
        """Whether it had no turn yet."""
        return self._spent[self._index(who)] == 0.0

    def spent(self, who: Any, seconds: float) -> None:
        """Note the time of a turn."""
        self._spent[self._index(who)] += seconds

    def drop(self, who: Any) -> None:
        """Who has nothing left to do takes no more turns."""
        index = self._index(who)
        del self._weights[index], self._spent[index]

    def _index(self, who: Any) -> int:
        return next(i for i, (entry, _) in enumerate(self._weights) if entry is who)
