"""Functions of each element. Sums and products are exact in every field, the rest are functions known by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.errors import ShapeError
from ir.layout import HANDED_ON, Memory
from ir.local import Local
from ir.operator import Attrs, Operator, one_type
from ir.tape import Call, Tape
from ir.types import DType

_NONE: Mapping[str, Hashable] = MappingProxyType({})
Evaluate = Callable[[Tape, Sequence[Any], Call], Any]  # Any: arrays of the tape's field


def _unary(
    name: str,
    emit: str,
    *,
    flops: float = 1.0,
    saved: tuple[int | str, ...] = (0,),
    defaults: Mapping[str, Hashable] = _NONE,
    attrs: tuple[str, ...] = (),
    **traits: Any,
) -> Operator:
    """An uninterpreted function of one operand; its attributes are part of the function's name.

    ``traits``: further fields of ``Operator``.
    """

    def evaluate(t: Tape, operands: Sequence[Any], call: Call) -> Any:
        return t.unary(":".join([name, *(str(value) for value in call.attrs.values())]), operands[0])

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
)
sub = _binary(
    "sub", "{0} - {1}", lambda t, x, c: t.sub(x[0], x[1]), linear=_BOTH, memory=Memory(handed=(0,)), measured_as="add"
)
mul = _binary(
    "mul",
    "{0} * {1}",
    lambda t, x, c: t.mul(x[0], x[1]),
    linear=_EITHER,
    saved=(0, 1),
    memory=Memory(backward=_spread),
    commutative=True,
)
div = _binary(
    "div",
    "{0} / {1}",
    lambda t, x, c: t.mul(x[0], t.unary("reciprocal", x[1])),
    linear=_FIRST,
    saved=(0, 1),
    memory=Memory(backward=lambda local: _spread(local) + local.result_bytes),
    takes_positive=True,
)

scale = Operator(
    "scale",
    "... -> ...",
    "map",
    attrs=("factor",),
    linear=_FIRST,
    evaluate=lambda t, x, c: t.scale(x[0], c.attrs["factor"]),
    eager="{0} * {factor}",
    measured_as="mul_scalar",
)
shift = Operator(
    "shift",
    "... -> ...",
    "map",
    attrs=("offset_by",),
    memory=HANDED_ON,
    evaluate=lambda t, x, c: t.shift(x[0], c.attrs["offset_by"]),
    eager="{0} + {offset_by}",
    measured_as="add_scalar",
)
neg = Operator("neg", "... -> ...", "map", emit="-{0}", linear=_FIRST, evaluate=lambda t, x, c: t.scale(x[0], -1.0))


def _cast_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    return DType(attrs["dtype"])


def _cast(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field, or of integers
    """Rounding is not part of a program's meaning; what is no zero is true."""
    (x,) = operands
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and DType(call.attrs["dtype"]) is DType.BOOL:
        return x != 0
    return x.astype(np.int64) if isinstance(x, np.ndarray) and x.dtype.kind == "b" else x


cast = Operator(
    "cast",
    "... -> ...",
    "map",
    attrs=("dtype",),  # a short name: "f32"
    linear=_FIRST,
    result_dtype=_cast_dtype,
    evaluate=_cast,
    eager="{0}.to({dtype})",
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
)

OPS = (
    add,
    sub,
    mul,
    div,
    scale,
    shift,
    neg,
    cast,
    where,
    _unary("relu", "F.relu({0})", saved=("out",), is_activation=True),
    _unary(
        "gelu",
        "",
        flops=8,
        is_activation=True,
        defaults={"approximate": "none"},
        eager="F.gelu({0}, approximate={approximate})",
    ),
    _unary("silu", "F.silu({0})", flops=5, is_activation=True),
    _unary("tanh", "torch.tanh({0})", flops=5, saved=("out",), is_activation=True),
    _unary("sigmoid", "torch.sigmoid({0})", flops=4, saved=("out",), is_activation=True),
    _unary("exp", "torch.exp({0})", flops=4, saved=("out",)),
    _unary("log", "torch.log({0})", flops=4, takes_positive=True),
    _unary("erf", "torch.erf({0})", flops=8),
    _unary("sqrt", "torch.sqrt({0})", saved=("out",), takes_positive=True),
    _unary("rsqrt", "torch.rsqrt({0})", saved=("out",), memory=_AGAIN, takes_positive=True),
    _unary("reciprocal", "torch.reciprocal({0})", saved=("out",), takes_positive=True),
    _unary("sin", "torch.sin({0})", flops=4),
    _unary("cos", "torch.cos({0})", flops=4),
    _unary("abs", "torch.abs({0})"),
    _unary(
        "pow",
        "{0}.pow({exponent})",
        flops=8,
        attrs=("exponent",),
        memory=_AGAIN,
        measured_as="pow_scalar",
        takes_positive=True,
    ),
)
