"""A stored tensor as what torch's exporter made of parameters, and the nodes that make it again.

Entry points: ``Made``, ``write``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Literal

import numpy as np
import onnx_ir

from ir.dims import Shape
from pdv.passes.fold_constants import Array

_MOST_RUNS = 16  # of neighbouring rows that are written as slices
_OPERATORS = {"exp": "Exp", "neg": "Neg", "add": "Add", "mul": "Mul", "div": "Div"}
_WITH_NUMBERS: Mapping[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "add": (np.add, np.subtract), "mul": (np.multiply, np.divide), "div": (np.divide, np.multiply),
}  # fmt: skip
"""Functions of an element and a number, and their inverses."""
Step = tuple[str, float]
"""A function of each element, and the number that goes into it, if one does."""
Head = Literal["joined", "weight norm", "linear", "sum"]
"""What several parameters come to: one after the other along dim 0; the first, times the second over its norm; the
product of the first with the second, and the third added; the first, added to each row of the second."""


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
        whole: the stored tensor's shape, where repetitions have dims of their own in ``shape``.
        dropped: what the first parameter is called after dropout, and the share of it that is dropped.
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
    whole: Shape | None = None
    dropped: tuple[str, float] | None = None

    def of(self, values: Mapping[str, Array]) -> Array:
        """The stored tensor, of the parameters' values; nothing is dropped."""
        part = computed(joined([values[name] for name in self.parameters], self.head), self.steps)
        part = part if self.width is None else part.reshape(-1, self.width)
        part = part if self.rows is None else part[list(self.rows)]
        part = part.reshape(self.between)
        found: Array = np.broadcast_to(part.transpose(self.turned) if self.turned else part, self.shape)
        if self.hidden is None:
            return found if self.whole is None else found.reshape(self.whole)
        where, number = self.hidden
        return np.where(where, found.dtype.type(number), found)


def joined(arrays: Sequence[Array], head: Head) -> Array:
    """What several parameters come to."""
    if head == "joined":
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if head == "linear":
        table, weight, *biases = arrays
        product: Array = table @ weight.T
        return product + biases[0] if biases else product
    if head == "sum":
        token, rows = arrays
        total: Array = token.reshape(-1) + rows.reshape(-1, rows.shape[-1])
        return total
    scale, weight = arrays
    found: Array = weight * (scale / np.sqrt((weight**2).sum(norm_axes(scale.shape), keepdims=True)))
    return found


def norm_axes(scale: Shape) -> tuple[int, ...]:
    """The dims over which a norm is taken, of whose results there are as many as of scales."""
    return tuple(dim for dim, size in enumerate(scale) if size == 1)


def computed(array: Array, steps: Sequence[Step]) -> Array:
    """What functions give of each element, in its own type."""
    for name, number in steps:
        if name in _WITH_NUMBERS:
            array = _WITH_NUMBERS[name][0](array, array.dtype.type(number))
        else:
            array = np.exp(array) if name == "exp" else -array
    return array


def inverted(array: Array, steps: Sequence[Step]) -> Array:
    """computed(inverted(x, steps), steps) == x, but for rounding."""
    for name, number in reversed(steps):
        if name in _WITH_NUMBERS:
            array = _WITH_NUMBERS[name][1](array, array.dtype.type(number))
        else:
            array = np.log(array) if name == "exp" else -array
    return array


@dataclass(frozen=True)
class _Writer:
    """Nodes at a graph's start, that compute a stored tensor of this name."""

    graph: onnx_ir.Graph
    name: str
    first: onnx_ir.Node
    step: Iterator[int] = field(default_factory=count)

    def add(self, op: str, operands: Sequence[onnx_ir.Value], **attributes: int | Sequence[int]) -> onnx_ir.Value:
        given = [
            onnx_ir.AttrInt64(key, number) if isinstance(number, int) else onnx_ir.AttrInt64s(key, number)
            for key, number in attributes.items()
        ]
        node = onnx_ir.Node("", op, operands, given, num_outputs=1)
        node.outputs[0].name = f"{self.name}.{next(self.step)}"
        self.graph.insert_before(self.first, node)
        return node.outputs[0]

    def stored(self, array: Array) -> onnx_ir.Value:
        tensor = onnx_ir.Tensor(array, name=f"{self.name}.{next(self.step)}")
        value = onnx_ir.Value(
            name=tensor.name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def known(self, numbers: Sequence[int]) -> onnx_ir.Value:
        return self.stored(np.asarray(numbers, np.int64))

    def join(self, values: Sequence[onnx_ir.Value]) -> onnx_ir.Value:
        return self.add("Concat", values, axis=0) if len(values) > 1 else values[0]

    def with_step(self, value: onnx_ir.Value, function: str, number: float) -> onnx_ir.Value:
        assert value.dtype is not None, value
        operands = (
            [value, self.stored(np.asarray(number, value.dtype.numpy()))] if function in _WITH_NUMBERS else [value]
        )
        found = self.add(_OPERATORS[function], operands)
        found.type = value.type
        return found

    def head(self, parameters: Sequence[onnx_ir.Value], head: Head) -> onnx_ir.Value:
        if head == "joined":
            return self.join(parameters)
        if head == "linear":
            return self.add("Gemm", parameters, transB=1)
        if head == "sum":
            token, table = parameters
            assert table.shape is not None, table
            flat = [self.add("Reshape", [each, self.known((-1, table.shape.numpy()[-1]))]) for each in (token, table)]
            return self.add("Add", flat)
        scale, weight = parameters
        assert scale.shape is not None, scale
        norm = self.add("ReduceL2", [weight, self.known(norm_axes(tuple(scale.shape.numpy())))], keepdims=1)
        return self.add("Mul", [weight, self.add("Div", [scale, norm])])

    def drop(self, table: onnx_ir.Value, name: str, share: float) -> onnx_ir.Value:
        """A table after dropout, which is one node for all that read what has this name."""
        named = _dropped_as(name, table.name)
        for node in self.graph:
            if node.outputs[0].name == named:
                return node.outputs[0]
        operands = [table, self.stored(np.asarray(share, np.float32)), self.stored(np.asarray(True))]
        node = onnx_ir.Node("", "Dropout", operands, num_outputs=1)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = named, table.type, table.shape
        self.graph.insert_before(self.first, node)
        return node.outputs[0]

    def rows(self, table: onnx_ir.Value, rows: Sequence[int]) -> onnx_ir.Value:
        runs = list(_runs(rows))
        if len(runs) > _MOST_RUNS:
            return self.add("Gather", [table, self.known(rows)], axis=0)
        zero = self.known([0])
        return self.join([self.add("Slice", [table, self.known([i]), self.known([j]), zero]) for i, j in runs])


def write(graph: onnx_ir.Graph, name: str, made: Made) -> onnx_ir.Value:
    """The stored tensor, computed from parameters at the graph's start."""
    nodes = [*graph]
    named = None if made.dropped is None else _dropped_as(made.dropped[0], made.parameters[0])
    after = next((i + 1 for i, node in enumerate(nodes) if node.outputs[0].name == named), 0)
    to = _Writer(graph, name, nodes[after])
    parameters, rows, width = [graph.initializers[each] for each in made.parameters], made.rows, made.width
    if made.dropped is not None:
        parameters[0] = to.drop(parameters[0], *made.dropped)
    if made.head == "linear":  # of the rows that are read alone
        parameters[0] = parameters[0] if rows is None else to.rows(parameters[0], rows)
        rows = width = None
    read = to.head(parameters, made.head)
    read.type = graph.initializers[made.parameters[0]].type
    for function, number in made.steps:
        read = to.with_step(read, function, number)
    if width is not None and made.head == "joined":
        read = to.add("Reshape", [read, to.known((-1, width))])
    if rows is not None:
        read = to.rows(read, rows)
    read = to.add("Reshape", [read, to.known(made.between)])
    between = made.between
    if made.turned:
        read = to.add("Transpose", [read], perm=made.turned)
        between = tuple(between[dim] for dim in made.turned)
    read = read if between == made.shape else to.add("Expand", [read, to.known(made.shape)])
    read = read if made.whole in (None, made.shape) else to.add("Reshape", [read, to.known(made.whole or ())])
    dtype = graph.initializers[made.parameters[0]].dtype
    if made.hidden is None or dtype is None:
        return read
    where, number = made.hidden
    return to.add("Where", [to.stored(where), to.stored(np.asarray(number, dtype.numpy())), read])


def _dropped_as(name: str, table: str | None) -> str:
    """What a table is called after the dropout whose result torch calls ``name``."""
    return f"{name} of {table}"


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbouring rows."""
    ends = [i + 1 for i, (row, following) in enumerate(pairwise(rows)) if following != row + 1]
    for start, stop in pairwise([0, *ends, len(rows)]):
        yield rows[start], rows[stop - 1] + 1
