"""Laws that remove what does nothing, and move what does little out of the way.

Reshapes sink towards the output until they meet another and cancel; transposes of parameters become the parameter's
view; constants are no bigger than what they say. Each law's first line is the equation it applies left to right.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from ir.builder import Builder
from ir.graph import Node, param_view
from pdv.passes.fold_constants import Array, fold
from pdv.rewrite.normal_form import Step


def _array_of(node: Node) -> Array | None:
    """The value of a constant, None for other nodes."""
    return cast(Array, node.attr("value").array) if node.is_const else None


def fold_constant(k: Builder, node: Node) -> Node | None:
    """f(constants) == constant"""
    if node.op.repeats and node.operands[0].type.shape[:1] == (1,):
        return None  # rows stay once
    value = fold(node.op, node.operands, node.attrs)
    return None if value is None else k.const(value, node.name, node.type.dtype)


def permute_of_singletons(k: Builder, node: Node) -> Node | None:
    """permute(x) == reshape(x) where only dims of size one change place"""
    if not node.op.reorders_dims:
        return None
    shape = node.operands[0].type.shape
    moved = [i for i in node.attr("perm") if shape[i] != 1]
    return k.reshape(node.operands[0], shape=node.type.shape, name=node.name) if moved == sorted(moved) else None


def param_move_is_view(k: Builder, node: Node) -> Node | None:
    """permute(param) == param read with a permuted view; likewise reshape"""
    if not (node.op.reorders_dims or _is_regrouped(node)) or not node.operands[0].is_param:
        return None
    param = node.operands[0]
    view = (*param_view(param), (node.op.name, *node.attrs.values()))
    if len(view) == 2 and view[0][0] == view[1][0] == "permute":
        view = (("permute", tuple(view[0][1][i] for i in view[1][1])),)
        view = () if view[0][1] == tuple(range(node.type.rank)) else view
    return k.param(
        param.attr("name"), node.type, source=param.attr("source"), view=view, trainable=param.attr("trainable")
    )


def sink_reshape_below_transpose(k: Builder, node: Node) -> Node | None:
    """transpose(reshape(x)) == reshape(transpose(x)) of the last two dims, which the reshape keeps"""
    if not node.op.reorders_dims or not _is_regrouped(node.operands[0]):
        return None
    (x,) = node.operands[0].operands
    shape, rank, perm = node.operands[0].type.shape, x.type.rank, node.attr("perm")
    if perm != (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2) or rank < 3 or x.type.shape[-2:] != shape[-2:]:
        return None
    swapped = k.permute(x, perm=(*range(rank - 2), rank - 1, rank - 2), name=node.name)
    return k.reshape(swapped, shape=node.type.shape, name=node.name)


def sink_reshape_below_linear(k: Builder, node: Node) -> Node | None:
    """linear(reshape(x), w) == reshape(linear(reshape'(x), w)) where reshape' leaves the leading dims of x apart"""
    if not node.op.maps_rows or not _is_regrouped(node.operands[0]):
        return None
    shaped, weight = node.operands
    (x,) = shaped.operands
    lead = next(
        (x.type.shape[:i] for i in range(x.type.rank) if math.prod(x.type.shape[i:]) == shaped.type.shape[-1]), ()
    )
    if not lead or lead == shaped.type.shape[:-1]:
        return None
    apart = k.reshape(x, shape=(*lead, shaped.type.shape[-1])) if x.type.shape != (*lead, shaped.type.shape[-1]) else x
    return k.reshape(k.apply(node.op, (apart, weight), {}, node.name), shape=node.type.shape, name=node.name)


def sink_reshape_below_vector(k: Builder, node: Node) -> Node | None:
    """f(reshape(x), v) == reshape(f(x, v)) for a vector v along the last dim, which the reshape keeps"""
    if not node.op.broadcasts or len(node.operands) != 2 or not _is_regrouped(node.operands[0]):
        return None
    shaped, vector = node.operands
    (x,) = shaped.operands
    if not (vector.is_param or vector.is_const) or vector.type.rank != 1 or shaped.type != node.type:
        return None
    if not x.type.rank or x.type.shape[-1] != shaped.type.shape[-1] or vector.type.shape[-1] != x.type.shape[-1]:
        return None
    return k.reshape(k.apply(node.op, (x, vector), {}, node.name), shape=node.type.shape, name=node.name)


def _is_regrouped(node: Node) -> bool:
    """True for a reshape: the same elements in the same order, under another shape."""
    return node.op.names_shape and not node.op.repeats


def absorb_expand(k: Builder, node: Node) -> Node | None:
    """f(x, expand(y)) == f(x, y) where f broadcasts to the same shape"""
    if not node.op.broadcasts:
        return None
    bare = tuple(x.operands[0] if x.op.repeats else x for x in node.operands)
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
        array = _array_of(operand)
        if array is None:
            continue
        others = np.broadcast_shapes(*(x.type.shape for j, x in enumerate(operands) if j != i))
        small = _without_leading_ones(_drop_repeats(array, others))
        if small.shape != array.shape and np.broadcast_shapes(small.shape, others) == node.type.shape:
            operands[i] = k.const(small, operand.name, operand.type.dtype)
    return k.apply(node.op, tuple(operands), dict(node.attrs), node.name) if operands != list(node.operands) else None


def _drop_repeats(array: Array, others: tuple[int, ...]) -> Array:
    """The array with size one in each dim along which it repeats and that `others` (aligned right) can give back."""
    for dim in range(array.ndim):
        from_right = array.ndim - dim
        given = from_right <= len(others) and others[-from_right] == array.shape[dim]
        first = array.take([0], axis=dim)
        if not (array.shape[dim] > 1 and given and np.array_equal(first, array.take([-1], axis=dim))):
            continue  # masks mostly differ at their ends, and are large
        if np.array_equal(array, np.broadcast_to(first, array.shape)):
            array = first
    return array


def rows_once(rows: int, *, inner: bool = False) -> Step:
    """The step for programs whose inputs have so many rows: f(x, c) == f(x, expand(c')) where c repeats c' in each row.

    Then no constant says how many rows there are. Where f broadcasts and nothing else has rows, it is expand(f(x, c')).
    inner: rows lie along a dim behind the first, as those of the states that a recurrent layer begins with,
    [layers, rows, width].
    """

    def step(k: Builder, node: Node) -> Node | None:
        if node.op.repeats or rows < 2:
            return None
        if not inner and (merged := _of_rows_and_more(k, node, rows)) is not None:
            return merged
        if node.op.broadcasts:
            return None if inner else _of_one_row(k, node, rows)
        operands = list(node.operands)
        for i, operand in enumerate(operands):
            array = _array_of(operand)
            if array is None or array.ndim < (1 if node.op.draws else 2):  # a vector else is of columns
                continue
            places = range(1, array.ndim) if inner else (0,)
            dim = next((place for place in places if array.shape[place] == rows), None)
            if dim is None or (array != (once := array.take([0], axis=dim))).any():
                continue
            operands[i] = k.expand(k.const(once, operand.name, operand.type.dtype), shape=array.shape)
        return (
            None if operands == list(node.operands) else k.apply(node.op, tuple(operands), dict(node.attrs), node.name)
        )

    return step


def _of_rows_and_more(k: Builder, node: Node, rows: int) -> Node | None:
    """f(x, c) == f(x, reshape(expand(c'))) where dim 0 of c is rows and more (heads), and c is the same in each row."""
    operands = list(node.operands)
    for i, operand in enumerate(operands):
        array = _array_of(operand)
        if array is None or array.ndim < 2 or array.shape[0] % rows or array.shape[0] in (0, rows):
            continue
        if node.op.broadcasts and array.ndim < node.type.rank:  # its dim 0 is another than that of the rows
            continue
        apart = array.reshape(rows, -1, *array.shape[1:])
        if (apart == apart[:1]).all():
            all_rows = k.expand(k.const(apart[:1], operand.name, operand.type.dtype), shape=apart.shape)
            operands[i] = k.reshape(all_rows, shape=array.shape)
    return None if operands == list(node.operands) else k.apply(node.op, tuple(operands), dict(node.attrs), node.name)


def _of_one_row(k: Builder, node: Node, rows: int) -> Node | None:
    shape, operands = node.type.shape, list(node.operands)
    whole = [i for i, x in enumerate(operands) if x.type.rank == len(shape) and x.type.shape[:1] == shape[:1]]
    if len(shape) < 2 or shape[0] != rows or len(whole) != 1:
        return None
    operand = operands[whole[0]]
    array = _array_of(operand)
    if array is None or (array != (once := array[:1])).any():
        return None
    operands[whole[0]] = k.const(once, operand.name, operand.type.dtype)
    one = k.apply(node.op, tuple(operands), dict(node.attrs), node.name)
    return k.expand(one, shape=shape) if one.type.shape[1:] == shape[1:] else None


def _without_leading_ones(array: Array, *, but: int = 0) -> Array:
    """Leading dims of size one dropped, but the last ``but``."""
    lead = next((i for i, size in enumerate(array.shape) if size != 1), array.ndim)
    return array.reshape(array.shape[min(lead, max(array.ndim - but, 0)) :])


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
    if not node.op.looks_up_rows:
        return None
    table, ids = node.operands
    array = _array_of(ids)
    if array is None:
        return None
    small = _drop_repeats(array, array.shape)
    if small.shape == array.shape:
        return None
    rows = k.apply(node.op, (table, k.const(small, ids.name, ids.type.dtype)), dict(node.attrs), node.name)
    return k.expand(rows, shape=node.type.shape, name=node.name)


def constant_mask(k: Builder, node: Node) -> Node | None:
    """attention under a mask that hides nothing, or the future, == attention without it, or causal"""
    if not node.op.has_scores or len(node.operands) != 4:
        return None
    q, key, v, mask = node.operands
    array = _array_of(mask)
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
    small = _drop_repeats(array, (*q.type.shape[:-1], 0))  # torch's attention wants all columns, and two dims
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


def usual_scale(k: Builder, node: Node) -> Node | None:
    """attention(scale=c) == attention(scale=1 / sqrt(d)) where c is that, but for rounding of its square roots

    All digits of it, as torch takes it where none is said: programs run in float64, too.
    """
    if not node.op.has_scores:
        return None
    q = node.operands[0]
    usual = 1 / math.sqrt(q.type.shape[-1])
    if node.attr("scale") == usual or not math.isclose(node.attr("scale"), usual, rel_tol=1e-6):
        return None
    return k.apply(node.op, node.operands, {**node.attrs, "scale": usual}, node.name)


STEPS: tuple[Step, ...] = (
    permute_of_singletons,
    param_move_is_view,
    sink_reshape_below_transpose,
    sink_reshape_below_linear,
    sink_reshape_below_vector,
    absorb_expand,
    leaf_second,
    shrink_constant,
    repeated_ids,
    constant_mask,
    usual_scale,
)
