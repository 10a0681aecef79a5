"""One ONNX node to be lowered: its operands as IR nodes, None where left out, and attributes as plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ir.graph import Node
from pdv.frontend.lowering import Lowering, TopK, Unsupported
from pdv.passes.fold_constants import Array


@dataclass(frozen=True, slots=True)
class NanMask:
    """Where a tensor is not a number; only the guard around a softmax asks this."""

    of: Node


Value = Node | tuple[Node, ...] | NanMask | TopK
"""A tensor, a sequence of tensors, a question about one, or its largest elements."""

Handler = Callable[["Call"], Any]  # Any: a Node, or a tuple with one entry per output (None: not computed)


@dataclass(frozen=True, slots=True)
class Call:
    """One ONNX node to be lowered."""

    k: Lowering
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any]  # Any: int, float, string, tensor or lists of them
    opset: int
    pytorch: bool

    def get(self, index: int) -> Node | None:
        """An optional tensor operand."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if isinstance(value, tuple):
            raise ValueError(f"operand {index} is a sequence")
        if isinstance(value, NanMask):
            raise Unsupported("IsNaN, other than as a guard of a softmax")
        if isinstance(value, TopK):
            raise Unsupported("TopK, other than put back by ScatterElements")
        return value

    def __getitem__(self, index: int) -> Node:
        """A required tensor operand."""
        node = self.get(index)
        if node is None:
            raise ValueError(f"operand {index} is missing")
        return node

    def array(self, index: int) -> Array:
        """A required operand that must be known."""
        array = self.k.value(self[index])
        if array is None:
            raise Unsupported(f"operand {index} depends on the model's inputs")
        return array

    def ints(self, index: int, attr: str = "") -> tuple[int, ...] | None:
        """Known integers from an operand or, in older opsets, an attribute; None if neither is there."""
        if self.get(index) is not None:
            return tuple(int(v) for v in self.array(index).reshape(-1))
        return tuple(self.attrs[attr]) if attr in self.attrs else None
