"""One ONNX node to be lowered: its operands as IR nodes, None where left out, and attributes as plain Python values.

What a reader asks for is noted; what the node says and nobody asked for is refused by name (``Call.check_all_read``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir

from ir.dims import Shape
from ir.errors import ModelError, first_line
from ir.graph import Node
from ir.types import DType
from pdv.frontend import masks
from pdv.frontend.chosen import Chosen
from pdv.frontend.lowering import Drawn, Lowering, TopK, Unsupported
from pdv.frontend.onnx.reference import evaluate
from pdv.passes.fold_constants import Array


@dataclass(frozen=True, slots=True)
class NanMask:
    """Where a tensor is not a number; only the guard around a softmax asks this."""

    of: Node


@dataclass(frozen=True, slots=True)
class Uniform:
    """Random numbers between two ends, read once: a mask may be made of them; noise, else.

    Attributes:
        drawn: what the file calls them, and between which ends it draws them; others were moved since.
    """

    shape: Shape
    dtype: DType
    low: float
    high: float
    drawn: tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Chance:
    """Truth values, a ``share`` of them true, where ``of`` is not zero: ones behind dropout."""

    of: Node
    share: float


@dataclass(frozen=True, slots=True)
class Places:
    """Where a mask holds: a column of numbers for each place, or, ``turned``, a row."""

    mask: Node
    turned: bool = False


Value = Node | tuple[Node, ...] | NanMask | TopK | Uniform | Chance | Places | Chosen
"""A tensor, a sequence of tensors, a question about one, its largest elements, random numbers and masks of them, places
where a mask holds, and rows that it chooses.
"""

Handler = Callable[["Call"], Any]  # Any: a Node, or a tuple with one entry per output (None: not computed)


class NeedsValueError(Unsupported):
    """An operand must be known when planning; ``operand`` is the one."""

    def __init__(self, index: int, operand: Node) -> None:
        what = f"operand {index} depends on the model's inputs"
        if operand.is_input:
            what = f"operand {index} is the input {operand.attr('name')!r}, whose value must be known when planning"
        super().__init__(what)
        self.operand = operand


def inputs_of(node: Node) -> list[str]:
    """The inputs of the model that a value depends on; none if one of them has several dims, as no known one has."""
    found: dict[Node, None] = {}
    left = [node]
    while left:
        one = left.pop()
        if one not in found:
            found[one] = None
            left += one.operands
    inputs = [one for one in found if one.is_input]
    return [one.attr("name") for one in inputs] if all(one.type.rank <= 1 for one in inputs) else []


def as_tensor(k: Lowering, value: Value | None) -> Value | None:
    """The answer to a question about a tensor, its largest elements, random numbers, or a mask, as one.

    Raises:
        Unsupported: of what has as many rows as a mask chooses.
    """
    if isinstance(value, Uniform):
        name, low, high = value.drawn
        k.drawn[name] = Drawn("uniform", len(value.shape), high - low, low)
        noise = masks.noise(k, "uniform", value.shape, value.dtype)
        return k.shift(k.scale(noise, high - low), value.low)
    if isinstance(value, Places | Chosen):
        raise Unsupported("of rows that a mask chooses, of which the number depends on values")
    if isinstance(value, Chance):
        return k.apply("compare_number", value.of, relation="!=", number=0.0)
    if isinstance(value, TopK):
        return first_of_sorted(k, value.of, value.k, value.of.type.rank - 1)[value.part == "places"]
    return k.apply("compare", value.of, value.of, relation="!=") if isinstance(value, NanMask) else value


def first_of_sorted(k: Lowering, x: Node, count: int, dim: int, *, largest: bool = True) -> tuple[Node, Node]:
    """The largest or smallest elements along a dim, in order, and where they were: of equal ones the first."""
    values, places = run_by_torch(k, "aten::sort.stable", x, stable=True, dim=dim, descending=largest)
    return k.slice(values, dim, 0, count), k.slice(places, dim, 0, count)


def run_by_torch(k: Lowering, function: str, *args: Any, **kwargs: Any) -> Any:  # Any: nodes, numbers, lists of either
    """What a function of torch gives, run as it is on whole operands: a node, or several.

    Raises:
        Unsupported: if it may not be run so.
    """
    from pdv.frontend.torch.opaque import find, opaque  # torch is imported where it is needed

    result = opaque(k, find(function), args, kwargs)
    k.foreign[f"{function} for {k.name!r}"] = None
    return result


def in_torch(function: str, c: Call) -> Any:  # Any: a node, or several
    """An operator of a domain of somebody's own, by what its user said that it is in torch."""
    attributes = {name: list(x) if isinstance(x, tuple) else x for name, x in c.attrs.items()}
    return run_by_torch(c.k, function, *(c.get(i) for i in range(len(c.inputs))), **attributes)


class Attributes(Mapping[str, Any]):  # Any: int, float, string, tensor or lists of them
    """The attributes of a node, with the schema's defaults where it has none; notes which were asked for."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = given
        self.defaults = defaults
        self._values = {**defaults, **given}
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[str]:
        """What was given, is not what leaving it out means, and nobody asked for."""
        return [
            f"attribute {name} = {value}"
            for name, value in self.given.items()
            if name not in self._asked and not _same(value, self.defaults.get(name))
        ]


class Operands(Sequence[Value | None]):
    """The operands of a node; notes which were asked for."""

    def __init__(self, values: Sequence[Value | None]) -> None:
        self._values = tuple(values)
        self._asked: set[int] = set()

    def __getitem__(self, index: Any) -> Any:  # Any: a number gives a value, a slice a tuple of them
        self._asked.update(range(len(self._values))[index] if isinstance(index, slice) else [index])
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[int]:
        """Those that are there, and nobody asked for."""
        return [i for i, value in enumerate(self._values) if value is not None and i not in self._asked]


@dataclass(frozen=True, slots=True)
class Call:
    """One ONNX node to be lowered.

    names: of its operands, in the schema's words.
    """

    k: Lowering
    inputs: Operands
    attrs: Attributes
    opset: int
    pytorch: bool
    names: Sequence[str]
    node: onnx_ir.Node

    def is_used(self, index: int) -> bool:
        """Whether somebody reads a result."""
        outputs = self.node.outputs
        return index < len(outputs) and bool(outputs[index].uses() or outputs[index].is_graph_output())

    @property
    def results(self) -> int:
        """How many results it has."""
        return len(self.node.outputs)

    def evaluate(self, operands: Sequence[Array | None]) -> tuple[Array, ...]:
        """Its results on known operands, by ONNX's reference implementation."""
        try:
            return evaluate(self.node, operands, self.opset, of_torch=self.pytorch)
        except ModelError:
            raise
        except Exception as error:  # the reference implementation raises anything
            raise Unsupported(f"onnx's reference implementation fails: {first_line(error)}") from error

    def get(self, index: int) -> Node | None:
        """An optional tensor operand."""
        value = as_tensor(self.k, self.inputs[index]) if index < len(self.inputs) else None
        if isinstance(value, tuple):
            raise ValueError(f"operand {index} is a sequence")
        assert not isinstance(value, NanMask | TopK | Uniform | Chance | Places | Chosen), value
        return value

    def __getitem__(self, index: int) -> Node:
        """A required tensor operand."""
        node = self.get(index)
        if node is None:
            raise ValueError(f"operand {index} is missing")
        return node

    def array(self, index: int) -> Array:
        """A required operand that must be known; a stored tensor is."""
        node = self[index]
        array = self.k.stored[node.attr("name")]() if node.is_param else self.k.value(node)
        if array is None:
            raise NeedsValueError(index, self[index])
        return array

    def ints(self, index: int, attr: str = "") -> tuple[int, ...] | None:
        """Known integers from an operand or, in older opsets, an attribute; None if neither is there."""
        if self.get(index) is not None:
            return tuple(int(v) for v in self.array(index).reshape(-1))
        return tuple(self.attrs[attr]) if attr in self.attrs else None

    def reduced(self) -> tuple[int, ...] | None:
        """The axes along which it reduces: all, if they are empty; None: along none."""
        stays, axes = self.attrs.get("noop_with_empty_axes", 0), self.ints(1, "axes") or ()
        return None if stays and not axes else axes

    def axis(self, name: str = "axis", *, end: bool = False) -> int:
        """An attribute that numbers a dim of operand 0, from the front; ``end``: or the place behind the last.

        Raises:
            ValueError: if there is no such dim.
        """
        return self.dim(int(self.attrs[name]), end=end)

    def dim(self, axis: int, *, end: bool = False) -> int:
        """A dim of operand 0 counted from the front.

        Raises:
            ValueError: if there is no such dim.
        """
        rank = self[0].type.rank
        if not -rank <= axis < rank + end:
            raise ValueError(f"axis {axis} of a tensor of rank {rank}")
        return axis + rank if axis < 0 else axis

    def check_all_read(self) -> None:
        """Whether the reader took all that the node says.

        Raises:
            Unsupported: naming what it did not.
        """
        names = {i: self.names[min(i, len(self.names) - 1)] for i in self.inputs.unread()} if self.names else {}
        unread = [*self.attrs.unread(), *(f"operand {i} ({name})" for i, name in names.items())]
        if unread:
            raise Unsupported(f"with {', '.join(unread)}")


def _same(value: Any, default: Any) -> bool:  # Any: attributes of any kind
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)
