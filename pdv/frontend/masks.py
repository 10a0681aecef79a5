"""What comparisons, masks and lookups become, over `Lowering`: shared by the frontends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers
from pdv.frontend.lowering import Lowering, Number, Unsupported

_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def compare(k: Lowering, relation: str, x: Node, y: Node) -> Node:
    """x relation y, of one element type."""
    if x.type.dtype is DType.BOOL:
        x, y = k.cast(x, DType.I64), k.cast(y, DType.I64)
    if (number := k.scalar(y, x)) is not None:
        return compare_number(k, relation, x, number)
    if (number := k.scalar(x, y)) is not None:
        return compare_number(k, _MIRRORED[relation], y, number)
    return k.apply("compare", x, y, relation=relation)


def compare_number(k: Lowering, relation: str, x: Node, number: Number) -> Node:
    """x relation number."""
    x = k.cast(x, DType.I64) if x.type.dtype is DType.BOOL else x
    plain = float(number) if x.type.dtype.is_floating else number
    return k.apply("compare_number", x, relation=relation, number=plain)


def truth(k: Lowering, x: Node) -> Node:
    """x as truth values: what is no zero is true."""
    return x if x.type.dtype is DType.BOOL else compare_number(k, "!=", x, 0)


def logical(k: Lowering, op: Literal["and", "or", "xor"], x: Node, y: Node) -> Node:
    """Of truth values alone: bits of integers are not known."""
    if {x.type.dtype, y.type.dtype} != {DType.BOOL}:
        raise Unsupported(f"{op} of the bits of {x.type.dtype.value} and {y.type.dtype.value}")
    if op == "xor":
        return compare(k, "!=", x, y)
    return k.apply(f"logical_{op}", x, y)


def negate(k: Lowering, x: Node) -> Node:
    """Not x, of truth values."""
    if x.type.dtype is not DType.BOOL:
        raise Unsupported(f"not of the bits of {x.type.dtype.value}")
    return k.apply("logical_not", x)


def anywhere(k: Lowering, x: Node, dims: Sequence[int] = (), keepdim: bool = False) -> Node:
    """Whether anything along some dims, or at all, is no zero."""
    return compare_number(k, ">", k.reduce("reduce_sum", k.cast(truth(k, x), DType.I64), dims, keepdim), 0)


def clamp(k: Lowering, x: Node, least: Number | None, most: Number | None) -> Node:
    """x, at least ``least`` and at most ``most``."""
    if x.type.dtype.is_floating:
        ends = (-np.inf if least is None else float(least), np.inf if most is None else float(most))
        if ends == (-np.inf, np.inf):
            return x
        return k.apply("clamp", x, minimum=ends[0], maximum=ends[1])
    for relation, end in (("<", least), (">", most)):
        if end is not None:
            x = k.apply("where", compare_number(k, relation, x, end), k.const(np.asarray(int(end)), x.type.dtype), x)
    return x


def pad(k: Lowering, x: Node, widths: Sequence[tuple[int, int]], value: Number) -> Node:
    """x with (before, after) elements of ``value`` at the ends of each of its last dims; what is negative is cut."""
    first = x.type.rank - len(widths)
    for dim, ends in enumerate(widths, first):
        size = x.type.shape[dim]
        x = k.slice(x, dim, max(-ends[0], 0), size - max(-ends[1], 0))
        pieces = [x]
        for at, width in enumerate(ends):
            if width > 0:
                shape = tuple(width if i == dim else n for i, n in enumerate(x.type.shape))
                pieces.insert(len(pieces) if at else 0, fill(k, value, shape, x.type.dtype))
        x = k.concat(pieces, dim)
    return x


def fill(k: Lowering, value: Number, shape: Sequence[int], dtype: DType) -> Node:
    """A constant tensor of one value."""
    number = np.float64 if dtype.is_floating else np.bool_ if dtype is DType.BOOL else np.int64
    return k.expand(k.const(np.asarray(value, number), dtype), shape)


def put_slice(k: Lowering, x: Node, piece: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
    """x with ``piece`` in place of its elements start to stop, each of them or every step-th."""
    dim %= x.type.rank
    size = x.type.shape[dim]
    chosen = range(size)[slice(start, stop, step)]
    if step != 1 and len(chosen) > 1:
        return _put_apart(k, x, k.cast(piece, x.type.dtype), dim, chosen)
    first, behind = (chosen[0], chosen[-1] + 1) if chosen else (0, 0)
    ends = [k.slice(x, dim, 0, first)] if first else []
    rest = [k.slice(x, dim, behind, size)] if behind < size else []
    return k.concat(k.alike(*ends, k.cast(piece, x.type.dtype), *rest), dim)


def _put_apart(k: Lowering, x: Node, piece: Node, dim: int, chosen: range) -> Node:
    """So of every step-th element: they are a column of x where its dim is taken apart in rows of a step."""
    size, step, shape = x.type.shape[dim], chosen.step, x.type.shape
    begins = chosen.start - chosen.start % step
    if begins + len(chosen) * step > size:  # the last row is not a whole one
        last = len(chosen) - 1
        x = put_slice(k, x, k.slice(piece, dim, last, last + 1), dim, chosen[-1], chosen[-1] + 1)
        return put_slice(k, x, k.slice(piece, dim, 0, last), dim, chosen.start, chosen[-1], step)
    ends = begins + len(chosen) * step
    rows = k.reshape(k.slice(x, dim, begins, ends), (*shape[:dim], len(chosen), step, *shape[dim + 1 :]))
    column = k.reshape(piece, (*shape[:dim], len(chosen), 1, *shape[dim + 1 :]))
    whole = put_slice(k, rows, column, dim + 1, chosen.start % step, chosen.start % step + 1)
    whole = k.reshape(whole, (*shape[:dim], ends - begins, *shape[dim + 1 :]))
    return put_slice(k, x, whole, dim, begins, ends)


def gather(k: Lowering, x: Node, dim: int, ids: Node) -> Node:
    """x[ids[i][j], j] along a dim; the other dims of x are as long as those of the ids, or cut to them."""
    dim %= x.type.rank
    for other, size in enumerate(ids.type.shape):
        x = x if other == dim else k.slice(x, other, 0, size)
    known, size = k.value(ids), x.type.shape[dim]
    if known is not None and (known.min() < 0 or known.max() >= size):
        raise ValueError(f"index {known.min()} to {known.max()} of a dim of size {size}")
    if ids.type.shape[dim] == 1 and x.type.dtype.is_floating:  # rows of logits, an id each
        moved = k.transpose(x, dim, -1)
        each = k.transpose(ids, dim, -1)
        found = k.apply("pick", moved, k.reshape(each, each.type.shape[:-1]))
        return k.transpose(k.reshape(found, (*found.type.shape, 1)), dim, -1)
    return k.apply("gather", x, k.cast(ids, DType.I64), dim=dim)


def index(k: Lowering, x: Node, ids: Sequence[Node | None]) -> Node:
    """x[i, j, ...] by ids that are broadcast to each other; ``x[i, :, j]`` has their dims first, as torch has them."""
    dims = [dim for dim, node in enumerate(ids) if node is not None]
    nodes = [node for node in ids if node is not None]
    if any(node.type.dtype is DType.BOOL for node in nodes):
        raise Unsupported("an index by a mask, of which the number of elements depends on values")
    if not are_neighbours(dims):
        return index(k, k.permute(x, order_from_front(dims, x.type.rank)), nodes)
    shape = np.broadcast_shapes(*(node.type.shape for node in nodes))
    if dims == [0, 1] and (found := _in_rows(k, x, nodes)) is not None:
        return found
    apart = _each_by_itself(k, x, dims[0], nodes, shape)
    if apart is not None:
        return apart
    sizes = x.type.shape[dims[0] : dims[-1] + 1]
    flat: Node | None = None
    for node, size in zip(nodes, sizes, strict=True):
        each = from_front(k, k.cast(node, DType.I64), size)
        flat = each if flat is None else k.add(k.scale(flat, size), each)
    assert flat is not None
    known = k.value(flat)
    wide = k.expand(flat, shape) if known is None else k.const(np.broadcast_to(known, shape))
    found = layers.index_select(k, layers.flatten(k, x, dims[0], dims[-1]), dims[0], k.reshape(wide, (-1,)))
    return k.reshape(found, (*x.type.shape[: dims[0]], *shape, *x.type.shape[dims[-1] + 1 :]))


def are_neighbours(dims: Sequence[int]) -> bool:
    """Whether dims follow one another."""
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))


def order_from_front(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """The order of all dims in which these come first."""
    return (*dims, *(dim for dim in range(rank) if dim not in dims))


def scatter(k: Lowering, x: Node, mask: Node, source: Node) -> Node:
    """x, and where the mask holds the source's elements in turn: whole rows of them, where the mask is of rows."""
    width = x.type.shape[-1] if x.type.rank else 1
    rows = mask.operands[0] if mask.op.name == "expand" else mask
    is_of_rows = bool(rows.type.rank) and rows.type.shape[-1] == 1 < width and source.type.shape[-1:] == (width,)
    sizes = (*x.type.shape[:-1], 1) if is_of_rows else x.type.shape
    chosen = k.expand(rows if is_of_rows else mask, sizes)
    turn = turns(k, k.reshape(chosen, (math.prod(sizes),)))
    table = k.reshape(source, (-1, width if is_of_rows else 1))
    found = k.apply("embedding", table, k.reshape(turn, sizes[:-1] if is_of_rows else sizes))
    found = k.reshape(found, x.type.shape)
    return k.apply("where", k.expand(mask, x.type.shape), found, x)


def turns(k: Lowering, mask: Node) -> Node:
    """[n] of each element at which the mask [n] holds, how many before it do; of the first ones, zero."""
    return clamp(k, k.shift(k.apply("cumsum", k.cast(mask, DType.I64), dim=0), -1), 0, None)


def from_front(k: Lowering, ids: Node, size: int) -> Node:
    """Numbers of elements, negative ones counted from the end."""
    known = k.value(ids)
    if known is not None:
        return k.const(known % size)
    return k.apply("where", compare_number(k, "<", ids, 0), k.shift(ids, size), ids)


def _in_rows(k: Lowering, x: Node, ids: Sequence[Node]) -> Node | None:
    """``x[arange(rows), n]`` and ``x[n, arange(rows)]``, by a place or several in each row; None if it is none such."""
    for turned in (False, True):
        table = k.permute(x, (1, 0, *range(2, x.type.rank))) if turned else x
        place = place_in_rows(k, table, ids[::-1] if turned else ids)
        if place is None:
            continue
        (count, *several), rest = place.type.shape, x.type.shape[2:]
        each = k.reshape(place, (count, math.prod(several), *(1 for _ in rest)))
        found = gather(k, table, 1, k.expand(each, (count, math.prod(several), *rest)))
        return k.reshape(found, (count, *several, *rest))
    return None


def place_in_rows(k: Lowering, x: Node, ids: Sequence[Node]) -> Node | None:
    """n of ``x[arange(rows), n]`` and ``x[arange(rows)[:, None], n]``: in each row places, whose numbers depend on
    values, [rows, ...]; None if it is none such.

    Said by rows and numbers of elements in one, as others are, it would hold for so many rows alone.
    """
    rows, at = ids
    count, size = x.type.shape[:2]
    known, shape = k.value(rows), at.type.shape
    if known is None or k.value(at) is not None or at.type.dtype is DType.BOOL:
        return None
    if shape[:1] != (count,) or np.broadcast_shapes(known.shape, shape) != shape:
        return None
    numbers = np.arange(count).reshape(-1, *(1 for _ in shape[1:]))
    if (np.broadcast_to(known, shape) != numbers).any():
        return None
    return from_front(k, k.cast(at, DType.I64), size)


def _each_by_itself(k: Lowering, x: Node, first: int, nodes: Sequence[Node], shape: Sequence[int]) -> Node | None:
    """x[i[:, None], j[None, :]] of known lists over dims of their own: one selection after the other, each of a dim."""
    lists: list[tuple[int, np.ndarray]] = []
    for node in nodes:
        array = k.value(node)
        lead = len(shape) - node.type.rank
        wide = [lead + dim for dim, size in enumerate(node.type.shape) if size != 1]
        if array is None or len(wide) != 1 or wide[0] in [at for at, _ in lists]:
            return None
        lists.append((wide[0], array.reshape(-1)))
    order = [at for at, _ in lists]
    if order != sorted(order):
        return None
    for number, (_, chosen) in enumerate(lists):
        x = layers.index_select(k, x, first + number, k.const(chosen.astype(np.int64)))
    joined = [1] * len(shape)
    for at, chosen in lists:
        joined[at] = len(chosen)
    return k.expand(
        k.reshape(x, (*x.type.shape[:first], *joined, *x.type.shape[first + len(nodes) :])),
        (*x.type.shape[:first], *shape, *x.type.shape[first + len(nodes) :]),
    )


def dropout(k: Lowering, x: Node, p: float) -> Node:
    """x with a share ``p`` of its elements zero, and the others scaled."""
    if not 0 <= p < 1:
        raise Unsupported(f"dropout with p = {p}")
    if p == 0:
        return x
    if k.drops_as_noise:
        drawn = noise(k, "uniform", x.type.shape, x.type.dtype)
        return k.mul(x, k.scale(k.cast(compare_number(k, "<", drawn, 1 - p), x.type.dtype), 1 / (1 - p)))
    if x in k.dropped:  # by another mask: of another value, therefore
        return k.scale(dropout(k, k.scale(x, 2.0), p), 0.5)
    k.dropped.add(x)
    return k.apply("dropout", x, p=float(p))


def noise(k: Lowering, kind: str, shape: Sequence[int], dtype: DType, low: int = 0, high: int = 1) -> Node:
    """Random numbers (``ir.ops.draws``) that nothing else draws."""
    k.noises += 1
    ends = {"low": low, "high": high} if kind == "integers" else {}
    like = fill(k, 1, shape, dtype)
    return k.apply("noise", like, kind=kind, draw=k.noises, trains=k.trains, **ends)


def attention_with_dropout(
    k: Lowering, q: Node, key: Node, v: Node, mask: Node | None, p: float, *, causal: bool, scale: float | None
) -> Node:
    """As ``layers.attention``, with dropout of what the softmax gives: in products, which keep the scores."""
    heads, dtype = q.type.shape[-3], q.type.dtype
    key, v = layers.repeat_heads(k, key, heads), layers.repeat_heads(k, v, heads)
    factor = 1 / math.sqrt(q.type.shape[-1]) if scale is None else scale
    scores = k.scale(layers.matmul(k, q, k.transpose(key, -2, -1)), factor)
    if causal:
        mask = k.const(np.tri(*scores.type.shape[-2:], dtype=np.bool_))
    if mask is not None and mask.type.dtype is DType.BOOL:
        shares = masked_softmax(k, scores, mask)
    elif mask is None:
        shares = layers.softmax(k, scores, -1)
    else:
        hidden, scores = k.value(mask), k.add(scores, k.cast(mask, dtype))
        sees = hidden is not None and not np.isneginf(hidden).all(-1).any()
        seen = compare_number(k, ">", mask, float("-inf"))
        shares = layers.softmax(k, scores, -1) if sees else masked_softmax(k, scores, seen)
    return layers.matmul(k, dropout(k, shares, p), v)


def masked_softmax(k: Lowering, scores: Node, mask: Node) -> Node:
    """The softmax of each row where the mask holds, and zero elsewhere: rows of which all is hidden see nothing."""
    dtype = scores.type.dtype
    lowest = k.const(np.asarray(np.finfo(np.float32).min / 2, np.float32), dtype)
    shares = layers.softmax(k, k.apply("where", mask, scores, lowest), -1)
    return k.apply("where", mask, shares, k.const(np.asarray(0, np.float32), dtype))


def hidden_attention(k: Lowering, shares: Node, v: Node) -> Node | None:
    """Attention under a mask of truth values, where ``shares`` are such of products (``masked_softmax``); else None."""
    if shares.op.name != "where" or shares.operands[1].op.name != "softmax" or v.type.rank < 3:
        return None
    mask, softmax, _ = shares.operands
    hidden = softmax.operands[0]
    if hidden.op.name != "where" or hidden.operands[0] is not mask or not layers.is_constant(k, shares.operands[2], 0):
        return None
    scores, factor = _unscaled(hidden.operands[1])
    if scores.op.name != "matmul" or not (scores.type.rank == v.type.rank == mask.type.rank):
        return None
    (q, by_q), (key, by_key) = map(_unscaled, scores.operands)
    return layers.attention(k, q, k.transpose(key, -2, -1), v, mask, scale=factor * by_q * by_key)


def _unscaled(x: Node) -> tuple[Node, float]:
    """What a node is a multiple of, and by what."""
    factor = 1.0
    while x.op.name == "scale":
        factor *= float(x.attr("factor"))
        x = x.operands[0]
    return x, factor


def cross_entropy(
    k: Lowering,
    logits: Node,
    labels: Node,
    *,
    ignored: int,
    reduction: Literal["none", "mean", "sum"],
    smoothing: float = 0.0,
) -> Node:
    """logits: [n, c] or [n, c, ...], labels: [n] or [n, ...]; the mean is over labels that are not ``ignored``."""
    if logits.type.rank > 2:
        logits = k.permute(logits, (0, *range(2, logits.type.rank), 1))
    scores = layers.softmax(k, logits, -1, "log_softmax")
    counted = compare_number(k, "!=", labels, ignored)
    chosen = labels
    if ignored >= 0:
        chosen = k.apply("where", counted, labels, k.const(np.asarray(-1), labels.type.dtype))
    losses = k.scale(k.apply("pick", scores, chosen), smoothing - 1)
    if smoothing:
        nothing = fill(k, 0, (1,) * labels.type.rank, scores.type.dtype)
        kept = k.apply("where", counted, k.reduce("reduce_mean", scores, (-1,), False), nothing)
        losses = k.add(losses, k.scale(kept, -smoothing))
    if reduction == "none":
        return losses
    total = k.reduce("reduce_sum", losses, (), False)
    if reduction == "sum":
        return total
    return k.div(total, k.reduce("reduce_sum", k.cast(counted, scores.type.dtype), (), False))
