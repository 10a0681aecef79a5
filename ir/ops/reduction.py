"""Sums and means over dims; the reduction operator is always in the name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ir.dims import Shape
from ir.errors import ShapeError
from ir.memory.layout import HANDED_ON
from ir.operator import Attrs, Operator
from ir.scaling.ties import doubt_terms
from ir.tape import Call, Tape

_FIRST = (frozenset({0}),)


def _loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """``dims`` (non-negative) vanish, or stay with size one if ``keepdim``."""
    dims, keep = attrs["dims"], attrs["keepdim"]
    assert isinstance(dims, tuple), attrs
    if len(set(dims)) != len(dims):
        raise ShapeError(f"{dims} are not dims of {shapes[0]}, each once")
    names = [f"d{i}" for i in range(len(shapes[0]))]
    kept = ["1" if i in dims else name for i, name in enumerate(names) if bool(keep) or i not in dims]
    return f"{' '.join(names)} -> {' '.join(kept)}", {}


def _sum(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    letters = "abcdefgh"[: len(call.loops.operands[0])]
    kept = "".join(c for i, c in enumerate(letters) if i not in call.attrs["dims"])
    return t.reshape(t.einsum(f"{letters}->{kept}", operands[0]), call.loops.result_shape)


def _mean(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    count = math.prod(call.whole_loops.extents[loop] for loop in call.loops.contracted)
    return t.scale(_sum(t, operands, call), 1.0 / count)


reduce_sum = Operator(
    "reduce_sum",
    _loops,
    "row",
    attrs=("dims", "keepdim"),
    dims_attr="dims",
    linear=_FIRST,
    backward_factor=1,
    memory=HANDED_ON,  # spread out without a copy
    ties=doubt_terms,
    evaluate=_sum,
    eager="{0}.sum({dims}, keepdim={keepdim})",
)
reduce_mean = Operator(
    "reduce_mean",
    _loops,
    "row",
    # the divisor counts points on all devices, so that cut means are terms of the whole one
    attrs=("dims", "keepdim"),
    dims_attr="dims",
    linear=_FIRST,
    backward_factor=1,
    evaluate=_mean,
    eager="{0}.mean({dims}, keepdim={keepdim})",
)

OPS = (reduce_sum, reduce_mean)
