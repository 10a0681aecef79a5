"""Elements at places that are known when a model is read: edges that are repeated, windows, single ones overwritten.

All are selections by constant ids, which leave other dims, the batch among them, to be cut. Entry points:
``pad_by_elements``, ``repeated``, ``windows``, ``put``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported


def pad_by_elements(k: Lowering, x: Node, widths: Sequence[tuple[int, int]], mode: str) -> Node:
    """The last dims, of which ``widths`` are before and behind, with elements of their own beyond their edges.

    mode: ``reflect`` (the edge itself once), ``replicate`` (the edge) or ``circular`` (from the other edge).
    """
    for dim, (before, behind) in enumerate(widths, x.type.rank - len(widths)):
        if before < 0 or behind < 0:
            raise Unsupported(f"padding by {mode}, of negative width")
        size = x.type.shape[dim]
        ids = np.concatenate([np.arange(-before, 0), np.arange(size, size + behind)])
        if mode == "reflect":
            ids = size - 1 - np.abs(size - 1 - np.abs(ids))
        elif mode == "replicate":
            ids = ids.clip(0, size - 1)
        elif mode == "circular":
            ids = ids % size
        else:
            raise Unsupported(f"padding by {mode}")
        first = [layers.index_select(k, x, dim, k.const(ids[:before]))] if before else []
        last = [layers.index_select(k, x, dim, k.const(ids[before:]))] if behind else []
        x = k.concat([*first, x, *last], dim)
    return x


def repeated(k: Lowering, x: Node, times: Sequence[int]) -> Node:
    """As often along each dim, of which there may be new ones in front."""
    x = k.reshape(x, ((1,) * (len(times) - x.type.rank) + x.type.shape))
    apart = [(1, size) if size > 1 < count else (size,) for size, count in zip(x.type.shape, times, strict=True)]
    spread = [
        (count, size) if size > 1 < count else (size * count,) for size, count in zip(x.type.shape, times, strict=True)
    ]
    whole = k.expand(k.reshape(x, [n for sizes in apart for n in sizes]), [n for sizes in spread for n in sizes])
    return k.reshape(whole, [math.prod(sizes) for sizes in spread])


def windows(k: Lowering, x: Node, dim: int, size: int, step: int) -> Node:
    """Pieces of a dim that begin a step apart: [..., n, ...] -> [..., windows, ..., size], as ``Tensor.unfold``."""
    dim %= x.type.rank
    starts = np.arange(0, x.type.shape[dim] - size + 1, step)
    ids = (starts[:, None] + np.arange(size)).reshape(-1)
    taken = layers.index_select(k, x, dim, k.const(ids))
    apart = k.reshape(taken, (*x.type.shape[:dim], len(starts), size, *x.type.shape[dim + 1 :]))
    return k.permute(apart, (*(i for i in range(apart.type.rank) if i != dim + 1), dim + 1))


def put(k: Lowering, x: Node, ids: Sequence[Node | None], piece: Node, accumulate: bool = False) -> Node:
    """x with elements overwritten, or added to, at known places (``x[:, i, i] = piece``, ``x[i, :, j] = piece``).

    Or at one place of each row, or with one number wherever a mask holds, whichever these are.
    """
    dims = [dim for dim, node in enumerate(ids) if node is not None]
    if not masks.are_neighbours(dims):
        order = masks.order_from_front(dims, x.type.rank)
        whole = put(k, k.permute(x, order), [node for node in ids if node is not None], piece, accumulate)
        return k.permute(whole, tuple(order.index(dim) for dim in range(x.type.rank)))
    known = [value for node in ids if node is not None and (value := k.value(node)) is not None]
    held = next(node for node in ids if node is not None)
    if len(dims) == 1 and held.type.dtype is DType.BOOL and not known and not piece.type.rank:
        return _put_where(k, x, dims[0], held, piece, accumulate)
    if dims == [0, 1] and len(known) == 1 and (found := _of_each_row(k, x, ids)) is not None:
        rest = x.type.shape[2:]
        each = k.expand(k.cast(piece, x.type.dtype), (x.type.shape[0], *rest))
        return _put_where(k, x, 0, found, k.reshape(each, (x.type.shape[0], 1, *rest)), accumulate)
    if len(known) < len(dims):
        raise Unsupported("elements overwritten at places that depend on values")
    if any(one.dtype == np.bool_ and one.ndim > 1 for one in known):
        raise Unsupported("elements overwritten by a mask of several dims")
    lists = np.broadcast_arrays(*(one.nonzero()[0] if one.dtype == np.bool_ else one for one in known))
    first, sizes = dims[0], x.type.shape[dims[0] : dims[-1] + 1]
    flat = np.ravel_multi_index([one % size for one, size in zip(lists, sizes, strict=True)], sizes)
    places, count = flat.reshape(-1), int(np.prod(sizes))
    if len(set(places)) < len(places):  # torch has gradients for what is overwritten at once, too
        raise Unsupported("elements overwritten at places that occur twice")
    lead, rest = x.type.shape[:first], x.type.shape[dims[-1] + 1 :]
    piece = k.expand(k.cast(piece, x.type.dtype), (*lead, *flat.shape, *rest))
    source = np.zeros(count, np.int64)  # of each place, which of what is put there
    source[places] = np.arange(len(places))
    taken = layers.index_select(k, k.reshape(piece, (*lead, len(places), *rest)), first, k.const(source))
    chosen = np.zeros(count, np.bool_)
    chosen[places] = True
    mask = k.const(np.broadcast_to(chosen.reshape(count, *(1 for _ in rest)), (*lead, count, *rest)))
    whole = k.reshape(x, (*lead, count, *rest))
    put_there = k.add(whole, taken) if accumulate else taken
    return k.reshape(k.apply("where", mask, put_there, whole), x.type.shape)


def _put_where(k: Lowering, x: Node, first: int, mask: Node, piece: Node, accumulate: bool) -> Node:
    """x with a piece of its rank, or a number, wherever a mask over dims from the first on holds."""
    rest = x.type.rank - first - mask.type.rank
    chosen = k.expand(k.reshape(mask, (*(1,) * first, *mask.type.shape, *(1,) * rest)), x.type.shape)
    there = k.expand(k.cast(piece, x.type.dtype), x.type.shape)
    return k.apply("where", chosen, k.add(x, there) if accumulate else there, x)


def _of_each_row(k: Lowering, x: Node, ids: Sequence[Node | None]) -> Node | None:
    """Where ``x[arange(rows), n]`` is: in each row one place, whose number depends on values (where tokens end)."""
    place = masks.place_in_rows(k, x, [node for node in ids if node is not None])
    if place is None or place.type.rank != 1:
        return None
    count, size = x.type.shape[:2]
    found = masks.compare(k, "==", k.reshape(place, (count, 1)), k.const(np.arange(size)))
    return k.expand(k.reshape(found, (count, size, *(1 for _ in x.type.shape[2:]))), x.type.shape)
