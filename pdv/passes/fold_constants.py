"""Evaluate operators whose operands are all known.

Folding is done in the tensor's own element type, as running the model would, and by NumPy whichever frontend asks, so
that both get the same bits (`Operator.fold`). Entry point: `fold`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by it
import numpy as np

from ir.errors import ModelError
from ir.graph import Node
from ir.operator import Operator

Array = np.ndarray[Any, Any]  # Any: the element type is known only at run time

MAX_FOLDED_BYTES = 1 << 30  # a constant table beyond this is a mistake or an attack, not a table


def fold(op: Operator, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Array | None:
    """The value of an operator over constants, or None if an operand is not constant or the operator is not foldable
    here.

    Raises:
        ModelError: if the value would take more than `MAX_FOLDED_BYTES`.
    """
    if op.fold is None or any(not x.is_const for x in operands):
        return None
    rounds = op.kind != "move" and not op.names_dtype  # casts round to nearest, ties to even, everywhere
    if rounds and any(x.type.dtype.is_half for x in operands):
        return None  # their arithmetic differs between libraries, so it stays as the model computes it
    if op.names_shape or op.broadcasts:
        shape = attrs["shape"] if op.names_shape else np.broadcast_shapes(*(x.type.shape for x in operands))
        check_foldable_size(shape, operands[-1].type.dtype.itemsize, operands[-1].name or op.name)
    with np.errstate(all="ignore"):
        return np.asarray(op.fold(*(x.attr("value").array for x in operands), **attrs))


def check_foldable_size(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Raises ModelError if a constant of this shape would be too big to compute while planning."""
    num_bytes = math.prod(shape) * itemsize
    if num_bytes > MAX_FOLDED_BYTES:
        raise ModelError(
            f"constant {where!r} of shape {list(shape)} takes {num_bytes} bytes",
            f"Allowed: up to {MAX_FOLDED_BYTES}",
            "Make it a stored tensor of the model",
        )
