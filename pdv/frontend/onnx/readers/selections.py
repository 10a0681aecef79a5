"""Elements that are put elsewhere, by known numbers: along each dim by itself, between some dims, or anywhere.

Dims that stay as they are, those of the batch above all, are left alone: they may be of any size, and be cut.
Entry points: ``selected``; ``tile``, ``trilu``, ``depth_to_space``, ``space_to_depth``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ir.dims import Shape
from ir.graph import Node
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call
from pdv.passes.fold_constants import Array

MOST_MOVED = 1 << 22  # elements of a selection that is written down


def selected(k: Lowering, xs: Sequence[Node], places: Array, filler: Array | None = None) -> Node:
    """The elements of ``xs``, one behind the other, that have these numbers; -1 is the filler, or zero."""
    if places.size > MOST_MOVED:
        raise Unsupported(f"a known selection of {places.size} elements")
    if 0 in places.shape:
        raise Unsupported("a result without elements")
    if len(xs) == 1 and (lines := _lines(places, xs[0].type.shape)) is not None:
        return along_each(k, xs[0], lines)
    shapes = [x.type.shape for x in xs]
    lead, places, shapes = _without_leading(places, shapes)
    tail, places, shapes = _without_trailing(places, shapes)
    parts = [k.reshape(x, (*lead, math.prod(shape), *tail)) for x, shape in zip(xs, shapes, strict=True)]
    ids, core = places.reshape(-1), places.shape
    found = layers.index_select(k, k.concat(parts, len(lead)), len(lead), k.const(np.maximum(ids, 0)))
    if (ids < 0).any():
        dtype = xs[0].type.dtype
        value = (np.zeros(()) if filler is None else filler).reshape(()).astype(dtype.torch_name)
        kept = k.const((ids >= 0).reshape(-1, *(1 for _ in tail)))
        found = k.apply("where", kept, found, k.const(value, dtype))
    return k.reshape(found, (*lead, *core, *tail))


def along_each(k: Lowering, x: Node, lines: Sequence[Array]) -> Node:
    """x with elements of each dim selected by number; dims that would stay as they are do."""
    for dim, line in enumerate(lines):
        if not np.array_equal(line, np.arange(x.type.shape[dim])):
            x = layers.index_select(k, x, dim, k.const(line))
    return x


def _lines(places: Array, shape: Shape) -> list[Array] | None:
    """For each dim the numbers along it, where what is selected there is the same wherever one is in the others."""
    if places.ndim != len(shape) or (places < 0).any():
        return None
    where = np.unravel_index(places, shape)
    lines = [np.moveaxis(at, dim, 0).reshape(at.shape[dim], -1)[:, 0] for dim, at in enumerate(where)]
    same = all((at == np.moveaxis(line[(...,) + (None,) * (at.ndim - 1)], 0, dim)).all()
               for dim, (at, line) in enumerate(zip(where, lines, strict=True)))  # fmt: skip
    return lines if same else None


def _without_leading(places: Array, shapes: list[Shape]) -> tuple[Shape, Array, list[Shape]]:
    """(leading dims that all have, and in which nothing moves; places of one element of these; shapes behind them)."""
    lead: list[int] = []
    while places.ndim and all(shape and shape[0] == places.shape[0] for shape in shapes):
        rest = [shape[1:] for shape in shapes]
        starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
        owner = np.searchsorted(starts, places, side="right") - 1
        sizes = np.asarray([math.prod(shape) for shape in rest] + [1])
        row, column = np.divmod(places - starts[owner], sizes[owner])
        number = np.arange(places.shape[0]).reshape(-1, *(1,) * (places.ndim - 1))
        moved = np.where(places < 0, -1, column + np.cumsum([0, *sizes[:-1]])[owner])
        if ((row != number) & (places >= 0)).any() or (moved != moved[:1]).any():
            break
        lead.append(places.shape[0])
        places, shapes = moved[0], rest
    return tuple(lead), places, shapes


def _without_trailing(places: Array, shapes: list[Shape]) -> tuple[Shape, Array, list[Shape]]:
    """The same of trailing dims."""
    tail: list[int] = []
    while places.ndim and all(shape and shape[-1] == places.shape[-1] for shape in shapes):
        number = np.arange(places.shape[-1])
        moved = np.where(places < 0, -1, places // places.shape[-1])
        if ((places % places.shape[-1] != number) & (places >= 0)).any() or (moved != moved[..., :1]).any():
            break
        tail.insert(0, places.shape[-1])
        places, shapes = moved[..., 0], [shape[:-1] for shape in shapes]
    return tuple(tail), places, shapes


def tile(c: Call) -> Node:
    """Each dim as often as is said."""
    x, times = c[0], c.ints(1) or ()
    if len(times) != x.type.rank or min(times, default=1) < 1:
        raise ValueError(f"{list(times)} repeats of {list(x.type.shape)}")
    apart: list[int] = []
    spread: list[int] = []
    for count, size in zip(times, x.type.shape, strict=True):
        apart += [1, size] if count != 1 and size != 1 else [size]
        spread += [count, size] if count != 1 and size != 1 else [max(count, size)]
    found = c.k.expand(c.k.reshape(x, apart), spread)
    return c.k.reshape(found, [count * size for count, size in zip(times, x.type.shape, strict=True)])


def trilu(c: Call) -> Node:
    """The last two dims above or below a diagonal, zero elsewhere."""
    k, x, upper = c.k, c[0], bool(c.attrs.get("upper", 1))
    off = int(c.array(1).reshape(-1)[0]) if c.get(1) is not None else 0
    rows, columns = (np.arange(size) for size in x.type.shape[-2:])
    distance = columns[None, :] - rows[:, None]
    kept = distance >= off if upper else distance <= off
    return k.apply("where", k.const(kept), x, masks.fill(k, 0, (), x.type.dtype))


def depth_to_space(c: Call) -> Node:
    """[n, channels, h, w] -> [n, channels / block², h block, w block]: by block first (DCR), or by channel."""
    (n, channels, h, w), block = c[0].type.shape, c.attrs["blocksize"]
    if block < 1 or channels % block**2:
        raise ValueError(f"{channels} channels in blocks of {block}")
    left = channels // block**2
    first = c.attrs.get("mode", "DCR") == "DCR"
    x = c.k.reshape(c[0], (n, block, block, left, h, w) if first else (n, left, block, block, h, w))
    x = c.k.permute(x, (0, 3, 4, 1, 5, 2) if first else (0, 1, 4, 2, 5, 3))
    return c.k.reshape(x, (n, left, h * block, w * block))


def space_to_depth(c: Call) -> Node:
    """[n, channels, h, w] -> [n, block² channels, h / block, w / block]."""
    (n, channels, h, w), block = c[0].type.shape, c.attrs["blocksize"]
    if block < 1 or h % block or w % block:
        raise ValueError(f"blocks of {block} of {[h, w]}")
    x = c.k.reshape(c[0], (n, channels, h // block, block, w // block, block))
    return c.k.reshape(c.k.permute(x, (0, 3, 5, 1, 2, 4)), (n, block**2 * channels, h // block, w // block))
