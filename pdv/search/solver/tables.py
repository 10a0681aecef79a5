"""Tables over variables of finite domains: their sums and minima, none larger than what is allowed.

A sum that is minimized is formed in slices; values of a variable that no summand tells apart are added up once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pdv import config

Table = np.ndarray[Any, np.dtype[np.float64]]
Choices = np.ndarray[Any, np.dtype[np.int64]]
Variable = int
Sizes = Mapping[Variable, int]

# Sums are formed in slices of about so many entries, so that they stay in cache.
SLICE_ENTRIES = 131_072
ROW_ENTRIES = 32_768  # for one value of what is minimized over


MAX_AXES = 60  # of a table: NumPy allows 64

WORTH_FOLDING = 2_000_000  # entries of a sum that is looked through for alike values
WORTH_LEAVING_OUT = 200_000  # entries of a sum, so many times those of its summands, that are asked if they are legal
SUMMANDS = 4
WORTH_JOINING = 50_000  # entries of a sum of which small summands are first added to larger ones


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

    @cached_property
    def classes(self) -> tuple[list[int], ...]:
        """By axis, the class of each value: that of the others which the table does not tell apart."""
        found = []
        for axis in range(self.table.ndim):
            rows, numbers = np.ascontiguousarray(np.moveaxis(self.table, axis, 0)), dict[bytes, int]()
            found.append([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
        return tuple(found)


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
) -> Table:
    """[neighbours] min over ``variable`` of the sum of factors; values that all take alike are added up once."""
    if math.prod(sizes[v] for v in (variable, *neighbours)) < WORTH_FOLDING or sizes[variable] == 0:
        return _minimize(factors, neighbours, variable, sizes)
    firsts, classes = folding(factors, (variable, *neighbours))
    smaller = [Factor(f.variables, f.table[np.ix_(*(firsts[v] for v in f.variables))]) for f in factors]
    least = _minimize(smaller, neighbours, variable, {v: len(first) for v, first in firsts.items()})
    return least[np.ix_(*(classes[v] for v in neighbours))]


def best_value(factors: Sequence[Factor], variable: Variable, others: Mapping[Variable, int]) -> int:
    """The first value of ``variable`` that minimizes the sum of factors, all of which are over it, given the others."""
    total: Table = np.zeros(())
    for factor in factors:
        total = total + factor.table[tuple(slice(None) if v == variable else others[v] for v in factor.variables)]
    return int(total.argmin())


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
        told = [f.classes[f.variables.index(variable)] for f in factors if variable in f.variables]
        numbers: dict[tuple[int, ...], int] = {}
        found = [numbers.setdefault(each, len(numbers)) for each in zip(*told, strict=True)]
        classes[variable] = np.array(found, dtype=np.int64)
        firsts[variable] = np.unique(classes[variable], return_index=True)[1]
    return firsts, classes


def _minimize(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Mapping[Variable, int]
) -> Table:
    """As ``minimize``, by slices of the variable that stay in cache."""
    shape = tuple(sizes[v] for v in neighbours)
    check_room(shape)
    if not factors or sizes[variable] == 0:  # no value is legal
        return np.full(shape, 0.0 if sizes[variable] else np.inf)
    if sizes[variable] * math.prod(shape) >= WORTH_JOINING:
        factors = _joined(factors)
    if sizes[variable] * math.prod(shape) >= max(WORTH_LEAVING_OUT, SUMMANDS * sum(f.table.size for f in factors)):
        return _least_of_legal(factors, neighbours, variable, sizes)
    return _least_in_rows([_spread(factor, (variable, *neighbours)) for factor in factors], shape)


def _least_of_legal(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Sizes
) -> Table:
    """The same, where no summand is infinite for certain values of neighbours, whatever the others are.

    Neighbours that the same factors are over are one axis meanwhile: what is illegal is so mostly for pairs.
    """
    found: dict[tuple[bool, ...], list[Variable]] = {}
    for v in neighbours:
        found.setdefault(tuple(v in factor.variables for factor in factors), []).append(v)
    groups = sorted(found.values(), key=lambda group: math.prod(sizes[v] for v in group))
    views = [_merged(factor, variable, groups) for factor in factors]
    joint = tuple(math.prod(sizes[v] for v in group) for group in groups)
    legal = [np.ones(size, dtype=bool) for size in joint]
    for factor, view in zip(factors, views, strict=True):
        may = np.isfinite(view)
        for axis, group in enumerate(groups, start=1):
            if group[0] in factor.variables:
                legal[axis - 1] &= may.any(axis=tuple(other for other in range(may.ndim) if other != axis))
    left = [np.flatnonzero(each) for each in legal]
    for axis, values in enumerate(left, start=1):
        views = [view.take(values, axis=axis) if view.shape[axis] > 1 else view for view in views]
    least = np.full(joint, np.inf)
    if all(map(len, left)):
        least[np.ix_(*left)] = _least_in_rows(views, tuple(map(len, left)))
    order = [v for group in groups for v in group]
    apart = least.reshape([sizes[v] for v in order])
    return np.array(apart.transpose([order.index(v) for v in neighbours]), order="C")


def _merged(factor: Factor, variable: Variable, groups: Sequence[Sequence[Variable]]) -> Table:
    """[variable, groups] the factor's table, of size one where it is not over a group."""
    here = [group for group in groups if group[0] in factor.variables]
    order = [v for v in (variable, *itertools.chain(*here)) if v in factor.variables]
    table = factor.table.transpose([factor.variables.index(v) for v in order])
    sizes = dict(zip(order, table.shape, strict=True))
    return table.reshape([math.prod(sizes.get(v, 1) for v in group) for group in ([variable], *groups)])


def _least_in_rows(views: Sequence[Table], shape: tuple[int, ...]) -> Table:
    """As ``_least``, by some values of the first of ``shape`` at a time."""
    rows = max(1, ROW_ENTRIES // max(1, math.prod(shape[1:])))
    if not shape or rows >= shape[0]:
        return _least(views, shape)
    starts = range(0, shape[0], rows)
    parts = ([view[:, at : at + rows] if view.shape[1] > 1 else view for view in views] for at in starts)
    each = zip(parts, starts, strict=True)
    return np.concatenate([_least(part, (min(rows, shape[0] - at), *shape[1:])) for part, at in each])


def _least(views: Sequence[Table], shape: tuple[int, ...]) -> Table:
    """[shape] the least over the first axis of the sum of views, which are of size one where they do not vary."""
    count = max(len(view) for view in views)
    step = max(1, SLICE_ENTRIES // max(1, math.prod(shape)))  # a neighbour may have no value left
    room = np.empty((min(step, count), *shape))
    least: Table | None = None
    for start in range(0, count, step):
        slices = [view[start : start + step] if len(view) > 1 else view for view in views]
        total = room[: min(step, count - start)]
        np.add(slices[0], slices[1] if len(slices) > 1 else 0.0, out=total)
        for one in slices[2:]:
            total += one
        found = total.min(axis=0)
        least = found if least is None else np.minimum(least, found, out=least)
    assert least is not None, "a variable with values"
    return least


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    """Fewer factors of the same sum: each is added to a larger one that has all of its variables, if there is one."""
    left, found = sorted(factors, key=lambda factor: factor.table.size), []
    for number, one in enumerate(left):
        scope = set(one.variables)
        host = next((at for at in range(number + 1, len(left)) if scope.issubset(left[at].variables)), None)
        if host is None:
            found.append(one)
        else:
            larger = left[host]
            left[host] = Factor(larger.variables, larger.table + _spread(one, larger.variables))
    return found


def _spread(factor: Factor, variables: tuple[Variable, ...]) -> Table:
    """The factor's table over all of ``variables`` (a superset of its own), of size one where it has none."""
    order = sorted(range(len(factor.variables)), key=lambda i: variables.index(factor.variables[i]))
    present = {factor.variables[i] for i in order}
    index = tuple(slice(None) if variable in present else None for variable in variables)
    return np.asarray(factor.table.transpose(order)[index])


def add_up(factors: Sequence[Factor], variables: tuple[Variable, ...], sizes: Mapping[Variable, int]) -> Table:
    """Sum of factors as one table over ``variables`` (a superset of theirs)."""
    shape = tuple(sizes[variable] for variable in variables)
    total, views = table_of(shape), [_spread(factor, variables) for factor in factors]
    if len(views) > 1:
        np.add(views[0], views[1], out=total)
    for one in views[2:] if len(views) > 1 else views:
        total += one
    return total
