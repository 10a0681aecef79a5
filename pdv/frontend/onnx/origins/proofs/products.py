"""Stored tensors known as sums and products of several parameters, by the values that these had.

linear(table, weight, bias), of which rows are chosen, scaled by a number that the file has, laid out in other dims and
repeated; and tokens added to rows of a table. Torch's optimizer draws masks, too, where a module drops out what depends
on parameters alone: elements of the table that are zero, all others being larger by one factor, which tells the share.
Values are compared to rounding, all of them, and an answer counts where it is the only one. Entry points:
``of_linear``, ``of_sum``, ``of_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from ir.dims import Shape
from pdv.frontend.onnx.origins.made import Head, Made, Step, computed, inverted, joined
from pdv.passes.fold_constants import Array

CLOSE = 1e-5  # of the sum of magnitudes: some steps of float32
_MOST = 1 << 26  # elements that are compared
_NOISE = 1e-2  # of what was solved for, of its root mean square: what a weight's condition loses, and more
_RATIO = 1e-3  # of the factors of rows
_CONDITION = 1e4  # of a weight that is solved for, at most
_LEAST = 4  # elements of a row that tell a ratio
_DEVIATIONS = 6  # of the share that was dropped


@dataclass(frozen=True)
class Layout:
    """A tensor as rows of so many elements, in some order of its dims, without its repetitions.

    Attributes:
        rows: [n, width]
        between: the rows' shape, one dim for each of the tensor's.
        turned: the order of these dims in the tensor.
        shape: the tensor's, repetitions along dims of their own.
    """

    rows: Array
    between: Shape
    turned: tuple[int, ...]
    shape: Shape

    def with_head(
        self,
        names: Sequence[str],
        rows: tuple[int, ...] | None,
        shape: Shape,
        steps: tuple[Step, ...],
        dropped: tuple[str, float] | None = None,
        head: Head = "linear",
    ) -> Made:
        """A tensor of this shape, made of such rows of what several parameters come to."""
        width = self.rows.shape[1]
        return Made(
            tuple(names), rows, self.between, self.shape, self.turned, steps, head, width, whole=shape, dropped=dropped
        )


@dataclass(frozen=True)
class Told:
    """What a file says besides values.

    Attributes:
        numbers: functions that scale, by numbers that the file has.
        shares: of dropout elsewhere in the file.
        drops: names of results by which dropout may have come in.
    """

    numbers: tuple[Step, ...] = ()
    shares: tuple[float, ...] = ()
    drops: tuple[str, ...] = ()


def of_linear(names: Sequence[str], parts: Sequence[Array], array: Array, told: Told) -> Made | None:
    """A tensor as ``linear(table, weight)`` or ``linear(table, weight, bias)``; None where it is not the only one.

    names, parts: the table [n, k], the weight [m, k], and the bias [m].
    """
    table, weight = parts[:2]
    biased = len(parts) > 2
    matched = table.ndim == weight.ndim == 2 and table.shape[1] == weight.shape[1]
    if not matched or (biased and parts[2].shape != weight.shape[:1]) or weight.shape[0] < 2:
        return None
    size = np.abs(table) @ np.abs(weight).T + (np.abs(parts[2]) if biased else 0)
    product = joined(parts, "linear")
    if not _are_apart(product):
        return None
    laid = list(_layouts(array, weight.shape[0]))
    numbers: list[tuple[Step, ...]] = [(each,) for each in told.numbers] or [()]
    for steps in numbers:
        wanted, close = computed(product, steps), CLOSE * np.abs(computed(size, steps))
        fits = [(layout, rows) for layout in laid if (rows := _match(layout.rows, wanted, close)) is not None]
        if len(fits) == 1:
            layout, rows = fits[0]
            whole = rows == tuple(range(len(table)))
            return layout.with_head(names, None if whole else rows, array.shape, steps)
        if fits:
            return None
    if len(told.drops) != 1:
        return None
    dropped = [
        (layout, steps, *fit)
        for steps in numbers
        for layout in laid
        if (fit := _dropped(layout.rows, parts, steps, told.shares)) is not None
    ]
    if len(dropped) != 1:
        return None
    layout, steps, rows, share = dropped[0]
    return layout.with_head(names, rows, array.shape, steps, (told.drops[0], share))


def of_sum(names: Sequence[str], parts: Sequence[Array], array: Array) -> Made | None:
    """A tensor as a token [..., k] added to rows of a table [..., n, k]; None where it is not the only one."""
    token, table = parts
    width = token.shape[-1] if token.ndim else 0
    if token.size != width or width < 2 or table.ndim < 2 or table.shape[-1] != width or array.shape[-1:] != (width,):
        return None
    wanted = joined(parts, "sum")
    close = CLOSE * (np.abs(token.reshape(-1)) + np.abs(table.reshape(-1, width)))
    if not _are_apart(wanted):
        return None
    straight = [each for each in _layouts(array, width) if not each.turned]
    fits = [(each, rows) for each in straight if (rows := _match(each.rows, wanted, close)) is not None]
    if len(fits) != 1:
        return None
    return fits[0][0].with_head(names, fits[0][1], array.shape, (), head="sum")


def of_rows(name: str, table: Array, array: Array) -> Made | None:
    """A tensor as rows of a table [..., k]; None where it is not the only one."""
    if table.ndim < 2 or table.shape[-1] < 2:
        return None
    wanted = table.reshape(-1, table.shape[-1])
    if not _are_apart(wanted):
        return None
    close = np.zeros_like(wanted)
    fits = [(each, rows) for each in _layouts(array, wanted.shape[1]) if (rows := _match(each.rows, wanted, close))]
    return fits[0][0].with_head((name,), fits[0][1], array.shape, (), head="joined") if len(fits) == 1 else None


def _layouts(array: Array, width: int) -> Iterator[Layout]:
    """All ways in which a tensor may be rows of ``width`` elements along dims of their own."""
    shape, first = list[int](), list[slice]()
    for dim, size in enumerate(array.shape):
        period = _period(array, dim)
        shape += [size // period, period] if period < size else [size]
        first += [slice(0, 1), slice(None)] if period < size else [slice(None)]
    once = array.reshape(shape)[tuple(first)]
    large = [dim for dim, size in enumerate(once.shape) if size > 1]
    for count in range(1, len(large) + 1):
        for own in permutations(large, count):
            if math.prod(once.shape[dim] for dim in own) != width:
                continue
            order = [*(dim for dim in range(once.ndim) if dim not in own), *own]
            turned = () if order == sorted(order) else tuple(map(int, np.argsort(order)))
            rows = once.transpose(order)
            yield Layout(rows.reshape(-1, width), rows.shape, turned, tuple(shape))


def _period(array: Array, dim: int) -> int:
    """After how many elements a tensor repeats itself along a dim."""
    size, moved = array.shape[dim], np.moveaxis(array, dim, 0)
    fits = (n for n in range(1, size) if size % n == 0 and np.array_equal(moved[n:], moved[:-n]))
    return next(fits, size)


def _are_apart(rows: Array) -> bool:
    """Whether no two columns are equal, so that values tell in which order they lie."""
    return bool(np.unique(rows, axis=1).shape[1] == rows.shape[1])


def _match(rows: Array, wanted: Array, close: Array) -> tuple[int, ...] | None:
    """Which row of ``wanted`` each one is; None where one is none, or several."""
    if len(rows) * wanted.size > _MOST:
        return None
    found = []
    for row in rows:
        same = np.flatnonzero((np.abs(wanted - row) <= close).all(1))
        if len(same) != 1:
            return None
        found.append(int(same[0]))
    return tuple(found)


def _dropped(
    rows: Array, parts: Sequence[Array], steps: Sequence[Step], shares: Sequence[float]
) -> tuple[tuple[int, ...], float] | None:
    """Which rows of a table each is the product of, elements of it dropped, and the share of these.

    What was multiplied by the weight is solved for; the product of what is read out of it has to be what the file has.
    """
    table, weight, bias = *(each.astype(np.float64) for each in parts[:2]), sum(parts[2:], np.zeros(1))
    if len(weight) < weight.shape[1] or np.linalg.cond(weight) > _CONDITION or len(rows) * table.size > _MOST:
        return None
    before = inverted(rows.astype(np.float64), steps) - bias
    solved = np.linalg.lstsq(weight, before.T, rcond=None)[0].T  # [n, k]
    least = _NOISE * np.sqrt((solved**2).mean())
    kept = np.abs(solved) > least
    found, factors = list[int](), list[float]()
    for row, mask in zip(solved, kept, strict=True):
        if mask.sum() < _LEAST:
            return None
        with np.errstate(all="ignore"):
            middle = np.median(row[mask] / table[:, mask], axis=1, keepdims=True)
            same = np.flatnonzero((np.abs(row[mask] - middle * table[:, mask]) <= least).all(1))
        if len(same) != 1:
            return None
        found.append(int(same[0]))
        factors.append(float(middle[same[0], 0]))
    factor = float(np.median(factors))
    if not np.allclose(factors, factor, rtol=_RATIO, atol=0) or factor <= 1 or len({*found}) < len(found):
        return None
    share = next((each for each in shares if abs(each - (1 - 1 / factor)) < _RATIO / 10), None)
    if share is None:
        return None
    larger = table[found] / (1 - share)
    again = np.where(np.abs(solved - larger) < np.abs(solved), larger, 0.0)
    if abs((again == 0).mean() - share) > _DEVIATIONS * math.sqrt(share * (1 - share) / again.size) + _NOISE:
        return None
    size = np.abs(computed(np.abs(again) @ np.abs(weight).T + np.abs(bias), steps))
    same = np.abs(computed(again @ weight.T + bias, steps) - rows) <= CLOSE * size
    return (tuple(found), share) if same.all() else None
