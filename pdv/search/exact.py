"""Exact minimization of a sum of small tables by variable elimination, in the min-plus semiring.

Variables have finite domains; a factor is a table over some of them. Eliminating a variable adds up the factors that
mention it and takes the minimum over it (Dechter, "Bucket elimination", Artificial Intelligence 1999). Cost is
exponential only in the width of the elimination order, which is small for the graphs of neural networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Variable = int

# Sums are formed in slices of at most this many entries, so that they stay in cache.
SLICE_ENTRIES = 2_000_000

# A table over this many entries (400 MB) means that the graph is too wide for elimination.
MAX_ENTRIES = 50_000_000


class TooWideError(Exception):
    """An elimination would need a table of more than ``MAX_ENTRIES``."""


@dataclass(frozen=True)
class Factor:
    """A table of seconds over ``variables``, one axis each; infinite where a combination is illegal."""

    variables: tuple[Variable, ...]
    table: Table


@dataclass(frozen=True)
class _Eliminated:
    variable: Variable
    neighbours: tuple[Variable, ...]
    best: np.ndarray[Any, np.dtype[np.int16]]


@dataclass(frozen=True)
class Elimination:
    """What is left: a table over the kept variables, and how to read back the rest."""

    kept: tuple[Variable, ...]
    table: Table
    trace: tuple[_Eliminated, ...]
    settled: frozenset[Variable] = frozenset()

    def recover(self, values: Mapping[Variable, int]) -> dict[Variable, int]:
        """The best value of every variable, given those of the kept ones."""
        chosen = {**dict.fromkeys(self.settled, 0), **values}
        for step in reversed(self.trace):
            chosen[step.variable] = int(step.best[tuple(chosen[other] for other in step.neighbours)])
        return chosen


def eliminate(factors: Iterable[Factor], sizes: Mapping[Variable, int], keep: Sequence[Variable]) -> Elimination:
    """min over all other variables of the sum of the factors, as a table over ``keep`` (in that order).

    Raises:
        TooWideError: if a table would outgrow ``MAX_ENTRIES``.
    """
    # a variable with one value is no choice: it would only add axes to tables, of which NumPy allows 64
    settled = {variable for variable, size in sizes.items() if size == 1 and variable not in keep}
    pool = [_without(factor, settled) for factor in factors]
    waiting = [variable for variable in sizes if variable not in keep and variable not in settled]
    trace: list[_Eliminated] = []
    while waiting:
        variable = min(waiting, key=lambda v: (_size_after(v, pool, sizes), v))
        waiting.remove(variable)
        touching = [factor for factor in pool if variable in factor.variables]
        pool = [factor for factor in pool if variable not in factor.variables]
        neighbours = tuple(sorted({v for factor in touching for v in factor.variables} - {variable}))
        best, table = _minimize(touching, neighbours, variable, sizes)
        trace.append(_Eliminated(variable, neighbours, best))
        pool.append(Factor(neighbours, table))
    return Elimination(tuple(keep), add_up(pool, tuple(keep), sizes), tuple(trace), frozenset(settled))


def _minimize(
    factors: Sequence[Factor], neighbours: tuple[Variable, ...], variable: Variable, sizes: Mapping[Variable, int]
) -> tuple[np.ndarray[Any, np.dtype[np.int16]], Table]:
    """(argmin, min) over ``variable`` of the sum of factors, by slices of the first neighbour where that is large."""
    shape = tuple(sizes[v] for v in neighbours)
    if math.prod(shape) > MAX_ENTRIES:
        raise TooWideError(f"a table of {shape}")
    if sizes[variable] == 0:  # no value is legal
        return np.zeros(shape, dtype=np.int16), np.full(shape, np.inf)
    if not neighbours or math.prod(shape) * sizes[variable] <= SLICE_ENTRIES:
        table = add_up(factors, (*neighbours, variable), sizes)
        return table.argmin(axis=-1).astype(np.int16), table.min(axis=-1)
    first, rest = neighbours[0], neighbours[1:]
    best = np.empty(shape, dtype=np.int16)
    least = np.empty(shape)
    for value in range(sizes[first]):
        sliced = [_at(factor, first, value) for factor in factors]
        best[value], least[value] = _minimize(sliced, rest, variable, sizes)
    return best, least


def _without(factor: Factor, settled: set[Variable]) -> Factor:
    """The factor without the axes of variables that have one value."""
    for variable in settled.intersection(factor.variables):
        factor = _at(factor, variable, 0)
    return factor


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
    total: Table = np.zeros(shape)
    for factor in factors:
        order = sorted(range(len(factor.variables)), key=lambda i: variables.index(factor.variables[i]))
        table = factor.table.transpose(order)
        present = [factor.variables[i] for i in order]
        index = tuple(slice(None) if variable in present else None for variable in variables)
        total += table[index]
    return total


def _size_after(variable: Variable, pool: Sequence[Factor], sizes: Mapping[Variable, int]) -> int:
    touched = {v for factor in pool if variable in factor.variables for v in factor.variables}
    return math.prod(sizes[v] for v in touched)
