"""Operators of which only the places matter: what moves elements, and what is linear along dims, by known numbers.

ONNX's reference implementation runs the node once while it is read: on the numbers of elements, which come out where
the elements would; or on a basis, which gives the columns of a matrix. The program has a selection, or a product.
Entry point: ``READERS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ir.graph import Node
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.passes.fold_constants import Array

MOST_MOVED = 1 << 22  # elements of a selection that is written down
MOST_ENTRIES = 1 << 22  # of a matrix


def moved(*data: int, fill: int | None = None) -> Handler:
    """Reader of an operator that puts elements of the operands ``data`` elsewhere; ``fill``: an operand of one element
    that it puts between them, zero where there is none. All other operands must be known.
    """

    def handle(c: Call) -> Node:
        if c.attrs.get("reduction", "none") != "none":
            raise Unsupported(f"{c.attrs['reduction']} of elements with what is there")
        xs = [c[i] for i in data if c.get(i) is not None]
        filler = c.get(fill) if fill is not None else None
        places, start = {}, 1  # zero is what the operator puts between elements
        for i, x in zip(data, xs, strict=False):
            places[i] = np.arange(start, start + x.type.num_elements).reshape(x.type.shape)
            start += x.type.num_elements
        if fill is not None:
            places[fill] = np.asarray(0)
        found = np.asarray(_reference(c, {i: array.astype(np.int64) for i, array in places.items()})[0])
        return selected(c.k, xs, found - 1, None if filler is None else c.array(fill or 0))

    return handle


def selected(k: Lowering, xs: Sequence[Node], places: Array, filler: Array | None = None) -> Node:
    """The elements of ``xs``, one behind the other, that have these numbers; -1 is the filler, or zero."""
    if places.size > MOST_MOVED:
        raise Unsupported(f"a known selection of {places.size} elements")
    if 0 in places.shape:
        raise Unsupported("a result without elements")
    dtype = xs[0].type.dtype
    parts = [k.reshape(x, (-1,)) for x in xs]
    if (places < 0).any():
        value = np.zeros((1,)) if filler is None else filler.reshape((1,))
        parts.append(k.const(value.astype(dtype.torch_name), dtype))
    total = sum(part.type.num_elements for part in parts)
    flat = k.concat(parts, 0)
    ids = np.where(places < 0, total - 1, places).reshape(-1)
    return k.reshape(layers.index_select(k, flat, 0, k.const(ids)), places.shape)


def mapped(c: Call, x: Node, over: Sequence[int]) -> Node:
    """An operator that is linear in operand 0, by one matrix over all these dims; the other operands are known.

    Its columns are what becomes of each element, where the other dims are of size one.
    """
    size = math.prod(x.type.shape[dim] for dim in over)
    columns: list[Array] = []
    for unit in np.eye(size, dtype=np.float64):
        small = unit.reshape([n if dim in over else 1 for dim, n in enumerate(x.type.shape)])
        columns.append(np.asarray(_reference(c, {0: small})[0]))
        if columns[0].size * size > MOST_ENTRIES:
            raise Unsupported(f"a map of {size} to {columns[0].size} elements")
    matrix = np.stack([column.reshape(-1) for column in columns], axis=1)
    return _applied(c.k, x, over, matrix, [columns[0].shape[dim] for dim in over])


def mapped_apart(c: Call, x: Node, over: Sequence[int]) -> Node:
    """The same, where what happens along each dim is an average of its own, whose weights add up to one."""
    shape = x.type.shape
    results: list[tuple[int, Array]] = []
    for dim in over:
        columns = []
        if shape[dim] * math.prod(shape[other] for other in over) > MOST_ENTRIES:
            raise Unsupported(f"a known map of {shape[dim]} elements")
        for unit in np.eye(shape[dim], dtype=np.float32):
            line = unit.reshape([n if other == dim else 1 for other, n in enumerate(shape)])
            full = np.broadcast_to(line, [n if other in over else 1 for other, n in enumerate(shape)])
            found = np.asarray(_reference(c, {0: np.ascontiguousarray(full)})[0])
            columns.append(np.moveaxis(found, dim, 0).reshape(found.shape[dim], -1)[:, 0])
        results.append((dim, np.stack(columns, axis=1)))
    for dim, matrix in results:
        x = _applied(c.k, x, [dim], matrix, [matrix.shape[0]])
    return x


def _applied(k: Lowering, x: Node, over: Sequence[int], matrix: Array, sizes: Sequence[int]) -> Node:
    """matrix: [m, n] over the dims, flat; ``sizes``: theirs afterwards."""
    shape, rank = x.type.shape, x.type.rank
    others = [dim for dim in range(rank) if dim not in over]
    flat = k.reshape(k.permute(x, (*others, *over)), (*(shape[dim] for dim in others), matrix.shape[1]))
    y = k.apply("linear", flat, k.const(matrix.astype(np.float32), x.type.dtype))
    order = (*others, *over)
    wide = k.reshape(y, (*(shape[dim] for dim in others), *sizes))
    return k.permute(wide, tuple(order.index(dim) for dim in range(rank)))


def gather_elements(c: Call) -> Node:
    """By known numbers a selection; by others a lookup in each line."""
    ids, axis = c[1], c.axis()
    if c.k.value(ids) is not None:
        return moved(0)(c)  # type: ignore[no-any-return]
    return masks.gather(c.k, c[0], axis, masks.from_front(c.k, ids, c[0].type.shape[axis]))


def resize(c: Call) -> Node:
    """Nearest is a selection, the other modes averages along each dim that changes."""
    x = c[0]
    if c.attrs.get("mode", "nearest") == "nearest" and not x.type.dtype.is_half:
        return moved(0)(c)  # type: ignore[no-any-return]
    if not x.type.dtype.is_floating:
        raise Unsupported(f"an average of {x.type.dtype.value}")
    if c.attrs.get("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise Unsupported("tf_crop_and_resize")
    zero = np.zeros(x.type.shape, np.float32)
    result = np.asarray(_reference(c, {0: zero})[0]).shape
    over = [dim for dim in range(x.type.rank) if result[dim] != x.type.shape[dim]]
    if not over:  # the same size, and perhaps other places
        over = list(range(2, x.type.rank))
    return mapped_apart(c, x, over)


def cumulative(c: Call) -> Node:
    """Sums of all elements before, along a dim."""
    x, axis = c[0], c.dim(int(c.array(1).reshape(-1)[0]))
    if not x.type.dtype.is_floating:
        raise Unsupported(f"of {x.type.dtype.value}")
    return mapped(c, x, [axis])


def fourier(c: Call) -> Node:
    """A discrete Fourier transform: linear along its dim and that of real and imaginary parts."""
    x = c[0]
    axis = c.attrs.get("axis", 1) if c.opset < 20 else -2 if c.get(2) is None else int(c.array(2).reshape(-1)[0])
    axis = c.dim(axis)
    if axis == x.type.rank - 1:
        raise ValueError("a transform over real and imaginary parts")
    return mapped(c, x, [axis, x.type.rank - 1])


def _reference(c: Call, given: dict[int, Array]) -> tuple[Array, ...]:
    """The node's results on these values of some operands; all other operands must be known."""
    arrays = [given[i] if i in given else None if c.get(i) is None else c.array(i) for i in range(len(c.inputs))]
    for name in c.attrs:
        c.attrs.get(name)  # the reference takes them all
    return c.evaluate(arrays)


READERS: Mapping[str, Handler] = {
    **{op: moved(0) for op in ("Tile", "Compress", "ReverseSequence", "GatherND", "DepthToSpace")},
    **{op: moved(0) for op in ("SpaceToDepth", "CenterCropPad", "Trilu")},
    **{op: moved(0, 2) for op in ("ScatterND",)},
    "GatherElements": gather_elements,
    "Pad": moved(0, fill=2),
    "Resize": resize,
    "Upsample": resize,
    "CumSum": cumulative,
    "Col2Im": lambda c: mapped(c, c[0], [1, 2]),
    "DFT": fourier,
}
