"""Functions of elements that have no derivative at some points, or overflow beside them: gradients there are torch's.

Shared by the frontends; over `Lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes

from ir.graph import Node
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering


def extreme(k: Lowering, relation: str, x: Node, y: Node) -> Node:
    """x where it has the relation to y, else y; of equal elements each takes half of the gradient."""
    x, y = k.alike(x, y)
    chosen = k.apply("where", masks.compare(k, relation, x, y), x, y)
    if not (x.needs_grad or y.needs_grad):
        return chosen
    half = k.add(k.scale(x, 0.5), k.scale(y, 0.5))
    return k.apply("where", masks.compare(k, "==", x, y), half, chosen)


def hardtanh(k: Lowering, x: Node, least: float, most: float) -> Node:
    """x, at least ``least`` and at most ``most``; no gradient where it is either."""
    if not x.type.dtype.is_floating:
        return masks.clamp(k, x, least, most)
    return k.apply("hardtanh", x, minimum=float(least), maximum=float(most))


def hard_sigmoid(k: Lowering, x: Node) -> Node:
    """A line from 0 at -3 to 1 at 3; no gradient at either."""
    return k.scale(hardtanh(k, k.shift(x, 3.0), 0.0, 6.0), 1 / 6)


def hard_swish(k: Lowering, x: Node) -> Node:
    """x times its hard sigmoid."""
    return k.mul(x, hard_sigmoid(k, x))


def elu(k: Lowering, x: Node, alpha: float = 1.0, scale: float = 1.0, within: float = 1.0) -> Node:
    """scale * x, or below zero scale * alpha * (exp(within * x) - 1), which large x never reach."""
    below = k.apply("expm1", k.scale(k.apply("clamp", x, minimum=-math.inf, maximum=0.0), within))
    return k.scale(k.add(k.apply("relu", x), k.scale(below, alpha)), scale)


def celu(k: Lowering, x: Node, alpha: float = 1.0) -> Node:
    """ELU whose derivative is 1 on both sides of zero."""
    return elu(k, x, alpha, 1.0, 1 / alpha)


def root(k: Lowering, x: Node) -> Node:
    """The square root of what is not negative; no gradient at zero, where a length or a deviation has none."""
    none = masks.compare_number(k, "==", x, 0.0)
    one, zero = (masks.fill(k, value, (), x.type.dtype) for value in (1.0, 0.0))
    return k.apply("where", none, zero, k.apply("sqrt", k.apply("where", none, one, x)))


def largest(k: Lowering, x: Node, dims: Sequence[int] = (), *, keep: bool = False) -> Node:
    """The largest element along dims, or of all; of equal ones each takes the same share of the gradient."""
    over = sorted({dim % x.type.rank for dim in dims} or range(x.type.rank))
    kept = [1 if i in over else n for i, n in enumerate(x.type.shape)]
    if len(over) > 1:
        rest = [i for i in range(x.type.rank) if i not in over]
        x = k.reshape(k.permute(x, (*rest, *over)), (*(x.type.shape[i] for i in rest), -1))
        found = k.apply("reduce_max", x, dim=x.type.rank - 1, keepdim=False)
        return k.reshape(found, kept) if keep else found
    return k.apply("reduce_max", x, dim=over[0], keepdim=keep) if over else x


def log_sum_exp(k: Lowering, x: Node, dims: Sequence[int], keep: bool = False) -> Node:
    """log(sum(exp(x))) along dims, or of all, of sizes that no exponential has."""
    most = float(ml_dtypes.finfo(x.type.dtype.torch_name).max)  # type: ignore[no-untyped-call]  # has no types
    top = k.apply("clamp", largest(k, x, dims, keep=True), minimum=-most, maximum=most)  # rows of -inf
    top = k.apply("detach", top) if top.needs_grad else top
    total = k.reduce("reduce_sum", k.apply("exp", k.sub(x, top)), dims, True)
    found = k.add(k.apply("log", total), top)
    return found if keep else k.reshape(found, k.reduce("reduce_sum", x, dims, False).type.shape)


def linear_beyond(k: Lowering, gap: Node, bound: float) -> Node:
    """gap^2 / 2 up to a bound, and a line of that slope beyond: Huber's loss, which squares nothing large."""
    size = k.apply("abs", gap)
    near = k.apply("clamp", size, minimum=-math.inf, maximum=bound)
    return k.add(k.scale(k.mul(near, near), 0.5), k.scale(k.sub(size, near), bound))
