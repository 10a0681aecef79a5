"""Sums and means over dims; the reduction operator is always in the name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.emission.code import Code, binary, method
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.graph import Node
from ir.memory.layout import HANDED_ON
from ir.operator import Attrs, Operator
from ir.scaling.ties import doubt_terms
from ir.tape import Call, Known, Tape
from ir.types import DType

_FIRST = (frozenset({0}),)


def _loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """``dims`` (non-negative) vanish, or stay with size one if ``keepdim``."""
    dims, keep = attrs["dims"], attrs["keepdim"]
    assert isinstance(dims, tuple), attrs
    if len(set(dims)) != len(dims):
        raise ShapeError(f"{dims} are not dims of {shapes[0]}, each once")
    names = [f"d{i}" for i in range(len(shapes[0]))]
    kept = ["1" if i in dims else name for i, name in enumerate(names) if bool(keep) or i not in dims]
    return f"{' '.join(names)} -> {' '.join(kept)}", {}


def _sum(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    letters = "abcdefgh"[: len(call.loops.operands[0])]
    kept = "".join(c for i, c in enumerate(letters) if i not in call.attrs["dims"])
    return t.reshape(t.einsum(f"{letters}->{kept}", operands[0]), call.loops.result_shape)


def _of_numbers(operands: Sequence[DType], attrs: Attrs) -> DType:
    if operands[0] is DType.BOOL:
        raise ShapeError("a sum of truth values", "Sums are of numbers", "Cast them to integers first")
    return operands[0]


def _mean(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    count = math.prod(call.whole_loops.extents[loop] for loop in call.loops.contracted)
    return t.scale(_sum(t, operands, call), 1.0 / count)


def _reduce(name: str) -> Callable[[Node, Sequence[Code], Writing], Code]:
    def reduce(node: Node, x: Sequence[Code], writing: Writing) -> Code:
        dims = node.attr("dims")
        where = str(dims[0]) if len(dims) == 1 else str(tuple(dims))
        return method(x[0], name, where, *(["keepdim=True"] if node.attr("keepdim") else []))

    return reduce


def _write_mean(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    """A cut mean is a term of the whole one: the mean of this share over the number of shares."""
    code = _reduce("mean")(node, x, writing)
    for axis in writing.cutting(node, *node.loops.contracted):
        code = binary(code, "/", Code(f"{axis}.size"))
    return code


reduce_sum = Operator(
    "reduce_sum",
    _loops,
    "row",
    attrs=("dims", "keepdim"),
    dims_attr="dims",
    linear=_FIRST,
    backward_factor=1,
    memory=HANDED_ON,  # spread out without a copy
    result_dtype=_of_numbers,
    ties=doubt_terms,
    evaluate=_sum,
    emit=_reduce("sum"),
    fold=lambda x, dims, keepdim: x.sum(dims, keepdims=keepdim),
)
reduce_mean = Operator(
    "reduce_mean",
    _loops,
    "row",
    # the divisor counts points on all devices, so that cut means are terms of the whole one
    attrs=("dims", "keepdim"),
    dims_attr="dims",
    linear=_FIRST,
    backward_factor=1,
    evaluate=_mean,
    emit=_write_mean,
    fold=lambda x, dims, keepdim: x.mean(dims, keepdims=keepdim),
)


def _cumsum_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    names = [f"d{i}*" if i == attrs["dim"] else f"d{i}" for i in range(len(shapes[0]))]
    return f"{' '.join(names)} -> {' '.join(names)}", {}


def _cumsum(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    (x,), dim = operands, call.attrs["dim"]
    if isinstance(x, np.ndarray):
        return np.cumsum(x, axis=dim + 1)
    letters = "abcdefgh"[: len(call.loops.operands[0])]
    size = x.shape[dim + 1]
    before = np.broadcast_to(np.triu(np.ones((size, size), dtype=np.int64)), (x.shape[0], size, size))
    return t.einsum(f"{letters},{letters[dim]}z->{letters.replace(letters[dim], 'z')}", x, before)


cumsum = Operator(
    "cumsum",
    _cumsum_loops,
    "row",
    attrs=("dim",),
    dims_attr="dim",
    linear=_FIRST,
    backward_factor=1,
    evaluate=_cumsum,
    emit="{0}.cumsum({dim})",
    measured_as="softmax",
    fold=lambda x, dim: x.cumsum(dim),
)


def _largest(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The largest element; of equal ones each takes the same share of the gradient."""
    most = x.max(axis=-1, keepdims=True)
    found = (x == most).astype(x.dtype)
    return most, lambda g: g * found / found.sum(axis=-1, keepdims=True)


def _max_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    dim, keep = attrs["dim"], bool(attrs["keepdim"])
    names = [f"d{i}*" if i == dim else f"d{i}" for i in range(len(shapes[0]))]
    kept = ["1" if i == dim else name for i, name in enumerate(names) if keep or i != dim]
    return f"{' '.join(names)} -> {' '.join(kept)}", {}


def _max(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    (x,), dim, rank = operands, call.attrs["dim"], len(call.loops.operands[0])
    if isinstance(x, np.ndarray):
        return x.max(axis=dim + 1).reshape(x.shape[0], *call.loops.result_shape)
    last = (*(i for i in range(rank) if i != dim), dim)
    return t.reshape(t.row_reduce(Known("largest", _largest), t.transpose(x, last)), call.loops.result_shape)


reduce_max = Operator(
    "reduce_max",
    _max_loops,
    "row",
    attrs=("dim", "keepdim"),
    dims_attr="dim",
    backward_factor=1,
    saved=(0, "out"),
    evaluate=_max,
    emit=lambda node, x, writing: method(
        x[0], "amax", str(node.attr("dim")), *(["keepdim=True"] if node.attr("keepdim") else [])
    ),
    measured_as="softmax",
    fold=lambda x, dim, keepdim: x.max(dim, keepdims=keepdim),
)

OPS = (reduce_sum, reduce_mean, cumsum, reduce_max)
