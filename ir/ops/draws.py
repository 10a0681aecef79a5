"""What is drawn at random: dropout, each element kept and scaled or zero, and noise, numbers of a distribution.

A proof takes what is drawn as it takes inputs: of each place in the whole value an element of which nothing is assumed,
so that ranks that hold the same part have the same, and others another. Integers steer, and are the lowest that may be
drawn, or the next. Float64, against which programs are run, drops nothing and has steady noise, the same in each row:
what is drawn is checked by its own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ir.emission.code import Code, call
from ir.emission.writing import Writing, block_index
from ir.evaluation.einsum import Data
from ir.graph import Node
from ir.memory.layout import Memory
from ir.operator import Operator
from ir.tape import Call, Known, Tape


def _nothing_dropped(places: Data) -> tuple[Data, Callable[[], Data]]:
    return np.ones_like(places), lambda: np.zeros_like(places)


def _dropout(t: Tape, operands: Sequence[Any], c: Call) -> Any:  # Any: arrays of the tape's field
    (x,) = operands
    return t.mul(x, t.unary(Known(f"dropout:{c.attrs['p']}", _nothing_dropped), _places(x.shape[0], c)))


def _places(worlds: int, c: Call) -> Any:
    """[worlds, *local]: the number of each element in the whole value."""
    shape = c.loops.result_shape
    found = np.zeros((worlds, *shape), dtype=np.int64)
    stride = 1
    for dim in reversed(range(len(shape))):
        group = c.loops.result[dim]
        start = c.starts.get(group[0], 0) if group else 0
        along = np.reshape(start, (-1, 1)) + np.arange(shape[dim])  # a dim of a function of elements is one loop
        found += stride * along.reshape(len(along), *(-1 if i == dim else 1 for i in range(len(shape))))
        stride *= c.whole_loops.result_shape[dim]
    return found


def _write(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = (*writing.stages, *writing.cutting(node, *node.loops.names))
    return call("dropout", x[0], repr(node.attr("p")), "self.training", *([block_index(axes)] if axes else []))


dropout = Operator(
    "dropout",
    "... -> ...",
    "map",
    attrs=("p",),
    linear=(frozenset({0}),),
    draws=True,
    memory=Memory(keeps=lambda local: float(local.result.elements)),  # a byte of the mask for each
    evaluate=_dropout,
    emit=_write,
    measured_as="mul_scalar",
)


# Kinds of noise: "uniform" between 0 and 1; "normal", of mean 0 and deviation 1; "integers" from ``low`` to ``high``,
# which is left out.
_FIRST = 0.6180339887498949  # of steady noise between 0 and 1, moved by a share of 1 along each dim but that of rows
_STEPS = (0.4142135623730951, 0.7320508075688772, 0.23606797749978969, 0.6457513110645906, 0.3166247903553998)
_SPAN = 2  # integers that are drawn in proofs and in steady noise, so that they lie in any table


def steady_uniform(shape: Sequence[int], starts: Sequence[Any] | None = None) -> Any:  # Any: numbers, arrays
    """Numbers between 0 and 1, the same in each row, of a part of a value that begins at ``starts`` along its dims."""
    found: Any = np.full(shape, _FIRST)
    for dim in range(1, len(shape)):
        along = np.arange(shape[dim]) + (0 if starts is None else starts[dim])
        found = found + _STEPS[dim % len(_STEPS)] * along.reshape(-1, *[1] * (len(shape) - dim - 1))
    return found % 1


def normal_of(steady: Any) -> Any:  # Any: arrays
    """Steady noise around 0."""
    return np.log(steady / (1 - steady))


def steady_integers(steady: Any, low: int, high: int) -> Any:  # Any: arrays
    """The lowest that may be drawn, or the next."""
    return low + np.floor(steady * min(high - low, _SPAN)).astype(np.int64)


def _noise(t: Tape, operands: Sequence[Any], c: Call) -> Any:  # Any: arrays of the tape's field
    worlds, kind, name = operands[0].shape[0], c.attrs["kind"], f"{c.attrs['kind']}:{c.attrs['draw']}"
    places, steady = _places(worlds, c), _steady(worlds, c)
    if kind == "integers":
        low, high = c.attrs["low"], c.attrs["high"]
        return low + t.whole(name, lambda x: steady_integers(steady, 0, high - low), places) % min(high - low, _SPAN)
    real = steady if kind == "uniform" else normal_of(steady)
    return t.unary(Known(name, lambda x: (real, lambda: np.zeros_like(real))), places)


def _steady(worlds: int, c: Call) -> Any:
    """[worlds, *local]: each rank's part of steady noise."""
    shape = c.loops.result_shape
    starts = [np.reshape(c.starts.get(group[0], 0) if group else 0, (-1, 1)) for group in c.loops.result]
    return np.stack([steady_uniform(shape, [start[min(i, len(start) - 1)] for start in starts]) for i in range(worlds)])


def _write_noise(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    axes = (*writing.stages, *writing.cutting(node, *node.loops.names))
    cuts = {dim: writing.cutting(node, *group) for dim, group in enumerate(node.loops.result) if dim and group}
    starts = [f"{dim}: {block_index(by)}" for dim, by in cuts.items() if by]
    ends = [f"low={node.attr('low')}", f"high={node.attr('high')}"] if node.attr("kind") == "integers" else []
    return call(
        "noise", x[0], repr(node.attr("kind")), *ends,
        *(["training=self.training"] if node.attr("trains") else []),
        *([f"block={block_index(axes)}"] if axes else []), *([f"cut={{{', '.join(starts)}}}"] if starts else []),
    )  # fmt: skip


noise = Operator(
    "noise",
    "... -> ...",
    "map",
    attrs=("kind", "draw", "trains", "low", "high"),
    defaults={"trains": False, "low": 0, "high": 1},
    differentiable=(),
    draws=True,
    evaluate=_noise,
    emit=_write_noise,
    measured_as="mul_scalar",
)

OPS = (dropout, noise)
