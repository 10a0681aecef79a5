"""Stored tensors and the parameter nodes that read them, in one program or in several.

A serial graph and its PCG may read one stored tensor by different views (a fused weight whole, or a chunk of it). What
all readers have in common, the *base*, is the array that is drawn once, and on which gradients are added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ir.dims import Shape
from ir.errors import VerificationError
from ir.graph import Graph, Node, View, ViewStep, param_view
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType, TensorType


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


class Reading(NamedTuple):
    """One view of one stored tensor, and its shape."""

    source: str
    view: View
    shape: Shape


Box = tuple[tuple[float, float], ...]
"""Per dim of a stored tensor, the part that a view reads, as fractions of the dim."""


def readings(node: Node) -> tuple[Reading, ...]:
    """What a parameter node reads: one stored tensor, or the parts of a concatenation."""
    view = param_view(node)
    if view and view[0][0] == "concat":
        return tuple(Reading(*part) for part in view[0][2])
    return (Reading(str(node.attr("source")), view, node.type.shape),)


def sources_of(node: Node) -> tuple[str, ...]:
    """The stored tensors that a parameter node reads, in order."""
    return tuple(reading.source for reading in readings(node))


def read_twice(params: Iterable[Node]) -> Iterator[tuple[Reading, Reading]]:
    """Readings of some parameters that have an element of a stored tensor in common: each would be trained apart."""
    parts: dict[str, list[Reading]] = {}
    for param in dict.fromkeys(params):
        for reading in readings(param):
            parts.setdefault(reading.source, []).append(reading)
    pairs = itertools.chain.from_iterable(itertools.combinations(each, 2) for each in parts.values())
    return ((one, other) for one, other in pairs if overlap(box(one), box(other)))


def trained_sources_of(graph: Graph) -> tuple[str, ...]:
    """The stored tensors that training changes, each once."""
    return tuple(dict.fromkeys(s for param in graph.params if param.attr("trainable") for s in sources_of(param)))


def rest_of_view(reading: Reading, base: Base) -> View:
    """How the base is read."""
    return reading.view[base.steps :]


def bases(graphs: Iterable[Graph]) -> dict[str, Base]:
    """The base of every stored tensor that the graphs read.

    Raises:
        VerificationError: if readers disagree about a tensor, or none tells its shape.
    """
    readers: dict[str, list[tuple[Node, Reading]]] = {}
    for graph in graphs:
        for node in graph.params:
            for reading in readings(node):
                readers.setdefault(reading.source, []).append((node, reading))
    return {source: _base(source, found) for source, found in readers.items()}


def _base(source: str, readers: list[tuple[Node, Reading]]) -> Base:
    steps = len(common_steps([reading.view for _, reading in readers]))
    shapes = {shape_before(reading.shape, reading.view[steps:]) for _, reading in readers} - {None}
    kinds = {(node.type.dtype, bool(node.attr("trainable"))) for node, _ in readers}
    if len(shapes) != 1 or len(kinds) != 1:
        raise VerificationError(
            f"readers of stored tensor {source} disagree about it: shapes {sorted(map(str, shapes))}, "
            f"(type, trainable) {sorted(map(str, kinds))}"
        )
    (shape,), ((dtype, trainable),) = shapes, kinds
    assert shape is not None
    return Base(shape, steps, dtype, trainable)


def common_steps(views: Sequence[View]) -> View:
    """What all views begin with."""
    steps = 0
    while all(len(view) > steps and view[steps] == views[0][steps] for view in views):
        steps += 1
    return views[0][:steps]


def view_calls(view: View) -> Iterator[tuple[Operator, dict[str, Hashable]]]:
    """The steps of a view as operators with their attributes."""
    for name, *values in view:
        op = OPERATORS[name]
        yield op, dict(zip(op.attrs, values, strict=False))  # a slice says also of how many elements it is


def apply_view(array: np.ndarray[Any, Any], view: View) -> np.ndarray[Any, Any]:
    """What a parameter reads of its one stored array."""
    for op, attrs in view_calls(view):
        assert op.fold is not None, f"no such view step: {op.name}"
        array = op.fold(array, **attrs)
    return array


def read_stored(node: Node, stored: Callable[[str, View], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What a parameter holds, given what each view of a stored tensor does."""
    view = param_view(node)
    if view and view[0][0] == "concat":
        _, dim, parts = view[0]
        joined = np.concatenate([stored(source, part) for source, part, _ in parts], axis=dim)
        return apply_view(joined, view[1:])
    return stored(str(node.attr("source")), view)


def shape_after(shape: Shape, view: View) -> Shape:
    """Shape of a view of what has this shape."""
    for op, attrs in view_calls(view):
        shape = op.solve(op.name, (TensorType(shape, DType.F32),), attrs).result_shape
    return shape


def shape_before(shape: Shape, view: View) -> Shape | None:
    """Shape that a view was taken of; None after a reshape, which does not tell."""
    for step in reversed(view):
        before = shape_before_step(shape, step)
        if before is None:
            return None
        shape = before
    return shape


def shape_before_step(shape: Shape, step: ViewStep) -> Shape | None:
    """Shape that one step of a view was taken of; None for a reshape, which does not tell."""
    match step:
        case ("permute", perm):
            return tuple(shape[perm.index(dim)] for dim in range(len(perm)))
        case ("chunk", dim, parts, _):
            return (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])
        case ("slice", dim, _, _, extent):
            return (*shape[:dim], extent, *shape[dim + 1 :])
    return None


def places(node: Node, found: Mapping[str, Base]) -> np.ndarray[Any, Any]:
    """[*node shape]: of each element that a parameter node reads, its place when all bases lie in one row."""
    starts = _starts(found)

    def numbers(source: str, view: View) -> np.ndarray[Any, Any]:
        base = found[source]
        count = math.prod(base.shape)
        return apply_view(np.arange(starts[source], starts[source] + count).reshape(base.shape), view[base.steps :])

    return read_stored(node, numbers)


def _starts(found: Mapping[str, Base]) -> dict[str, int]:
    sizes = [math.prod(base.shape) for base in found.values()]
    return dict(zip(found, itertools.accumulate(sizes, initial=0), strict=False))


def add_up(gradients: Mapping[Node, np.ndarray[Any, Any]], found: Mapping[str, Base]) -> dict[str, Any]:
    """Stored tensor -> [trials, elements]: the sum of its readers' gradients, each [trials, *node shape]."""
    if not gradients:
        return {}
    first = next(iter(gradients.values()))
    starts = _starts(found)
    row = np.zeros((first.shape[0], sum(math.prod(base.shape) for base in found.values())), dtype=first.dtype)
    for node, gradient in gradients.items():
        row[:, places(node, found)] += gradient
    read = dict.fromkeys(source for node in gradients for source in sources_of(node))
    return {source: row[:, starts[source] : starts[source] + math.prod(found[source].shape)] for source in read}


def box(reading: Reading) -> Box:
    """What is read of a stored tensor; what follows a reshape no longer narrows it."""
    view = reading.view
    rank = next((len(step[1]) for step in view if step[0] == "permute"), len(reading.shape))
    if view and view[0][0] == "reshape":
        return ()
    dims = list(range(rank))
    parts = [(0.0, 1.0)] * rank
    for step in view:
        match step:
            case ("permute", perm):
                dims = [dims[dim] for dim in perm]
            case ("chunk", dim, count, index):
                start, stop = parts[dims[dim]]
                width = (stop - start) / count
                parts[dims[dim]] = start + index * width, start + (index + 1) * width
            case ("slice", dim, first, last, extent):
                start, stop = parts[dims[dim]]
                width = (stop - start) / extent
                parts[dims[dim]] = start + first * width, start + last * width
            case _:
                break
    return tuple(parts)


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> bool:
    """True if two boxes share more than a border."""
    tolerance = 1e-9  # of a dim; no dim has a billion elements
    return all(max(x[0], y[0]) < min(x[1], y[1]) - tolerance for x, y in zip(a, b, strict=False))
