"""Sequences of tensors, each a tuple of values whose length is known, and optional values. Entry point: `READERS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend.lowering import Unsupported
from pdv.frontend.onnx.call import Call, Handler, Value

Parts = tuple[Node, ...]


def _parts(c: Call) -> Parts:
    """Of operand 0.

    Raises:
        ValueError: if it is none.
    """
    found: Value | None = c.inputs[0]
    if not isinstance(found, tuple):
        raise ValueError("operand 0 is not a sequence")
    return found


def _place(c: Call, index: int, *, end: bool = False) -> int:
    """A place in the sequence, counted from the front; end: or the one behind the last.

    Raises:
        ValueError: if it has no such place.
    """
    place, count = int(c.array(index)), len(_parts(c))
    if not -count <= place < count + end:
        raise ValueError(f"place {place} of a sequence of {count}")
    return place + count if place < 0 else place


def empty(c: Call) -> tuple[Parts]:
    """Its type is that of what comes into it."""
    c.attrs.get("dtype")
    return ((),)


def construct(c: Call) -> tuple[Parts]:
    """All operands, in order."""
    return (tuple(c[i] for i in range(len(c.inputs))),)


def at(c: Call) -> Node:
    """One tensor of a sequence."""
    return _parts(c)[_place(c, 1)]


def insert(c: Call) -> tuple[Parts]:
    """Before a place, or at the end."""
    parts, new = _parts(c), c[1]
    if parts and parts[0].type.dtype is not new.type.dtype:
        raise ValueError(f"{new.type.dtype.torch_name} into a sequence of {parts[0].type.dtype.torch_name}")
    place = len(parts) if c.get(2) is None else _place(c, 2, end=True)
    return ((*parts[:place], new, *parts[place:]),)


def erase(c: Call) -> tuple[Parts]:
    """Without one tensor, the last if none is named."""
    parts = _parts(c)
    place = len(parts) - 1 if c.get(1) is None else _place(c, 1)
    return ((*parts[:place], *parts[place + 1 :]),)


def concat(c: Call) -> Node:
    """Joined along an axis, or along a new one."""
    parts, new = _parts(c), bool(c.attrs.get("new_axis", 0))
    if not parts:
        raise ValueError("a sequence of no tensors is joined")
    rank, axis = parts[0].type.rank + new, int(c.attrs["axis"])
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a result of rank {rank}")
    axis %= rank
    if new:
        parts = tuple(c.k.reshape(x, (*x.type.shape[:axis], 1, *x.type.shape[axis:])) for x in parts)
    return c.k.concat(list(parts), axis)


def of_optional(c: Call) -> Any:  # Any: a tensor, or a sequence as the only result
    """What is in an optional value, and an optional value of it: the same."""
    found = c.inputs[0] if len(c.inputs) else None
    if found is None:
        raise Unsupported("an optional value that holds nothing")
    return (found,)


READERS: Mapping[str, Handler] = {
    "SequenceEmpty": empty,
    "SequenceConstruct": construct,
    "SequenceAt": at,
    "SequenceInsert": insert,
    "SequenceErase": erase,
    "SequenceLength": lambda c: c.k.const(np.asarray(len(_parts(c))), DType.I64),
    "ConcatFromSequence": concat,
    "Optional": of_optional,
    "OptionalGetElement": of_optional,
}
