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
from pdv.frontend.linear_maps import applied, fourier_matrix
from pdv.frontend.lowering import Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.readers import selections
from pdv.frontend.onnx.readers.logic import chosen
from pdv.frontend.onnx.readers.nearest import nearest_lines
from pdv.frontend.onnx.readers.selections import MOST_MOVED, selected
from pdv.passes.fold_constants import Array

MOST_ENTRIES = 1 << 22  # of a matrix


def moved(*data: int, fill: int | None = None) -> Handler:
    """Reader of an operator that puts elements of the operands ``data`` elsewhere; ``fill``: an operand of one element
    that it puts between them, zero where there is none. All other operands must be known.
    """

    def handle(c: Call) -> Node:
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


def mapped(c: Call, x: Node, over: Sequence[int]) -> Node:
    """An operator that is linear in operand 0, by one matrix over all these dims; the other operands are known.

    Its columns are what becomes of each element, where the other dims are of size one.
    """
    columns = _columns(c, x, over)
    matrix = np.stack([column.reshape(-1) for column in columns], axis=1)
    return applied(c.k, x, over, matrix, [columns[0].shape[dim] for dim in over])


def _columns(c: Call, x: Node, over: Sequence[int]) -> list[Array]:
    """What the operator makes of each element, where all dims but these are of size one."""
    size = math.prod(x.type.shape[dim] for dim in over)
    columns: list[Array] = []
    for unit in np.eye(size, dtype=np.float64):
        small = unit.reshape([n if dim in over else 1 for dim, n in enumerate(x.type.shape)])
        columns.append(np.asarray(_reference(c, {0: small})[0]))
        if columns[0].size * size > MOST_ENTRIES:
            raise Unsupported(f"a map of {size} to {columns[0].size} elements")
    return columns


def columns_to_image(c: Call) -> Node:
    """[n, channels and kernel, places] -> [n, channels, *space]: sums of what lies on a point."""
    k, x = c.k, c[0]
    columns = _columns(c, x, (1, 2))
    matrix = np.stack([column.reshape(-1) for column in columns], axis=1)
    y = k.apply("linear", k.reshape(x, (x.type.shape[0], -1)), k.const(matrix.astype(np.float32), x.type.dtype))
    return k.reshape(y, (x.type.shape[0], *columns[0].shape[1:]))


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
        x = applied(c.k, x, [dim], matrix, [matrix.shape[0]])
    return x


def gather_elements(c: Call) -> Node:
    """By known numbers a selection; by others a lookup in each line."""
    ids, axis = c[1], c.axis()
    if c.k.value(ids) is not None:
        return moved(0)(c)  # type: ignore[no-any-return]
    return masks.gather(c.k, c[0], axis, masks.from_front(c.k, ids, c[0].type.shape[axis]))


def resize(c: Call) -> Node:
    """Nearest is a selection, the other modes averages along each dim that changes."""
    x = c[0]
    cropping = c.attrs.get("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if c.attrs.get("mode", "nearest") == "nearest" and not cropping:
        for name in c.attrs:
            c.attrs.get(name)  # what is nearest does not depend on the others
        c.get(1)  # a region, which torch's exporter leaves empty and which cropping alone reads
        return selections.along_each(c.k, x, nearest_lines(c))
    if c.attrs.get("mode", "nearest") == "nearest" and not x.type.dtype.is_half:
        return moved(0)(c)  # type: ignore[no-any-return]
    if not x.type.dtype.is_floating:
        raise Unsupported(f"an average of {x.type.dtype.value}")
    if cropping:
        return cropped(c, x)
    zero = np.zeros(x.type.shape, np.float32)
    result = np.asarray(_reference(c, {0: zero})[0]).shape
    over = [dim for dim in range(x.type.rank) if result[dim] != x.type.shape[dim]]
    if not over:  # the same size, and perhaps other places
        over = list(range(2, x.type.rank))
    return mapped_apart(c, x, over)


def cropped(c: Call, x: Node) -> Node:
    """Averages of a part of x, which may reach beyond it: what it finds there is added."""
    size = x.type.num_elements
    beyond = np.asarray(_reference(c, {0: np.zeros(x.type.shape, np.float32)})[0])
    if size * beyond.size > MOST_ENTRIES:
        raise Unsupported(f"a map of {size} to {beyond.size} elements")
    units = np.eye(size, dtype=np.float32).reshape(size, *x.type.shape)
    columns = [(np.asarray(_reference(c, {0: unit})[0]) - beyond).reshape(-1) for unit in units]
    y = applied(c.k, x, range(x.type.rank), np.stack(columns, axis=1), beyond.shape)
    return c.k.add(y, c.k.const(beyond, x.type.dtype)) if beyond.any() else y


def cumulative(c: Call) -> Node:
    """Sums of all elements before, along a dim."""
    k, x, axis = c.k, c[0], c.dim(int(c.array(1).reshape(-1)[0]))
    size = x.type.shape[axis]
    backward = k.const(np.arange(size)[::-1].copy())
    x = k.apply("index_select", x, backward, dim=axis) if c.attrs["reverse"] else x
    if c.attrs["exclusive"]:
        first = masks.fill(k, 0, [1 if dim == axis else n for dim, n in enumerate(x.type.shape)], x.type.dtype)
        x = k.concat([first, k.slice(x, axis, 0, size - 1)], axis)
    y = k.cast(k.apply("cumsum", x, dim=axis), x.type.dtype)
    return k.apply("index_select", y, backward, dim=axis) if c.attrs["reverse"] else y


def fourier(c: Call) -> Node:
    """A discrete Fourier transform: linear along its dim and that of real and imaginary parts."""
    x = c[0]
    axis = c.attrs.get("axis", 1) if c.opset < 20 else -2 if c.get(2) is None else int(c.array(2).reshape(-1)[0])
    axis = c.dim(axis)
    if axis == x.type.rank - 1:
        raise ValueError("a transform over real and imaginary parts")
    inverse, one_sided = bool(c.attrs["inverse"]), bool(c.attrs["onesided"])
    size, parts = x.type.shape[axis], x.type.shape[-1]
    if inverse and one_sided:
        return mapped(c, x, [axis, x.type.rank - 1])
    length = size if c.get(1) is None else int(c.array(1).reshape(-1)[0])
    matrix = fourier_matrix(length, min(length, size), parts, inverse=inverse, one_sided=one_sided)
    x = c.k.slice(x, axis, 0, length)
    return applied(c.k, x, [axis, x.type.rank - 1], matrix, [matrix.shape[0] // 2, 2])


def short_fourier(c: Call) -> Node:
    """signal: [batch, length, 1 or 2], step, window or none -> [batch, frames, frequencies, 2]."""
    k, x, step = c.k, c[0], int(c.array(1).reshape(-1)[0])
    window, one_sided = c.get(2), bool(c.attrs["onesided"])
    size = window.type.shape[0] if window is not None else int(c.array(3).reshape(-1)[0])
    if c.get(3) is not None and int(c.array(3).reshape(-1)[0]) != size:
        raise ValueError(f"frame_length {c.array(3)}, and a window of {size}")
    batch, length = x.type.shape[:2]
    parts = x.type.shape[2] if x.type.rank == 3 else 1
    frames = (length - size) // step + 1
    if step < 1 or frames < 1 or (one_sided and parts == 2):
        raise ValueError(f"frames of {size}, {step} apart, of {length} elements of {parts} parts")
    places = (np.arange(frames)[:, None] * step + np.arange(size)).reshape(-1)
    y = layers.index_select(k, k.reshape(x, (batch, length, parts)), 1, k.const(places))
    y = k.reshape(y, (batch, frames, size, parts))
    if window is not None:
        y = k.mul(y, k.reshape(window, (size, 1)))
    frequencies = size // 2 + 1 if one_sided else size
    matrix = fourier_matrix(size, size, parts, inverse=False, one_sided=one_sided)
    y = applied(k, y, [2, 3], matrix, [frequencies, 2])
    return k.reshape(y, (batch, frames, frequencies, 2))


def range_(c: Call) -> Node:
    """Known numbers, a step apart."""
    start, limit, step = (c.array(i).reshape(()) for i in range(3))
    if step == 0:
        raise ValueError("a range whose step is zero")
    count = max(math.ceil((limit - start) / step), 0)
    if count > MOST_MOVED:
        raise Unsupported(f"a range of {count} numbers")
    wide = np.float64 if c[0].type.dtype.is_floating else np.int64
    array = start.astype(wide) + np.arange(count) * step.astype(wide)
    return c.k.const(array.astype(c[0].type.dtype.torch_name), c[0].type.dtype)


def scatter_nd(c: Call) -> Node:
    """Slices put to known places, or joined with what is there."""
    if c.attrs.get("reduction", "none") == "none":
        return moved(0, 2)(c)  # type: ignore[no-any-return]
    shape, ids = c[0].type.shape, c.array(1)
    depth = ids.shape[-1]
    ids = np.where(ids < 0, ids + np.array(shape[:depth]), ids)
    rest = math.prod(shape[depth:])
    first = (
        np.ravel_multi_index(tuple(np.moveaxis(ids, -1, 0)), shape[:depth]) if depth else np.zeros(ids.shape[:-1], int)
    )
    return _joined(c, (first[..., None] * rest + np.arange(rest)).reshape(-1))


def scatter_elements(c: Call) -> Node:
    """Elements put to known places of their lines, or joined with what is there."""
    if c.attrs.get("reduction", "none") == "none":
        return moved(0, 2)(c)  # type: ignore[no-any-return]
    shape, axis = c[0].type.shape, c.axis()
    places: list[Array] = list(np.indices(c.array(1).shape))
    places[axis] = np.where(c.array(1) < 0, c.array(1) + shape[axis], c.array(1))
    return _joined(c, np.ravel_multi_index(tuple(places), shape).reshape(-1))


def _joined(c: Call, targets: Array) -> Node:
    """Operand 0 with the elements of operand 2 added, multiplied, or put where they are larger or smaller.

    targets: the place of each; those for one place follow each other.
    """
    k, x, updates = c.k, c[0], c[2]
    how = c.attrs["reduction"]
    order = np.argsort(targets, kind="stable")
    _, starts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    for turn in range(int(counts.max(initial=0))):
        has = counts > turn
        numbers = np.full(x.type.num_elements, -1)
        at = order[starts[has] + turn]
        numbers[targets[at]] = at
        neutral = {"add": 0, "mul": 1}.get(how, 0)
        more = selected(k, [updates], numbers.reshape(x.type.shape), np.asarray(neutral))
        if how in ("add", "mul"):
            x = getattr(k, how)(x, more)
        else:
            found = chosen(k, ">" if how == "max" else "<", more, x)
            x = k.apply("where", k.const((numbers >= 0).reshape(x.type.shape)), found, x)
    return x


def _reference(c: Call, given: dict[int, Array]) -> tuple[Array, ...]:
    """The node's results on these values of some operands; all other operands must be known."""
    arrays = [given[i] if i in given else None if c.get(i) is None else c.array(i) for i in range(len(c.inputs))]
    for name in c.attrs:
        c.attrs.get(name)  # the reference takes them all
    return c.evaluate(arrays)


def pad(c: Call) -> Node:
    """Around a tensor, each dim by itself, elements of one value, or its own as ``mode`` says; ends may be cut off."""
    k, x, ends, mode = c.k, c[0], _ends(c), c.attrs["mode"]
    kept = [size + min(before, 0) + min(after, 0) for size, (before, after) in zip(x.type.shape, ends, strict=True)]
    value = c.array(2) if c.get(2) is not None else np.asarray(c.attrs.get("value", 0.0))
    if mode == "constant" and min(kept, default=1) > 0:
        return masks.pad(k, x, ends, value.item())
    if mode == "constant":
        full = [left + max(before, 0) + max(after, 0) for left, (before, after) in zip(kept, ends, strict=True)]
        return masks.fill(k, value.item(), full, x.type.dtype)
    lines = []
    for (before, after), size in zip(ends, x.type.shape, strict=True):
        line = np.arange(size)[max(-before, 0) : size - max(-after, 0)]
        lines.append(np.pad(line, (max(before, 0), max(after, 0)), mode))
    return selections.along_each(k, x, lines)


def _ends(c: Call) -> list[tuple[int, int]]:
    """(before, after) of each dim; negative where elements are cut off."""
    shape = c[0].type.shape
    widths, axes = c.ints(1, "pads") or (), (c.ints(3) if c.get(3) is not None else None) or range(len(shape))
    ends = [(0, 0)] * len(shape)
    for axis, before, after in zip(axes, widths, widths[len(axes) :], strict=False):
        ends[axis] = before, after
    return ends


def gather_nd(c: Call) -> Node:
    """Slices by several ids each, which are the last dim of operand 1."""
    ids = c[1]
    if int(c.attrs.get("batch_dims", 0)):
        found: Node = moved(0)(c)
        return found
    return masks.index(c.k, c[0], [c.k.select(ids, ids.type.rank - 1, i) for i in range(ids.type.shape[-1])])


READERS: Mapping[str, Handler] = {
    **{op: moved(0) for op in ("Compress", "ReverseSequence", "CenterCropPad")},
    "Tile": selections.tile,
    "Trilu": selections.trilu,
    "DepthToSpace": selections.depth_to_space,
    "SpaceToDepth": selections.space_to_depth,
    "GatherND": gather_nd,
    "TensorScatter": moved(0, 1),
    "Scatter": scatter_elements,
    "GatherElements": gather_elements,
    "Pad": pad,
    "Resize": resize,
    "Upsample": resize,
    "CumSum": cumulative,
    "Col2Im": columns_to_image,
    "STFT": short_fourier,
    "Range": range_,
    "DFT": fourier,
}
