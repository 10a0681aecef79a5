"""What ATen operators make of rows that a mask chose: of each row by itself, or sums and means of all.

And of the places where it holds: rows are taken there, and put. Entry points: ``of_chosen``, ``nonzero``, ``where``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ir.graph import Node
from pdv.frontend import chosen, masks
from pdv.frontend.chosen import Chosen, Places
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.torch.scalars import Handler

Value = Node | Chosen | Places | tuple[Node | Chosen | Places | None, ...]

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
    "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.unbind.int": 1,
}  # fmt: skip
_NEW = ("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default")
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_SAME = ("aten._to_copy.default", "aten.clone.default", "aten.alias.default", "aten.detach.default")
_TURNS = ("aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.numpy_T.default")
_DIVISIONS = ("aten.floor_divide.default", "aten.div.Tensor_mode", "aten.div.Scalar_mode")
_TAKEN = ("aten.index_select.default", "aten.gather.default")
_OF_WIDTH = ("aten.gather.default", "aten.scatter_add.default")
_ALONG = (*_TAKEN, "aten.index_add.default", "aten.scatter_add.default")
_REDUCED: Mapping[str, tuple[str, Callable[..., Node]]] = {
    "aten.sum.default": ("reduce_sum", chosen.total),
    "aten.sum.dim_IntList": ("reduce_sum", chosen.total),
    "aten.mean.default": ("reduce_mean", chosen.mean),
    "aten.mean.dim": ("reduce_mean", chosen.mean),
}


def nonzero(k: Lowering, x: Node) -> Places:
    """Where a tensor is not zero, [n, dims]."""
    if not x.type.rank:
        raise Unsupported("of a single number")
    return Places(masks.truth(k, x), tuple(range(x.type.rank)), columns=1)


def where(k: Lowering, x: Node) -> tuple[Places, ...]:
    """The same, apart for each dim: ``torch.where`` of one operand."""
    found = nonzero(k, x)
    return tuple(replace(found, dims=(dim,), columns=None) for dim in found.dims)


def of_chosen(
    k: Lowering, target: Any, handler: Handler | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Value:  # Any: an operator of torch; nodes, rows, places, numbers, lists of them
    """What an operator gives, of which operands are chosen rows, or places where a mask holds.

    Raises:
        Unsupported: if it is none of each row, nor a sum or mean of all.
    """
    name, first = str(target), args[0] if args else None
    if any(isinstance(x, Places) for x in tree_leaves((args, kwargs))):
        return _of_places(k, name, first, args, kwargs)
    mask = chosen.same_mask([*args, *kwargs.values()])
    if isinstance(first, Chosen) and first.ahead:
        return _behind(name, first, args)
    if name == "aten.sym_size.int" and isinstance(first, Chosen) and args[1] == 0:
        return chosen.count(k, first)
    if name in _REDUCED and isinstance(first, Chosen):
        return _reduced(k, name, first, *args[1:], **kwargs)
    if name in _NEW and isinstance(first, Chosen) and all(isinstance(size, int) for size in args[1]):
        return cast(Handler, handler)(k, first.rows, *args[1:], **kwargs)  # type: ignore[return-value]
    if name == "aten.index_put.default" and isinstance(first, Node) and isinstance(args[2], Chosen):
        if len(args[1]) != 1 or not isinstance(args[1][0], Node) or any(args[3:]):
            raise Unsupported("rows that a mask chose, put elsewhere, or added")
        return chosen.put_back(k, first, args[1][0], chosen.whole(k, args[2]))
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        args = _with_turns(k, args, mask)
    if handler is None or not _is_of_rows(target, name, args):
        raise Unsupported("of rows that a mask chooses, of which the number depends on values")
    return _of_each(k, name, handler, args, kwargs)


def _of_each(k: Lowering, name: str, handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
    """What is made of each row, by what makes as much of all."""
    rows = [x for x in args if isinstance(x, Chosen)]
    like, *_ = spread = chosen.alike(k, rows)
    left = iter(spread)
    given = [next(left).rows if isinstance(x, Chosen) else x for x in args]
    if name in _VIEWS:
        given[1] = [given[0].type.shape[0], *args[1][1:]]
    made = handler(k, *given, **kwargs)
    plain = replace(like, taken=None, term=None)
    if isinstance(made, tuple):
        return tuple(replace(plain, rows=cast(Node, part)) for part in made)
    if not isinstance(made, Node):
        raise Unsupported("several results of rows that a mask chooses")
    onto = next((x for x in rows if x.taken is not None and x.term is None), None)
    if name == "aten.add.Tensor" and len(rows) == len(args) and onto is not None and not kwargs:
        term = next((x for x in rows if x is not onto), onto)
        return replace(plain, rows=made, taken=onto.taken, term=term)
    return replace(plain, rows=made)


def _behind(name: str, rows: Chosen, args: Sequence[Any]) -> Chosen:
    """Of rows behind dims of size one (``x[None, i]``) what is left without these."""
    rank = rows.ahead + rows.rows.type.rank
    if name in ("aten.squeeze.dim", "aten.select.int") and args[1] % rank < rows.ahead:
        return replace(rows, ahead=rows.ahead - 1)
    if name in _VIEWS and _is_count(args[1]) and tuple(args[1][1:]) == rows.rows.type.shape[1:]:
        return replace(rows, ahead=0)
    if name not in _SAME:
        _refuse()
    return rows


def _refuse() -> NoReturn:
    raise Unsupported("of rows that a mask chooses, of which the number depends on values")


def _of_places(k: Lowering, name: str, first: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
    """What is taken or put by places where a mask holds, and what is made of these alone."""
    if isinstance(first, Places):
        return _moved(k, name, first, args[1:], kwargs)
    if not isinstance(first, Node):
        _refuse()
    if name == "aten.index.Tensor":
        lead = next(at for at, x in enumerate(args[1]) if x is not None)
        mask, dims = _numbers(args[1][lead:])
        if first.type.shape[:lead] != (1,) * lead:
            raise Unsupported("rows of a dim that is not the first, by places where a mask holds")
        rows = chosen.take(k, k.reshape(first, first.type.shape[lead:]), dims, mask)
        return replace(rows, ahead=lead)
    if name == "aten.index_put.default":
        mask, dims = _numbers(args[1])
        return _put(k, first, dims, mask, args[2], accumulate=any(args[3:]))
    if name in _ALONG and args[1] % first.type.rank == 0 and isinstance(args[2], Places):
        ids, width = args[2], args[2].width
        if bool(width) is not (name in _OF_WIDTH) or (width and first.type.shape[1:] != (width,)):
            _refuse()
        mask, dims = _numbers([replace(ids, width=0)])
        if name in _TAKEN:
            return chosen.take(k, first, dims, mask)
        if len(args) == 4 and kwargs.get("alpha", 1) == 1:
            return _put(k, first, dims, mask, args[3], accumulate=True)
    _refuse()


def _put(k: Lowering, x: Node, dims: Sequence[int], mask: Node, value: Any, *, accumulate: bool) -> Node:
    if isinstance(value, Node) and (not value.type.rank or value.type.shape[0] == 1):  # the same for all rows
        rows = k.reshape(value, value.type.shape or (1,))
        value = Chosen(rows, chosen.flatten(k, mask), mask.type.shape, (1,) * mask.type.rank)
    if not isinstance(value, Chosen) or value.ahead:
        _refuse()
    return chosen.put(k, x, dims, mask, value, accumulate=accumulate)


def _numbers(ids: Sequence[Any]) -> tuple[Node, tuple[int, ...]]:
    """The mask, and along which of its dims rows are numbered.

    Raises:
        Unsupported: if other numbers are among these, or of another mask.
    """
    known = [x for x in ids if isinstance(x, Places) and len(x.dims) == 1 and x.columns is None and not x.width]
    if len(known) < len(ids) or any(x.mask is not known[0].mask for x in known):
        raise Unsupported("places where a mask holds, beside others")
    return known[0].mask, tuple(x.dims[0] for x in known)


def _moved(k: Lowering, name: str, x: Places, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
    """Places laid out in other ways, one column of them, or how many there are."""
    if name == "aten.sym_size.int" and args[0] == int(x.columns == 0):
        return chosen.count(k, Chosen(x.mask, chosen.flatten(k, x.mask)))
    if name in _SAME and kwargs.get("dtype") in (None, torch.int64):
        return x
    if x.columns is not None:
        return _of_columns(name, x, x.columns, args)
    if x.width:
        _refuse()
    if name == "aten.unsqueeze.default":
        return replace(x, columns=args[0] % 2)
    if name in _VIEWS and _is_count(args[0]) and list(args[0][1:]) in ([], [1]):
        return replace(x, columns=len(args[0]) - 1 or None)
    return _divided(k, name, x, args, kwargs)


def _of_columns(name: str, x: Places, columns: int, args: Sequence[Any]) -> Value:
    """The same of [n, dims], or of [dims, n]."""
    apart = [replace(x, dims=(dim,), columns=None) for dim in x.dims]
    if name in _TURNS and (name != "aten.permute.default" or [n % 2 for n in args[0]] == [1, 0]):
        return replace(x, columns=1 - columns)
    if name == "aten.unbind.int" and [*args, 0][0] % 2 == columns:
        return tuple(apart)
    if name == "aten.select.int" and args[0] % 2 == columns:
        return apart[int(args[1])]
    if name == "aten.slice.Tensor" and args[0] % 2 == columns and x.dims[slice(*args[1:])]:
        return replace(x, dims=x.dims[slice(*args[1:])])
    if len(apart) == 1:
        if name == "aten.squeeze.dim" and args[0] % 2 == columns:
            return apart[0]
        if name in _VIEWS and _is_count(args[0]) and len(args[0]) == 1:
            return apart[0]
        if name == "aten.expand.default" and columns == 1 and _is_count(args[0]) and int(args[0][1]) > 0:
            return replace(apart[0], width=int(args[0][1]))
    _refuse()


def _is_count(sizes: Sequence[Any]) -> bool:  # Any: numbers; of the first, as many as there are places
    return bool(sizes) and (sizes[0] == -1 or isinstance(sizes[0], Node))


def _divided(k: Lowering, name: str, x: Places, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Places:
    """Of places of which some are of each row (``i // k``) the row, or (``i % k``) which of them it is."""
    (dim,), by = x.dims, args[0] if args else None
    size = x.mask.type.shape[dim]
    floors = name == "aten.floor_divide.default" or kwargs.get("rounding_mode") == "floor"
    if name not in (*_DIVISIONS, "aten.remainder.Scalar") or not isinstance(by, int) or by < 1 or size % by:
        _refuse()
    if name != "aten.remainder.Scalar" and not floors:
        _refuse()
    sizes = (*x.mask.type.shape[:dim], size // by, by, *x.mask.type.shape[dim + 1 :])
    return Places(k.reshape(x.mask, sizes), (dim + (name == "aten.remainder.Scalar"),))


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
        return of_all(k, chosen.whole(k, rows), everything=len(over) == rank, keepdim=keepdim)
    if 0 in over:
        raise Unsupported("of chosen rows, over some of their dims")
    return replace(rows, rows=k.reduce(op, rows.rows, sorted(over), keepdim), taken=None, term=None)
