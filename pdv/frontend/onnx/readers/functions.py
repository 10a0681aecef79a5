"""What ONNX's functions of elements become: those of one operand, and sums, means and powers of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import kinks, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.origins.left_out import SMOOTHED

MOST_FACTORS = 8  # of a power that is written out
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


def hard_sigmoid(c: Call) -> Node:
    """A line between 0 and 1; torch's own as torch has it."""
    k, x, slope, shift = c.k, c[0], c.attrs["alpha"], c.attrs["beta"]
    if np.float32(slope) == np.float32(1 / 6) and shift == 0.5:
        return kinks.hard_sigmoid(k, x)
    return sloped(k, x, slope, shift)


def sloped(k: Lowering, x: Node, slope: float, shift: float) -> Node:
    """A line between 0 and 1."""
    return kinks.hardtanh(k, k.shift(k.scale(x, slope), shift), 0.0, 1.0)


def log_sum_exp(c: Call) -> Node:
    """Of all elements, or along axes."""
    axes = c.reduced()
    if axes is None:
        return c[0]
    return kinks.log_sum_exp(c.k, c[0], [c.dim(axis) for axis in axes], bool(c.attrs["keepdims"]))


def reduced(
    before: Callable[[Lowering, Node], Node], after: Callable[[Lowering, Node], Node] = lambda k, x: x
) -> Handler:
    """A sum of functions of elements, and a function of it."""

    def handle(c: Call) -> Node:
        axes = c.reduced()
        x = before(c.k, c[0])
        total = x if axes is None else c.k.reduce("reduce_sum", x, axes, bool(c.attrs["keepdims"]))
        return after(c.k, total)

    return handle


def leaky(k: Lowering, x: Node, below: Node) -> Node:
    """x, and ``below`` where it is negative."""
    return k.apply("where", masks.compare_number(k, "<", x, 0), below, x)


def power(c: Call) -> Node:
    """In the type of what is raised; of integers by a small known exponent as products."""
    k, x, y = c.k, c[0], c[1]
    by = k.scalar(y, x)
    if x.type.dtype.is_floating:
        if by == 0:
            return k.expand(k.const(np.ones((), np.float64), x.type.dtype), x.type.shape)
        number = None if by is None else k.const(np.asarray(by, np.float64), x.type.dtype)
        return k.pow(x, k.cast(y, x.type.dtype) if number is None else number)
    if by is not None and by == int(by) and 1 <= by <= MOST_FACTORS:
        return reduce(k.mul, [x] * int(by))
    if y.type.dtype.is_floating:
        return k.cast(k.pow(k.cast(x, y.type.dtype), y), x.type.dtype)
    return (
        k.apply("power", *k.alike(x, y))
        if x.type.dtype is y.type.dtype
        else k.cast(k.apply("power", *(k.cast(each, DType.I64) for each in (x, y))), x.type.dtype)
    )


def cross_entropy(c: Call) -> tuple[Node, None]:
    """Of logits and labels, of which some do not count; in other forms by the body that ONNX gives."""
    if c.get(2) is not None or "ignore_index" not in c.attrs.given or c.is_used(1):
        raise Unsupported("with weights, or with all labels counted, or with its logarithms as a value")
    ignored, kind = int(c.attrs["ignore_index"]), c.attrs["reduction"]
    smoothing = float(c.node.metadata_props.get(SMOOTHED, 0))
    return masks.cross_entropy(c.k, c[0], c[1], ignored=ignored, reduction=kind, smoothing=smoothing), None


READERS: Mapping[str, Handler] = {
    **{op: function(op.lower()) for op in _FUNCTIONS},
    "Asin": asin,
    "Acos": acos,
    "Acosh": acosh,
    "Atanh": atanh,
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "Sum": of_all(lambda k, x, y: k.add(x, y)),
    "Mean": mean,
    "Pow": power,
    "LeakyRelu": lambda c: leaky(c.k, c[0], c.k.scale(c[0], c.attrs["alpha"])),
    "PRelu": lambda c: leaky(c.k, c[0], c.k.mul(c[0], c[1])),
    "ReduceL1": reduced(lambda k, x: k.apply("abs", x)),
    "ReduceL2": reduced(lambda k, x: k.mul(x, x), kinks.root),
    "ReduceSumSquare": reduced(lambda k, x: k.mul(x, x)),
    "ReduceLogSum": reduced(lambda k, x: x, lambda k, x: k.apply("log", x)),
    "ReduceLogSumExp": log_sum_exp,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": lambda c: kinks.hard_swish(c.k, c[0]),
    "Elu": lambda c: kinks.elu(c.k, c[0], c.attrs["alpha"]),
    "Selu": lambda c: kinks.elu(c.k, c[0], c.attrs["alpha"], c.attrs["gamma"]),
    "Celu": lambda c: kinks.celu(c.k, c[0], c.attrs["alpha"]),
}
