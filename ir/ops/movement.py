"""Operators that only move elements: what they do is their notation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from ir.dims import Shape
from ir.emission.code import Code, method, tuple_of
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.graph import Node
from ir.memory.layout import Layout, Sizes, merge_strides
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties

_FIRST = (frozenset({0}),)


def _ints(value: object) -> tuple[int, ...]:
    return cast("tuple[int, ...]", value)


def matched_dims(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dims of two shapes with equal products, left to right: where a reshape really mixes dims."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [], []
        m = n = 1
        if i < len(before):
            left.append(i)
            m *= before[i]
            i += 1
        if (j < len(after) and m != 1) or not left:
            right.append(j)
            n *= after[j]
            j += 1
        while m != n:
            if m < n:
                left.append(i)
                m *= before[i]
                i += 1
            else:
                right.append(j)
                n *= after[j]
                j += 1
        runs.append((left, right))
    return runs


def _reshape_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """Runs of dims split into common factors; a run without any is taken whole.

    [6, 8] -> [48] is "(a b)"; [2304] -> [12, 192] is "(a b) -> a b"; [6, 4] -> [8, 3] has no common cut.
    """
    before, after = shapes[0], _ints(attrs["shape"])
    assert math.prod(before) == math.prod(after), f"reshape {before} -> {after}"
    left: list[str] = ["1"] * len(before)
    right: list[str] = ["1"] * len(after)
    extents: dict[str, int] = {}
    for run, (sources, targets) in enumerate(matched_dims(before, after)):
        factors = _common_factors([before[i] for i in sources], [after[j] for j in targets])
        if factors is None:
            # no common refinement: one opaque loop per dim, none of which can be cut
            for side, dims, shape in ((left, sources, before), (right, targets, after)):
                for position, d in enumerate(dims):
                    name = f"x{run}_{'ab'[side is right]}{position}"
                    side[d] = name + "*"
                    extents[name] = shape[d]
            continue
        names = [f"r{run}_{index}" for index in range(len(factors))]
        extents.update(zip(names, factors, strict=True))
        for side, dims, shape in ((left, sources, before), (right, targets, after)):
            at = 0
            for d in dims:
                group: list[str] = []
                size = 1
                while size < shape[d]:
                    group.append(names[at])
                    size *= factors[at]
                    at += 1
                side[d] = f"({' '.join(group)})" if group else "1"
    return f"{' '.join(left)} -> {' '.join(right)}", extents


def _common_factors(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Extents of the loops that both sides are products of, in order; None if there are none."""
    bounds = sorted({math.prod(side[i:]) for side in (left, right) for i in range(len(side) + 1)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(bounds)):
        return None
    return [outer // inner for outer, inner in pairwise(bounds)]


def _keep_opaque(node: Node, loops: Loops, ties: Ties) -> None:
    """Runs without common factors stay."""
    for loop in node.loops.whole:
        before, after = list(node.operands[0].type.shape), list(node.type.shape)
        ties.keep(loops[loop], f"the model reshapes {before} to {after}")


def _write_reshape(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    """``unflatten``, ``flatten``, ``squeeze`` or ``unsqueeze`` where one of them says it, else ``reshape``."""
    (x,) = operands
    before, after = node.operands[0].type.shape, node.type.shape
    runs = [(s, t) for s, t in matched_dims(before, after) if len(s) != 1 or len(t) != 1]
    if len(runs) == 1:
        found = _single(node, x, writing, *runs[0])
        if found is not None:
            return found
    return method(x, "reshape", *(_sizes(node, x, writing, range(len(after))) or ["()"]))


def _single(node: Node, x: Code, writing: Writing, sources: list[int], targets: list[int]) -> Code | None:
    before, after = node.operands[0].type.shape, node.type.shape
    if len(targets) == len(sources) + 1 == 1 or (len(sources) == 1 and len(targets) == 2 and 1 in _at(after, targets)):
        one = next(dim for dim in targets if after[dim] == 1)
        return method(x, "unsqueeze", str(one))
    if len(sources) == len(targets) + 1 == 1 or (len(targets) == 1 and len(sources) == 2 and 1 in _at(before, sources)):
        one = next(dim for dim in sources if before[dim] == 1)
        return method(x, "squeeze", str(one))
    if len(sources) == 1 and targets:
        return method(x, "unflatten", str(sources[0]), tuple_of(tuple(_sizes(node, x, writing, targets))))
    if len(targets) == 1 and sources:
        ends = (sources[0],) if sources[-1] == len(before) - 1 else (sources[0], sources[-1])
        return method(x, "flatten", *map(str, ends))
    return None


def _at(shape: tuple[int, ...], dims: list[int]) -> list[int]:
    return [shape[dim] for dim in dims]


def _sizes(node: Node, x: Code, writing: Writing, dims: range | list[int]) -> list[str]:
    """Sizes of some dims of the result: one is -1, an open one before any cut one; other cut ones are divided."""
    left, near = writing.left_open(node, dims), [(node.operands[0], x)]
    return ["-1" if dim == left else writing.size(node, dim, near).text for dim in dims]


reshape = Operator(
    "reshape",
    _reshape_loops,
    "move",
    attrs=("shape",),
    linear=_FIRST,
    ties=_keep_opaque,
    strides=lambda attrs, x, shape: merge_strides(x, shape),
    evaluate=lambda t, x, c: t.reshape(x[0], c.loops.result_shape),
    emit=_write_reshape,
    fold=lambda x, shape: x.reshape(shape),
)


def _permute_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    names, order = [f"d{i}" for i in range(len(shapes[0]))], _ints(attrs["perm"])
    if sorted(order) != list(range(len(names))):
        raise ShapeError(f"{order} are not the dims of {shapes[0]}, each once")
    return f"{' '.join(names)} -> {' '.join(names[i] for i in order)}", {}


def _write_permute(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    """``x.transpose(1, 2)`` where two dims change places, else ``x.permute(...)``."""
    (x,) = operands
    perm: tuple[int, ...] = node.attr("perm")
    moved = [dim for dim, source in enumerate(perm) if dim != source]
    if len(moved) == 2:
        return method(x, "transpose", *map(str, moved))
    return method(x, "permute", *map(str, perm))


permute = Operator(
    "permute",
    _permute_loops,
    "move",
    attrs=("perm",),
    dims_attr="perm",
    linear=_FIRST,
    strides=lambda attrs, x, shape: tuple(x.strides[dim] for dim in attrs["perm"]),
    evaluate=lambda t, x, c: t.transpose(x[0], c.attrs["perm"]),
    emit=_write_permute,
    fold=lambda x, perm: x.transpose(perm),
)


def _expand_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """Dims of size one become loops of the result alone."""
    before, after = shapes[0], _ints(attrs["shape"])
    assert len(before) == len(after), f"expand {before} -> {after}: reshape first"
    names = [f"d{i}" for i in range(len(after))]
    left = ["1" if size == 1 else name for name, size in zip(names, before, strict=True)]
    return f"{' '.join(left)} -> {' '.join(names)}", dict(zip(names, after, strict=True))


def _expand_strides(attrs: Attrs, x: Layout, shape: Shape) -> Sizes:
    return tuple(stride if size == new else 0 for size, new, stride in zip(x.shape, shape, x.strides, strict=True))


def _write_expand(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    """``x.expand(-1, -1, 4, -1)``: dims that stay are -1."""
    (x,) = operands
    near = [(node.operands[0], x)]
    pairs = zip(node.operands[0].type.shape, node.type.shape, strict=True)
    written = ["-1" if before == after else writing.size(node, d, near).text for d, (before, after) in enumerate(pairs)]
    return method(x, "expand", *written)


expand = Operator(
    "expand",
    _expand_loops,
    "move",
    attrs=("shape",),
    linear=_FIRST,
    repeats=True,
    strides=_expand_strides,
    evaluate=lambda t, x, c: t.expand(x[0], c.loops.result_shape),
    emit=_write_expand,
    fold=np.broadcast_to,
)

detach = Operator(
    "detach",
    "... -> ...",
    "move",
    linear=_FIRST,
    strides=lambda attrs, x, shape: x.strides,
    differentiable=(),
    evaluate=lambda t, x, c: t.detach(x[0]),
    emit="{0}.detach()",
    fold=lambda x: x,
)

row_major = Operator(
    "row_major",
    "... -> ...",
    "move",
    linear=_FIRST,
    lays_out=True,
    evaluate=lambda t, x, c: x[0],
    emit="{0}.contiguous()",
    fold=lambda x: x,
)

OPS = (reshape, permute, expand, detach, row_major)
