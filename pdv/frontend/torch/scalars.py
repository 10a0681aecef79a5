"""Numbers among the operands of ATen operators, and the type in which torch computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend.chosen import Chosen, Places
from pdv.frontend.lowering import Lowering, Number, TopK, Unsupported

Result = Node | Chosen | Places | tuple[Node | Chosen | Places | TopK | None, ...]
Handler = Callable[..., Result]
Scalar = Node | Number


def operand(k: Lowering, value: Scalar, dtype: DType) -> Node:
    """A tensor in an element type, or a number as a constant of it."""
    if isinstance(value, Node):
        return k.cast(value, dtype)
    number = np.float64 if dtype.is_floating else np.int64
    return k.const(np.asarray(value, np.bool_ if dtype is DType.BOOL else number), dtype)


def operands(k: Lowering, *values: Scalar) -> tuple[Node, ...]:
    """Tensors and numbers in the type in which ATen computes with them: a tensor wins over a number of its kind."""
    dtype = k.promote(*(value for value in values if isinstance(value, Node)))
    numbers = [value for value in values if not isinstance(value, Node)]
    if not dtype.is_floating and any(isinstance(number, float) for number in numbers):
        dtype = DType.F32
    elif dtype is DType.BOOL and not all(isinstance(number, bool) for number in numbers):
        dtype = DType.I64
    return tuple(operand(k, value, dtype) for value in values)


def dtype_of(dtype: Any) -> DType:  # Any: a torch type, unimported here
    """The type that torch calls so.

    Raises:
        Unsupported: if the IR has no such type.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        return DType.from_name(name)
    except KeyError:
        raise Unsupported(f"elements of type {name}") from None
