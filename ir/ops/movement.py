"""Operators that only move elements: what they do is their notation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, cast

from ir.dims import Shape
from ir.errors import ShapeError
from ir.graph import Node
from ir.memory.layout import HANDED_ON, Layout, Sizes, merged
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties, join_sizes, scaled_start, slice_sizes, where
from ir.tape import Call, Tape

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


reshape = Operator(
    "reshape",
    _reshape_loops,
    "move",
    attrs=("shape",),
    linear=_FIRST,
    ties=_keep_opaque,
    strides=lambda attrs, x, shape: merged(x, shape),
    evaluate=lambda t, x, c: t.reshape(x[0], c.loops.result_shape),
    eager="{0}.reshape({shape})",
)


def _permute_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    names, order = [f"d{i}" for i in range(len(shapes[0]))], _ints(attrs["perm"])
    if sorted(order) != list(range(len(names))):
        raise ShapeError(f"{order} are not the dims of {shapes[0]}, each once")
    return f"{' '.join(names)} -> {' '.join(names[i] for i in order)}", {}


permute = Operator(
    "permute",
    _permute_loops,
    "move",
    attrs=("perm",),
    dims_attr="perm",
    linear=_FIRST,
    strides=lambda attrs, x, shape: tuple(x.strides[dim] for dim in attrs["perm"]),
    evaluate=lambda t, x, c: t.transpose(x[0], c.attrs["perm"]),
    eager="{0}.permute({perm})",
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


expand = Operator(
    "expand",
    _expand_loops,
    "move",
    attrs=("shape",),
    linear=_FIRST,
    repeats=True,
    strides=_expand_strides,
    evaluate=lambda t, x, c: t.expand(x[0], c.loops.result_shape),
    eager="{0}.expand({shape})",
)


def _chunk_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """``dim`` is (parts × piece); the piece is not outermost, so it cannot be cut: pieces would interleave."""
    dim, parts, index = (cast(int, attrs[name]) for name in ("dim", "parts", "index"))
    if not 0 <= index < parts:
        raise ShapeError(f"no piece {index} of {parts}")
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = [f"(parts* {name})" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(names)}", {"parts": parts}


def _chunk(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    dim, index = call.attrs["dim"], call.attrs["index"]
    size = call.loops.result_shape[dim]
    return t.slice(operands[0], dim, index * size, (index + 1) * size)


def _keep_parts(node: Node, loops: Loops, ties: Ties) -> None:
    ties.keep(loops["parts"], f"{where(node)} takes {node.attr('parts')} parts")


chunk = Operator(
    "chunk",
    _chunk_loops,
    "move",
    attrs=("dim", "parts", "index"),
    dims_attr="dim",
    linear=_FIRST,
    ties=_keep_parts,
    strides=lambda attrs, x, shape: x.strides,
    evaluate=_chunk,
    eager="{0}.chunk({parts}, {dim})[{index}]",
)


def _slice_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    dim, start, stop = (cast(int, attrs[name]) for name in ("dim", "start", "stop"))
    if not 0 <= start <= stop <= shapes[0][dim]:
        raise ShapeError(f"no elements {start} to {stop} in dim {dim} of {shapes[0]}")
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = [name + "*" if i == dim else name for i, name in enumerate(names)]
    right = ["piece*" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(right)}", {"piece": stop - start}


def table_below(node: Node) -> Node | None:
    """The constant of which a slice takes the leading part, as long as the inputs are: a table of all lengths.

    A part of a constant that is the same at all sizes is a constant itself, once a program is canonical.
    """
    if node.attrs.get("start") != 0:
        return None
    below = node.operands[0]
    while below.op.kind == "parallel" or table_below(below) is not None:
        below = below.operands[0]
    return below if "value" in below.attrs else None


def from_end(index: int, extent: int) -> bool:
    """Whether a slice's start or stop is taken to count from the end of the dim, where that is open: the nearer one."""
    return 2 * index > extent


def _numbers(node: Node) -> tuple[int, int, int]:
    """Extent of the dim that is sliced, start, stop."""
    return node.operands[0].type.shape[node.attr("dim")], node.attr("start"), node.attr("stop")


def _tie_slice(node: Node, loops: Loops, ties: Ties) -> None:
    """Where sizes are open and both ends count from one end of the dim, the piece keeps its size."""
    extent, start, stop = _numbers(node)
    whole, piece = loops[f"d{node.attr('dim')}"], loops["piece"]
    if not ties.are_open:
        slice_sizes(ties.atoms, whole, piece, (extent, start, stop))
    elif table_below(node) is not None:
        ties.follow(whole, (piece,), lambda size: max(size, extent), where(node))
        ties.tables.append((whole, piece, extent))
    else:
        ties.doubts.append((whole, f"{where(node)} takes {start} to {stop} of it"))
        if from_end(start, extent) == from_end(stop, extent):
            ties.keep(piece, f"{where(node)} takes {stop - start} of it")
        else:
            ties.follow(piece, (whole,), lambda size: size - extent + stop - start, where(node))


def _slice_at(node: Node, operands: Sequence[Node], shape: Shape, are_open: bool) -> dict[str, Hashable]:
    dim, (extent, start, stop) = node.attr("dim"), _numbers(node)
    whole, piece = operands[0].type.shape[dim], shape[dim]
    if not are_open:
        start = scaled_start((extent, start, stop), whole)
    elif from_end(start, extent):
        start += whole - extent
    return {"start": start, "stop": start + piece}


slice_ = Operator(
    "slice",
    _slice_loops,
    "move",
    attrs=("dim", "start", "stop"),
    dims_attr="dim",
    linear=_FIRST,
    ties=_tie_slice,
    attrs_at=_slice_at,
    strides=lambda attrs, x, shape: x.strides,
    evaluate=lambda t, x, c: t.slice(x[0], c.attrs["dim"], c.attrs["start"], c.attrs["stop"]),
    eager="{0}.narrow({dim}, {start}, {stop} - {start})",
)


def _concat_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """Equal pieces give (parts × piece); unequal ones a whole dim of their sum."""
    dim = cast(int, attrs["dim"])
    names = [f"d{i}" for i in range(len(shapes[0]))]
    equal = len({shape[dim] for shape in shapes}) == 1
    left = []
    for number in range(len(shapes)):
        piece = f"d{dim}" if equal else f"p{number}*"
        left.append(" ".join(piece if i == dim else name for i, name in enumerate(names)))
    joined = f"(parts* d{dim})" if equal else "joined*"
    right = " ".join(joined if i == dim else name for i, name in enumerate(names))
    extents = {"parts": len(shapes)} if equal else {"joined": sum(shape[dim] for shape in shapes)}
    return f"{', '.join(left)} -> {right}", extents


def _tie_pieces(node: Node, loops: Loops, ties: Ties) -> None:
    """The number of equal pieces stays; unequal ones add up."""
    if "parts" in loops:
        ties.atoms.keep(loops["parts"])
    else:
        pieces = {loop: extent for loop, extent in node.loops.extents.items() if loop.startswith("p")}
        ties.atoms.unify(loops["joined"], join_sizes(ties.atoms, [loops[loop] for loop in pieces], [*pieces.values()]))


concat = Operator(
    "concat",
    _concat_loops,
    "move",
    attrs=("dim",),
    dims_attr="dim",
    joins=True,
    memory=HANDED_ON,  # narrow views of the gradient
    ties=_tie_pieces,
    flops_per_point=0,  # its loops are one per piece, and their product nothing
    linear=(),  # all operands together; arity varies, so it is not declared as a set
    evaluate=lambda t, x, c: t.concat(x, c.attrs["dim"]),
    eager="torch.cat(x, {dim})",
)

OPS = (reshape, permute, expand, chunk, slice_, concat)
