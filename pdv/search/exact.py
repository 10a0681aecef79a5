"""Minimization of a sum of small tables by variable elimination, in the min-plus semiring: exactly, or from below.

Variables have finite domains; a factor is a table over some of them. Eliminating a variable adds up the factors that
mention it (its *bucket*) and takes the minimum over it (Dechter, "Bucket elimination", Artificial Intelligence 1999).
Cost is exponential only in the width of the elimination order, which is small for the graphs of neural networks. Where
a sum would outgrow a limit, the bucket is split and each part minimized alone, which gives a lower bound (Dechter and
Rish, "Mini-buckets", JACM 2003); what the parts say about the variable is levelled first, so that they disagree less.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

# A bucket of so many entries is looked through for alike values; one so many times over the limit is not. What is left
# of it may be so many times the limit.
WORTH_FOLDING = 2_000_000
FOLDABLE = 16
FOLDED = 4


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
    """A table of seconds over ``variables``, one axis each; infinite where a combination is illegal."""

    variables: tuple[Variable, ...]
    table: Table


@dataclass(frozen=True)
class PricedFactor:
    """Seconds and bytes over ``variables``; ``num_bytes`` is None where it takes no memory."""

    variables: tuple[Variable, ...]
    seconds: Table
    num_bytes: Table | None = None

    def at(self, price: float) -> Factor:
        """Their sum at a price of memory, in seconds per byte."""
        if self.num_bytes is None or price == 0.0:
            return Factor(self.variables, self.seconds)
        return Factor(self.variables, self.seconds + price * self.num_bytes)


@dataclass(frozen=True)
class _Bucket:
    """Factors that were minimized over ``variable``; ``senders`` are the buckets whose messages are among them."""

    variable: Variable
    neighbours: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    senders: tuple[int, ...]
    best: np.ndarray[Any, np.dtype[np.int16]]
    message: Table


@dataclass(frozen=True)
class Elimination:
    """What is left: a table over the kept variables, and how to read back the rest.

    ``exact`` is False where buckets were split: the table is then a lower bound, and what ``recover`` reads a guess.
    """

    kept: tuple[Variable, ...]
    table: Table
    buckets: tuple[_Bucket, ...]
    sizes: Mapping[Variable, int]
    settled: frozenset[Variable] = frozenset()
    exact: bool = True

    def recover(self, values: Mapping[Variable, int]) -> dict[Variable, int]:
        """The best value of every variable, given those of the kept ones."""
        chosen = {**dict.fromkeys(self.settled, 0), **values}
        for bucket in reversed(self.buckets):
            at = tuple(chosen[other] for other in bucket.neighbours)
            chosen.setdefault(bucket.variable, int(bucket.best[at]))
        return chosen

    def marginals(self, context: Table) -> dict[Variable, Table]:
        """For every value of every variable, what the whole costs at least if it is taken.

        Args:
            context: over the kept variables, what is added to the table from elsewhere.
        """
        total = self.table + context
        found = {v: _least_but(total, i) for i, v in enumerate(self.kept)}
        root = Factor(self.kept, total)
        parents = {sender: bucket for bucket in self.buckets for sender in bucket.senders}
        numbers = {id(bucket): number for number, bucket in enumerate(self.buckets)}
        beliefs: dict[int, Factor] = {}
        for number in range(len(self.buckets) - 1, -1, -1):
            bucket = self.buckets[number]
            parent = parents.get(number)
            above = root if parent is None else beliefs[numbers[id(parent)]]
            outside = Factor(bucket.neighbours, _without(above, bucket))
            scope = (*bucket.neighbours, bucket.variable)
            table = add_up((*bucket.factors, outside), scope, self.sizes)
            beliefs[number] = Factor(scope, table)
            least = _least_but(table, len(scope) - 1)
            found[bucket.variable] = np.maximum(found.get(bucket.variable, least), least)
        return found


def _least_but(table: Table, axis: int) -> Table:
    """[axis] the minimum over all others."""
    others = tuple(i for i in range(table.ndim) if i != axis)
    least: Table = table.min(axis=others) if table.size else np.full(table.shape[axis], np.inf)
    return least


def _without(above: Factor, bucket: _Bucket) -> Table:
    """Over a bucket's neighbours: the least of all else, its own message taken out of what it was added to."""
    order = {variable: position for position, variable in enumerate(above.variables)}
    rest = tuple(i for variable, i in order.items() if variable not in bucket.neighbours)
    least = above.table.min(axis=rest) if rest else above.table
    present = [v for v in above.variables if v in bucket.neighbours]
    least = least.transpose([present.index(v) for v in bucket.neighbours])
    with np.errstate(invalid="ignore"):
        found: Table = np.where(np.isfinite(least), least - bucket.message, np.inf)
    return found


def eliminate(
    factors: Iterable[Factor],
    sizes: Mapping[Variable, int],
    keep: Sequence[Variable],
    *,
    limit: float = math.inf,
    known: Known | None = None,
) -> Elimination:
    """min over all other variables of the sum of the factors, as a table over ``keep`` (in that order).

    With ``limit``, no sum of more entries is formed, and the table may be a lower bound; unless alike values of
    variables (``folding``) make it small enough, and the whole exact. What is ``known`` is not minimized again.

    Raises:
        TooWideError: if a table would outgrow ``config.MAX_TABLE_BYTES``.
    """
    # a variable with one value is no choice: it would only add axes to tables, of which NumPy allows 64
    settled = frozenset(variable for variable, size in sizes.items() if size == 1 and variable not in keep)
    known = Known() if known is None else known
    fixed = [known.fixed(factor, settled) for factor in factors]
    found = _eliminated(fixed, sizes, keep, settled, limit, known, fold=True)
    found = found or _eliminated(fixed, sizes, keep, settled, limit, known, fold=False)
    assert found is not None, "what may be split has an end"
    return found


class Known:
    """Buckets minimized before, by the very tables in them: alike parts of blocks, and variants, share these."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, tuple[tuple[Factor, ...], Argmin, Table]] = {}  # factors: so that ids stay theirs
        self._fixed: dict[Hashable, tuple[Table, Table]] = {}

    def fixed(self, factor: Factor, settled: frozenset[Variable]) -> Factor:
        """The factor without the axes of variables that have one value."""
        left = tuple(v for v in factor.variables if v not in settled)
        if len(left) == len(factor.variables):
            return factor
        at = tuple(0 if v in settled else slice(None) for v in factor.variables)
        key = id(factor.table), tuple(v in settled for v in factor.variables)
        if key not in self._fixed:
            self._fixed[key] = factor.table, np.asarray(factor.table[at])
        return Factor(left, self._fixed[key][1])

    def minimized(
        self, factors: tuple[Factor, ...], neighbours: tuple[Variable, ...], variable: Variable, sizes: Sizes
    ) -> tuple[Argmin, Table]:
        """(argmin, min) over ``variable`` of the sum of factors."""
        place = {v: number for number, v in enumerate((variable, *neighbours))}
        key = tuple((id(f.table), tuple(place[v] for v in f.variables)) for f in factors), sizes[variable]
        if key not in self._buckets:
            self._buckets[key] = (factors, *_folded(factors, neighbours, variable, sizes))
        _, best, table = self._buckets[key]
        return best, table


def _eliminated(
    factors: Sequence[Factor],
    sizes: Sizes,
    keep: Sequence[Variable],
    settled: frozenset[Variable],
    limit: float,
    known: Known,
    *,
    fold: bool,
) -> Elimination | None:
    """As ``eliminate``; where alike values are to be folded, None if that is not enough."""
    pool = _Pool([(factor, -1) for factor in factors], sizes)
    waiting = [variable for variable in sizes if variable not in keep and variable not in settled]
    buckets: list[_Bucket] = []
    exact = True
    after = {variable: pool.size_after(variable) for variable in waiting}
    while after:
        variable = min(after, key=lambda v: (after[v], v))
        size = after.pop(variable)
        touching = pool.taken(variable)
        if not fold or size <= limit:
            parts = _parts(touching, variable, sizes, limit)
        elif size <= FOLDABLE * limit and folded_size([factor for factor, _ in touching], sizes) <= FOLDED * limit:
            parts = [touching]
        else:
            return None
        exact = exact and len(parts) == 1
        for part in _levelled(parts, variable, sizes):
            bucket = _minimized(part, variable, sizes, known)
            pool.add((Factor(bucket.neighbours, bucket.message), len(buckets)))
            buckets.append(bucket)
        near = {other for factor, _ in touching for other in factor.variables}
        after |= {other: pool.size_after(other) for other in near.intersection(after)}  # no others change
    table = add_up([factor for factor, _ in pool.entries.values()], tuple(keep), sizes)
    return Elimination(tuple(keep), table, tuple(buckets), dict(sizes), settled, exact)


class _Pool:
    """Factors (each with the bucket that sent it, or -1) that are still to be added, by variable."""

    def __init__(self, entries: Sequence[tuple[Factor, int]], sizes: Mapping[Variable, int]) -> None:
        self.entries: dict[int, tuple[Factor, int]] = {}
        self._touching: dict[Variable, dict[int, None]] = {}
        self._sizes = sizes
        self._arrivals = 0
        for entry in entries:
            self.add(entry)

    def add(self, entry: tuple[Factor, int]) -> None:
        """One more."""
        self.entries[self._arrivals] = entry
        for variable in entry[0].variables:
            self._touching.setdefault(variable, {})[self._arrivals] = None
        self._arrivals += 1

    def taken(self, variable: Variable) -> list[tuple[Factor, int]]:
        """Those over ``variable``, which leave the pool."""
        found = []
        for number in self._touching.pop(variable, ()):
            entry = self.entries.pop(number)
            found.append(entry)
            for other in entry[0].variables:
                if other != variable:
                    del self._touching[other][number]
        return found

    def size_after(self, variable: Variable) -> int:
        """Entries of the sum of those over ``variable``."""
        touched: set[Variable] = set()
        for number in self._touching.get(variable, ()):
            touched.update(self.entries[number][0].variables)
        return math.prod(self._sizes[v] for v in touched)


def _parts(
    touching: list[tuple[Factor, int]], variable: Variable, sizes: Mapping[Variable, int], limit: float
) -> list[list[tuple[Factor, int]]]:
    """The bucket, or parts of it whose sums stay within the limit (first fit, large ones first)."""
    if not touching:
        return [[]]
    parts: list[tuple[set[Variable], list[tuple[Factor, int]]]] = []
    for entry in sorted(touching, key=lambda e: -e[0].table.size):
        scope = set(entry[0].variables)
        for number, (joined, members) in enumerate(parts):
            if math.prod(sizes[v] for v in joined | scope) <= limit:
                parts[number] = (joined | scope, [*members, entry])
                break
        else:
            parts.append((scope, [entry]))
    return [members for _, members in parts]


def _levelled(
    parts: list[list[tuple[Factor, int]]], variable: Variable, sizes: Mapping[Variable, int]
) -> list[list[tuple[Factor, int]]]:
    """The same parts, with what each says about the variable alone replaced by the mean over parts; the sum stays."""
    if len(parts) == 1:
        return parts
    alone = []
    for part in parts:
        neighbours = tuple(sorted({v for factor, _ in part for v in factor.variables} - {variable}))
        table = add_up([factor for factor, _ in part], (*neighbours, variable), sizes)
        alone.append(_least_but(table, len(neighbours)))
    mean = sum(alone) / len(alone)
    with np.errstate(invalid="ignore"):
        shifts = [np.where(np.isfinite(mean), mean - own, np.inf) for own in alone]
    return [[*part, (Factor((variable,), shift), -1)] for part, shift in zip(parts, shifts, strict=True)]


def _minimized(entries: Sequence[tuple[Factor, int]], variable: Variable, sizes: Sizes, known: Known) -> _Bucket:
    factors = tuple(factor for factor, _ in entries)
    neighbours = tuple(sorted({v for factor in factors for v in factor.variables} - {variable}))
    best, table = known.minimized(factors, neighbours, variable, sizes)
    return _Bucket(variable, neighbours, factors, tuple(sender for _, sender in entries if sender >= 0), best, table)


def _folded(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Mapping[Variable, int]
) -> tuple[Argmin, Table]:
    """As ``_minimize``; where that is much work, values of a variable that all factors take alike are added up once."""
    if math.prod(sizes[v] for v in (variable, *neighbours)) < WORTH_FOLDING or sizes[variable] == 0:
        return _minimize(factors, neighbours, variable, sizes)
    firsts, classes = folding(factors, (variable, *neighbours))
    smaller = [Factor(f.variables, f.table[np.ix_(*(firsts[v] for v in f.variables))]) for f in factors]
    best, least = _minimize(smaller, neighbours, variable, {v: len(first) for v, first in firsts.items()})
    spread = np.ix_(*(classes[v] for v in neighbours))
    return firsts[variable].astype(np.int16)[best][spread], least[spread]


def folded_size(factors: Sequence[Factor], sizes: Mapping[Variable, int]) -> int:
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
    """(argmin, min) over ``variable`` of the sum of factors, by slices of the first neighbour where that is large."""
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
