"""Evaluate operators whose operands are all known.

Folding is done in the tensor's own element type, as running the model would, and by NumPy whichever frontend asks, so
that both get the same bits. Operators missing from `EVALUATORS` are left in the graph. Entry point: `fold`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ir.errors import ModelError
from ir.graph import Node
from ir.ops import OPERATORS
from ir.types import DType

Array = np.ndarray[Any, Any]  # Any: the element type is known only at run time
Evaluator = Callable[[Sequence[Array], Mapping[str, Any]], Array]  # Any: attribute types differ by operator

MAX_FOLDED_BYTES = 1 << 30  # a constant table beyond this is a mistake or an attack, not a table


def fold(op: str, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Array | None:
    """The value of an operator over constants, or None if an operand is not constant or the operator is not foldable
    here.

    Raises:
        ModelError: if the value would take more than `MAX_FOLDED_BYTES`.
    """
    evaluator = EVALUATORS.get(op)
    if evaluator is None or any(not x.is_const for x in operands):
        return None
    declared = OPERATORS[op]
    rounds = declared.kind != "move" and not declared.names_dtype  # casts round to nearest, ties to even, everywhere
    if rounds and any(x.type.dtype not in _NUMPY for x in operands):
        return None  # half types: their arithmetic differs between libraries
    if declared.names_shape or declared.broadcasts:
        shape = attrs["shape"] if declared.names_shape else np.broadcast_shapes(*(x.type.shape for x in operands))
        check_foldable_size(shape, operands[-1].type.dtype.itemsize, operands[-1].name or op)
    with np.errstate(all="ignore"):
        value: Array = np.asarray(evaluator([x.attr("value").array for x in operands], attrs))
    return value


def check_foldable_size(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Raises ModelError if a constant of this shape would be too big to compute while planning."""
    num_bytes = math.prod(shape) * itemsize
    if num_bytes > MAX_FOLDED_BYTES:
        raise ModelError(
            f"constant {where!r} of shape {list(shape)} takes {num_bytes} bytes",
            f"Allowed: up to {MAX_FOLDED_BYTES}",
            "Make it a stored tensor of the model",
        )


def _slice(x: Sequence[Array], attrs: Mapping[str, Any]) -> Array:
    piece: Array = x[0][(slice(None),) * attrs["dim"] + (slice(attrs["start"], attrs["stop"]),)]
    return piece


def _unary(function: Callable[[Array], Array]) -> Evaluator:
    return lambda x, attrs: function(x[0])


def _binary(function: Callable[[Array, Array], Array]) -> Evaluator:
    return lambda x, attrs: function(x[0], x[1])


_NUMPY: Mapping[DType, Any] = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.I8: np.int8,
    DType.U8: np.uint8,
    DType.BOOL: np.bool_,
}  # not the half types: their arithmetic differs between libraries, so it stays as the model computes it


def _cast(x: Sequence[Array], attrs: Mapping[str, Any]) -> Array:
    """Half constants are kept as float32 arrays of representable values."""
    dtype = DType(attrs["dtype"])
    if dtype in _NUMPY:
        return x[0].astype(_NUMPY[dtype])
    half = np.float16 if dtype is DType.F16 else ml_dtypes.bfloat16
    return x[0].astype(half).astype(np.float32)


EVALUATORS: Mapping[str, Evaluator] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "div": _binary(np.divide),
    "scale": lambda x, attrs: x[0] * x[0].dtype.type(attrs["factor"]),
    "unbiased": lambda x, attrs: x[0] * x[0].dtype.type(attrs["points"] / (attrs["points"] - 1)),
    "shift": lambda x, attrs: x[0] + x[0].dtype.type(attrs["offset_by"]),
    "neg": _unary(np.negative),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1 / np.sqrt(x)),
    "reciprocal": _unary(np.reciprocal),
    "exp": _unary(np.exp),
    "log": _unary(np.log),
    "sin": _unary(np.sin),
    "cos": _unary(np.cos),
    "tanh": _unary(np.tanh),
    "abs": _unary(np.abs),
    "pow": lambda x, attrs: x[0] ** x[0].dtype.type(attrs["exponent"]),
    "cast": _cast,
    "where": lambda x, attrs: np.where(x[0], x[1], x[2]),
    "reshape": lambda x, attrs: x[0].reshape(attrs["shape"]),
    "permute": lambda x, attrs: x[0].transpose(attrs["perm"]),
    "expand": lambda x, attrs: np.broadcast_to(x[0], attrs["shape"]),
    "chunk": lambda x, attrs: np.split(x[0], attrs["parts"], attrs["dim"])[attrs["index"]],
    "slice": _slice,
    "concat": lambda x, attrs: np.concatenate(x, attrs["dim"]),
    "reduce_sum": lambda x, attrs: x[0].sum(attrs["dims"], keepdims=attrs["keepdim"]),
    "reduce_mean": lambda x, attrs: x[0].mean(attrs["dims"], keepdims=attrs["keepdim"]),
    "embedding": lambda x, attrs: x[0][x[1]],
}
