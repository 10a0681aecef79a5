"""The numbers that a recording computes with, and its values: arrays of a field, with bounds on them.

Every array leads with the *world* axis: trials × simulated ranks, trials outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np

from ir.evaluation.einsum import Data
from ir.evaluation.polynomial import Pieces, Size
from ir.tape import Known


class Field(Protocol):
    """The numbers that a tape computes with. Arrays lead with the world axis."""

    trials: int
    trial_axis: bool  # whether values from outside lead with one axis of length ``trials``
    foreign: Callable[..., Any] | None  # calls functions of other libraries; None where functions are names

    def lift(self, array: Data) -> Data:
        """[worlds, ...] field elements of integers or booleans."""

    def constant(self, array: Data | float) -> tuple[Data, Size]:
        """[trials, *shape] field elements of a known array, and bounds on them."""

    def matmul(self, x: Data, y: Data) -> Data:
        """[b, m, k] · [b, k, n]."""

    def sum(self, x: Data, axes: tuple[int, ...]) -> Data:
        """Sum over axes."""

    def reduce(self, x: Data) -> Data:
        """Back into the field after a few plain additions, subtractions or one product."""

    def unary(self, function: Known, x: Data) -> tuple[Data, Callable[[], Data]]:
        """f(x), and how to get f'(x)."""

    def relate(self, name: str, real: Callable[[Data, Data], Data], pair: tuple[Data, Data], gap: Data) -> Data:
        """A truth value of each pair of elements, whose difference is ``gap``, the same in all trials."""

    def whole(self, name: str, real: Callable[[Data], Data], x: Data) -> Data:
        """An integer of each element, the same in all trials."""

    def row(self, function: Known, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """A function of each row along the last axis, and its pullback."""

    def row_reduce(self, function: Known, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """A function of each row to size one, and its pullback."""


@dataclass(slots=True, eq=False)
class Var:
    """An array of the field, with bounds on it, and on its ``pieces`` where these have others.

    ``slot`` is its place on the tape, -1 where no gradient flows.
    """

    data: Data
    size: Size
    slot: int = -1
    pieces: Pieces | None = None

    def along(self, dim: int) -> Pieces:
        """Bounds on its stretches along a dim of one world's array."""
        if self.pieces is not None and self.pieces.dim == dim:
            return self.pieces
        return Pieces.of(dim, [(self.shape[dim + 1], self.size)])

    @property
    def shape(self) -> tuple[int, ...]:
        """World axis included."""
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def dtype(self) -> Any:
        """Of the representation; never bool, which is how masks are told from additive ones."""
        return self.data.dtype


def sliced(found: Var | Data, x: Var | Data, dim: int, start: int, stop: int) -> Var | Data:
    """A slice of x, with what is known of these of its pieces."""
    if isinstance(found, Var) and isinstance(x, Var) and start < stop:
        found.pieces = x.along(dim).within(start, stop)
        found.size = found.pieces.size
    return found


def joined(found: Var, xs: Sequence[Var], dim: int) -> Var:
    """What several were joined to along a dim, with what is known of each."""
    found.pieces = Pieces.of(dim, (stretch for x in xs for stretch in x.along(dim).stretches))
    return found


MOST_COUNTED = 1 << 63


def counts(x: object, number: float) -> TypeGuard[Data]:
    """True for plain integers and a whole number, whose arithmetic is that of integers in every field.

    Integers are what floats were made of, too: of those a mask may make numbers that integers do not hold.
    """
    small = isinstance(x, np.ndarray) and x.dtype.kind in "iu" and abs(number) < MOST_COUNTED
    return small and float(number).is_integer()


@dataclass(frozen=True, slots=True)
class Calls:
    """How often a named function was asked, and bounds on its arguments over one common denominator."""

    points: int
    size: Size
    hashed: bool  # rows are known by a hash of 64 bits, elements by themselves
