"""What ATen operators make of rows that a mask chose: of each row by itself, or sums and means of all.

Entry point: ``of_chosen``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload

from ir.graph import Node
from pdv.frontend import chosen
from pdv.frontend.chosen import Chosen
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.torch.scalars import Handler

_OF_EACH_ROW = {  # operator -> the operand that may be rows; the others are the same for all
    "aten.linear.default": 0, "aten.mm.default": 0, "aten.matmul.default": 0, "aten.addmm.default": 1,
    "aten.layer_norm.default": 0, "aten.dropout.default": 0,
    "aten._to_copy.default": 0, "aten.clone.default": 0, "aten.alias.default": 0,
    "aten.detach.default": 0, "aten.zeros_like.default": 0, "aten.ones_like.default": 0, "aten.full_like.default": 0,
}  # fmt: skip
_OF_OTHER_DIMS = {  # operator -> the argument that is a dim, which is not that of the rows
    "aten._softmax.default": 1, "aten.softmax.int": 1, "aten._log_softmax.default": 1, "aten.log_softmax.int": 1,
    "aten.unsqueeze.default": 1, "aten.squeeze.dim": 1, "aten.select.int": 1, "aten.slice.Tensor": 1,
    "aten.gather.default": 1,
}  # fmt: skip
_NEW = ("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default")
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_REDUCED: Mapping[str, tuple[str, Callable[..., Node]]] = {
    "aten.sum.default": ("reduce_sum", chosen.total),
    "aten.sum.dim_IntList": ("reduce_sum", chosen.total),
    "aten.mean.default": ("reduce_mean", chosen.mean),
    "aten.mean.dim": ("reduce_mean", chosen.mean),
}


def of_chosen(
    k: Lowering, target: Any, handler: Handler | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Node | Chosen:  # Any: an operator of torch; nodes, rows, numbers, lists of them
    """What an operator gives, of which operands are chosen rows.

    Raises:
        Unsupported: if it is none of each row, nor a sum or mean of all.
    """
    name, first = str(target), args[0] if args else None
    mask = chosen.same_mask([*args, *kwargs.values()])
    if name == "aten.sym_size.int" and isinstance(first, Chosen) and args[1] == 0:
        return chosen.count(k, first)
    if name in _REDUCED and isinstance(first, Chosen):
        return _reduced(k, name, first, *args[1:], **kwargs)
    if name in _NEW and isinstance(first, Chosen) and all(isinstance(size, int) for size in args[1]):
        return cast(Handler, handler)(k, first.rows, *args[1:], **kwargs)  # type: ignore[return-value]
    if name == "aten.index_put.default" and isinstance(first, Node) and isinstance(args[2], Chosen):
        if len(args[1]) != 1 or not isinstance(args[1][0], Node) or any(args[3:]):
            raise Unsupported("rows that a mask chose, put elsewhere, or added")
        return chosen.put_back(k, first, args[1][0], args[2])
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        args = _with_turns(k, args, mask)
    if handler is None or not _is_of_rows(target, name, args):
        raise Unsupported("of rows that a mask chooses, of which the number depends on values")
    given = [x.rows if isinstance(x, Chosen) else x for x in args]
    if name in _VIEWS:
        given[1] = [given[0].type.shape[0], *args[1][1:]]
    made = handler(k, *given, **kwargs)
    if not isinstance(made, Node):
        raise Unsupported("several results of rows that a mask chooses")
    return Chosen(made, mask)


def _with_turns(k: Lowering, args: Sequence[Any], mask: Node) -> list[Any]:  # Any: as above
    """Operands of which those that have a row for each chosen one have them where these are."""
    rank = max(x.rows.type.rank for x in args if isinstance(x, Chosen))

    def placed(x: Any) -> Any:  # Any: as above
        has_rows = isinstance(x, Node) and x.type.rank == rank and x.type.shape[0] > 1
        return Chosen(chosen.in_turn(k, x, mask), mask) if has_rows else x

    return [placed(x) for x in args]


def _is_of_rows(target: Any, name: str, args: Sequence[Any]) -> bool:  # Any: as above
    """Whether each row of the result is made of one row of each operand."""
    rows = [at for at, x in enumerate(args) if isinstance(x, Chosen)]
    rank = args[rows[0]].rows.type.rank if rows else 0
    if name in _VIEWS:
        each, rest = args[0].rows.type.shape[1:], args[1][1:]
        return (args[1][0] == -1 or isinstance(args[1][0], Node)) and math.prod(rest) == math.prod(each)
    if name in _OF_OTHER_DIMS:
        alike = all(args[at].rows.type.rank == rank for at in rows)
        return alike and args[_OF_OTHER_DIMS[name]] % (rank + (name == "aten.unsqueeze.default")) != 0
    others = [x for x in args if isinstance(x, Node)]
    if name in _OF_EACH_ROW:
        return rows == [_OF_EACH_ROW[name]] and all(x.type.rank <= 2 for x in others)
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    spread = all(x.type.rank < rank or x.type.shape[:1] == (1,) for x in others if x.type.num_elements > 1)
    return pointwise and spread and len({args[at].rows.type.rank for at in rows}) == 1


def _reduced(
    k: Lowering, name: str, rows: Chosen, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
) -> Node | Chosen:  # Any: types of results
    """A sum or mean over all, over the rows, or over dims of each row."""
    if any(value is not None for value in kwargs.values()):
        raise Unsupported("of chosen rows, in another type")
    op, of_all = _REDUCED[name]
    rank = rows.rows.type.rank
    over = {dim % rank for dim in dims or range(rank)}
    if over in ({0}, set(range(rank))):
        return of_all(k, rows, everything=len(over) == rank, keepdim=keepdim)
    if 0 in over:
        raise Unsupported("of chosen rows, over some of their dims")
    return Chosen(k.reduce(op, rows.rows, sorted(over), keepdim), rows.mask)
