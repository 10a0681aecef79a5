"""More functions of each element, known by name: trigonometry, rounding, signs, powers; divisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.emission.code import Code, binary, literal, method
from ir.emission.code import call as call_of
from ir.emission.writing import Writing
from ir.evaluation import bounds
from ir.evaluation.einsum import Data
from ir.graph import Node, unmoved
from ir.memory.layout import Memory
from ir.memory.local import Local
from ir.operator import Attrs, Operator
from ir.ops.elementwise import (
    _FIRST,
    Evaluate,
    _binary,
    _cast_dtype,
    _fold_cast,
    _of,
    _reciprocal,
    _spread,
    _unary,
    _write_cast,
)
from ir.tape import Call, Known, Tape

Whole = Callable[[Any, Any], Any]  # Any: arrays of integers
Real = Callable[[Data, Data], tuple[Data, Data, Data]]


def _flat(x: Data) -> Data:
    """The derivative of what is constant between jumps."""
    return np.zeros_like(x)


def _clamp(x: Data, minimum: float, maximum: float) -> tuple[Data, Callable[[], Data]]:
    return np.clip(x, minimum, maximum), lambda: ((x >= minimum) & (x <= maximum)) * 1.0


def _write_clamp(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    said = {"min": node.attr("minimum"), "max": node.attr("maximum")}
    neutral = {"min": -math.inf, "max": math.inf}
    ends = [f"{end}={literal(value).text}" for end, value in said.items() if value != neutral[end]]
    return method(x[0], "clamp", *ends)


def _hardtanh(x: Data, minimum: float, maximum: float) -> tuple[Data, Callable[[], Data]]:
    """As clamp, but without a gradient at the ends themselves, which ReLU6 meets wherever it is given zeros."""
    return np.clip(x, minimum, maximum), lambda: ((x > minimum) & (x < maximum)) * 1.0


def _write_hardtanh(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    ends = node.attr("minimum"), node.attr("maximum")
    return (
        call_of("F.relu6", x[0])
        if ends == (0.0, 6.0)
        else call_of("F.hardtanh", x[0], *(literal(end).text for end in ends))
    )


def _spread_out(t: Tape, operands: Sequence[Any], call: Call) -> list[Any]:
    """Operands as the result is shaped."""
    shape = call.loops.result_shape
    lead = [(1,) * (len(shape) - len(x.shape) + 1) + tuple(x.shape[1:]) for x in operands]
    return [t.expand(t.reshape(x, each), shape) for x, each in zip(operands, lead, strict=True)]


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
        wide = _spread_out(t, operands, call)
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


def _divide(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """A quotient; over floats no product with a reciprocal, which is off by a step where what is rounded next jumps."""
    if t.foreign is None:
        return t.mul(operands[0], t.unary(Known("reciprocal", _reciprocal), operands[1]))
    return t.joint(Known("div", _real_quotient), _spread_out(t, operands, call))


def _real_quotient(operands: Sequence[Data], _: Sequence[bool]) -> tuple[Data, Callable[[Data], tuple[Data, Data]]]:
    x, y = operands
    return x / y, lambda g: (g / y, -g * x / (y * y))


def _divide_by(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    number = float(call.attrs["number"])
    if t.foreign is None:
        return t.scale(operands[0], 1 / number)
    return t.joint(Known(f"div:{number}", lambda x, _: (x[0] / number, lambda g: (g / number,))), operands)


def _write_divide_by(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    return binary(x[0], "/", literal(float(node.attr("number"))))


def _both_ways(local: Local) -> float:
    return _spread(local) + local.result_bytes


def _rest(name: str, rest: np.ufunc, rounded: np.ufunc) -> Operator:
    """What a division leaves whose quotient is rounded so; of integers by zero, nothing."""
    return _binary(
        name,
        f"torch.{name}({{0}}, {{1}})",
        _of_two(
            name,
            lambda x, y: (rest(x, y), _flat(x) + 1, -rounded(x / y)),
            lambda x, y: np.where(y == 0, 0, rest(x, np.where(y == 0, 1, y))),
        ),
        saved=(0, 1),
        memory=Memory(backward=_both_ways),
        measured_as="div",
        takes_positive=True,
        between=bounds.rest if name == "remainder" else None,
        fold=rest,
    )


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
remainder = _rest("remainder", np.remainder, np.floor)  # of the sign of the divisor
fmod = _rest("fmod", np.fmod, np.trunc)  # of the sign of what is divided
div = _binary(
    "div",
    "{0} / {1}",
    _divide,
    linear=_FIRST,
    saved=(0, 1),
    memory=Memory(backward=_both_ways),
    takes_positive=True,
    fold=np.divide,
)
divide_by = Operator(  # of what is rounded next; elsewhere it is said as ``scale``
    "divide_by",
    "... -> ...",
    "map",
    attrs=("number",),
    linear=_FIRST,
    evaluate=_divide_by,
    emit=_write_divide_by,
    measured_as="mul_scalar",
    between=bounds.divided,
    fold=lambda x, number: x / x.dtype.type(number),
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
    between=bounds.held,
    fold=_fold_cast,
)

_CLOSE = 1e-6  # of factors that a frontend rounded to float32
Said = tuple[tuple[Node, ...], Attrs]


def _by_sign(node: Node) -> tuple[Node, Node] | None:
    """x and y of where(x > 0, x, y); at zero x >= 0 would have another gradient."""
    if node.op.name != "where" or not node.type.dtype.is_floating:
        return None
    asked, x, below = node.operands
    if asked.op.name != "compare_number" or (asked.attr("relation"), asked.attr("number")) != (">", 0.0):
        return None
    return (x, below) if asked.operands[0] is x else None


def _says_leaky(node: Node) -> Said | None:
    """where(x > 0, x, factor x)"""
    x, below = _by_sign(node) or (node, node)
    fits = below.op.name == "scale" and below.operands[0] is x
    return ((x,), {"factor": below.attr("factor")}) if fits else None


def _says_prelu(node: Node) -> Said | None:
    """where(x > 0, x, weight x), of one number, or one for each channel."""
    x, below = _by_sign(node) or (node, node)
    weights = [other for other in below.operands if other is not x]
    if x is below or below.op.name != "mul" or len(weights) != 1 or x.type != node.type:
        return None
    (weight,), channels = weights, (x.type.shape[:2] or (0,))[-1]
    alone = [1] * x.type.rank
    shapes = [tuple(alone), (1, channels, *alone[2:])]
    fits = unmoved(weight).is_param and x.type.rank > 1 and weight.type.shape in shapes
    return ((x, weight), {}) if fits else None


def _prelu_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    names = [f"d{i}" for i in range(len(shapes[0]))]
    right = [name if size > 1 else "1" for name, size in zip(names, shapes[1], strict=True)]
    return f"{' '.join(names)}, {' '.join(right)} -> {' '.join(names)}", {}


def _prelu(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    x, weight = operands
    asked = t.relate("> 0", np.greater, x, t.constant(0.0, (1,) * (len(x.shape) - 1)))
    return t.where(asked, x, t.mul(x, weight))


def _write_prelu(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    return call_of("F.prelu", x[0], method(x[1], "flatten"))


def _says_elu(node: Node, *, steep: bool) -> Said | None:
    """relu(x) + factor expm1(within min(x, 0)), where ``within`` is 1, or (``steep``) 1 / factor."""
    if not node.op.adds or node.operands[0].op.name != "relu":
        return None
    above, rest = node.operands
    below, factor = _scaled(rest)
    clamped, within = _scaled(below.operands[0]) if below.op.name == "expm1" else (below, 1.0)
    if clamped.op.name != "clamp" or (clamped.attr("minimum"), clamped.attr("maximum")) != (-math.inf, 0.0):
        return None
    fits = abs(within * factor - 1.0) < _CLOSE if steep else within == 1.0
    is_same = below is not clamped and clamped.operands[0] is above.operands[0]
    return (above.operands, {"factor": factor}) if is_same and fits and factor > 0.0 else None


def _scaled(node: Node) -> tuple[Node, float]:
    """What a factor scales, and the factor."""
    return (node.operands[0], float(node.attr("factor"))) if node.op.name == "scale" else (node, 1.0)


def _leaky_relu(x: Data, factor: float) -> tuple[Data, Callable[[], Data]]:
    return np.where(x > 0, x, factor * x), lambda: np.where(x > 0, 1.0, factor)


def _elu(x: Data, factor: float) -> tuple[Data, Callable[[], Data]]:
    below = np.exp(np.minimum(x, 0))
    return np.where(x > 0, x, factor * (below - 1)), lambda: np.where(x > 0, 1.0, factor * below)


def _celu(x: Data, factor: float) -> tuple[Data, Callable[[], Data]]:
    below = np.exp(np.minimum(x, 0) / factor)
    return np.where(x > 0, x, factor * (below - 1)), lambda: np.where(x > 0, 1.0, below)


prelu = Operator(
    "prelu",
    _prelu_loops,
    "map",
    saved=(0, 1),
    evaluate=_prelu,
    says=_says_prelu,
    emit=_write_prelu,
)

OPS = (
    power,
    div,
    divide_by,
    quotient,
    remainder,
    fmod,
    to_integer,
    prelu,
    _unary("leaky_relu", "F.leaky_relu({0}, {factor})", _leaky_relu, attrs=("factor",), says=_says_leaky),
    _unary("elu", "F.elu({0}, {factor})", _elu, flops=4, attrs=("factor",), says=partial(_says_elu, steep=False)),
    _unary("celu", "F.celu({0}, {factor})", _celu, flops=4, attrs=("factor",), says=partial(_says_elu, steep=True)),
    _unary("tan", "torch.tan({0})", _of(np.tan, lambda x: 1 / np.cos(x) ** 2), flops=4, fold=np.tan),
    _unary("atan", "torch.atan({0})", _of(np.arctan, lambda x: 1 / (1 + x * x)), flops=8),
    _unary("sinh", "torch.sinh({0})", _of(np.sinh, np.cosh), flops=8),
    _unary("cosh", "torch.cosh({0})", _of(np.cosh, np.sinh), flops=8),
    _unary("asinh", "torch.asinh({0})", _of(np.arcsinh, lambda x: 1 / np.sqrt(1 + x * x)), flops=8),
    _unary("floor", "torch.floor({0})", _of(np.floor, _flat), fold=np.floor),
    _unary("ceil", "torch.ceil({0})", _of(np.ceil, _flat), fold=np.ceil),
    _unary("round", "torch.round({0})", _of(np.rint, _flat), fold=np.rint),
    _unary("clamp", _write_clamp, _clamp, attrs=("minimum", "maximum"), between=bounds.clamped),
    _unary(
        "hardtanh",
        _write_hardtanh,
        _hardtanh,
        attrs=("minimum", "maximum"),
        is_activation=True,
        between=bounds.clamped,
    ),
    _unary("sign", "torch.sign({0})", _of(np.sign, _flat), fold=np.sign),
)
