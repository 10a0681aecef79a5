"""Dropout: each element kept and scaled, or zero, as a mask says that differs where the value is cut.

A proof takes masks as it takes inputs: of each place in the whole value an element of which nothing is assumed, so that
ranks that hold the same part have the same mask, and others another. Float64, against which programs are run, drops
nothing: what is drawn is checked by its own tests.
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

OPS = (dropout,)
