"""Stored tensors and the parameter nodes that read them, in one program or in several.

A serial graph and its PCG may read one stored tensor by different views (a fused weight whole, or a chunk of it). What
all readers have in common, the *base*, is the array that is drawn once, and on which gradients are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.errors import VerificationError
from ir.graph import Graph, Node, View, apply_view, param_view
from ir.types import DType


@dataclass(frozen=True, slots=True)
class Base:
    """What is common to all readers of one stored tensor.

    Attributes:
        shape: of the array after the first ``steps`` view steps, which all readers share.
        steps: how many.
        dtype: its element type.
        trainable: whether training changes it.
    """

    shape: Shape
    steps: int
    dtype: DType
    trainable: bool


def source_of(node: Node) -> str:
    """The stored tensor that a parameter node reads."""
    return str(node.attr("source"))


def rest_of_view(node: Node, base: Base) -> View:
    """How a parameter node reads the base."""
    return param_view(node)[base.steps :]


def bases(graphs: Iterable[Graph]) -> dict[str, Base]:
    """The base of every stored tensor that the graphs read.

    Raises:
        VerificationError: if readers disagree about a tensor, or none tells its shape.
    """
    readers: dict[str, list[Node]] = {}
    for graph in graphs:
        for node in graph.params:
            readers.setdefault(source_of(node), []).append(node)
    return {source: _base(source, nodes) for source, nodes in readers.items()}


def _base(source: str, nodes: list[Node]) -> Base:
    views = [param_view(node) for node in nodes]
    steps = 0
    while all(len(view) > steps and view[steps] == views[0][steps] for view in views):
        steps += 1
    shapes = {_before(node.type.shape, view[steps:]) for node, view in zip(nodes, views, strict=True)} - {None}
    kinds = {(node.type.dtype, bool(node.attr("trainable"))) for node in nodes}
    if len(shapes) != 1 or len(kinds) != 1:
        raise VerificationError(
            f"readers of stored tensor {source} disagree about it: shapes {sorted(map(str, shapes))}, "
            f"(type, trainable) {sorted(map(str, kinds))}"
        )
    (shape,), ((dtype, trainable),) = shapes, kinds
    assert shape is not None
    return Base(shape, steps, dtype, trainable)


def _before(shape: Shape, view: View) -> Shape | None:
    """Shape that a view was taken of; None after a reshape, which does not tell."""
    for step in reversed(view):
        match step:
            case ("permute", perm):
                shape = tuple(shape[perm.index(dim)] for dim in range(len(perm)))
            case ("chunk", dim, parts, _):
                shape = (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])
            case _:
                return None
    return shape


def places(node: Node, base: Base) -> np.ndarray[Any, Any]:
    """[*node shape]: the row-major place in the base of each element that a parameter node reads."""
    numbers = np.arange(math.prod(base.shape)).reshape(base.shape)
    return apply_view(numbers, rest_of_view(node, base))


def add_up(gradients: Mapping[Node, np.ndarray[Any, Any]], found: Mapping[str, Base]) -> dict[str, Any]:
    """Stored tensor -> [trials, elements]: the sum of its readers' gradients, each [trials, *node shape]."""
    totals: dict[str, Any] = {}
    for node, gradient in gradients.items():
        source = source_of(node)
        base = found[source]
        total = totals.setdefault(source, np.zeros((gradient.shape[0], math.prod(base.shape)), dtype=gradient.dtype))
        total[:, places(node, base)] += gradient
    return totals
