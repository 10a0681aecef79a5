"""A stored tensor as what torch's exporter made of parameters, and the nodes that make it again.

Entry points: ``Made``, ``write``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import onnx_ir

from ir.dims import Shape
from pdv.passes.fold_constants import Array

_MOST_RUNS = 16  # of neighbouring rows that are written as slices
_OPERATORS = {"exp": "Exp", "neg": "Neg"}
Step = tuple[str, float]
"""A function of each element, and the number that it adds, if it does."""
Head = Literal["joined", "weight norm"]
"""What several parameters come to: one after the other along dim 0; the first, times the second over its norm."""


@dataclass(frozen=True)
class Made:
    """A stored tensor as what was made of parameters.

    Attributes:
        parameters: by name.
        rows: which of their rows, in order; None: all.
        between: their shape before its dims change places, and it is repeated to ``shape``.
        shape: the stored tensor's.
        turned: the order of its dims then; empty: as they are.
        steps: the functions of each element that come first of all.
        head: what several parameters come to before that.
        width: how many elements a row has; none: as many as dim 0 says.
        hidden: the places that hold a number instead, and which.
    """

    parameters: tuple[str, ...]
    rows: tuple[int, ...] | None
    between: Shape
    shape: Shape
    turned: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    head: Head = "joined"
    width: int | None = None
    hidden: tuple[Array, float] | None = field(default=None, compare=False)

    def of(self, values: Mapping[str, Array]) -> Array:
        """The stored tensor, of the parameters' values."""
        part = computed(joined([values[name] for name in self.parameters], self.head), self.steps)
        part = part if self.width is None else part.reshape(-1, self.width)
        part = part if self.rows is None else part[list(self.rows)]
        part = part.reshape(self.between)
        found: Array = np.broadcast_to(part.transpose(self.turned) if self.turned else part, self.shape)
        if self.hidden is None:
            return found
        where, number = self.hidden
        return np.where(where, found.dtype.type(number), found)


def joined(arrays: Sequence[Array], head: Head) -> Array:
    """What several parameters come to."""
    if head == "joined":
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    scale, weight = arrays
    found: Array = weight * (scale / np.sqrt((weight**2).sum(norm_axes(scale.shape), keepdims=True)))
    return found


def norm_axes(scale: Shape) -> tuple[int, ...]:
    """The dims over which a norm is taken, of whose results there are as many as of scales."""
    return tuple(dim for dim, size in enumerate(scale) if size == 1)


def computed(array: Array, steps: Sequence[Step]) -> Array:
    """What functions give of each element, in its own type."""
    for name, number in steps:
        array = np.exp(array) if name == "exp" else -array if name == "neg" else array + array.dtype.type(number)
    return array


def inverted(array: Array, steps: Sequence[Step]) -> Array:
    """computed(inverted(x, steps), steps) == x, but for rounding."""
    for name, number in reversed(steps):
        array = np.log(array) if name == "exp" else -array if name == "neg" else array - array.dtype.type(number)
    return array


Known = Callable[[Sequence[int]], onnx_ir.Value]
Add = Callable[..., onnx_ir.Value]


def write(graph: onnx_ir.Graph, name: str, made: Made) -> onnx_ir.Value:
    """The stored tensor, computed from parameters at the graph's start."""
    first, step = next(iter(graph)), iter(range(1 << 16))

    def add(op: str, operands: Sequence[onnx_ir.Value], **attributes: int | Sequence[int]) -> onnx_ir.Value:
        given = [
            onnx_ir.AttrInt64(key, number) if isinstance(number, int) else onnx_ir.AttrInt64s(key, number)
            for key, number in attributes.items()
        ]
        node = onnx_ir.Node("", op, operands, given, num_outputs=1)
        node.outputs[0].name = f"{name}.{next(step)}"
        graph.insert_before(first, node)
        return node.outputs[0]

    def stored(array: Array) -> onnx_ir.Value:
        tensor = onnx_ir.Tensor(array, name=f"{name}.{next(step)}")
        value = onnx_ir.Value(
            name=tensor.name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(value)
        return value

    def known(numbers: Sequence[int]) -> onnx_ir.Value:
        return stored(np.asarray(numbers, np.int64))

    def with_number(value: onnx_ir.Value, number: float) -> onnx_ir.Value:
        assert value.dtype is not None, value
        return add("Add", [value, stored(np.asarray(number, value.dtype.numpy()))])

    read = _head(made, [graph.initializers[each] for each in made.parameters], add, known)
    for function, number in made.steps:
        like, read = read, with_number(read, number) if function == "add" else add(_OPERATORS[function], [read])
        read.type = like.type
    if made.width is not None:
        read = add("Reshape", [read, known((-1, made.width))])
    if made.rows is not None:
        runs = list(_runs(made.rows))
        zero = known([0]) if len(runs) <= _MOST_RUNS else None
        read = (
            add("Gather", [read, known(made.rows)], axis=0)
            if zero is None
            else _join([add("Slice", [read, known([start]), known([stop]), zero]) for start, stop in runs], add)
        )
    read = add("Reshape", [read, known(made.between)])
    between = made.between
    if made.turned:
        read = add("Transpose", [read], perm=made.turned)
        between = tuple(between[dim] for dim in made.turned)
    read = read if between == made.shape else add("Expand", [read, known(made.shape)])
    if made.hidden is None:
        return read
    where, number = made.hidden
    dtype = graph.initializers[made.parameters[0]].dtype
    assert dtype is not None, made
    return add("Where", [stored(where), stored(np.asarray(number, dtype.numpy())), read])


def _head(made: Made, parameters: Sequence[onnx_ir.Value], add: Add, known: Known) -> onnx_ir.Value:
    if made.head == "joined":
        return _join(parameters, add)
    scale, weight = parameters
    assert scale.shape is not None, scale
    norm = add("ReduceL2", [weight, known(norm_axes(tuple(scale.shape.numpy())))], keepdims=1)
    return add("Mul", [weight, add("Div", [scale, norm])])


def _join(values: Sequence[onnx_ir.Value], add: Add) -> onnx_ir.Value:
    return add("Concat", values, axis=0) if len(values) > 1 else values[0]


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbouring rows."""
    ends = [i + 1 for i, (row, following) in enumerate(pairwise(rows)) if following != row + 1]
    for start, stop in pairwise([0, *ends, len(rows)]):
        yield rows[start], rows[stop - 1] + 1
