"""Rows that a mask chooses, as ONNX has them: places where it holds, and what lies there. Entry point: `of_rows`."""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Node
from ir.types import DType
from pdv.frontend import chosen, masks
from pdv.frontend.chosen import Chosen
from pdv.frontend.lowering import Unsupported
from pdv.frontend.onnx.call import Call, Handler, Operands, Places, Value

_OF_EACH = {
    "Abs", "Add", "And", "Cast", "CastLike", "Clip", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Gelu", "Greater",
    "GreaterOrEqual", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or",
    "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xor",
}  # fmt: skip
"""Functions of each element, whose operands are broadcast."""


def non_zero(c: Call) -> Places:
    """Where a tensor is not zero, of which the number is not known."""
    return Places(masks.truth(c.k, c[0]))


def of_rows(c: Call, op: str, handler: Handler) -> Value:
    """What an operator gives of which operands are places of a mask, or rows that it chooses.

    Raises:
        Unsupported: if it is none of each row, nor a sum or mean of all.
    """
    values = [c.inputs[i] for i in range(len(c.inputs))]
    first, second = [*values, None][:2]
    if isinstance(first, Places) and op == "Transpose" and list(c.attrs.get("perm", (1, 0))) == [1, 0]:
        return replace(first, turned=not first.turned)
    if isinstance(second, Places) and isinstance(first, Node) and op == "GatherND":
        if second.turned and not int(c.attrs.get("batch_dims", 0)):
            return chosen.choose(c.k, first, second.mask)
    elif isinstance(first, Chosen) and op in ("ReduceMean", "ReduceSum"):
        return _reduced(c, op, first)
    elif op in _OF_EACH and not any(isinstance(x, Places) for x in values):
        return _each(c, values, handler)
    raise Unsupported("of rows that a mask chooses, of which the number depends on values")


def _each(c: Call, values: list[Value | None], handler: Handler) -> Value:
    mask = chosen.same_mask(values)
    ranks = {x.rows.type.rank for x in values if isinstance(x, Chosen)}
    others = [x for x in values if isinstance(x, Node) and x.type.num_elements > 1]
    if len(ranks) > 1 or any(x.type.rank >= min(ranks) for x in others):
        raise Unsupported("rows that a mask chooses, beside tensors that have rows of their own")
    rows = Operands([x.rows if isinstance(x, Chosen) else x for x in values])
    found = handler(replace(c, inputs=rows))
    made = found[0] if isinstance(found, tuple) else found
    if not isinstance(made, Node) or c.is_used(1):
        raise Unsupported("several results of rows that a mask chooses")
    return Chosen(made, mask)


def _reduced(c: Call, op: str, rows: Chosen) -> Value:
    """Over all, or over the rows alone."""
    rank, axes = rows.rows.type.rank, c.reduced()
    if axes is None or rows.rows.type.dtype is DType.BOOL:
        raise Unsupported("of rows that a mask chooses, as they are")
    over = {axis % rank for axis in axes} or set(range(rank))
    if over not in ({0}, set(range(rank))):
        raise Unsupported("of rows that a mask chooses, over some of their dims")
    of_all = chosen.mean if op == "ReduceMean" else chosen.total
    return of_all(c.k, rows, everything=len(over) == rank, keepdim=bool(c.attrs.get("keepdims", 1)))
