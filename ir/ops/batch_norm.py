"""Batch normalisation as sums over the batch.

In training it is three operators, so that cutting the batch makes its statistics sums across devices by itself:
channel_mean, channel_variance (around that mean, for precision), batch_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ir.dims import Shape
from ir.emission.code import Code, binary, call
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.graph import Node, unmoved
from ir.memory.layout import Memory
from ir.memory.local import Local
from ir.operator import Attrs, Operator
from ir.ops.elementwise import RSQRT
from ir.tape import Call, Tape

_FIRST = (frozenset({0}),)


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


# Sums over devices are taken step by step (pdv/emit/templates/kernels/operators.py): x - mean is kept, then squared.
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


def _write_statistic(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    """``channel_mean(x, dp.size)``: this rank's term of it."""
    axes = writing.cutting(node, *node.loops.contracted)
    return call(node.op.name, *x, " * ".join(f"{axis}.size" for axis in axes) or "1")


def _write_norm(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    """One call of torch's; by statistics that gradients flow through, the helper that spells it out."""
    if any(statistic.needs_grad for statistic in node.operands[1:3]):
        return call("batch_norm", *x, repr(node.attr("eps")))
    return call(fused_batch_norm(node), *x, f"eps={node.attr('eps')!r}")


def fused_batch_norm(node: Node) -> str:
    """The call that norms [n, c, ...] in one kernel, forward and backward."""
    return "fused_batch_norm" if node.type.rank > 3 and node.needs_grad else "F.batch_norm"


channel_mean = Operator(
    "channel_mean",
    _channel_loops(0),
    "row",
    linear=_FIRST,
    backward_factor=1,
    evaluate=_channel_mean,
    result_name="mean",
    emit=_write_statistic,
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
    emit=_write_statistic,
)


def _points_of(operand: Node) -> int:
    """Of a variance; 0 if it is none."""
    variance = unmoved(operand)
    is_variance = variance.op is channel_variance
    return math.prod(variance.loops.extents[loop] for loop in variance.loops.contracted) if is_variance else 0


def counts_variance(node: Node) -> bool:
    """Whether the points of an ``unbiased`` are those of the variance that it reads."""
    return _points_of(node.operands[0]) == int(node.attr("points"))


def points_at(node: Node, operand: Node) -> int:
    """The points of an ``unbiased`` where its operand is ``operand``, at other sizes."""
    return _points_of(operand) if counts_variance(node) else int(node.attr("points"))


def _write_unbiased(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    n = Code(str(node.attr("points")))
    if counts_variance(node):
        image = unmoved(node.operands[0]).operands[0]
        n = writing.count(image, (0, *range(2, image.type.rank)))
    return binary(x[0], "*", binary(n, "/", binary(n, "-", Code("1"))))


unbiased = Operator(  # a variance that divides by one point less
    "unbiased",
    "... -> ...",
    "map",
    attrs=("points",),
    linear=_FIRST,
    # a proof at small sizes is of the true number
    attrs_at=lambda node, x, shape, are_open: {"points": points_at(node, x[0])} if are_open else {},
    evaluate=lambda t, x, c: t.scale(x[0], c.attrs["points"] / (c.attrs["points"] - 1)),
    emit=_write_unbiased,
    measured_as="mul_scalar",
    fold=lambda x, points: x * x.dtype.type(points / (points - 1)),
)
batch_norm = Operator(
    "batch_norm",
    _batch_norm_loops,
    "map",
    attrs=("eps",),
    statistics=(channel_mean, channel_variance),
    flops_per_point=4,
    saved=(0, 1, 2, 3),
    memory=_norm_memory,
    evaluate=_batch_norm,
    is_heavy=True,
    emit=_write_norm,
    eager="batch_norm(*x, {eps})",
    takes_positive=True,
)

OPS = (channel_mean, channel_variance, unbiased, batch_norm)
