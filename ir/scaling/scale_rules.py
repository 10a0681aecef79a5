"""What single operators ask of sizes: which are tied together by attributes, and how attributes follow them.

Read by ``scale.py``. An operator whose attributes name no sizes needs no entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import cast

from ir.dims import Shape
from ir.errors import ShapeError
from ir.graph import Node
from ir.ops.stencil import output_extent
from ir.scaling.size_factors import Atoms, Factors

_PREFIX = 16  # a slice up to here keeps its numbers, a longer one its proportions

Loops = Mapping[str, Factors]
Constraint = Callable[[Node, Loops, Atoms], None]


def no_constraint(node: Node, loops: Loops, atoms: Atoms) -> None:
    """Most operators: their loops say all."""
    del node, loops, atoms


def _keep_opaque(node: Node, loops: Loops, atoms: Atoms) -> None:
    """A reshape's runs without common factors stay."""
    for loop in node.loops.whole:
        atoms.keep(loops[loop])


def _keep_chosen(node: Node, loops: Loops, atoms: Atoms) -> None:
    """Known ids name elements: all of them stay, and what they choose from."""
    if node.operands[1].is_const:
        atoms.keep((*loops["v"], *loops["p"]))


def _more_than_chosen(node: Node, loops: Loops, atoms: Atoms) -> None:
    """What the k largest are chosen from has more than k elements, if it has."""
    atoms.at_least(loops["d"], min(node.attr("k") + 1, node.loops.extents["d"]))


def _keep_parts(node: Node, loops: Loops, atoms: Atoms) -> None:
    """The number of pieces stays; unequal pieces add up."""
    if "parts" in loops:
        atoms.keep(loops["parts"])
    else:
        pieces = [(loops[loop], extent) for loop, extent in node.loops.extents.items() if loop.startswith("p")]
        joined = join_sizes(atoms, [factors for factors, _ in pieces], [extent for _, extent in pieces])
        atoms.unify(loops["joined"], joined)


def join_sizes(atoms: Atoms, pieces: Sequence[Factors], sizes: Sequence[int]) -> Factors:
    """The dim that pieces of these sizes make together: multiples of a large unit stay so, others add up."""
    unit = _unit(*sizes, sum(sizes))
    if unit == 1:
        joined = atoms.new(sum(sizes))
        atoms.follows(joined, pieces, lambda *each: sum(each))
        return (joined,)
    step = atoms.new(unit)
    for factors, size in zip(pieces, sizes, strict=True):
        count = atoms.new(size // unit)
        atoms.keep((count,))
        atoms.unify(factors, (count, step))
    total = atoms.new(sum(sizes) // unit)
    atoms.keep((total,))
    return (total, step)


def _slice_of(node: Node) -> tuple[str, int, int, int]:
    """(loop that is sliced, its extent, start, stop)."""
    dim = node.attr("dim")
    return f"d{dim}", node.operands[0].type.shape[dim], node.attr("start"), node.attr("stop")


def _unit(*numbers: int) -> int:
    """What a slice or a concat counts in: the largest unit of all its numbers, or one where that keeps too many."""
    unit = math.gcd(*numbers)
    return unit if max(numbers) // unit <= max(_PREFIX, 2 * unit) else 1


def _slice(node: Node, loops: Loops, atoms: Atoms) -> None:
    loop, *numbers = _slice_of(node)
    slice_sizes(atoms, loops[loop], loops["piece"], tuple(numbers))


def slice_sizes(atoms: Atoms, whole: Factors, piece: Factors, numbers: tuple[int, ...]) -> None:
    """A slice in a large unit scales with it; one near an end keeps its numbers (extent, start, stop)."""
    extent, start, stop = numbers
    unit = _unit(extent, start, stop)
    if unit > 1:
        step, count, part = atoms.new(unit), atoms.new(extent // unit), atoms.new((stop - start) // unit)
        atoms.keep((count, part))
        atoms.unify(whole, (count, step))
        atoms.unify(piece, (part, step))
    elif stop == extent and start <= _PREFIX:
        atoms.at_least(whole, start + 2)
        atoms.follows(piece[0], [whole], lambda size: size - start)
    else:
        atoms.keep(piece)
        atoms.at_least(whole, stop)


def _scaled_slice(node: Node, sizes: Mapping[str, int], shape: Shape, operands: Sequence[Node]) -> dict[str, Hashable]:
    _, *numbers = _slice_of(node)
    whole = operands[0].type.shape[node.attr("dim")]
    start = scaled_start(tuple(numbers), whole)
    if start + sizes["piece"] > whole:
        raise ShapeError(f"a slice from {start} of {sizes['piece']} does not fit into {whole}")
    return {"start": start, "stop": start + sizes["piece"]}


def scaled_start(numbers: tuple[int, ...], size: int) -> int:
    """Where the slice (extent, start, stop) starts when the dim has another size."""
    extent, start, stop = numbers
    unit = _unit(extent, start, stop)
    return start // unit * (size // (extent // unit)) if unit > 1 else start


def _count(span: tuple[int, ...], size: int) -> int:
    """Windows that fit into ``size``; none if it is too small."""
    try:
        return output_extent(size, *span)
    except ShapeError:
        return 0


def _windows(node: Node, loops: Loops, atoms: Atoms) -> None:
    """Kernels stay; the number of windows follows from space."""
    kernel = node.attr("kernel") if "kernel" in node.attrs else node.operands[1].type.shape[2:]
    for name in ("kh", "kw"):
        if name in loops:
            atoms.keep(loops[name])
    for i, (space, windows) in enumerate((("h", "h'"), ("w", "w'"))):
        numbers = [cast("tuple[int, ...]", node.attr(key))[i] for key in ("stride", "padding", "dilation")]
        span = (kernel[i], *numbers)
        if node.loops.extents[windows] > 1:
            atoms.follows(loops[windows][0], [loops[space]], partial(_count, span))
        else:
            atoms.keep(loops[space])


CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "reshape": _keep_opaque,
        "index_select": _keep_chosen,
        "top_k": _more_than_chosen,
        "chunk": _keep_parts,
        "concat": _keep_parts,
        "slice": _slice,
        "conv2d": _windows,
        "max_pool2d": _windows,
        "avg_pool2d": _windows,
    }
)
"""Operators whose attributes tie sizes together."""

SCALED: Mapping[str, Callable[[Node, Mapping[str, int], Shape, Sequence[Node]], dict[str, Hashable]]] = (
    MappingProxyType(
        {
            "reshape": lambda node, sizes, shape, operands: {"shape": shape},
            "expand": lambda node, sizes, shape, operands: {"shape": shape},
            "slice": _scaled_slice,
            "conv2d": lambda node, sizes, shape, operands: {"groups": sizes["g"]},
        }
    )
)
"""Operators whose attributes change with the sizes."""

PLAIN = frozenset({
    "approximate", "axis", "causal", "dim", "dims", "dtype", "eps", "exponent", "factor", "k", "keepdim", "offset_by",
    "perm", "points", "scale", "to_dim",
})  # fmt: skip
"""Attributes that name no size: places of dims, axes, numbers whose value is the same at all sizes."""


def check_attributes(node: Node) -> None:
    """Attributes either name no size, or a table here says what they ask of sizes.

    Raises:
        ShapeError: naming the attribute that nobody has thought about.
    """
    unknown = [name for name in node.op.attrs if name not in PLAIN]
    if unknown and node.op.name not in CONSTRAINTS and node.op.name not in SCALED:
        raise ShapeError(f"whether {unknown[0]} of {node.op.name} names a size is not said")
