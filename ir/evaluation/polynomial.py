"""How large a polynomial a computed value can be: what the probability of a false proof depends on.

Between functions known only by name, every element of a value is a polynomial N / D in what was drawn at random and in
the functions' values: N has integer coefficients, D is an integer that all elements of an array share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import groupby

MOST_DENOMINATOR_BITS = 1 << 16  # a larger common denominator is given up: nothing is then claimed


@dataclass(frozen=True, slots=True)
class Size:
    """Bounds on a polynomial N / D.

    Attributes:
        degree: of N.
        bits: log2 of the sum of the absolute values of N's coefficients.
        denominator: D; 0 if it was given up.
    """

    degree: int = 1
    bits: float = 0.0
    denominator: int = 1

    def times(self, other: Size, terms: int = 1) -> Size:
        """Of a sum of ``terms`` products."""
        bits = self.bits + other.bits + math.log2(max(terms, 1))
        return Size(self.degree + other.degree, bits, _keep(self.denominator * other.denominator))

    def plus(self, other: Size) -> Size:
        """Of a sum or a difference, or of an array that holds elements of both."""
        if self.denominator == other.denominator:
            return Size(max(self.degree, other.degree), max(self.bits, other.bits) + 1, self.denominator)
        common = _keep(math.lcm(self.denominator, other.denominator))
        grown = max((x.bits + _log2(common, x.denominator) for x in (self, other)), default=0.0)
        return Size(max(self.degree, other.degree), grown + 1, common)

    @property
    def height(self) -> float:
        """log2 of any coefficient of the difference of two such polynomials, D's factor apart; infinite without D."""
        return self.bits + 1 if self.denominator else math.inf


def _keep(denominator: int) -> int:
    return denominator if denominator.bit_length() <= MOST_DENOMINATOR_BITS else 0


def _log2(common: int, own: int) -> float:
    return math.log2(common // own) if common and own else 0.0


def size_of(*values: Fraction | None) -> Size:
    """Of an array of constants; what stands for no rational is drawn at random, and so a variable."""
    known = [value for value in values if value is not None]
    denominator = 1
    for value in known:
        denominator = _keep(math.lcm(denominator, value.denominator)) if denominator else 0
    largest = max((abs(value) for value in known), default=Fraction(1))
    bits = math.log2(max(math.ceil(largest), 1)) + (math.log2(denominator) if denominator else 0.0)
    return Size(1 if len(known) < len(values) else 0, bits, denominator)


ONE = Size(0)
"""Of the number one."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bounds on stretches of an array along one dim: a program that fills rows in one by one (the inverse within a
    chunk of linear attention) has rows of low degree beside such that are made of all before them.

    Attributes:
        dim: of one world's array.
        stretches: how long each is, and the bounds on it.
    """

    dim: int
    stretches: tuple[tuple[int, Size], ...]

    @classmethod
    def of(cls, dim: int, stretches: Iterable[tuple[int, Size]]) -> Pieces:
        """Neighbours of the same bounds are one."""
        alike = groupby(((length, size) for length, size in stretches if length), key=lambda one: one[1])
        return cls(dim, tuple((sum(length for length, _ in group), size) for size, group in alike))

    def within(self, start: int, stop: int) -> Pieces:
        """Those of a slice along the dim."""
        found, begin = [], 0
        for length, size in self.stretches:
            found.append((max(0, min(stop, begin + length) - max(start, begin)), size))
            begin += length
        return Pieces.of(self.dim, found)

    @property
    def size(self) -> Size:
        """Bounds on all of them."""
        return reduce(Size.plus, (size for _, size in self.stretches)) if self.stretches else ONE
