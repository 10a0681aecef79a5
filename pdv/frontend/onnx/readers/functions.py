"""What ONNX's functions of elements become: those of one operand, and sums, means and powers of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import numpy as np

from ir.graph import Node
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler

_FUNCTIONS = (
    "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Floor", "Ceil", "Round", "Sign",
)  # fmt: skip


def function(op: str) -> Handler:
    """A function of floats."""

    def handle(c: Call) -> Node:
        if not c[0].type.dtype.is_floating:
            raise Unsupported(f"of {c[0].type.dtype.value}")
        return c.k.apply(op, c[0])

    return handle


def asin(c: Call) -> Node:
    """By the arc tangent."""
    k, x = c.k, c[0]
    return k.apply("atan", k.div(x, k.apply("sqrt", k.shift(k.apply("neg", k.mul(x, x)), 1))))


def acos(c: Call) -> Node:
    """A right angle less the arc sine."""
    return c.k.shift(c.k.apply("neg", asin(c)), math.pi / 2)


def atanh(c: Call) -> Node:
    """By logarithms."""
    k, x = c.k, c[0]
    return k.scale(k.sub(k.apply("log1p", x), k.apply("log1p", k.apply("neg", x))), 0.5)


def acosh(c: Call) -> Node:
    """By a logarithm."""
    k, x = c.k, c[0]
    return k.apply("log", k.add(x, k.apply("sqrt", k.shift(k.mul(x, x), -1))))


def of_all(combine: Callable[[Lowering, Node, Node], Node]) -> Handler:
    """Operands combined one after the other."""
    return lambda c: reduce(lambda x, y: combine(c.k, x, y), _all(c))


def _all(c: Call) -> Sequence[Node]:
    return [c[i] for i in range(len(c.inputs))]


def mean(c: Call) -> Node:
    """Of the operands, broadcast to each other."""
    return c.k.scale(reduce(c.k.add, _all(c)), 1 / len(c.inputs))


def power(c: Call) -> Node:
    """By a known exponent; of integers by a whole one that is not negative, as products."""
    k, x = c.k, c[0]
    exponent = k.value(c[1])
    if exponent is None or exponent.size != 1 or exponent.ndim > x.type.rank:
        raise Unsupported("an exponent that is not a constant scalar")
    by = exponent.reshape(()).item()
    if x.type.dtype.is_floating:
        if by == 0:
            return k.expand(k.const(np.ones((), np.float64), x.type.dtype), x.type.shape)
        return k.pow(x, k.const(np.asarray(by, np.float64), x.type.dtype))
    if by != int(by) or not 1 <= by <= 8:
        raise Unsupported(f"{x.type.dtype.value} to the power of {by}")
    return reduce(k.mul, [x] * int(by))


READERS: Mapping[str, Handler] = {
    **{op: function(op.lower()) for op in _FUNCTIONS},
    "Asin": asin,
    "Acos": acos,
    "Acosh": acosh,
    "Atanh": atanh,
    "Sum": of_all(lambda k, x, y: k.add(x, y)),
    "Mean": mean,
    "Pow": power,
}
