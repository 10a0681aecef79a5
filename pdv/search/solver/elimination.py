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
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from pdv.search.solver.tables import (
    Choices,
    Factor,
    Sizes,
    Table,
    Variable,
    add_up,
    best_value,
    folded_size,
    minimize,
)

# What may be folded has at most so many times the entries of the limit, and what is left of it so many times.
FOLDABLE = 16
FOLDED = 4

MOST_KNOWN_BYTES = 1 << 29  # of what a search keeps of buckets minimized before
# Entries of a bucket that is added up for marginals.
WORTH_ADDING = 8_000_000


@dataclass(frozen=True)
class _Bucket:
    """Factors that were minimized over ``variable``; ``senders`` are the buckets whose messages are among them."""

    variable: Variable
    neighbours: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    senders: tuple[int, ...]
    message: Factor

    def within(self, kept: Mapping[Variable, Sequence[int] | Choices]) -> _Bucket:
        """The bucket over some values of some neighbours."""
        if kept.keys().isdisjoint(self.neighbours):
            return self
        return replace(
            self, factors=tuple(factor.within(kept) for factor in self.factors), message=self.message.within(kept)
        )


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
            if bucket.variable not in chosen:
                chosen[bucket.variable] = best_value(bucket.factors, bucket.variable, chosen)
        return chosen

    def marginals(self, context: Table) -> dict[Variable, Table]:
        """For every value of a variable, what the whole costs at least if it is taken.

        Variables whose bucket is too large to be added up have none; what is below them sees the least of all.

        Args:
            context: over the kept variables, what is added to the table from elsewhere.
        """
        total = self.table + context
        finite = {v: np.flatnonzero(np.isfinite(_least_but(total, axis))) for axis, v in enumerate(self.kept)}
        left = {v: values if len(values) else np.zeros(1, np.int64) for v, values in finite.items()}
        found = {v: np.full(self.sizes[v], np.inf) for v in self.kept}
        for variable, least in self._marginals(Factor(self.kept, total).within(left), left).items():
            if variable in left:
                found[variable][left[variable]] = least
            else:
                found[variable] = least
        return found

    def _marginals(self, root: Factor, left: Mapping[Variable, Choices]) -> dict[Variable, Table]:
        """The same where of the kept variables but these values are ``left``, over which ``root`` is the whole."""
        sizes = {**self.sizes, **{variable: len(values) for variable, values in left.items()}}
        buckets = [bucket.within(left) for bucket in self.buckets]
        found = {v: _least_but(root.table, i) for i, v in enumerate(self.kept)}
        received = {sender for bucket in buckets for sender in bucket.senders}
        outside = {n: _without(root, bucket) for n, bucket in enumerate(buckets) if n not in received}
        for number in range(len(buckets) - 1, -1, -1):
            bucket = buckets[number]
            scope = (*bucket.neighbours, bucket.variable)
            above = Factor(bucket.neighbours, outside.pop(number))
            if math.prod(sizes[v] for v in scope) > WORTH_ADDING:
                floor = Factor((), np.asarray(root.table.min(initial=np.inf)))
                outside |= {n: _without(floor, buckets[n]) for n in bucket.senders}
                continue
            belief = Factor(scope, add_up((*bucket.factors, above), scope, sizes))
            outside |= {n: _without(belief, buckets[n]) for n in bucket.senders}
            least = _least_but(belief.table, len(scope) - 1)
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
    least, message = above.table.min(axis=rest) if rest else above.table, bucket.message.table
    present = [v for v in above.variables if v in bucket.neighbours]
    if present:  # else it is one number
        least = least.transpose([present.index(v) for v in bucket.neighbours])
    with np.errstate(invalid="ignore"):
        found: Table = np.where(np.isfinite(least) & np.isfinite(message), least - message, np.inf)
    return found


def eliminate(
    factors: Iterable[Factor],
    sizes: Mapping[Variable, int],
    keep: Sequence[Variable],
    *,
    limit: float = math.inf,
    known: BucketCache | None = None,
) -> Elimination:
    """min over all other variables of the sum of the factors, as a table over ``keep`` (in that order).

    With ``limit``, no sum of more entries is formed, and the table may be a lower bound; unless alike values of
    variables (``folding``) make it small enough, and the whole exact. What is ``known`` is not minimized again.

    Raises:
        TooWideError: if a table would outgrow ``config.MAX_TABLE_BYTES``.
    """
    # a variable with one value is no choice: it would only add axes to tables, of which NumPy allows 64
    settled = frozenset(variable for variable, size in sizes.items() if size == 1 and variable not in keep)
    known = BucketCache() if known is None else known
    fixed = [known.fixed(factor, settled) for factor in factors]
    found = _eliminate(fixed, sizes, keep, settled, limit, known, fold=True)
    found = found or _eliminate(fixed, sizes, keep, settled, limit, known, fold=False)
    assert found is not None, "what may be split has an end"
    return found


class BucketCache:
    """Buckets minimized before, by the keys of the tables in them: alike parts of blocks, and variants, share these.

    What was known longest is forgotten where it takes too much memory.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._buckets: dict[Hashable, Factor] = {}
        self._fixed: dict[Hashable, Factor] = {}

    def fixed(self, factor: Factor, settled: frozenset[Variable]) -> Factor:
        """The factor without the axes of variables that have one value."""
        left = tuple(v for v in factor.variables if v not in settled)
        if len(left) == len(factor.variables):
            return factor
        at = tuple(0 if v in settled else slice(None) for v in factor.variables)
        key = factor.key, tuple(v in settled for v in factor.variables)
        if key not in self._fixed:
            self._fixed[key] = Factor(left, np.asarray(factor.table[at]))
        return replace(self._fixed[key], variables=left)

    def minimize(
        self, factors: tuple[Factor, ...], neighbours: tuple[Variable, ...], variable: Variable, sizes: Sizes
    ) -> Factor:
        """min over ``variable`` of the sum of factors, as a factor over the neighbours."""
        place = {v: number for number, v in enumerate((variable, *neighbours))}
        key = tuple((f.key, tuple(place[v] for v in f.variables)) for f in factors), sizes[variable]
        if key not in self._buckets:
            self._buckets[key] = message = Factor(neighbours, minimize(factors, neighbours, variable, sizes))
            self.num_bytes += message.table.nbytes
            while self.num_bytes > MOST_KNOWN_BYTES:
                self.num_bytes -= self._buckets.pop(next(iter(self._buckets))).table.nbytes
            return message
        return replace(self._buckets[key], variables=neighbours)


def _eliminate(
    factors: Sequence[Factor],
    sizes: Sizes,
    keep: Sequence[Variable],
    settled: frozenset[Variable],
    limit: float,
    known: BucketCache,
    *,
    fold: bool,
) -> Elimination | None:
    """As ``eliminate``; where alike values are to be folded, None if that is not enough."""
    pool = _Pool([(factor, -1) for factor in factors], sizes)
    waiting = [variable for variable in sizes if variable not in keep and variable not in settled]
    buckets: list[_Bucket] = []
    exact = True
    after = {variable: pool.size_after(variable) for variable in waiting}
    cheapest = [(size, variable) for variable, size in after.items()]
    heapify(cheapest)
    while after:
        size, variable = heappop(cheapest)
        if after.get(variable) != size:  # eliminated, or said anew
            continue
        del after[variable]
        touching = pool.taken(variable)
        if not fold or size <= limit:
            parts = _parts(touching, variable, sizes, limit)
        elif size <= FOLDABLE * limit and folded_size([factor for factor, _ in touching]) <= FOLDED * limit:
            parts = [touching]
        else:
            return None
        exact = exact and len(parts) == 1
        for part in _level(parts, variable, sizes):
            bucket = _minimize(part, variable, sizes, known)
            pool.add((bucket.message, len(buckets)))
            buckets.append(bucket)
        near = {other for factor, _ in touching for other in factor.variables}
        for other in near.intersection(after):  # no others change
            after[other] = pool.size_after(other)
            heappush(cheapest, (after[other], other))
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


def _level(
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


def _minimize(entries: Sequence[tuple[Factor, int]], variable: Variable, sizes: Sizes, known: BucketCache) -> _Bucket:
    factors = tuple(factor for factor, _ in entries)
    neighbours = tuple(sorted({v for factor in factors for v in factor.variables} - {variable}))
    message = known.minimize(factors, neighbours, variable, sizes)
    return _Bucket(variable, neighbours, factors, tuple(sender for _, sender in entries if sender >= 0), message)
