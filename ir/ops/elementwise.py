"""Functions of each element. Sums and products are exact in every field, the rest are functions known by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.emission.code import Code, binary, call, literal, method
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.evaluation import bounds
from ir.evaluation.einsum import Data
from ir.graph import Node
from ir.memory.layout import HANDED_ON, Memory
from ir.memory.local import Local
from ir.operator import Attrs, Operator, one_type
from ir.tape import Call, Known, Tape
from ir.types import DType

_NONE: Mapping[str, Hashable] = MappingProxyType({})
Real = Callable[..., tuple[Data, Callable[[], Data]]]
Evaluate = Callable[[Tape, Sequence[Any], Call], Any]  # Any: arrays of the tape's field


def _unary(
    name: str,
    emit: str | Callable[..., Code],
    real: Real,
    *,
    flops: float = 1.0,
    saved: tuple[int | str, ...] = (0,),
    defaults: Mapping[str, Hashable] = _NONE,
    attrs: tuple[str, ...] = (),
    whole: Callable[..., Data] | None = None,
    **traits: Any,
) -> Operator:
    """A function of one operand that floats alone know (``real``); its attributes are part of the function's name.

    ``whole``: the same of integers, which stay integers, as ids must; ``traits``: further fields of ``Operator``.
    """

    def evaluate(t: Tape, operands: Sequence[Any], call: Call) -> Any:
        values = call.attrs.values()
        if whole is not None and isinstance(operands[0], np.ndarray) and operands[0].dtype.kind in "iu":
            return whole(operands[0], *values)
        return t.unary(Known(":".join([name, *map(str, values)]), lambda x: real(x, *values)), operands[0])

    return Operator(
        name,
        "... -> ...",
        "map",
        emit=emit,
        attrs=(*defaults, *attrs),
        defaults=defaults,
        flops_per_point=flops,
        saved=saved,
        evaluate=evaluate,
        **traits,
    )


def _binary(
    name: str,
    emit: str,
    evaluate: Evaluate,
    linear: tuple[frozenset[int], ...] = (),
    saved: tuple[int | str, ...] = (),
    **traits: Any,
) -> Operator:
    return Operator(
        name,
        "..., ... -> ...",
        "map",
        emit=emit,
        linear=linear,
        saved=saved,
        evaluate=evaluate,
        **traits,
    )


_erf = np.frompyfunc(math.erf, 1, 1)


def _gelu(x: Data, approximate: str) -> tuple[Data, Callable[[], Data]]:
    if approximate == "tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        t = np.tanh(c * (x + k * x**3))
        return 0.5 * x * (1 + t), lambda: 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * k * x * x)
    cdf = 0.5 * (1 + np.asarray(_erf(x / math.sqrt(2)), dtype=np.float64))
    return x * cdf, lambda: cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _sigmoid(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = 1 / (1 + np.exp(-x))
    return y, lambda: y * (1 - y)


def _silu(x: Data) -> tuple[Data, Callable[[], Data]]:
    s = 1 / (1 + np.exp(-x))
    return x * s, lambda: s * (1 + x * (1 - s))


def _tanh(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = np.tanh(x)
    return y, lambda: 1 - y * y


def _exp(x: Data) -> tuple[Data, Callable[[], Data]]:
    y = np.exp(x)
    return y, lambda: y


def _pow(x: Data, exponent: float) -> tuple[Data, Callable[[], Data]]:
    return x**exponent, lambda: exponent * x ** (exponent - 1)


def _of(function: Callable[[Data], Any], derivative: Callable[[Data], Any]) -> Real:
    return lambda x: (np.asarray(function(x), dtype=np.float64), lambda: derivative(x))


_reciprocal = _of(lambda x: 1 / x, lambda x: -1 / (x * x))
RSQRT = Known("rsqrt", _of(lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5))

_EITHER = (frozenset({0}), frozenset({1}))
_BOTH = (frozenset({0, 1}),)
_FIRST = (frozenset({0}),)


def _spread(local: Local) -> float:
    """A product's gradient by an operand that was spread out is made whole before it is summed."""
    spread = any(
        operand.needs_grad and layout.elements < local.result.elements
        for operand, layout in zip(local.node.operands, local.operands, strict=True)
    )
    return local.result_bytes if spread else 0.0


_AGAIN = Memory(backward=lambda local: local.result_bytes)

add = _binary(
    "add",
    "{0} + {1}",
    lambda t, x, c: t.add(x[0], x[1]),
    linear=_BOTH,
    memory=HANDED_ON,
    commutative=True,
    between=bounds.added,
    fold=np.add,
)
sub = _binary(
    "sub",
    "{0} - {1}",
    lambda t, x, c: t.sub(x[0], x[1]),
    linear=_BOTH,
    memory=Memory(handed=(0,)),
    measured_as="add",
    between=bounds.subtracted,
    fold=np.subtract,
)
mul = _binary(
    "mul",
    "{0} * {1}",
    lambda t, x, c: t.mul(x[0], x[1]),
    linear=_EITHER,
    saved=(0, 1),
    memory=Memory(backward=_spread),
    commutative=True,
    fold=np.multiply,
)


def _scale(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    return binary(x[0], "*", literal(_number(node, "factor")))


def _shift(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    by = _number(node, "offset_by")
    return binary(x[0], "-" if by < 0 else "+", literal(abs(by)))


def _number(node: Node, attr: str) -> float | int:
    """A literal of the kind of the node's elements: an integer times 2.0 is none in torch."""
    return float(node.attr(attr)) if node.type.dtype.is_floating else int(node.attr(attr))


scale = Operator(
    "scale",
    "... -> ...",
    "map",
    attrs=("factor",),
    linear=_FIRST,
    evaluate=lambda t, x, c: t.scale(x[0], c.attrs["factor"]),
    emit=_scale,
    between=bounds.scaled,
    measured_as="mul_scalar",
    fold=lambda x, factor: x * x.dtype.type(factor),
)
shift = Operator(
    "shift",
    "... -> ...",
    "map",
    attrs=("offset_by",),
    memory=HANDED_ON,
    evaluate=lambda t, x, c: t.shift(x[0], c.attrs["offset_by"]),
    emit=_shift,
    between=bounds.shifted,
    measured_as="add_scalar",
    fold=lambda x, offset_by: x + x.dtype.type(offset_by),
)
neg = Operator(
    "neg",
    "... -> ...",
    "map",
    emit="-{0}",
    linear=_FIRST,
    evaluate=lambda t, x, c: t.scale(x[0], -1.0),
    between=bounds.negated,
    fold=np.negative,
)


def _cast_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    return DType(attrs["dtype"])


def _cast(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field, or of integers
    """Rounding is not part of a program's meaning; what is no zero is true."""
    (x,) = operands
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and DType(call.attrs["dtype"]) is DType.BOOL:
        return x != 0
    return x.astype(np.int64) if isinstance(x, np.ndarray) and x.dtype.kind == "b" else x


def _fold_cast(x: Any, dtype: str) -> Any:  # Any: arrays of any element type
    """Half types are kept as float32 arrays of representable values; who folds has NumPy know bfloat16."""
    to = DType(dtype)
    folded = x.astype(to.torch_name)
    return folded.astype(np.float32) if to.is_half else folded


def _write_cast(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    return method(x[0], "to", f"torch.{DType(node.attr('dtype')).torch_name}")


cast = Operator(
    "cast",
    "... -> ...",
    "map",
    attrs=("dtype",),  # a short name: "f32"
    linear=_FIRST,
    result_dtype=_cast_dtype,
    evaluate=_cast,
    emit=_write_cast,
    between=bounds.held,
    fold=_fold_cast,
)


def _chosen_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """That of both choices.

    Raises:
        ShapeError: if they differ, or the mask is none.
    """
    if dtypes[0] is not DType.BOOL:
        raise ShapeError(f"where by {dtypes[0].value}", "A mask of truth values", "Compare, or cast")
    one_type("where", dtypes[1:])
    return dtypes[1]


where = Operator(
    "where",
    "..., ..., ... -> ...",
    "map",
    emit="torch.where({0}, {1}, {2})",
    linear=(frozenset({1, 2}),),
    saved=(0,),
    differentiable=(1, 2),
    result_dtype=_chosen_dtype,
    evaluate=lambda t, x, c: t.where(x[0], x[1], x[2]),
    between=bounds.chosen,
    fold=np.where,
)


def _write_gelu(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    approximate = node.attr("approximate")
    return call("F.gelu", x[0], *([] if approximate == "none" else [f'approximate="{approximate}"']))


OPS = (
    add,
    sub,
    mul,
    scale,
    shift,
    neg,
    cast,
    where,
    _unary(
        "relu",
        "F.relu({0})",
        _of(lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
        saved=("out",),
        whole=lambda x: np.maximum(x, 0),
        between=bounds.above_zero,
        is_activation=True,
    ),
    _unary(
        "gelu",
        _write_gelu,
        _gelu,
        flops=8,
        is_activation=True,
        defaults={"approximate": "none"},
    ),
    _unary(
        "softplus",
        "F.softplus({0})",
        lambda x: (np.logaddexp(x, 0), lambda: 1 / (1 + np.exp(-x))),
        flops=5,
        is_activation=True,
    ),
    _unary("silu", "F.silu({0})", _silu, flops=5, is_activation=True),
    _unary(
        "tanh",
        "torch.tanh({0})",
        _tanh,
        flops=5,
        saved=("out",),
        is_activation=True,
        between=lambda *_: (-1, 1),
        fold=np.tanh,
    ),
    _unary(
        "sigmoid",
        "torch.sigmoid({0})",
        _sigmoid,
        flops=4,
        saved=("out",),
        is_activation=True,
        between=lambda *_: (0, 1),
    ),
    _unary("exp", "torch.exp({0})", _exp, flops=4, saved=("out",), fold=np.exp),
    _unary("log", "torch.log({0})", _of(np.log, lambda x: 1 / x), flops=4, takes_positive=True, fold=np.log),
    _unary(
        "log1p", "torch.log1p({0})", _of(np.log1p, lambda x: 1 / (1 + x)), flops=4, takes_positive=True, fold=np.log1p
    ),
    _unary("expm1", "torch.expm1({0})", _of(np.expm1, np.exp), flops=4, fold=np.expm1),
    _unary("erf", "torch.erf({0})", _of(_erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)), flops=8),
    _unary(
        "sqrt",
        "torch.sqrt({0})",
        _of(np.sqrt, lambda x: 0.5 / np.sqrt(x)),
        saved=("out",),
        takes_positive=True,
        fold=np.sqrt,
    ),
    _unary(
        "rsqrt",
        "torch.rsqrt({0})",
        RSQRT.real,
        saved=("out",),
        memory=_AGAIN,
        takes_positive=True,
        fold=lambda x: 1 / np.sqrt(x),
    ),
    _unary("reciprocal", "torch.reciprocal({0})", _reciprocal, saved=("out",), takes_positive=True, fold=np.reciprocal),
    _unary("sin", "torch.sin({0})", _of(np.sin, np.cos), flops=4, fold=np.sin),
    _unary("cos", "torch.cos({0})", _of(np.cos, lambda x: -np.sin(x)), flops=4, fold=np.cos),
    _unary("abs", "torch.abs({0})", _of(np.abs, np.sign), whole=np.abs, between=bounds.folded_up, fold=np.abs),
    _unary(
        "pow",
        "{0}.pow({exponent})",
        _pow,
        flops=8,
        attrs=("exponent",),
        memory=_AGAIN,
        measured_as="pow_scalar",
        takes_positive=True,
        fold=lambda x, exponent: x ** x.dtype.type(exponent),
    ),
)
