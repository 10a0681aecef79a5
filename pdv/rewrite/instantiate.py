"""A law at given sizes: two programs, which must be equal.

Entry point: ``instantiate``. Operand variables become parameters (inputs, where they are integers), so that gradients
by all of them are compared; the results of a side become outputs. Which sizes to take is decided in ``check``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import numpy as np

from ir.builder import Builder
from ir.dims import Shape
from ir.errors import ShapeError
from ir.evaluation.rational import short_float
from ir.graph import Graph, Node
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import TensorType
from pdv.rewrite.expression import Literal, Star, Symbol, evaluate, in_full, is_rounded
from pdv.rewrite.law import Law, Operand, Term
from pdv.rewrite.law import Shape as LawShape

Values = Mapping[str, object]
"""Extents (int), runs of leading dims (tuple of int) and attribute variables, by name."""


def instantiate(law: Law, values: Values) -> tuple[Graph, Graph]:
    """Both sides of ``law`` under ``values``.

    Raises:
        ShapeError: if a side does not type-check there, or its results differ in type from the other's.
    """
    left, right = (_side(law, side, values) for side in (law.left, law.right))
    for (name, one), (_, other) in zip(left.outputs, right.outputs, strict=True):
        if one.type != other.type:
            raise ShapeError(f"{name} of {law.name} is {one.type} on the left, {other.type} on the right")
    return left, right


def _side(law: Law, terms: Sequence[Term], values: Values) -> Graph:
    k = Builder()
    nodes = {}
    for name, shape in law.shapes.items():
        tensor = TensorType(dims_of(shape, values), shape.dtype)
        if shape.role == "number":
            nodes[name] = k.const(np.array(values[name], np.float64), name, shape.dtype)
        else:
            nodes[name] = (k.param if shape.dtype.is_floating and shape.role != "mask" else k.input)(name, tensor)
    return k.graph({f"y{number}": build(k, term, nodes, values) for number, term in enumerate(terms)})


def build(
    k: Builder, term: Term, nodes: Mapping[str, Node], values: Values, name: str = "", *, short: bool = False
) -> Node:
    """The node of a term, under a name; ``short``: what stands behind ``~`` is written as short as its type has it.

    Raises:
        ShapeError: if it does not type-check.
    """
    if isinstance(term, Operand):
        return nodes[term.name]
    operands = tuple(build(k, operand, nodes, values) for operand in term.operands)
    op, rank = OPERATORS[term.op], operands[0].type.rank
    attrs = {
        attr: hashable(evaluate(in_full(written, rank) if isinstance(written, tuple) else written, values))
        for attr, written in term.attrs
    }
    if short:
        rounded = [attr for attr, written in term.attrs if is_rounded(written)]
        attrs |= {attr: short_float(cast(float, attrs[attr]), operands[0].type.dtype) for attr in rounded}
    try:
        node = k.apply(op, operands, resolve_attrs(op, attrs, operands[0].type.shape), name)
    except (AssertionError, IndexError, TypeError, ValueError) as error:  # attributes that do not fit the operands
        raise ShapeError(f"{term} over {[str(operand.type) for operand in operands]}: {error}") from error
    if 0 in node.type.shape:
        raise ShapeError(f"{term} is empty")
    return node


def resolve_attrs(op: Operator, attrs: Mapping[str, Hashable], shape: Shape) -> dict[str, Hashable]:
    """Attributes with dims counted from the front; ``shape`` is the first operand's.

    Raises:
        ShapeError: if there is no such dim.
    """
    if not op.dims_attr:
        return dict(attrs)
    dims = attrs[op.dims_attr]
    found = tuple(_dim(dim, shape) for dim in dims) if isinstance(dims, tuple) else _dim(cast(int, dims), shape)
    return {**attrs, op.dims_attr: found}


def dims_of(shape: LawShape, values: Values) -> Shape:
    """The extents of an operand variable."""
    found: list[int] = []
    for dim in shape.dims:
        match dim:
            case Star(name):
                found.extend(cast("tuple[int, ...]", values[name]))
            case Symbol(name):
                found.append(cast(int, values[name]))
            case Literal(value):
                found.append(cast(int, value))
    return tuple(found)


def _dim(dim: int, shape: Shape) -> int:
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
        raise ShapeError(f"no dim {dim} in {shape}")
    return at


def hashable(value: object) -> Hashable:
    """A value that is one."""
    assert isinstance(value, Hashable), value
    return value
