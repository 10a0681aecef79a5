"""How the elements of one tensor were moved to make another: rows of a table, other shapes, dims that change places.

Known by values alone: each element of what was made is one of the tensor, and is there once. Places with a number that
masks have are hidden, and may be anything. Entry point: ``find_moves``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ir.dims import Shape
from pdv.passes.fold_constants import Array

_LOWEST = -1e30  # what masks have is below
_CLOSE = 1e-5  # of what was computed in another order: some steps of float32
_MOST = 1 << 20  # elements that are compared


@dataclass(frozen=True)
class Moves:
    """What ``Made`` says of moves: rows of so many elements, which of them, their shape, and the order of dims."""

    width: int
    rows: tuple[int, ...] | None
    between: Shape
    turned: tuple[int, ...]
    hidden: tuple[Array, float] | None


def find_moves(source: Array, made: Array) -> Moves | None:
    """By which moves ``made`` comes of ``source``; None where values do not tell it."""
    if not source.size or not made.size or made.size > _MOST:
        return None
    where = made <= _LOWEST
    numbers = np.unique(made[where])
    if len(numbers) > 1 or where.all():
        return None
    once, covered = _without_repeats(made, where)
    places = _places(source.reshape(-1), once, covered)
    if places is None:
        return None
    hidden = (where, float(numbers[0])) if len(numbers) else None
    for width in dict.fromkeys((math.prod(source.shape[1:]), source.shape[-1] if source.ndim else 1, 1)):
        found = _by_rows(places, covered, width, source.size // width)
        if found is not None:
            return Moves(width, *found, hidden)
    return None


def _without_repeats(made: Array, where: Array) -> tuple[Array, Array]:
    """A tensor, and where it is hidden, without its repetitions along whole dims, which have size one then."""
    for dim in range(made.ndim):
        first = made.take([0], axis=dim)
        if made.shape[dim] > 1 and (made == first).all():
            made, where = first, where.take([0], axis=dim)
    return made, where


def _places(source: Array, made: Array, hidden: Array) -> Array | None:
    """Where in a flat tensor each element lies; None where one is there twice, or not at all."""
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    near = np.clip(np.searchsorted(ordered, made), 0, len(ordered) - 1)
    left = np.clip(near - 1, 0, None)
    near = np.where(np.abs(ordered[left] - made) < np.abs(ordered[near] - made), left, near)
    with np.errstate(all="ignore"):
        same = np.isclose(ordered[near], made, rtol=_CLOSE, atol=0) | hidden
    if not same.all():
        return None
    gap = np.diff(ordered, prepend=-np.inf, append=np.inf)
    apart = np.minimum(gap[near], gap[near + 1]) > 2 * _CLOSE * np.abs(ordered[near])
    return order[near] if (apart | hidden).all() else None


def _by_rows(
    places: Array, hidden: Array, width: int, count: int
) -> tuple[tuple[int, ...] | None, Shape, tuple[int, ...]] | None:
    """Which rows, their shape, and the order of dims, if each row is there whole, along dims of its own."""
    rows, columns = np.divmod(places, width)
    steps = [_step(columns, hidden, dim) for dim in range(places.ndim)]
    if None in steps:
        return None
    own = sorted((dim for dim, step in enumerate(steps) if step), key=lambda dim: -(steps[dim] or 0))
    sizes = [places.shape[dim] for dim in own]
    if [steps[dim] for dim in own] != [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]:
        return None
    if math.prod(sizes) != width:
        return None
    others = [dim for dim in range(places.ndim) if dim not in own]
    grid = sum((steps[dim] or 0) * _along(places.shape, dim) for dim in own)
    shown = np.where(hidden, -1, rows).max(tuple(own), keepdims=True) if own else np.where(hidden, -1, rows)
    if not (hidden | ((rows == shown) & (columns == grid))).all():
        return None
    order = [*others, *own]
    numbers = tuple(map(int, np.clip(shown, 0, None).reshape(-1)))
    between = tuple(places.shape[dim] for dim in order)
    turned = tuple(map(int, np.argsort(order)))
    whole = numbers == tuple(range(count))
    return None if whole else numbers, between, () if order == sorted(order) else turned


def _step(columns: Array, hidden: Array, dim: int) -> int | None:
    """By how much the place in a row moves from each to the next along a dim; None where that is not one number."""
    steps = np.diff(columns, axis=dim)
    told = ~(hidden.take(range(1, hidden.shape[dim]), axis=dim) | hidden.take(range(hidden.shape[dim] - 1), axis=dim))
    found = np.unique(steps[told])
    return None if len(found) > 1 or (len(found) and found[0] < 0) else int(found[0]) if len(found) else 0


def _along(shape: Shape, dim: int) -> Array:
    """The index along a dim, for all elements."""
    return np.arange(shape[dim]).reshape([-1 if each == dim else 1 for each in range(len(shape))])
