"""Gathers by integer ids: rows of a table, or elements of any dim."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from ir.dims import Shape
from ir.emission.code import Code, call
from ir.emission.writing import Writing, block_count, block_index
from ir.errors import ShapeError
from ir.graph import Node
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties, where
from ir.tape import Call, Tape
from ir.types import DType


def _ids_are_integers(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """The table's type.

    Raises:
        ShapeError: if the ids are no integers.
    """
    table, ids, *_ = dtypes
    if ids.is_floating or ids is DType.BOOL:
        raise ShapeError(f"ids are {ids.value}", "Integers", "Cast them, or swap the operands")
    return table


# Elements chosen by ids: linear in what they are chosen from, and no arithmetic.
_lookup = partial(
    Operator,
    kind="index",
    linear=(frozenset({0}),),
    flops_per_point=0,
    backward_factor=1,
    saved=(1,),
    differentiable=(0,),
    result_dtype=_ids_are_integers,
)


def _write_embedding(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = writing.cutting(node, "v")
    table, ids = x
    padding = [f"padding_idx={node.attr('padding_idx')}"] if node.op.attrs else []
    if axes:
        return call("embedding_block", ids, table, block_index(axes), block_count(axes), *padding)
    return call("F.embedding", ids, table, *padding)


embedding = _lookup(
    "embedding",
    "v d, ... -> ... d",
    offset_loop="v",  # a shard of the vocabulary answers zero for ids outside it: a term of the sum
    evaluate=lambda t, x, c: t.take(x[0], x[1], c.offset),
    emit=_write_embedding,
    constant_name="{0}_ids",
    fold=lambda table, ids: table[ids],
)


def _padded_embedding(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """Rows of a table, of which one takes no gradient."""
    table, ids = operands
    rows = t.take(table, ids, call.offset)
    return t.where((np.asarray(ids) == call.attrs["padding_idx"])[..., None], t.detach(rows), rows)


def _padding_at(node: Node, operands: Sequence[Node], shape: Shape, are_open: bool) -> dict[str, Hashable]:
    """In a shorter table another row is that of padding, so that ids meet it there, too."""
    return {"padding_idx": min(cast(int, node.attr("padding_idx")), operands[0].type.shape[0] - 1)}


padded_embedding = _lookup(
    "padded_embedding",  # of which the row of padding is read and not trained, as torch's `padding_idx` has it
    "v d, ... -> ... d",
    attrs=("padding_idx",),
    attrs_at=_padding_at,
    offset_loop="v",
    evaluate=_padded_embedding,
    emit=_write_embedding,
    measured_as="embedding",
    constant_name="{0}_ids",
    fold=lambda table, ids, padding_idx: table[ids],
)


def _select_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """x: [..., v, ...], ids: [p] -> [..., p, ...]; v is whole, for any of it may be asked for."""
    dim = cast(int, attrs["dim"])
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = ["v*" if i == dim else name for i, name in enumerate(names)]
    right = ["p" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(left)}, p -> {' '.join(right)}", {}


def _select(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """The chosen dim to the front, the others flat: a table, whose rows are taken."""
    x, ids = operands
    dim, rank = call.attrs["dim"], len(call.loops.operands[0])
    front = (dim, *(i for i in range(rank) if i != dim))
    back = tuple(front.index(i) for i in range(rank))
    moved = t.transpose(x, front)
    sizes = tuple(moved.shape[1:])
    table = t.reshape(moved, (sizes[0], math.prod(sizes[1:])))
    rows = t.take(table, ids, np.zeros(1, dtype=np.int64))
    return t.transpose(t.reshape(rows, (rows.shape[1], *sizes[1:])), back)


def _keep_chosen(node: Node, loops: Loops, ties: Ties) -> None:
    """Known ids name elements: all of them stay, and what they choose from; those that may be any ids do not."""
    if ties.is_known(node.operands[1]):
        ties.keep((*loops["v"], *loops["p"]), f"{where(node)} takes known elements of it")


index_select = _lookup(
    "index_select",
    _select_loops,
    emit="torch.index_select({0}, {dim}, {1})",
    constant_name="chosen",
    attrs=("dim",),
    ties=_keep_chosen,
    evaluate=_select,
    fold=lambda x, ids, dim: x.take(ids, dim),
)


def _pick(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    """Each row's element at its id, of the part of the row that a rank has; zero where the id is elsewhere."""
    x, ids = operands
    places = np.asarray(ids) - np.asarray(call.offset).reshape(-1, *(1,) * (ids.ndim - 1))
    return t.reshape(_elements(t, x, places[..., None]), tuple(x.shape[1:-1]))


def _elements(t: Tape, x: Any, places: Any) -> Any:
    """x: [*lead, v], places: [*lead, p] -> [*lead, p]; zero where a place is outside."""
    lead, size, each = tuple(x.shape[1:-1]), x.shape[-1], places.shape[-1]
    rows = np.arange(math.prod(lead)).reshape(*lead, 1)
    flat = np.where((places >= 0) & (places < size), rows * size + places, -1)
    table = t.reshape(x, (math.prod(lead) * size, 1))
    found = t.take(table, flat.reshape(flat.shape[0], -1), np.zeros(1, dtype=np.int64))
    return t.reshape(found, (*lead, each))


def _write_pick(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = writing.cutting(node, "v")
    return call("pick", *x, *([block_index(axes)] if axes else []))


pick = _lookup(
    "pick",  # of each row the element at its id, and zero where there is none: of log softmaxes, those of labels
    "... v, ... -> ...",
    offset_loop="v",
    evaluate=_pick,
    emit=_write_pick,
    measured_as="embedding",
)


def _gather_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """x: [..., v, ...], ids: [..., p, ...] -> [..., p, ...]; v is whole."""
    dim = cast(int, attrs["dim"])
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = ["v*" if i == dim else name for i, name in enumerate(names)]
    right = ["p" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}", {}


def _gather(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, ids = operands
    dim, rank = call.attrs["dim"], len(call.loops.operands[0])
    last = (*(i for i in range(rank) if i != dim), dim)
    back = tuple(last.index(i) for i in range(rank))
    found = _elements(t, t.transpose(x, last), np.asarray(t.transpose(ids, last)))
    return t.transpose(found, back)


gather = _lookup(
    "gather",
    _gather_loops,
    attrs=("dim",),
    dims_attr="dim",
    ties=_keep_chosen,
    evaluate=_gather,
    emit="torch.gather({0}, {dim}, {1})",
    measured_as="index_select",
)


def _bags(starts: Any, count: int) -> Any:
    """How many bags begin at each of so many places or before it, less one."""
    return np.searchsorted(np.sort(starts), np.arange(count), "right") - 1


def _bag_numbers(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    """On each rank; integers in every field."""
    ids, offsets = operands
    return np.stack([_bags(starts, ids.shape[1]) for starts in offsets])


bag_numbers = _lookup(
    "bag_numbers",  # of ids in a line, in which bag each is; offsets are where bags begin
    "v*, b* -> v",
    linear=(),
    saved=(),
    differentiable=(),
    result_dtype=lambda dtypes, attrs: _ids_are_integers((DType.I64, dtypes[1]), attrs),
    evaluate=_bag_numbers,
    emit="bag_numbers({0}, {1})",
    fold=lambda ids, offsets: _bags(offsets, ids.size),
)


def _segment_sum(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    """A product with truth values: whether a row is of a segment of this rank's block."""
    values, numbers, _ = operands
    segments = np.asarray(call.offset)[:, None, None] + np.arange(call.loops.extents["b"])
    return t.einsum("nd,nb->bd", values, (np.asarray(numbers)[..., None] == segments).astype(np.int64))


def _write_segment_sum(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = writing.cutting(node, "b")
    return call("segment_sum", *x, *([block_index(axes)] if axes else []))


segment_sum = Operator(
    "segment_sum",  # of rows, by the number of their segment; as many segments as the last operand has elements
    "n* d, n*, b -> b d",  # rows stay whole: how many they are differs from step to step
    "row",
    linear=(frozenset({0}),),
    flops=lambda loops: float(loops.extents["n"] * loops.extents["d"]),
    backward_factor=1,
    saved=(1,),
    differentiable=(0,),
    result_dtype=_ids_are_integers,
    offset_loop="b",  # a shard of the segments leaves out rows of others
    evaluate=_segment_sum,
    emit=_write_segment_sum,
    measured_as="embedding",
)

OPS = (embedding, padded_embedding, index_select, pick, gather, bag_numbers, segment_sum)
