"""Functions of whole rows (softmax, layer norm), and batch normalisation as sums over the batch.

Batch normalisation in training is three operators, so that cutting the batch makes its statistics sums across
devices by itself: channel_mean, channel_variance (around that mean, for precision), batch_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.errors import ShapeError
from ir.evaluation.einsum import Data
from ir.graph import Node
from ir.memory.layout import Memory
from ir.memory.local import INDEX_BYTES, Local
from ir.operator import Attrs, Operator
from ir.ops.elementwise import RSQRT
from ir.scaling.ties import Loops, Ties, where
from ir.tape import Call, Known, Tape

_FIRST = (frozenset({0}),)
_TIE = 1e-9  # of a row's largest element: what differs by less is equal but for rounding


def _softmax_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    assert attrs["dim"] == -1, "frontends move the softmax dim to the end"
    return "... d* -> ... d*", {}


def _softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return y, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True))


SOFTMAX = Known("softmax", _softmax)

softmax = Operator(
    "softmax",
    _softmax_loops,
    "row",
    emit="F.softmax({0}, dim={dim})",
    attrs=("dim",),
    defaults={"dim": -1},
    flops_per_point=5,
    saved=("out",),
    evaluate=lambda t, x, c: t.row(SOFTMAX, x[0]),
    is_heavy=True,
    result_name="probabilities",
)


def _log_softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    z = x - x.max(axis=-1, keepdims=True)
    y = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return y, lambda g: g - np.exp(y) * g.sum(axis=-1, keepdims=True)


log_softmax = Operator(
    "log_softmax",
    _softmax_loops,
    "row",
    emit="F.log_softmax({0}, dim={dim})",
    attrs=("dim",),
    defaults={"dim": -1},
    flops_per_point=5,
    saved=("out",),
    evaluate=lambda t, x, c: t.row(Known("log_softmax", _log_softmax), x[0]),
    is_heavy=True,
    measured_as="softmax",
)


def _more_than_chosen(node: Node, loops: Loops, ties: Ties) -> None:
    """What the k largest are chosen from has more than k elements, if it has."""
    ties.atoms.at_least(loops["d"], min(node.attr("k") + 1, node.loops.extents["d"]))


def _top_k(k: int, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    """Not a number in rows whose choice rounding decides."""
    ordered = -np.sort(-x, axis=-1)
    least, next_ = ordered[..., k - 1, None], ordered[..., k : k + 1]
    kept = (x >= least).astype(x.dtype)
    tied = (least - next_ <= _TIE * np.abs(ordered).max(axis=-1, keepdims=True)).any(axis=-1, keepdims=True)
    kept[np.broadcast_to(tied, kept.shape)] = np.nan
    return x * kept, lambda g: g * kept


def _chosen(local: Local) -> float:
    """Indices: [rows, k], once of topk and once more of scatter, in the same memory."""
    return float(local.rows * int(local.node.attr("k")) * INDEX_BYTES)


top_k = Operator(  # the row with all but its k largest elements set to zero
    "top_k",
    "... d* -> ... d*",
    "row",
    emit="top_k({0}, {k})",
    attrs=("k",),
    flops_per_point=5,
    saved=("out",),
    memory=Memory(keeps=_chosen, forward=lambda local: local.result_bytes, saved=()),
    ties=_more_than_chosen,
    evaluate=lambda t, x, c: t.row(Known(f"top_k:{c.attrs['k']}", partial(_top_k, c.attrs["k"])), x[0]),
)


def _keep_rows(node: Node, loops: Loops, ties: Ties) -> None:
    """torch's function is told the size of the rows."""
    if ties.are_open:
        ties.keep(loops["d"], f"{where(node)} norms rows of this size")


def _standardize(eps: float, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    y = centred * inverse

    def pullback(g: Data) -> Data:
        along = y * (g * y).mean(axis=-1, keepdims=True)
        return np.asarray(inverse * (g - g.mean(axis=-1, keepdims=True) - along))

    return y, pullback


def _layer_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    x, *affine = operands
    y = t.row(Known(f"layer_norm:{call.attrs['eps']}", partial(_standardize, call.attrs["eps"])), x)
    return _affine(t, y, affine, len(call.loops.operands[0]))


def _unit_rms(eps: float, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    inverse = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    y = x * inverse
    return y, lambda g: inverse * (g - y * (g * y).mean(axis=-1, keepdims=True))


def _rms_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, *affine = operands
    y = t.row(Known(f"rms_norm:{call.attrs['eps']}", partial(_unit_rms, call.attrs["eps"])), x)
    return _affine(t, y, affine, len(call.loops.operands[0]))


def _affine(t: Tape, y: Any, affine: Sequence[Any], rank: int) -> Any:
    """y * weight + bias, the vectors along the last of ``rank`` dims."""
    for apply, vector in zip((t.mul, t.add), affine, strict=False):
        y = apply(y, t.reshape(vector, (1,) * (rank - 1) + (vector.shape[-1],)))
    return y


layer_norm = Operator(
    "layer_norm",
    lambda shapes, attrs: (", ".join(["... d*", "d*", "d*"][: len(shapes)]) + " -> ... d*", {}),
    "row",
    attrs=("eps",),
    flops_per_point=8,
    saved=(0,),
    memory=Memory(keeps=lambda local: 2 * local.row_bytes),
    evaluate=_layer_norm,
    ties=_keep_rows,
    is_row_norm=True,
    is_heavy=True,
    eager="F.layer_norm({0}, {width}, *x[1:], eps={eps})",
    measured_as="layernorm",
)
rms_norm = Operator(
    "rms_norm",
    "... d*, d* -> ... d*",
    "row",
    attrs=("eps",),
    flops_per_point=5,
    saved=(0,),
    memory=Memory(  # one number a row; on a CPU the rows before they meet the weight too
        keeps=lambda local: local.row_bytes + local.composed_bytes,
        forward=lambda local: local.composed_bytes,
        backward=lambda local: 2 * local.composed_bytes,
    ),
    evaluate=_rms_norm,
    ties=_keep_rows,
    is_row_norm=True,
    is_heavy=True,
    eager="F.rms_norm({0}, {width}, {1}, {eps})",
    measured_as="rmsnorm",
)


def _image(rank: int) -> str:
    """The loops of [n, c, ...], a letter each."""
    letters = "nchwtuvxyz"
    if not 2 <= rank <= len(letters):
        raise ShapeError(f"channels are the second of 2 to {len(letters)} dims, not of {rank}")
    return letters[:rank]


def _channel_loops(vectors: int) -> Callable[[Sequence[Shape], Attrs], tuple[str, dict[str, int]]]:
    """[n, c, ...] beside vectors of channels -> a vector of channels."""

    def loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
        return f"{', '.join((' '.join(_image(len(shapes[0]))), *('c',) * vectors))} -> c", {}

    return loops


def _batch_norm_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    image = " ".join(_image(len(shapes[0])))
    return f"{image}, c, c, c, c -> {image}", {}


def _count(call: Call) -> int:
    """Points that a channel's statistics run over, on all devices together."""
    return math.prod(call.whole_loops.extents[loop] for loop in call.loops.contracted)


def _channel_mean(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    return t.scale(t.einsum(f"{_image(_rank(call))}->c", operands[0]), 1.0 / _count(call))


def _channel_variance(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, mean = operands
    centred = t.sub(x, _per_channel(t, mean, call))
    image = _image(_rank(call))
    return t.scale(t.einsum(f"{image},{image}->c", centred, centred), 1.0 / _count(call))


def _batch_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, mean, variance, weight, bias = (operands[0], *(_per_channel(t, v, call) for v in operands[1:]))
    inverse = t.unary(RSQRT, t.shift(variance, float(call.attrs["eps"])))
    return t.add(t.mul(t.mul(t.sub(x, mean), inverse), weight), bias)


def _rank(call: Call) -> int:
    """Of the image."""
    return len(call.loops.operands[0])


def _per_channel(t: Tape, vector: Any, call: Call) -> Any:
    return t.reshape(vector, (1, vector.shape[-1], *(1,) * (_rank(call) - 2)))


# Sums over devices are taken step by step (pdv/emit/templates/operators.py): x - mean is kept, then squared.
_STEP_BY_STEP = Memory(
    keeps=lambda local: local.operand_bytes(),
    forward=lambda local: local.operand_bytes(),
    backward=lambda local: 2 * local.operand_bytes(),
    saved=(),
)


def _variance_memory(local: Local) -> Memory:
    """Around the mean of the same points, with no move of a partial sum in between, it is torch's batch norm's."""
    is_within = local.node.operands[1].op is channel_mean
    return Memory(saved=(), is_within=True) if is_within else _STEP_BY_STEP


def _norm_memory(local: Local) -> Memory:
    """By the statistics of all points that this device has, it is one call of torch's."""
    x, mean, variance, *_ = local.node.operands
    is_of_all = mean.op is channel_mean and variance.op is channel_variance and mean.operands[0] is x
    return Memory(saved=(0,)) if is_of_all else _STEP_BY_STEP


channel_mean = Operator(
    "channel_mean",
    _channel_loops(0),
    "row",
    linear=_FIRST,
    backward_factor=1,
    evaluate=_channel_mean,
    result_name="mean",
    eager="channel_mean({0})",
)
channel_variance = Operator(
    "channel_variance",
    _channel_loops(1),
    "row",
    flops_per_point=3,
    saved=(0, 1),
    memory=_variance_memory,
    evaluate=_channel_variance,
    result_name="variance",
    eager="channel_variance({0}, {1})",
)


def variance_below(node: Node) -> Node:
    """What an ``unbiased`` reads, collectives apart."""
    while node.op.kind == "parallel":
        node = node.operands[0]
    return node


def _points_of(operand: Node) -> int:
    """Of a variance; 0 if it is none."""
    variance = variance_below(operand)
    is_variance = variance.op is channel_variance
    return math.prod(variance.loops.extents[loop] for loop in variance.loops.contracted) if is_variance else 0


def counts_variance(node: Node) -> bool:
    """Whether the points of an ``unbiased`` are those of the variance that it reads."""
    return _points_of(node.operands[0]) == int(node.attr("points"))


def points_at(node: Node, operand: Node) -> int:
    """The points of an ``unbiased`` where its operand is ``operand``, at other sizes."""
    return _points_of(operand) if counts_variance(node) else int(node.attr("points"))


unbiased = Operator(  # a variance that divides by one point less
    "unbiased",
    "... -> ...",
    "map",
    attrs=("points",),
    linear=_FIRST,
    # a proof at small sizes is of the true number
    attrs_at=lambda node, x, shape, are_open: {"points": points_at(node, x[0])} if are_open else {},
    evaluate=lambda t, x, c: t.scale(x[0], c.attrs["points"] / (c.attrs["points"] - 1)),
    eager="{0} * ({points} / ({points} - 1))",
    measured_as="mul_scalar",
)
batch_norm = Operator(
    "batch_norm",
    _batch_norm_loops,
    "map",
    attrs=("eps",),
    flops_per_point=4,
    saved=(0, 1, 2, 3),
    memory=_norm_memory,
    evaluate=_batch_norm,
    is_heavy=True,
    eager="batch_norm(*x, {eps})",
    takes_positive=True,
)

OPS = (softmax, log_softmax, top_k, layer_norm, rms_norm, channel_mean, channel_variance, unbiased, batch_norm)
