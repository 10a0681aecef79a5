"""Laws that remove what does nothing, and move what does little out of the way.

Reshapes sink towards the output until they meet another and cancel; transposes of parameters become the parameter's
view; constants are no bigger than what they say. Each law's first line is the equation it applies left to right.
"""

from __future__ import annotations

import math

import numpy as np

from ir.builder import Builder
from ir.graph import Node, param_view
from pdv.passes.fold_constants import Array, fold
from pdv.passes.match import array_of, is_op
from pdv.passes.numbers import short_float
from pdv.passes.rewrite import Law

WITHOUT_BROADCAST = ("concat", "linear", "matmul")


def fold_constant(k: Builder, node: Node) -> Node | None:
    """f(constants) == constant"""
    if not node.operands:
        return None
    if is_op(node, "expand") and node.operands[0].type.shape[0] == 1:
        return None  # rows stay once
    value = fold(node.op.name, node.operands, node.attrs)
    return None if value is None else k.const(value, node.name, node.type.dtype)


def drop_no_op(k: Builder, node: Node) -> Node | None:
    """reshape to the same shape, permute by identity, expand by one, cast to the same type, x * 1, x + 0 == x"""
    if not node.operands:
        return None
    x = node.operands[0]
    same_type = x.type == node.type
    match node.op.name:
        case "reshape" | "expand" | "cast":
            return x if same_type else None
        case "slice" | "chunk":
            return x if same_type else None
        case "permute":
            return x if node.attr("perm") == tuple(range(node.type.rank)) else None
        case "scale":
            return x if node.attr("factor") == 1 else None
        case "shift":
            return x if node.attr("offset_by") == 0 else None
        case "concat":
            return x if len(node.operands) == 1 else None
        case _:
            return None


def merge_moves(k: Builder, node: Node) -> Node | None:
    """reshape(reshape(x)) == reshape(x), permute(permute(x)) == permute(x), expand(expand(x)) == expand(x)"""
    if not is_op(node, "reshape", "permute", "expand") or not is_op(node.operands[0], node.op.name):
        return None
    inner = node.operands[0]
    (x,) = inner.operands
    if is_op(node, "permute"):
        perm = tuple(inner.attr("perm")[i] for i in node.attr("perm"))
        return k.permute(x, perm=perm, name=node.name)
    return k.apply(node.op, (x,), dict(node.attrs), node.name)


def permute_of_singletons(k: Builder, node: Node) -> Node | None:
    """permute(x) == reshape(x) where only dims of size one change place"""
    if not is_op(node, "permute"):
        return None
    shape = node.operands[0].type.shape
    moved = [i for i in node.attr("perm") if shape[i] != 1]
    return k.reshape(node.operands[0], shape=node.type.shape, name=node.name) if moved == sorted(moved) else None


def reshape_of_reduction(k: Builder, node: Node) -> Node | None:
    """reshape(reduce(x, keepdim)) == reduce(x), where the reshape only removes the reduced dims"""
    if not is_op(node, "reshape") or not is_op(node.operands[0], "reduce_mean", "reduce_sum"):
        return None
    reduction = node.operands[0]
    (x,) = reduction.operands
    dims = reduction.attr("dims")
    kept = tuple(size for i, size in enumerate(x.type.shape) if i not in dims)
    if not reduction.attr("keepdim") or kept != node.type.shape:
        return None
    return k.apply(reduction.op, (x,), {"dims": dims, "keepdim": False}, node.name)


def mean_of_sum(k: Builder, node: Node) -> Node | None:
    """sum(x) * (1 / n) == mean(x), where n elements are summed"""
    if not is_op(node, "scale") or not is_op(node.operands[0], "reduce_sum"):
        return None
    reduction = node.operands[0]
    count = math.prod(reduction.operands[0].type.shape[dim] for dim in reduction.attr("dims"))
    if node.attr("factor") != short_float(1 / count) or count == 1:
        return None
    return k.reduce_mean(*reduction.operands, name=node.name, **reduction.attrs)


def param_move_is_view(k: Builder, node: Node) -> Node | None:
    """permute(param) == param read with a permuted view; likewise reshape"""
    if not is_op(node, "permute", "reshape") or not node.operands[0].is_param:
        return None
    param = node.operands[0]
    step = ("permute", node.attr("perm")) if is_op(node, "permute") else ("reshape", node.attr("shape"))
    view = (*param_view(param), step)
    if len(view) == 2 and view[0][0] == view[1][0] == "permute":
        view = (("permute", tuple(view[0][1][i] for i in view[1][1])),)
        view = () if view[0][1] == tuple(range(node.type.rank)) else view
    return k.param(
        param.attr("name"), node.type, source=param.attr("source"), view=view, trainable=param.attr("trainable")
    )


def sink_reshape_below_transpose(k: Builder, node: Node) -> Node | None:
    """transpose(reshape(x)) == reshape(transpose(x)) of the last two dims, which the reshape keeps"""
    if not is_op(node, "permute") or not is_op(node.operands[0], "reshape"):
        return None
    (x,) = node.operands[0].operands
    shape, rank, perm = node.operands[0].type.shape, x.type.rank, node.attr("perm")
    if perm != (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2) or rank < 3 or x.type.shape[-2:] != shape[-2:]:
        return None
    swapped = k.permute(x, perm=(*range(rank - 2), rank - 1, rank - 2), name=node.name)
    return k.reshape(swapped, shape=node.type.shape, name=node.name)


def sink_reshape_below_linear(k: Builder, node: Node) -> Node | None:
    """linear(reshape(x), w) == reshape(linear(reshape'(x), w)) where reshape' leaves the leading dims of x apart"""
    if not is_op(node, "linear") or not is_op(node.operands[0], "reshape"):
        return None
    shaped, weight = node.operands
    (x,) = shaped.operands
    lead = next(
        (x.type.shape[:i] for i in range(x.type.rank) if math.prod(x.type.shape[i:]) == shaped.type.shape[-1]), ()
    )
    if not lead or lead == shaped.type.shape[:-1]:
        return None
    apart = k.reshape(x, shape=(*lead, shaped.type.shape[-1])) if x.type.shape != (*lead, shaped.type.shape[-1]) else x
    return k.reshape(k.linear(apart, weight, name=node.name), shape=node.type.shape, name=node.name)


def sink_reshape_below_vector(k: Builder, node: Node) -> Node | None:
    """f(reshape(x), v) == reshape(f(x, v)) for a vector v along the last dim, which the reshape keeps"""
    if not _is_binary(node) or not is_op(node.operands[0], "reshape"):
        return None
    shaped, vector = node.operands
    (x,) = shaped.operands
    if not (vector.is_param or vector.is_const) or vector.type.rank != 1 or shaped.type != node.type:
        return None
    if not x.type.rank or x.type.shape[-1] != shaped.type.shape[-1] or vector.type.shape[-1] != x.type.shape[-1]:
        return None
    return k.reshape(k.apply(node.op, (x, vector), {}, node.name), shape=node.type.shape, name=node.name)


def _is_binary(node: Node) -> bool:
    return node.op.broadcasts and len(node.operands) == 2


def absorb_expand(k: Builder, node: Node) -> Node | None:
    """f(x, expand(y)) == f(x, y) where f broadcasts to the same shape"""
    if not node.op.broadcasts:
        return None
    bare = tuple(x.operands[0] if is_op(x, "expand") else x for x in node.operands)
    for operands in (bare, *((*node.operands[:i], bare[i], *node.operands[i + 1 :]) for i in range(len(bare)))):
        if operands != node.operands and np.broadcast_shapes(*(x.type.shape for x in operands)) == node.type.shape:
            return k.apply(node.op, operands, dict(node.attrs), node.name)
    return None


def shrink_constant(k: Builder, node: Node) -> Node | None:
    """f(x, c) == f(x, c') where c repeats c' along dims that f broadcasts"""
    if not node.op.broadcasts:
        return None
    operands = list(node.operands)
    for i, operand in enumerate(operands):
        array = array_of(operand)
        if array is None:
            continue
        others = np.broadcast_shapes(*(x.type.shape for j, x in enumerate(operands) if j != i))
        small = _without_leading_ones(_unrepeated(array, others))
        if small.shape != array.shape and np.broadcast_shapes(small.shape, others) == node.type.shape:
            operands[i] = k.const(small, operand.name, operand.type.dtype)
    return k.apply(node.op, tuple(operands), dict(node.attrs), node.name) if operands != list(node.operands) else None


def _unrepeated(array: Array, others: tuple[int, ...]) -> Array:
    """The array with size one in each dim along which it repeats and that `others` (aligned right) can give back."""
    for dim in range(array.ndim):
        from_right = array.ndim - dim
        given = from_right <= len(others) and others[-from_right] == array.shape[dim]
        first = array.take([0], axis=dim)
        if array.shape[dim] > 1 and given and np.array_equal(array, np.broadcast_to(first, array.shape)):
            array = first
    return array


def rows_once(rows: int) -> Law:
    """The law for programs whose inputs have so many rows: f(x, c) == f(x, expand(c')) where c repeats c' in each row.

    Then no constant says how many rows there are.
    """

    def law(k: Builder, node: Node) -> Node | None:
        if not is_op(node, *WITHOUT_BROADCAST) or rows < 2:
            return None
        operands = list(node.operands)
        for i, operand in enumerate(operands):
            array = array_of(operand)
            if array is None or array.ndim < 2 or array.shape[0] != rows or (array != array[:1]).any():
                continue
            operands[i] = k.expand(k.const(array[:1], operand.name, operand.type.dtype), shape=array.shape)
        return (
            None if operands == list(node.operands) else k.apply(node.op, tuple(operands), dict(node.attrs), node.name)
        )

    return law


def _without_leading_ones(array: Array, *, but: int = 0) -> Array:
    """Leading dims of size one dropped, but the last ``but``."""
    lead = next((i for i, size in enumerate(array.shape) if size != 1), array.ndim)
    return array.reshape(array.shape[min(lead, max(array.ndim - but, 0)) :])


def constant_scalar(k: Builder, node: Node) -> Node | None:
    """x + c == shift(x), x * c == scale(x) for a constant of one element"""
    if not _is_binary(node):
        return None
    x, y = node.operands
    array = array_of(y)
    if array is None or array.size != 1 or x.type != node.type or not x.type.dtype.is_floating:
        return None
    value = short_float(float(array.reshape(())), x.type.dtype)
    if not math.isfinite(value) or (is_op(node, "div") and value == 0):
        return None
    match node.op.name:
        case "add":
            return k.shift(x, offset_by=value, name=node.name)
        case "sub":
            return k.shift(x, offset_by=-value, name=node.name)
        case "mul":
            return k.scale(x, factor=value, name=node.name)
        case _:
            return k.scale(x, factor=short_float(1 / value, x.type.dtype), name=node.name)


def leaf_second(k: Builder, node: Node) -> Node | None:
    """param + x == x + param, param * x == x * param; likewise for constants"""
    if not node.op.commutative:
        return None
    x, y = node.operands
    first, second = (operand.is_param or operand.is_const for operand in (x, y))
    if not first or second or x.type.dtype != y.type.dtype:
        return None
    return k.apply(node.op, (y, x), {}, node.name)


def repeated_ids(k: Builder, node: Node) -> Node | None:
    """embedding(w, expand(ids)) == expand(embedding(w, ids)), for constant ids that repeat along dims"""
    if not is_op(node, "embedding"):
        return None
    table, ids = node.operands
    array = array_of(ids)
    if array is None:
        return None
    small = _unrepeated(array, array.shape)
    if small.shape == array.shape:
        return None
    rows = k.embedding(table, k.const(small, ids.name, ids.type.dtype), name=node.name)
    return k.expand(rows, shape=node.type.shape, name=node.name)


def constant_mask(k: Builder, node: Node) -> Node | None:
    """attention under a mask that hides nothing, or the future, == attention without it, or causal"""
    if not node.op.has_scores or len(node.operands) != 4:
        return None
    q, key, v, mask = node.operands
    array = array_of(mask)
    if array is None:
        return None
    keep = array if array.dtype == np.bool_ else _keep_of_additive(array)
    attrs = dict(node.attrs)
    if keep is not None and keep.all():
        return k.attention(q, key, v, name=node.name, **attrs)
    rows, columns = q.type.shape[-2], key.type.shape[-2]
    causal = np.tri(rows, columns, dtype=bool)
    if keep is not None and keep.shape[-2:] == (rows, columns) and (keep == causal).all():
        return k.attention(q, key, v, name=node.name, **{**attrs, "causal": True})
    small = _unrepeated(array, (*q.type.shape[:-1], 0))  # torch's attention wants all columns, and two dims
    small = _without_leading_ones(small, but=2)
    if small.shape == array.shape:
        return None
    return k.attention(q, key, v, k.const(small, mask.name, mask.type.dtype), name=node.name, **attrs)


def _keep_of_additive(array: Array) -> Array | None:
    """True where an additive mask adds 0, if everywhere else it adds what makes softmax exactly zero."""
    keep = array == 0
    hidden = array[~keep]
    return (
        keep if (hidden <= -1e30).all() else None
    )  # exp underflows to 0 below about -104 in float32; scores are far from 1e30


SIMPLIFICATIONS: tuple[Law, ...] = (
    fold_constant,
    drop_no_op,
    merge_moves,
    permute_of_singletons,
    reshape_of_reduction,
    mean_of_sum,
    param_move_is_view,
    sink_reshape_below_transpose,
    sink_reshape_below_linear,
    sink_reshape_below_vector,
    absorb_expand,
    constant_scalar,
    leaf_second,
    shrink_constant,
    repeated_ids,
    constant_mask,
)
