"""Comparisons and truth values: masks of inputs, of positions, and of what was computed.

Of integers they are what they are in every field. Of floats a proof knows a comparison by its name alone: whether a
difference is below zero is then a function of that difference of which nothing is assumed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.emission.code import SUM, UNARY, Code, literal
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.graph import Node
from ir.operator import Attrs, Operator, one_type
from ir.tape import Call, Tape
from ir.types import DType

RELATIONS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
)


def _truth(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """Truth values, of operands of one type.

    Raises:
        ShapeError: if they are of several.
    """
    one_type("compare", dtypes)
    return DType.BOOL


def _only_truth(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """Truth values, of truth values.

    Raises:
        ShapeError: if an operand is something else.
    """
    if set(dtypes) != {DType.BOOL}:
        raise ShapeError(f"and, or, not of {', '.join(x.value for x in dtypes)}", "Truth values", "Compare, or cast")
    return DType.BOOL


def _compare(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field, or of integers
    x, y = operands
    relation = RELATIONS[call.attrs["relation"]]
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return relation(*_aligned(x, y))
    return t.relate(f"{call.attrs['relation']} 0", relation, x, y)


def _aligned(x: Any, y: Any) -> tuple[Any, Any]:
    """With ones put in after the first axis, so that both have as many dims."""
    rank = max(x.ndim, y.ndim)
    return tuple(a.reshape(a.shape[0], *(1,) * (rank - a.ndim), *a.shape[1:]) for a in (x, y))


def _compare_number(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    (x,), number = operands, call.attrs["number"]
    relation = RELATIONS[call.attrs["relation"]]
    if isinstance(x, np.ndarray):
        return relation(x, number)
    return t.relate(f"{call.attrs['relation']} 0", relation, x, t.constant(number, (1,) * (len(x.shape) - 1)))


def _write_compare(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    right = x[1] if len(x) > 1 else literal(node.attr("number"))
    text = f"{x[0].at(SUM)} {node.attr('relation')} {right.at(SUM)}"
    return Code(f"({text})")


def _write_both(sign: str) -> Callable[[Node, Sequence[Code], Writing], Code]:
    return lambda node, x, writing: Code(f"({x[0].at(UNARY)} {sign} {x[1].at(UNARY)})")


compare = Operator(
    "compare",
    "..., ... -> ...",
    "map",
    attrs=("relation",),
    result_dtype=_truth,
    differentiable=(),
    evaluate=_compare,
    emit=_write_compare,
    measured_as="add",
    fold=lambda x, y, relation: RELATIONS[relation](x, y),
)
compare_number = Operator(
    "compare_number",
    "... -> ...",
    "map",
    attrs=("relation", "number"),
    result_dtype=_truth,
    differentiable=(),
    evaluate=_compare_number,
    emit=_write_compare,
    measured_as="add_scalar",
    fold=lambda x, relation, number: RELATIONS[relation](x, number),
)
_logical = partial(Operator, kind="map", result_dtype=_only_truth, differentiable=())
logical_and = _logical(
    "logical_and",
    "..., ... -> ...",
    evaluate=lambda t, x, c: t.mul(x[0], x[1]),
    emit=_write_both("&"),
    measured_as="add",
    fold=np.logical_and,
)
logical_or = _logical(
    "logical_or",
    "..., ... -> ...",
    evaluate=lambda t, x, c: t.add(x[0], x[1]),
    emit=_write_both("|"),
    measured_as="add",
    fold=np.logical_or,
)
logical_not = _logical(
    "logical_not",
    "... -> ...",
    evaluate=lambda t, x, c: ~x[0],
    emit=lambda node, x, writing: Code(f"~{x[0].at(UNARY)}", UNARY),
    measured_as="add_scalar",
    fold=np.logical_not,
)

OPS = (compare, compare_number, logical_and, logical_or, logical_not)
