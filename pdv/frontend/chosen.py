"""Rows that a mask chooses, of which the number depends on values: kept whole, beside the mask.

``x[mask]`` has no shape that could be planned. What becomes of such rows, one by one, is computed of all rows; those
that are not chosen have a filler there, and take no part in sums and means. Shared by the frontends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported

_FILLER = 0.5  # in the domain of logarithms, roots and their like, of x as of 1 - x


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ``rows`` [n, ...] where the ``mask`` [n] holds; the other rows mean nothing."""

    rows: Node
    mask: Node


def choose(k: Lowering, x: Node, mask: Node) -> Chosen:
    """x[mask], the mask over the first dims of x."""
    if mask.type.dtype is not DType.BOOL or mask.type.shape != x.type.shape[: mask.type.rank] or not mask.type.rank:
        raise Unsupported(f"an index of {x.type} by {mask.type}")
    flat = k.reshape(mask, (-1,))
    rows = layers.flatten(k, x, 0, mask.type.rank - 1)
    dtype = x.type.dtype
    number = np.asarray(_FILLER, np.float32) if dtype.is_floating else np.asarray(0)
    filler = k.const(number.astype(np.bool_) if dtype is DType.BOOL else number, dtype)
    return Chosen(k.apply("where", _beside(k, flat, rows), rows, filler), flat)


def in_turn(k: Lowering, source: Node, mask: Node) -> Node:
    """[n, ...] of which the rows that the mask chooses are those of ``source``, as many, one after the other."""
    count, *rest = source.type.shape
    found = k.apply("embedding", k.reshape(source, (count, -1)), masks.turns(k, mask))
    return k.reshape(found, (*mask.type.shape, *rest))


def put_back(k: Lowering, x: Node, mask: Node, chosen: Chosen) -> Node:
    """x with the rows that the mask chooses overwritten by what was made of these, chosen by the same mask."""
    if k.reshape(mask, (-1,)) is not chosen.mask or mask.type.shape != x.type.shape[: mask.type.rank]:
        raise Unsupported("rows that one mask chose, put to where another one holds")
    rows = layers.flatten(k, x, 0, mask.type.rank - 1)
    found = k.apply("where", _beside(k, chosen.mask, rows), k.cast(chosen.rows, x.type.dtype), rows)
    return k.reshape(found, x.type.shape)


def count(k: Lowering, chosen: Chosen, dtype: DType = DType.I64) -> Node:
    """How many rows are chosen."""
    return k.reduce("reduce_sum", k.cast(chosen.mask, dtype), (), False)


def total(k: Lowering, chosen: Chosen, *, everything: bool = True, keepdim: bool = False) -> Node:
    """The sum of the chosen rows; of all elements in them, if ``everything`` is."""
    rows = chosen.rows if chosen.rows.type.dtype is not DType.BOOL else k.cast(chosen.rows, DType.I64)
    nothing = masks.fill(k, 0, (1,) * rows.type.rank, rows.type.dtype)
    kept = k.apply("where", _beside(k, chosen.mask, rows), rows, nothing)
    return k.reduce("reduce_sum", kept, () if everything else (0,), keepdim)


def mean(k: Lowering, chosen: Chosen, *, everything: bool = True, keepdim: bool = False) -> Node:
    """The mean of the chosen rows, or of all elements in them; of none it is not a number."""
    rest = tuple(range(1, chosen.rows.type.rank))
    each = k.reduce("reduce_mean", chosen.rows, rest, True) if everything and rest else chosen.rows
    summed = total(k, Chosen(each, chosen.mask), everything=everything, keepdim=keepdim)
    return k.div(summed, count(k, chosen, summed.type.dtype))


def same_mask(values: Iterable[object]) -> Node:
    """The one mask by which all rows among the values are chosen.

    Raises:
        Unsupported: if there are several.
    """
    found = {value.mask for value in values if isinstance(value, Chosen)}
    if len(found) != 1:
        raise Unsupported("rows that different masks chose, together")
    return found.pop()


def _beside(k: Lowering, mask: Node, rows: Node) -> Node:
    """The mask with dims of size one for those of each row."""
    return k.reshape(mask, (mask.type.shape[0], *(1,) * (rows.type.rank - 1)))
