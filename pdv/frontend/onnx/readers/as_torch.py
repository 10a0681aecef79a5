"""ONNX operators that loops cannot say and torch has: run by torch as they are, on whole operands.

Entry points: ``READERS``; ``scatter_elements``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler, run_by_torch
from pdv.frontend.onnx.readers import known, windows

_INTERPOLATIONS = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


def sample(c: Call) -> Node:
    """x: [n, c, *space] at points [n, *places, dims], which lie between -1 and 1."""
    dims, mode = c[0].type.rank - 2, c.attrs["mode"]
    number = _INTERPOLATIONS.get(mode)
    if dims not in (2, 3) or number is None or (dims == 3 and number == 2):
        raise Unsupported(f"{mode} sampling over {dims} dims")
    how = (number, _PADDINGS[c.attrs["padding_mode"]], bool(c.attrs["align_corners"]))
    found: Node = run_by_torch(c.k, f"aten::grid_sampler_{dims}d", c[0], c[1], *how)
    return found


def determinant(c: Call) -> Node:
    """Of each matrix."""
    found: Node = run_by_torch(c.k, "aten::linalg_det", c[0])
    return found


def bits(op: str) -> Handler:
    """Of integers, bit by bit."""

    def handle(c: Call) -> Node:
        return _on_bits(c, f"aten::bitwise_{op}", [c[i] for i in range(len(c.inputs))])

    return handle


def shifted_bits(c: Call) -> Node:
    """Of integers; shifts by their width or more leave nothing."""
    direction = "left_shift" if c.attrs["direction"] == "LEFT" else "right_shift"
    return _on_bits(c, f"aten::bitwise_{direction}.Tensor", [c[0], c[1]])


def _on_bits(c: Call, function: str, operands: Sequence[Node]) -> Node:
    """Of types in which torch does not compute, wide ones on the way."""
    own = operands[0].type.dtype
    wide = [c.k.cast(x, DType.I64) for x in operands] if own.is_stored else operands
    found: Node = run_by_torch(c.k, function, *wide)
    return c.k.cast(found, own)


def max_pool(c: Call) -> tuple[Node, Node | None]:
    """Maximum over windows, and where each was, in all elements of the operand."""
    if not c.is_used(1):
        return windows.max_pool(c)
    over = windows.window(c, tuple(c.attrs["kernel_shape"]))
    x, dims = c[0], len(over.kernel)
    if not over.even or dims > 2 or c.attrs.get("storage_order", 0):
        raise Unsupported("the places of maxima over such windows")
    lead = ((1,) * (2 - dims), (0,) * (2 - dims))
    wide = c.k.reshape(x, (*x.type.shape[:2], *lead[0], *x.type.shape[2:]))
    spans = [[*lead[0], *over.kernel], [*lead[0], *over.stride], [*lead[1], *over.before], [*lead[0], *over.dilation]]
    values, places = run_by_torch(c.k, "aten::max_pool2d_with_indices", wide, *spans)
    planes = np.arange(math.prod(x.type.shape[:2])).reshape(*x.type.shape[:2], *(1,) * dims)
    shape = tuple(n for i, n in enumerate(values.type.shape) if i != 2 or dims == 2)
    places = c.k.reshape(places, shape)
    return c.k.reshape(values, shape), c.k.add(places, c.k.const(planes * math.prod(x.type.shape[2:])))


def max_unpool(c: Call) -> Node:
    """Elements put where they were, among all elements of the result; zeros elsewhere."""
    k, x, places = c.k, c[0], c[1]
    kernel = c.attrs["kernel_shape"]
    dims = len(kernel)
    stride, pads = c.attrs.get("strides", (1,) * dims), c.attrs.get("pads", (0,) * (2 * dims))
    space = [
        (n - 1) * s - pads[i] - pads[dims + i] + f
        for i, (n, s, f) in enumerate(zip(x.type.shape[2:], stride, kernel, strict=True))
    ]
    inner = (*x.type.shape[:2], *space)
    shape = tuple(c.ints(2) or ()) or inner
    zeros = k.const(np.zeros(math.prod(inner), np.float32).astype(x.type.dtype.torch_name), x.type.dtype)
    flat: Node = run_by_torch(k, "aten::scatter.src", zeros, 0, k.reshape(places, (-1,)), k.reshape(x, (-1,)))
    y = k.reshape(flat, inner)
    return windows.padded(k, y, (0,) * dims, [m - n for m, n in zip(shape[2:], space, strict=True)], 0.0)


def scatter_elements(c: Call) -> Node:
    """Elements put to places that inputs say; known places are a selection."""
    k, x, places, updates, how = c.k, c[0], c[1], c[2], c.attrs.get("reduction", "none")
    if k.value(places) is not None:
        return known.scatter_elements(c)
    dim = c.axis()
    from_front = masks.from_front(k, places, x.type.shape[dim])
    return _scattered(k, x, dim, from_front, updates, how)


def _scattered(k: Lowering, x: Node, dim: int, places: Node, updates: Node, how: str) -> Node:
    found: Node
    if how in ("none", "add"):
        name = "aten::scatter.src" if how == "none" else "aten::scatter_add"
        found = run_by_torch(k, name, x, dim, places, updates)
    else:
        found = run_by_torch(k, "aten::scatter_reduce.two", x, dim, places, updates, _REDUCTIONS[how])
    return found


def scatter_nd(c: Call) -> Node:
    """Slices put to places that inputs say."""
    k, x, ids, updates, how = c.k, c[0], c[1], c[2], c.attrs["reduction"]
    if k.value(ids) is not None:
        return known.scatter_nd(c)
    depth, shape = ids.type.shape[-1], x.type.shape
    rows, rest = math.prod(shape[:depth]), math.prod(shape[depth:])
    flat: Node | None = None
    for i in range(depth):
        each = masks.from_front(k, k.select(ids, ids.type.rank - 1, i), shape[i])
        flat = each if flat is None else k.add(k.scale(flat, shape[i]), each)
    if flat is None:
        raise Unsupported("slices put to no place")
    count = flat.type.num_elements
    wide = k.expand(k.reshape(flat, (count, 1)), (count, rest))
    y = _scattered(k, k.reshape(x, (rows, rest)), 0, wide, k.reshape(updates, (count, rest)), how)
    return k.reshape(y, shape)


READERS: Mapping[str, Handler] = {
    "GridSample": sample,
    "Det": determinant,
    **{f"Bitwise{name}": bits(op) for name, op in (("And", "and.Tensor"), ("Or", "or.Tensor"), ("Xor", "xor.Tensor"))},
    "BitwiseNot": bits("not"),
    "BitShift": shifted_bits,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
    "ScatterND": scatter_nd,
}
