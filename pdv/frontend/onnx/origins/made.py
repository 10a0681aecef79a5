"""A stored tensor as what torch's exporter made of parameters, and the nodes that make it again.

Entry points: ``Made``, ``write``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir

from ir.dims import Shape
from pdv.passes.fold_constants import Array

_MOST_RUNS = 16  # of neighbouring rows that are written as slices
_OPERATORS = {"exp": "Exp", "neg": "Neg"}
Step = tuple[str, float]
"""A function of each element, and the number that it adds, if it does."""


@dataclass(frozen=True)
class Made:
    """A stored tensor as what was made of parameters.

    Attributes:
        parameters: by name, one after the other along dim 0.
        rows: which of their rows, in order; None: all.
        between: their shape before it is repeated to ``shape``.
        turned: whether the dims of the one matrix change places first.
        steps: the functions of each element that come first of all.
    """

    parameters: tuple[str, ...]
    rows: tuple[int, ...] | None
    between: Shape
    shape: Shape
    turned: bool = False
    steps: tuple[Step, ...] = ()

    def of(self, values: Mapping[str, Array]) -> Array:
        """The stored tensor, of the parameters' values."""
        whole = np.concatenate([values[name] for name in self.parameters]) if len(self.parameters) > 1 else None
        part = computed(values[self.parameters[0]] if whole is None else whole, self.steps)
        part = part if self.rows is None else part[list(self.rows)]
        part = part.T if self.turned else part
        found: Array = np.broadcast_to(part.reshape(self.between), self.shape)
        return found


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


def write(graph: onnx_ir.Graph, name: str, made: Made) -> onnx_ir.Value:
    """The stored tensor, computed from parameters at the graph's start."""
    first, step = next(iter(graph)), iter(range(1 << 16))

    def add(op: str, operands: Sequence[onnx_ir.Value], **attributes: int) -> onnx_ir.Value:
        given = [onnx_ir.AttrInt64(key, number) for key, number in attributes.items()]
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

    def join(values: Sequence[onnx_ir.Value]) -> onnx_ir.Value:
        return add("Concat", values, axis=0) if len(values) > 1 else values[0]

    def with_number(value: onnx_ir.Value, number: float) -> onnx_ir.Value:
        assert value.dtype is not None, value
        return add("Add", [value, stored(np.asarray(number, value.dtype.numpy()))])

    read = join([graph.initializers[each] for each in made.parameters])
    for function, number in made.steps:
        like, read = read, with_number(read, number) if function == "add" else add(_OPERATORS[function], [read])
        read.type = like.type
    if made.rows is not None:
        runs = list(_runs(made.rows))
        zero = known([0]) if len(runs) <= _MOST_RUNS else None
        read = (
            add("Gather", [read, known(made.rows)], axis=0)
            if zero is None
            else join([add("Slice", [read, known([start]), known([stop]), zero]) for start, stop in runs])
        )
    if made.turned:
        return add("Transpose", [read])
    read = add("Reshape", [read, known(made.between)])
    return read if made.between == made.shape else add("Expand", [read, known(made.shape)])


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbouring rows."""
    ends = [i + 1 for i, (row, following) in enumerate(pairwise(rows)) if following != row + 1]
    for start, stop in pairwise([0, *ends, len(rows)]):
        yield rows[start], rows[stop - 1] + 1
