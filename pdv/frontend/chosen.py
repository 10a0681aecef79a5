"""Rows that a mask chooses, of which the number depends on values: kept whole, beside the mask.

``x[mask]`` has no shape that could be planned. What becomes of such rows, one by one, is computed of all rows; those
that are not chosen have a filler there, and take no part in sums and means. Shared by the frontends.

Nor have the places where a mask holds (``torch.where(selected == i)``) such a shape: they are known by the mask, and
what is taken and put there is taken of all rows, and put where it holds, as loops over experts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.dims import Shape
from ir.graph import Node
from ir.types import DType
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported

_FILLER = 0.5  # in the domain of logarithms, roots and their like, of x as of 1 - x
_NUMBERED = tuple(f"torch.ops.aten.{name}" for name in ("topk.default", "sort.default", "sort.stable"))
"""Functions that number elements of a dim, each at most once."""
_COMPARED = ("compare", "compare_number")
_MOVES = ("reshape", "permute", "slice")
_TRUTH = (("!=", 0), (">", 0), ("==", 1))
"""Comparisons of zeros and ones by which these are truth values."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ``rows`` [n, ...] where the ``mask`` [n] holds; the other rows mean nothing.

    Attributes:
        sizes: the dims of the mask before they were laid out as one, if rows are the same along some of them.
        lead: these, but one where rows are the same: ``rows`` has a row for each element of this shape.
        ahead: how many dims of size one stand before that of the rows.
        taken: what the rows are taken of, and its places: the mask's dims along its first ones.
        term: what was added to rows that are ``taken``.
    """

    rows: Node
    mask: Node
    sizes: Shape = ()
    lead: Shape = ()
    ahead: int = 0
    taken: tuple[Node, tuple[int, ...]] | None = None
    term: Chosen | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where a ``mask`` holds: of each such element, in their order, the numbers along some ``dims`` of the mask.

    Attributes:
        columns: the dim along which those of several dims lie, [n, dims] or [dims, n]; None of one dim, [n].
        width: how often the numbers of one dim are repeated, [n, width]; 0 if they are not.
    """

    mask: Node
    dims: tuple[int, ...]
    columns: int | None = None
    width: int = 0


def flatten(k: Lowering, mask: Node) -> Node:
    """The mask as [n]: the same one, however it was laid out."""
    while mask.op.name == "reshape":
        (mask,) = mask.operands
    return k.reshape(mask, (-1,))


def choose(k: Lowering, x: Node, mask: Node) -> Chosen:
    """x[mask], the mask over the first dims of x."""
    if mask.type.dtype is not DType.BOOL or mask.type.shape != x.type.shape[: mask.type.rank] or not mask.type.rank:
        raise Unsupported(f"an index of {x.type} by {mask.type}")
    flat = flatten(k, mask)
    rows = layers.flatten(k, x, 0, mask.type.rank - 1)
    return Chosen(k.apply("where", _beside(k, flat, rows), rows, _filler(k, x.type.dtype)), flat)


def _filler(k: Lowering, dtype: DType) -> Node:
    number = np.asarray(_FILLER, np.float32) if dtype.is_floating else np.asarray(0)
    return k.const(number.astype(np.bool_) if dtype is DType.BOOL else number, dtype)


def take(k: Lowering, x: Node, dims: Sequence[int], mask: Node) -> Chosen:
    """x[i, j, ...] by the places along ``dims`` where the mask holds: rows that are the same along its other dims."""
    sizes = mask.type.shape
    if len(set(dims)) < len(dims) or any(x.type.shape[at] < sizes[dim] for at, dim in enumerate(dims)):
        raise Unsupported(f"rows of {x.type} by places of {mask.type} along dims {list(dims)}")
    part = x
    for at, dim in enumerate(dims):
        part = k.slice(part, at, 0, sizes[dim])
    order = sorted(range(len(dims)), key=dims.__getitem__)
    turned = k.permute(part, (*order, *range(len(dims), x.type.rank)))
    lead = tuple(size if dim in dims else 1 for dim, size in enumerate(sizes))
    rows = k.reshape(turned, (math.prod(lead), *x.type.shape[len(dims) :]))
    held = k.reshape(_holds(k, mask, _others(mask, dims)), (-1,))
    found = k.apply("where", _beside(k, held, rows), rows, _filler(k, x.type.dtype))
    return Chosen(found, flatten(k, mask), sizes, lead, taken=(x, tuple(dims)))


def put(k: Lowering, x: Node, dims: Sequence[int], mask: Node, value: Chosen, *, accumulate: bool) -> Node:
    """x with rows overwritten by the value's, or with these added, at the places along ``dims`` where the mask holds.

    Raises:
        Unsupported: if rows are overwritten at places that may occur twice: of which one remains, torch does not say.
    """
    sizes, others = mask.type.shape, _others(mask, dims)
    rest = x.type.shape[len(dims) :]
    if len(set(dims)) < len(dims) or x.type.shape[: len(dims)] != tuple(sizes[dim] for dim in dims):
        raise Unsupported(f"rows put into {x.type} by places of {mask.type} along dims {list(dims)}")
    if flatten(k, mask) is not value.mask:
        raise Unsupported("rows that one mask chose, put to where another one holds")
    if not accumulate and not _is_once(mask, others):
        raise Unsupported("rows overwritten at places that may occur twice (index_add adds)")
    if not accumulate and value.term is not None and value.taken == (x, tuple(dims)):
        return put(k, x, dims, mask, value.term, accumulate=True)  # x[i] = x[i] + term
    rows = whole(k, value).rows
    rows = k.reshape(rows, (*sizes, *(1,) * (len(rest) + 1 - rows.type.rank), *rows.type.shape[1:]))
    rows = k.expand(k.cast(rows, x.type.dtype), (*sizes, *rest))
    if others and rows.type.dtype is DType.BOOL:
        raise Unsupported("truth values put to where a mask holds")

    def in_place(node: Node, behind: int) -> Node:
        kept = sorted(dims)
        return k.permute(node, (*(kept.index(dim) for dim in dims), *range(len(dims), len(dims) + behind)))

    ones = (1,) * len(rest)
    nothing = masks.fill(k, 0, (1,) * rows.type.rank, rows.type.dtype)
    found = k.apply("where", k.reshape(mask, (*sizes, *ones)), rows, nothing)
    found = in_place(k.reduce("reduce_sum", found, others, False) if others else found, len(rest))
    if accumulate:
        return k.add(x, found)
    held = in_place(_holds(k, mask, others), 0)
    return k.apply("where", k.reshape(held, (*held.type.shape, *ones)), found, x)


def whole(k: Lowering, chosen: Chosen) -> Chosen:
    """The same with a row for each element of the mask."""
    return replace(_spread(k, chosen, chosen.sizes), sizes=(), lead=()) if chosen.lead else chosen


def alike(k: Lowering, values: Sequence[Chosen]) -> list[Chosen]:
    """Rows that the same mask chose, of which all have as many."""
    if len({(value.sizes, value.lead) for value in values}) == 1:
        return list(values)
    if len({value.sizes for value in values}) == 1:
        lead = tuple(max(sizes) for sizes in zip(*(value.lead for value in values), strict=True))
        return [_spread(k, value, lead) for value in values]
    return [whole(k, value) for value in values]


def _spread(k: Lowering, chosen: Chosen, lead: Shape) -> Chosen:
    """With rows repeated for each element of a shape."""
    if chosen.lead == lead:
        return chosen
    rest = chosen.rows.type.shape[1:]
    apart = k.expand(k.reshape(chosen.rows, (*chosen.lead, *rest)), (*lead, *rest))
    return replace(chosen, rows=k.reshape(apart, (math.prod(lead), *rest)), lead=lead)


def _others(mask: Node, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in range(mask.type.rank) if dim not in dims)


def _holds(k: Lowering, mask: Node, dims: Sequence[int]) -> Node:
    """Whether the mask holds anywhere along some dims."""
    return masks.anywhere(k, mask, dims, keepdim=False) if dims else mask


def _is_once(mask: Node, dims: Sequence[int]) -> bool:
    """Whether a mask is known to hold at most once along some dims: which of several that differ are a number."""
    long = [dim for dim in dims if mask.type.shape[dim] > 1]
    return not long or (len(long) == 1 and _at_most_one(mask, long[0]))


def _at_most_one(mask: Node, dim: int) -> bool:
    """Whether along a dim at most one element of a mask, or of its zeros and ones, is true."""
    if mask.op.name == "logical_and":
        return any(one.type == mask.type and _at_most_one(one, dim) for one in mask.operands)
    if mask.op.name in _COMPARED and mask.attr("relation") == "==" and _is_one_of_several(mask, dim):
        return True
    if mask.op.name == "compare_number":
        is_truth = (mask.attr("relation"), mask.attr("number")) in _TRUTH and _is_of_truth(mask.operands[0])
        return is_truth and _at_most_one(mask.operands[0], dim)
    before = _dim_before(mask, dim) if mask.op.name in (*_MOVES, "cast") else None
    return before is not None and _at_most_one(mask.operands[0], before)


def _is_one_of_several(mask: Node, dim: int) -> bool:
    """Whether a comparison is one of elements that differ along a dim with what is the same along it."""
    at = dim - mask.type.rank
    sides = mask.operands
    for one in sides:
        others = [other.type.shape for other in sides if other is not one]
        same = all(len(shape) < -at or shape[at] == 1 for shape in others)
        if same and one.type.rank >= -at and _all_differ(one, at + one.type.rank):
            return True
    return False


def _all_differ(x: Node, dim: int) -> bool:
    """Whether all integers along a dim are known to differ."""
    if x.op.is_foreign and x.attr("function") in _NUMBERED and x.attr("output") == 1:
        loops = str(x.attr("loops")).rpartition("-> ")[2].split()
        return [at for at, loop in enumerate(loops) if loop.startswith("k")] == [dim]
    if x.op.name in _MOVES or (x.op.name == "cast" and x.type.dtype in (DType.I32, DType.I64)):
        before = _dim_before(x, dim)
        return before is not None and _all_differ(x.operands[0], before)
    return False


def _is_of_truth(x: Node) -> bool:
    """Whether numbers are those of truth values, zero and one."""
    while x.op.name in (*_MOVES, "cast") and x.type.dtype is not DType.BOOL:
        x = x.operands[0]
    return x.type.dtype is DType.BOOL


def _dim_before(x: Node, dim: int) -> int | None:
    """Which dim of what is moved one of the result is, whole or cut."""
    before = x.operands[0].type.shape
    if x.op.name == "permute":
        return int(x.attr("perm")[dim])
    if x.op.name == "reshape":
        lead, size = math.prod(x.type.shape[:dim]), x.type.shape[dim]
        found = [at for at, n in enumerate(before) if n == size and math.prod(before[:at]) == lead]
        return found[0] if found else None
    return dim


def in_turn(k: Lowering, source: Node, mask: Node) -> Node:
    """[n, ...] of which the rows that the mask chooses are those of ``source``, as many, one after the other."""
    count, *rest = source.type.shape
    found = k.apply("embedding", k.reshape(source, (count, -1)), masks.turns(k, mask))
    return k.reshape(found, (*mask.type.shape, *rest))


def put_back(k: Lowering, x: Node, mask: Node, chosen: Chosen) -> Node:
    """x with the rows that the mask chooses overwritten by what was made of these, chosen by the same mask."""
    if flatten(k, mask) is not chosen.mask or mask.type.shape != x.type.shape[: mask.type.rank]:
        raise Unsupported("rows that one mask chose, put to where another one holds")
    rows = layers.flatten(k, x, 0, mask.type.rank - 1)
    found = k.apply("where", _beside(k, chosen.mask, rows), k.cast(chosen.rows, x.type.dtype), rows)
    return k.reshape(found, x.type.shape)


def count(k: Lowering, chosen: Chosen, dtype: DType = DType.I64) -> Node:
    """How many rows are chosen."""
    return k.reduce("reduce_sum", k.cast(chosen.mask, dtype), (), False)


def total(k: Lowering, chosen: Chosen, *, everything: bool = True, keepdim: bool = False) -> Node:
    """The sum of the chosen rows; of all elements in them, if ``everything`` is."""
    rows = chosen.rows if chosen.rows.type.dtype is not DType.BOOL else k.cast(chosen.rows, DType.I64)
    nothing = masks.fill(k, 0, (1,) * rows.type.rank, rows.type.dtype)
    kept = k.apply("where", _beside(k, chosen.mask, rows), rows, nothing)
    return k.reduce("reduce_sum", kept, () if everything else (0,), keepdim)


def mean(k: Lowering, chosen: Chosen, *, everything: bool = True, keepdim: bool = False) -> Node:
    """The mean of the chosen rows, or of all elements in them; of none it is not a number."""
    rest = tuple(range(1, chosen.rows.type.rank))
    each = k.reduce("reduce_mean", chosen.rows, rest, True) if everything and rest else chosen.rows
    summed = total(k, Chosen(each, chosen.mask), everything=everything, keepdim=keepdim)
    return k.div(summed, count(k, chosen, summed.type.dtype))


def same_mask(values: Iterable[object]) -> Node:
    """The one mask by which all rows among the values are chosen.

    Raises:
        Unsupported: if there are several.
    """
    found = {value.mask for value in values if isinstance(value, Chosen)}
    if len(found) != 1:
        raise Unsupported("rows that different masks chose, together")
    return found.pop()


def _beside(k: Lowering, mask: Node, rows: Node) -> Node:
    """The mask with dims of size one for those of each row."""
    return k.reshape(mask, (mask.type.shape[0], *(1,) * (rows.type.rank - 1)))
