"""More functions of each element, known by name: trigonometry, rounding, signs, powers; divisions of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ir.evaluation.einsum import Data
from ir.memory.layout import Memory
from ir.memory.local import Local
from ir.operator import Operator
from ir.ops.elementwise import Evaluate, _binary, _cast_dtype, _fold_cast, _of, _spread, _unary, _write_cast
from ir.tape import Call, Known, Tape

Whole = Callable[[Any, Any], Any]  # Any: arrays of integers
Real = Callable[[Data, Data], tuple[Data, Data, Data]]


def _flat(x: Data) -> Data:
    """The derivative of what is constant between jumps."""
    return np.zeros_like(x)


def _of_two(name: str, real: Real, whole: Whole) -> Evaluate:
    """A function of two operands known by its name, as one of rows of two elements; of integers, ``whole``.

    real: over float64: (x, y) -> what it gives, and its derivatives by both.
    """

    def rows(both: Data) -> tuple[Data, Callable[[Data], Data]]:
        with np.errstate(all="ignore"):
            found, by_x, by_y = real(both[..., :1], both[..., 1:])
        return found, lambda g: np.concatenate([g * by_x, g * by_y], axis=-1)

    def evaluate(t: Tape, operands: Sequence[Any], call: Call) -> Any:
        shape = call.loops.result_shape
        lead = [(1,) * (len(shape) - len(x.shape) + 1) + tuple(x.shape[1:]) for x in operands]
        wide = [t.expand(t.reshape(x, each), shape) for x, each in zip(operands, lead, strict=True)]
        if all(isinstance(x, np.ndarray) for x in wide):
            return whole(*wide)
        both = t.concat([t.reshape(x, (*shape, 1)) for x in wide], len(shape))
        return t.reshape(t.row_reduce(Known(name, rows), both), shape)

    return evaluate


def _power(x: Any, y: Any) -> Any:
    """By negative exponents only one and minus one are not zero."""
    return np.where(y < 0, np.where(np.abs(x) == 1, x ** (y & 1), 0), x ** np.maximum(y, 0))


def _quotient(x: Any, y: Any) -> Any:
    """Towards zero; by zero it is zero, where a device stops."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.maximum(np.abs(y), 1))


def _remainder(x: Any, y: Any) -> Any:
    """Of the sign of the divisor."""
    return np.where(y == 0, 0, np.remainder(x, np.where(y == 0, 1, y)))


def _both_ways(local: Local) -> float:
    return _spread(local) + local.result_bytes


power = _binary(
    "power",
    "torch.pow({0}, {1})",
    _of_two("power", lambda x, y: (x**y, y * x ** (y - 1), x**y * np.log(x)), _power),
    saved=(0, 1, "out"),
    memory=Memory(backward=_both_ways),
    flops_per_point=8,
    measured_as="mul",
    takes_positive=True,
)
quotient = _binary(  # of integers, towards zero
    "quotient",
    'torch.div({0}, {1}, rounding_mode="trunc")',
    _of_two("quotient", lambda x, y: (np.trunc(x / y), _flat(x), _flat(y)), _quotient),
    differentiable=(),
    measured_as="div",
    takes_positive=True,
    fold=_quotient,
)
remainder = _binary(
    "remainder",
    "torch.remainder({0}, {1})",
    _of_two("remainder", lambda x, y: (np.remainder(x, y), _flat(x) + 1, -np.floor(x / y)), _remainder),
    saved=(0, 1),
    memory=Memory(backward=_both_ways),
    measured_as="div",
    takes_positive=True,
    fold=np.remainder,
)
to_integer = Operator(  # of floats: towards zero, which is a function of the value, known by name
    "to_integer",
    "... -> ...",
    "map",
    attrs=("dtype",),
    result_dtype=_cast_dtype,
    differentiable=(),
    evaluate=lambda t, x, c: t.whole(f"to {c.attrs['dtype']}", np.trunc, x[0]),
    emit=_write_cast,
    measured_as="cast",
    fold=_fold_cast,
)

OPS = (
    power,
    quotient,
    remainder,
    to_integer,
    _unary("tan", "torch.tan({0})", _of(np.tan, lambda x: 1 / np.cos(x) ** 2), flops=4, fold=np.tan),
    _unary("atan", "torch.atan({0})", _of(np.arctan, lambda x: 1 / (1 + x * x)), flops=8),
    _unary("sinh", "torch.sinh({0})", _of(np.sinh, np.cosh), flops=8),
    _unary("cosh", "torch.cosh({0})", _of(np.cosh, np.sinh), flops=8),
    _unary("asinh", "torch.asinh({0})", _of(np.arcsinh, lambda x: 1 / np.sqrt(1 + x * x)), flops=8),
    _unary("floor", "torch.floor({0})", _of(np.floor, _flat), fold=np.floor),
    _unary("ceil", "torch.ceil({0})", _of(np.ceil, _flat), fold=np.ceil),
    _unary("round", "torch.round({0})", _of(np.rint, _flat), fold=np.rint),
    _unary("sign", "torch.sign({0})", _of(np.sign, _flat), fold=np.sign),
)
