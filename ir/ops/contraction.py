"""Sums of products. Forward, backward, cost and cuts all follow from the loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ir.dims import Loops, Shape
from ir.emission.code import Code, call, keyword_argument
from ir.emission.writing import Writing, block_index
from ir.errors import ShapeError
from ir.evaluation.einsum import Data
from ir.graph import Node
from ir.memory.layout import NOTHING, Layout, Memory, row_major
from ir.memory.local import Local
from ir.operator import Attrs, Operator, one_type
from ir.ops.normalization import SOFTMAX
from ir.scaling.ties import doubt_terms
from ir.tape import Call, Tape
from ir.types import DType

_BILINEAR = (frozenset({0}), frozenset({1}))

linear = Operator(
    "linear",
    "... k, n k -> ... n",
    "contraction",
    bias_rank=1,
    emit="F.linear({0}, {1})",
    flops_per_point=2,  # one multiply, one add
    linear=_BILINEAR,
    saved=(0, 1),
    ties=doubt_terms,
)


def _matmul_memory(local: Local) -> Memory:
    """Of a matrix times a batch of matrices at::matmul makes one product of matrices, transposed."""
    first, second = local.operands
    folds = len(first.shape) == 2 and len(second.shape) > 2 and local.node.operands[0].needs_grad
    return _FOLDED if folds else NOTHING


def _transposed(local: Local) -> Layout:
    *batch, rows, columns = local.result.shape
    return Layout(local.result.shape, (*row_major((*batch, columns, rows))[:-2], 1, rows))


# the batch, transposed into one matrix, is a copy where it lies row-major
_FOLDED = Memory(keeps=lambda local: local.operand_bytes(1), saved=(0,), layout=_transposed)

matmul = Operator(
    "matmul",
    "... m k, ... k n -> ... m n",
    "contraction",
    emit="torch.matmul({0}, {1})",
    flops_per_point=2,
    linear=_BILINEAR,
    saved=(0, 1),
    measured_as="bmm",
    memory=_matmul_memory,
    ties=doubt_terms,
)


def _shares(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    """The softmax of each row, and zero where all of a row is -inf: what sees nothing is zero, as in torch."""
    highest = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(highest), 0.0, highest))
    total = e.sum(axis=-1, keepdims=True)
    y = e / np.where(total == 0, 1.0, total)
    return y, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True))


_SHARES = replace(SOFTMAX, real=_shares)
"""By its name the softmax, which laws take it for."""


def _attention(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """softmax(scale · q kᵀ + mask) v, causal from this rank's first query row on."""
    q, k, v, *mask = operands
    scores = t.scale(t.einsum("...se,...te->...st", q, k), float(call.attrs["scale"]))
    rank = len(call.loops.operands[0])
    rows, columns = call.loops.extents["s"], call.loops.extents["t"]
    if call.attrs["causal"]:
        keep = causal_mask(call.offset, rows, columns, rank)
        scores = t.where(keep, scores, t.constant(float("-inf"), (1,) * rank))
    if not mask or mask[0].dtype != bool:
        scores = t.add(scores, mask[0]) if mask else scores
        return t.einsum("...st,...te->...se", t.row(_SHARES, scores), v)
    seeing = mask[0].any(axis=-1, keepdims=True)  # a row that sees nothing is zero, as in torch
    scores = t.where(mask[0] | ~seeing, scores, t.constant(float("-inf"), (1,) * rank))
    weights = t.row(SOFTMAX, scores)
    weights = weights if seeing.all() else t.where(seeing, weights, t.constant(0.0, (1,) * rank))
    return t.einsum("...st,...te->...se", weights, v)


def causal_mask(offset: Any, rows: int, columns: int, rank: int) -> Any:
    """[R, 1.., rows, columns] bool: query row i of a rank, at global row offset + i, sees columns up to it."""
    row = offset.reshape(-1, 1, 1) + np.arange(rows).reshape(1, -1, 1)
    keep = np.arange(columns).reshape(1, 1, -1) <= row
    return keep.reshape(keep.shape[0], *(1,) * (rank - 2), rows, columns)


def _attention_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """t is taken whole, for the softmax runs over it; so are e (a score needs all of it) and f."""
    mask = ""
    if len(shapes) == 4:
        rows = "1" if shapes[3][-2] == 1 < shapes[0][-2] else "s"
        mask = f", ... {rows} t*"
    return f"... s e*, ... t* e*, ... t* f*{mask} -> ... s f*", {}


def _attention_flops(loops: Loops) -> float:
    """q kᵀ and p v, two flops per multiply-add; half of it is masked where causal, but library kernels vary."""
    extents = loops.extents
    pairs = loops.points / (extents["e"] * extents["f"])
    return 2.0 * pairs * (extents["e"] + extents["f"])


def _attention_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """That of queries, keys and values; a mask is of theirs, or of truth values.

    Raises:
        ShapeError: if they differ.
    """
    one_type("attention", [dtype for i, dtype in enumerate(dtypes) if i < 3 or dtype is not DType.BOOL])
    return dtypes[0]


def _heads_inside(local: Local) -> Layout:
    """[b, h, s, f], laid out as [b, s, h, f]."""
    if len(local.result.shape) != 4:
        return local.result
    _, heads, rows, features = local.result.shape
    return Layout(local.result.shape, (heads * rows * features, features, heads * features, 1))


def _write_attention(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    """PyTorch's fused attention; with a cut causal mask, the helper that shifts it."""
    width = node.operands[0].type.shape[-1]
    scale = float(node.attr("scale"))
    default = math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-12)  # the text is held to the graph, in float64
    options = [] if default else [f"scale={scale!r}"]
    causal, mask = node.attr("causal"), x[3] if len(x) == 4 else None
    axes = writing.cutting(node, "s")
    if causal and (axes or mask is not None):
        given = [keyword_argument("mask", mask)] if mask is not None else []
        return call("causal_attention", *x[:3], block_index(axes), *given, *options)
    given = [keyword_argument("attn_mask", mask)] if mask is not None else []
    flags = ["is_causal=True"] if causal else []
    return call("F.scaled_dot_product_attention", *x[:3], *given, *flags, *options)


attention = Operator(
    "attention",
    _attention_loops,
    "row",
    attrs=("causal", "scale"),
    defaults={"causal": False},
    linear=(frozenset({2}),),
    offset_loop="s",
    flops=_attention_flops,
    backward_factor=2.5,  # five matmuls against two: FlashAttention-2 (Dao 2023), section 3.1
    saved=(0, 1, 2, "out"),
    differentiable=(0, 1, 2),
    result_dtype=_attention_dtype,
    memory=Memory(keeps=lambda local: local.row_bytes, backward=lambda local: local.row_bytes, layout=_heads_inside),
    evaluate=_attention,
    emit=_write_attention,
    constant_name="mask",
    has_scores=True,
    is_heavy=True,
    measured_as="attn",
)


def _grouped(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """A product with each matrix, of the rows that are its own."""
    x, matrices, ends = operands
    rows = np.asarray(call.offset)[:, None] + np.arange(call.loops.extents["s"])
    numbers = (np.asarray(ends)[:, None, :] <= rows[..., None]).sum(-1)  # how many groups end before a row
    return _routed(t, (x, matrices, numbers), call)


def _routed(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    """A product with each matrix, of the rows that have its number."""
    x, matrices, numbers = operands
    _, count, width, columns = matrices.shape
    found = None
    for group in range(count):
        own = t.einsum("sk,s->sk", x, (np.asarray(numbers) == group).astype(np.int64))
        y = t.einsum("sk,kn->sn", own, t.reshape(t.slice(matrices, 0, group, group + 1), (width, columns)))
        found = y if found is None else t.add(found, y)
    return found


def _grouped_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    """That of rows and matrices, which are of one.

    Raises:
        ShapeError: if they differ, or what says which rows are whose is no integers.
    """
    if dtypes[2].is_floating or dtypes[2] is DType.BOOL:
        raise ShapeError(f"the numbers of groups are {dtypes[2].value}", "Integers", "Cast them, or swap the operands")
    one_type("a product of rows with a matrix each", dtypes[:2])
    return dtypes[0]


def _write_grouped(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = writing.cutting(node, "s")
    return call("grouped_linear", *x, *([block_index(axes)] if axes else []))


grouped_linear = Operator(
    "grouped_linear",  # rows in groups, one behind the other, each group times a matrix of its own: experts
    "s k, e* k n, e* -> s n",  # the last says where groups end; rows behind all of them are zero
    "row",
    linear=_BILINEAR,
    flops=lambda loops: 2.0 * math.prod(loops.extents[loop] for loop in "skn"),
    backward_factor=2,
    saved=(0, 1, 2),
    differentiable=(0, 1),
    result_dtype=_grouped_dtype,
    offset_loop="s",  # a shard of the rows begins behind the groups of others
    evaluate=_grouped,
    emit=_write_grouped,
    is_heavy=True,
    measured_as="bmm",
)

routed_linear = replace(
    grouped_linear,
    name="routed_linear",  # the same of rows in any order, of which the last says each one's matrix
    loops="s k, e* k n, s -> s n",  # rows of numbers that no matrix has are zero
    offset_loop=None,
    evaluate=_routed,
    emit="routed_linear({0}, {1}, {2})",
)

OPS = (linear, matmul, attention, grouped_linear, routed_linear)
