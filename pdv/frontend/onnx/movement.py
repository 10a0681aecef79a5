"""ONNX operators that move or make elements: shapes, parts, sequences, tables, constants."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ir.graph import Node
from pdv.frontend import layers, masks
from pdv.frontend.lowering import TopK, Unsupported
from pdv.frontend.onnx.call import Call, Operands, Value, as_tensor, first_of_sorted
from pdv.frontend.onnx.origins.stopped import is_detached, padding_of
from pdv.frontend.onnx.readers import as_torch
from pdv.frontend.onnx.readers.ids import are_from_front
from pdv.passes.fold_constants import Array


def reshape(c: Call) -> Node:
    """0 copies a dim, unless allowzero; -1 takes what is left."""
    shape = list(c.ints(1, "shape") or ())
    if not c.attrs.get("allowzero", 0):
        shape = [c[0].type.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return c.k.reshape(c[0], shape)


def transpose(c: Call) -> Node:
    """Without perm, the dims reversed."""
    perm = tuple(c.attrs.get("perm", tuple(reversed(range(c[0].type.rank)))))
    if any(dim < 0 for dim in perm):
        raise ValueError(f"perm {list(perm)}")
    return c.k.permute(c[0], perm)


def slice_(c: Call) -> Node:
    """Starts, stops, axes and steps, each known."""
    starts, stops = c.ints(1, "starts") or (), c.ints(2, "ends") or ()
    axes = c.ints(3, "axes") or tuple(range(len(starts)))
    steps = c.ints(4) or (1,) * len(starts)
    x = c[0]
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        x = c.k.slice(x, axis, start, stop, step)
    return x


def split(c: Call) -> tuple[Node, ...]:
    """By sizes, or into num_outputs pieces of which the last may be shorter."""
    axis = c.axis()
    total = c[0].type.shape[axis]
    sizes = c.ints(1, "split")
    if sizes is None:
        parts = c.attrs.get("num_outputs", c.results)
        if c.opset < 18 and total % parts:
            raise ValueError(f"{total} elements in {parts} equal parts")
        size = -(-total // parts)
        sizes = tuple(min(size, total - i * size) for i in range(parts))
    if len(sizes) != c.results:
        raise ValueError(f"{len(sizes)} parts for {c.results} results")
    return c.k.split(c[0], axis, sizes)


def split_to_sequence(c: Call) -> tuple[Value, ...]:
    """A scalar split is the size of every piece."""
    axis = c.axis()
    total = c[0].type.shape[axis]
    sizes: tuple[int, ...] = (1,) * total
    if c.get(1) is not None:
        array = c.array(1)
        sizes = tuple(int(v) for v in array.reshape(-1))
        if array.ndim == 0:
            sizes = tuple(min(sizes[0], total - i) for i in range(0, total, sizes[0]))
        c.attrs.get("keepdims")  # means nothing where sizes are given
    elif not c.attrs.get("keepdims", 1):
        return (tuple(c.k.select(c[0], axis, i) for i in range(total)),)
    return (c.k.split(c[0], axis, sizes),)


def concat(c: Call) -> Node:
    """Joined along an axis."""
    return c.k.concat([c[i] for i in range(len(c.inputs))], c.axis())


def squeeze(c: Call) -> Node:
    """Without axes, every dim of size one goes."""
    x, axes = c[0], c.ints(1, "axes")
    chosen = {i for i, n in enumerate(x.type.shape) if n == 1} if axes is None else {c.dim(axis) for axis in axes}
    if any(x.type.shape[i] != 1 for i in chosen):
        raise ValueError(f"squeeze of dims {sorted(chosen)} of {list(x.type.shape)}")
    return c.k.reshape(x, [n for i, n in enumerate(x.type.shape) if i not in chosen])


def unsqueeze(c: Call) -> Node:
    """Axes count dims of the result."""
    axes = c.ints(1, "axes") or ()
    rank = c[0].type.rank + len(axes)
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"axes {list(axes)} of a result of rank {rank}")
    inserted = {axis % rank for axis in axes}
    if len(inserted) != len(axes):
        raise ValueError(f"axes {list(axes)} name a dim twice")
    sizes = iter(c[0].type.shape)
    return c.k.reshape(c[0], [1 if i in inserted else next(sizes) for i in range(rank)])


def flatten(c: Call) -> Node:
    """Two dims: before the axis, and from it on."""
    axis = c.axis(end=True)
    return c.k.reshape(c[0], (math.prod(c[0].type.shape[:axis]), math.prod(c[0].type.shape[axis:])))


def identity(c: Call) -> Value:
    """The operand; without its gradient, where the file says that the module stopped it."""
    x: Value = c.inputs[0]
    return c.k.apply("detach", x) if isinstance(x, Node) and x.needs_grad and is_detached(c.node) else x


def gather(c: Call) -> Node:
    """Rows of a table are an embedding, one known index is a selection."""
    axis, x, ids = c.axis(), c[0], c[1]
    value = c.k.value(ids)
    if value is not None and value.ndim == 0:
        return c.k.select(x, axis, int(value))
    if value is not None:
        ids = c.k.const(from_front(value, x.type.shape[axis]), ids.type.dtype)
    if value is None and not ((x.is_param or x.is_const) and are_from_front(c.k, c.node, ids)):
        ids = masks.from_front(c.k, ids, x.type.shape[axis])
    if axis == 0 and x.type.rank == 2 and x.type.dtype.is_floating:
        return layers.embedding(c.k, x, ids, padding_of(c.node) if x.needs_grad else -1)
    shape = x.type.shape
    if x.type.num_elements == 0:
        raise Unsupported("one element whose number is not known")
    found = layers.index_select(c.k, x, axis, c.k.reshape(ids, (-1,)))
    return c.k.reshape(found, (*shape[:axis], *ids.type.shape, *shape[axis + 1 :]))


def from_front(ids: Array, size: int) -> Array:
    """Known numbers of elements of a dim, all counted from the front.

    Raises:
        ValueError: if there are no such elements.
    """
    if ids.size and (ids.min() < -size or ids.max() >= size):
        raise ValueError(f"index {ids.min()} to {ids.max()} of a dim of size {size}")
    return np.where(ids < 0, ids + size, ids)


def top_k(c: Call) -> tuple[Value, Value]:
    """The k largest along an axis, and where they are."""
    (count,) = c.ints(1) or ()
    c.attrs.get("sorted")  # elements that are put back are in no order
    x, dim, largest = c[0], c.axis(), bool(c.attrs.get("largest", 1))
    if dim == x.type.rank - 1 and largest and x.type.dtype.is_floating:
        return layers.top_k(c.k, x, count, dim, largest=True)
    return first_of_sorted(c.k, x, count, dim, largest=largest)


def scatter_elements(c: Call) -> Node:
    """The k largest elements of each row, back where they were; or elements to places, such as what is made of them."""
    places, values = c.inputs[1], c.inputs[2]
    if isinstance(places, TopK) and isinstance(values, TopK) and c.attrs.get("reduction", "none") == "none":
        with suppress(Unsupported):
            return layers.scatter(c.k, c[0], c.attrs.get("axis", 0), places, values)
    return as_torch.scatter_elements(replace(c, inputs=Operands([as_tensor(c.k, c.inputs[i]) for i in range(3)])))


def constant_of_shape(c: Call) -> Node:
    """One value throughout; without it, float zero."""
    value = c.attrs["value"].numpy().reshape(()) if "value" in c.attrs else np.zeros((), np.float32)
    return c.k.expand(c.k.const(value), c.ints(0) or ())


def shape(c: Call) -> Node:
    """All shapes are known."""
    return c.k.const(np.asarray(c[0].type.shape[slice(c.attrs.get("start", 0), c.attrs.get("end"))], np.int64))


def constant(c: Call) -> Node:
    """The value in any of its attributes."""
    for name, kind in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if name in c.attrs:
            return c.k.const(np.asarray(c.attrs[name], kind))
    if "value" not in c.attrs:
        raise Unsupported("a sparse or string constant")
    return c.k.const(c.attrs["value"].numpy())
