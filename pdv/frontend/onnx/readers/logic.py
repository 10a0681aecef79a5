"""What ONNX's comparisons become, and what is made of them: extremes, their places, ends of ranges, one-hot rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import kinks, layers, masks
from pdv.frontend.lowering import Lowering, Number, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.origins.signature import call_of

MOST_FACTORS = 64  # of a product that is written out
_HARD = ("hardtanh", "relu6")
_RELATIONS = {"Equal": "==", "Less": "<", "LessOrEqual": "<=", "Greater": ">", "GreaterOrEqual": ">="}


def comparison(relation: str) -> Handler:
    """Truth values."""
    return lambda c: masks.compare(c.k, relation, c[0], c[1])


def extreme(relation: str) -> Handler:
    """The larger, or the smaller, of all operands; of x and a number, gradients are those of a clamp."""

    def handle(c: Call) -> Node:
        told = call_of(c.node)[0]

        def either(x: Node, y: Node) -> Node:
            end = c.k.scalar(y, x)
            if told.startswith("clamp") or (not told and end is not None):
                return chosen(c.k, f"{relation}=", x, y)
            return kinks.extreme(c.k, f"{relation}=", x, y)

        return reduce(either, [c[i] for i in range(len(c.inputs))])

    return handle


def chosen(k: Lowering, relation: str, x: Node, y: Node) -> Node:
    """x where it has the relation to y, else y."""
    return k.apply("where", masks.compare(k, relation, x, y), x, y)


def clip(c: Call) -> Node:
    """Between two ends, each of which may be left out."""
    k, x = c.k, c[0]
    if c.opset < 11:
        return _clamped(c, float(c.attrs["min"]), float(c.attrs["max"]))
    low, high = c.get(1), c.get(2)
    known = [None if end is None else k.scalar(end, x) for end in (low, high)]
    given = all(end is None or number is not None for end, number in zip((low, high), known, strict=True))
    if given and x.type.dtype is not DType.BOOL:
        return x if low is high is None else _clamped(c, *known)
    x = x if low is None else chosen(k, ">=", x, low)
    return x if high is None else chosen(k, "<=", x, high)


def _clamped(c: Call, least: Number | None, most: Number | None) -> Node:
    """Between two numbers; a ReLU6 or hardtanh, which the file says or the numbers do, has no gradient at them."""
    told = call_of(c.node)[0].rstrip("_")
    if least is not None and most is not None and (told in _HARD or (not told and (least, most) == (0, 6))):
        return kinks.hardtanh(c.k, c[0], least, most)
    return masks.clamp(c.k, c[0], least, most)


def not_finite(c: Call) -> Node:
    """Infinities, of one sign or both."""
    k, x, most = c.k, c[0], float(np.finfo(np.float32).max)
    if x.type.dtype not in (DType.F32, DType.F16):
        raise Unsupported(f"infinities of {x.type.dtype.value}")
    above, below = c.attrs["detect_positive"], c.attrs["detect_negative"]
    if above and below:
        return masks.compare_number(k, ">", k.apply("abs", x), most)
    if not above and not below:
        return k.const(np.zeros(x.type.shape, np.bool_))
    return masks.compare_number(k, ">", x, most) if above else masks.compare_number(k, "<", x, -most)


def reduce_extreme(sign: int) -> Handler:
    """The largest (1) or the smallest (-1) along dims."""

    def handle(c: Call) -> Node:
        k, x = c.k, c[0]
        axes = c.reduced()
        keep = bool(c.attrs["keepdims"])
        if axes is None:
            return x
        if x.type.dtype is DType.U8:
            return k.cast(_extreme(k, k.cast(x, DType.I32), sign, axes, c, keep=keep), DType.U8)
        if x.type.rank == 0:
            return x
        if not x.type.num_elements:
            return _of_nothing(c, x, axes, -sign, keep=keep)
        if x.type.dtype is DType.BOOL:
            return masks.truth(k, _extreme(k, k.cast(x, DType.I64), sign, axes, c, keep=keep))
        return _extreme(k, x, sign, axes, c, keep=keep)

    return handle


def _extreme(k: Lowering, x: Node, sign: int, axes: Sequence[int], c: Call, *, keep: bool) -> Node:
    found = kinks.largest(k, x if sign > 0 else k.apply("neg", x), [c.dim(axis) for axis in axes], keep=keep)
    return found if sign > 0 else k.apply("neg", found)


def _of_nothing(c: Call, x: Node, axes: Sequence[int], sign: int, *, keep: bool) -> Node:
    """What an extreme of no elements is: the end of the type's range."""
    dims = {c.dim(axis) for axis in axes} or set(range(x.type.rank))
    shape = [1 if dim in dims else n for dim, n in enumerate(x.type.shape) if keep or dim not in dims]
    if x.type.dtype is DType.BOOL:
        return c.k.const(np.full(shape, sign > 0))
    if x.type.dtype.is_floating:
        return c.k.const(np.full(shape, sign * np.inf, np.float32), x.type.dtype)
    info = np.iinfo(x.type.dtype.torch_name)
    return c.k.const(np.full(shape, info.max if sign > 0 else info.min), x.type.dtype)


def reduce_product(c: Call) -> Node:
    """The product along dims, written out."""
    k, x = c.k, c[0]
    axes = c.reduced()
    if axes is None:
        return x
    for dim in sorted({c.dim(axis) for axis in axes} or range(x.type.rank), reverse=True):
        if not x.type.shape[dim]:
            x = masks.fill(k, 1, [1 if i == dim else n for i, n in enumerate(x.type.shape)], x.type.dtype)
        if x.type.shape[dim] > MOST_FACTORS:
            raise Unsupported(f"a product of {x.type.shape[dim]} factors")
        x = reduce(k.mul, [k.slice(x, dim, i, i + 1) for i in range(x.type.shape[dim])])
        if not c.attrs["keepdims"]:
            x = k.reshape(x, (*x.type.shape[:dim], *x.type.shape[dim + 1 :]))
    return x


def cumulative_product(c: Call) -> Node:
    """Products of all elements before, written out."""
    k, x, dim = c.k, c[0], c.dim(int(c.array(1).reshape(-1)[0]))
    size = x.type.shape[dim]
    if size > MOST_FACTORS:
        raise Unsupported(f"products of {size} factors")
    rows = [k.slice(x, dim, i, i + 1) for i in range(size)]
    rows = rows[::-1] if c.attrs["reverse"] else rows
    found = [rows[0]]
    for row in rows[1:]:
        found.append(k.mul(found[-1], row))
    if c.attrs["exclusive"]:
        found = [masks.fill(k, 1, rows[0].type.shape, x.type.dtype), *found[:-1]]
    return k.concat(found[::-1] if c.attrs["reverse"] else found, dim)


def place_of(sign: int) -> Handler:
    """Where the largest (1) or smallest (-1) element along a dim is: the first, or the last, of equal ones."""

    def handle(c: Call) -> Node:
        dim, keep = c.axis(), bool(c.attrs["keepdims"])
        x = c[0] if c[0].type.dtype.is_floating else c.k.cast(c[0], DType.I64)
        if sign < 0:
            x = c.k.apply("neg", x) if x.type.dtype.is_floating else c.k.shift(c.k.apply("neg", x), -1)  # wraps as ~x
        found = _place(c.k, x, dim, last=bool(c.attrs.get("select_last_index", 0)))
        return found if keep else c.k.reshape(found, (*x.type.shape[:dim], *x.type.shape[dim + 1 :]))

    return handle


def _place(k: Lowering, x: Node, dim: int, *, last: bool) -> Node:
    """[..., v, ...] -> [..., 1, ...]: the number of the largest element."""
    if x.type.rank == 0:
        raise Unsupported(f"the place of the largest of {x.type}")
    size = x.type.shape[dim]
    is_largest = masks.compare(k, "==", x, kinks.largest(k, x, [dim], keep=True))
    numbers = np.arange(size) if last else np.arange(size)[::-1]
    line = k.const(numbers.reshape([size if i == dim else 1 for i in range(x.type.rank)]).astype(np.int64))
    none = k.const(np.asarray(-1, np.int64))
    found = kinks.largest(k, k.apply("where", is_largest, line, none), [dim], keep=True)
    return found if last else k.shift(k.apply("neg", found), size - 1)


def hardmax(c: Call) -> Node:
    """One at the largest element along a dim, else zero; before opset 13 along all dims from that on, as one."""
    k, whole, dim = c.k, c[0], c.axis()
    x = layers.flatten(k, whole, dim, whole.type.rank - 1) if c.opset < 13 else whole
    line = np.arange(x.type.shape[dim]).reshape([-1 if i == dim else 1 for i in range(x.type.rank)])
    found = masks.compare(k, "==", k.const(line.astype(np.int64)), _place(k, x, dim, last=False))
    one, zero = (masks.fill(k, value, (1,) * x.type.rank, x.type.dtype) for value in (1, 0))
    return k.reshape(k.apply("where", found, one, zero), whole.type.shape)


def one_hot(c: Call) -> Node:
    """A new dim, with one value where its number is the id, and another elsewhere."""
    k, ids, depth = c.k, c[0], int(c.array(1).reshape(-1)[0])
    rank = ids.type.rank + 1
    axis = c.attrs["axis"]
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a result of rank {rank}")
    axis %= rank
    ids = k.cast(ids, DType.I64)
    ids = masks.from_front(k, ids, depth)
    wide = k.reshape(ids, (*ids.type.shape[:axis], 1, *ids.type.shape[axis:]))
    line = k.const(np.arange(depth).reshape([-1 if i == axis else 1 for i in range(rank)]))
    off, on = (k.reshape(part, (1,)) for part in k.split(c[2], 0, (1, 1)))
    return k.apply("where", masks.compare(k, "==", wide, line), on, off)


def modulo(c: Call) -> Node:
    """The rest of a division, with the sign of the divisor, or with ``fmod`` of the dividend."""
    k, x, y = c.k, c[0], c[1]
    if not x.type.dtype.is_floating:
        return k.sub(x, k.mul(y, k.apply("quotient", x, y))) if c.attrs["fmod"] else k.apply("remainder", x, y)
    return k.apply("fmod" if c.attrs["fmod"] else "remainder", x, y)


def lp_normalization(c: Call) -> Node:
    """Lines of norm one, by the sum of sizes or of squares; those of zeros stay."""
    k, x, dim = c.k, c[0], c.axis()
    p = c.attrs["p"]
    total = k.reduce("reduce_sum", k.mul(x, x) if p == 2 else k.apply("abs", x), (dim,), True)
    norm = kinks.root(k, total) if p == 2 else total
    is_zero = masks.compare_number(k, "==", norm, 0)
    one = masks.fill(k, 1, norm.type.shape, x.type.dtype)
    return k.div(x, k.apply("where", is_zero, one, norm))


READERS: Mapping[str, Handler] = {
    **{op: comparison(relation) for op, relation in _RELATIONS.items()},
    "And": lambda c: masks.logical(c.k, "and", c[0], c[1]),
    "Or": lambda c: masks.logical(c.k, "or", c[0], c[1]),
    "Xor": lambda c: masks.logical(c.k, "xor", c[0], c[1]),
    "Not": lambda c: masks.negate(c.k, c[0]),
    "Max": extreme(">"),
    "Min": extreme("<"),
    "Clip": clip,
    "IsInf": not_finite,
    "ReduceMax": reduce_extreme(1),
    "ReduceMin": reduce_extreme(-1),
    "ReduceProd": reduce_product,
    "CumProd": cumulative_product,
    "ArgMax": place_of(1),
    "ArgMin": place_of(-1),
    "Hardmax": hardmax,
    "OneHot": one_hot,
    "Mod": modulo,
    "LpNormalization": lp_normalization,
    "Size": lambda c: c.k.const(np.asarray(c[0].type.num_elements, np.int64)),
    "Softplus": lambda c: c.k.apply("softplus", c[0]),
}
