"""Tables over variables of finite domains: their sums and minima, none larger than what is allowed.

A sum that is minimized is formed in slices; values of a variable that no summand tells apart are added up once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdv import config

Table = np.ndarray[Any, np.dtype[np.float64]]
Choices = np.ndarray[Any, np.dtype[np.int64]]
Argmin = np.ndarray[Any, np.dtype[np.int16]]
Variable = int
Sizes = Mapping[Variable, int]

# Sums are formed in slices of at most this many entries, so that they stay in cache.
SLICE_ENTRIES = 2_000_000


MAX_AXES = 60  # of a table: NumPy allows 64

WORTH_FOLDING = 2_000_000  # entries of a sum that is looked through for alike values


class TooWideError(Exception):
    """A table of more than ``config.MAX_TABLE_BYTES`` would be needed."""


def table_of(shape: Sequence[int], value: float = 0.0) -> Table:
    """A new table; all that may be large is made here, so that none is larger than what is allowed.

    Raises:
        TooWideError: if this one would be.
    """
    check_room(shape)
    return np.full(tuple(shape), value) if value else np.zeros(tuple(shape))


def check_room(shape: Sequence[int]) -> None:
    """Whether a table of this shape may be made.

    Raises:
        TooWideError: if it would be too large.
    """
    if 8 * math.prod(shape) > config.MAX_TABLE_BYTES or len(shape) > MAX_AXES:
        raise TooWideError(f"a table of {' x '.join(map(str, shape))}")


@dataclass(frozen=True)
class Factor:
    """A table of seconds over ``variables``, one axis each; infinite where a combination is illegal.

    ``key`` is equal for factors of the same table alone: what is found out about a table is kept under it.
    """

    variables: tuple[Variable, ...]
    table: Table
    key: Hashable = field(default_factory=object, compare=False, repr=False)

    def within(self, kept: Mapping[Variable, Sequence[int] | Choices]) -> Factor:
        """The entries of some values of some variables."""
        table = self.table
        for axis, variable in enumerate(self.variables):
            if variable in kept:
                table = table.take(kept[variable], axis=axis)
        return self if table is self.table else Factor(self.variables, table)


@dataclass(frozen=True)
class PricedFactor:
    """Seconds and bytes over ``variables``; ``num_bytes`` is None where it takes no memory; ``key``: see ``Factor``."""

    variables: tuple[Variable, ...]
    seconds: Table
    num_bytes: Table | None = None
    key: Hashable = field(default_factory=object, compare=False, repr=False)

    def at(self, price: float) -> Factor:
        """Their sum at a price of memory, in seconds per byte."""
        if self.num_bytes is None or price == 0.0:
            return Factor(self.variables, self.seconds, self.key)
        return Factor(self.variables, self.seconds + price * self.num_bytes, (self.key, price))


def minimize(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Mapping[Variable, int]
) -> tuple[Argmin, Table]:
    """(argmin, min) over ``variable`` of the sum of factors; values that all factors take alike are added up once."""
    if math.prod(sizes[v] for v in (variable, *neighbours)) < WORTH_FOLDING or sizes[variable] == 0:
        return _minimize(factors, neighbours, variable, sizes)
    firsts, classes = folding(factors, (variable, *neighbours))
    smaller = [Factor(f.variables, f.table[np.ix_(*(firsts[v] for v in f.variables))]) for f in factors]
    best, least = _minimize(smaller, neighbours, variable, {v: len(first) for v, first in firsts.items()})
    spread = np.ix_(*(classes[v] for v in neighbours))
    return firsts[variable].astype(np.int16)[best][spread], least[spread]


def folded_size(factors: Sequence[Factor]) -> int:
    """Entries of the sum of factors, alike values of a variable counted once."""
    variables = tuple({v for factor in factors for v in factor.variables})
    return math.prod(len(first) for first in folding(factors, variables)[0].values())


def folding(
    factors: Sequence[Factor], variables: Sequence[Variable]
) -> tuple[dict[Variable, Choices], dict[Variable, Choices]]:
    """By variable: the first of each class of values that no factor tells apart, and the class of each value."""
    firsts, classes = {}, {}
    for variable in variables:
        slices = [
            np.ascontiguousarray(np.moveaxis(factor.table, factor.variables.index(variable), 0))
            for factor in factors
            if variable in factor.variables
        ]
        numbers: dict[bytes, int] = {}
        found = [
            numbers.setdefault(b"".join(rows[i].tobytes() for rows in slices), len(numbers))
            for i in range(len(slices[0]))
        ]
        classes[variable] = np.array(found, dtype=np.int64)
        firsts[variable] = np.unique(classes[variable], return_index=True)[1]
    return firsts, classes


def _minimize(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Mapping[Variable, int]
) -> tuple[Argmin, Table]:
    """As ``minimize``, by slices of the first neighbour where that is large."""
    shape = tuple(sizes[v] for v in neighbours)
    check_room(shape)
    if sizes[variable] == 0:  # no value is legal
        return np.zeros(shape, dtype=np.int16), np.full(shape, np.inf)
    if not neighbours or math.prod(shape) * sizes[variable] <= SLICE_ENTRIES:
        table = add_up(factors, (variable, *neighbours), sizes)
        return table.argmin(axis=0).astype(np.int16), table.min(axis=0)
    first, rest = neighbours[0], neighbours[1:]
    best = np.empty(shape, dtype=np.int16)
    least = np.empty(shape)
    for value in range(sizes[first]):
        sliced = [_at(factor, first, value) for factor in factors]
        best[value], least[value] = _minimize(sliced, rest, variable, sizes)
    return best, least


def _at(factor: Factor, variable: Variable, value: int) -> Factor:
    """The factor with one variable fixed."""
    if variable not in factor.variables:
        return factor
    position = factor.variables.index(variable)
    left = factor.variables[:position] + factor.variables[position + 1 :]
    return Factor(left, np.asarray(factor.table.take(value, axis=position)))


def add_up(factors: Sequence[Factor], variables: tuple[Variable, ...], sizes: Mapping[Variable, int]) -> Table:
    """Sum of factors as one table over ``variables`` (a superset of theirs)."""
    shape = tuple(sizes[variable] for variable in variables)
    total = table_of(shape)
    for factor in factors:
        order = sorted(range(len(factor.variables)), key=lambda i: variables.index(factor.variables[i]))
        table = factor.table.transpose(order)
        present = [factor.variables[i] for i in order]
        index = tuple(slice(None) if variable in present else None for variable in variables)
        total += table[index]
    return total
