"""Parts of a dim, and operands joined along one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np

from ir.dims import Shape
from ir.emission.code import ATOM, Code, call, literal, method, tuple_of
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.evaluation.bounds import union, with_zeros
from ir.graph import Constant, Node
from ir.memory.layout import HANDED_ON
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties, join_sizes, scaled_start, slice_sizes, where
from ir.tape import Call, Tape

_FIRST = (frozenset({0}),)
Ends = tuple[tuple[int, int, int], ...]
"""By dim, ascending: how many elements stand before and behind."""


def _ints(value: object) -> tuple[int, ...]:
    return cast("tuple[int, ...]", value)


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


def parts_code(parts: Sequence[Node], x: Code) -> Code:
    """All the parts of ``x``: chunks, or slices one behind another."""
    dim = f"dim={parts[0].attr('dim')}"
    if parts[0].op.takes_part:
        return method(x, "chunk", str(parts[0].attr("parts")), dim)
    sizes = [str(part.attr("stop") - part.attr("start")) for part in parts]
    return method(x, "split", sizes[0] if len(set(sizes)) == 1 else tuple_of(tuple(sizes)), dim)


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
    emit=lambda node, x, writing: Code(f"{parts_code([node], x[0]).text}[{node.attr('index')}]"),
    fold=lambda x, dim, parts, index: np.split(x, parts, dim)[index],
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


def _write_slice(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    """``x.narrow(dim, start, length)``, ``x[:, 1:-1]`` where the dim is open, ``x[:ids.size(1)]`` of a table."""
    (x,) = operands
    dim, start, stop = node.attr("dim"), node.attr("start"), node.attr("stop")
    if table_below(node) is not None and writing.is_open(node, dim):
        return Code(f"{x.at(ATOM)}[{':, ' * dim}: {writing.size(node, dim).text}]")
    if not writing.is_open(node.operands[0], dim):
        return method(x, "narrow", str(dim), str(start), str(stop - start))
    extent = node.operands[0].type.shape[dim]
    first, last = (str(i - extent if from_end(i, extent) else i) for i in (start, stop))
    piece = f"{'' if start == 0 else first}:{'' if stop == extent else last}"
    return Code(f"{x.at(ATOM)}[{':, ' * dim}{piece}]")


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
    emit=_write_slice,
    fold=lambda x, dim, start, stop: x[(slice(None),) * dim + (slice(start, stop),)],
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


def _write_concat(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    return call("torch.cat", tuple_of(tuple(code.text for code in x)), f"dim={node.attr('dim')}")


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
    emit=_write_concat,
    fold=lambda *x, dim: np.concatenate(x, dim),
)


def _pad_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    dim, after = (cast(int, attrs[name]) for name in ("dim", "after"))
    if after < 1:
        raise ShapeError(f"{after} zeros behind dim {dim} of {shapes[0]}")
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = [name + "*" if i == dim else name for i, name in enumerate(names)]
    right = ["padded*" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(right)}", {"padded": shapes[0][dim] + after}


def _pad(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    (x,), dim, after = operands, call.attrs["dim"], call.attrs["after"]
    shape = tuple(after if i == dim else size for i, size in enumerate(x.shape[1:]))
    zeros = np.zeros((len(x), *shape), x.dtype) if isinstance(x, np.ndarray) else t.constant(0.0, shape)
    return t.concat([x, zeros], dim)


def _tie_padding(node: Node, loops: Loops, ties: Ties) -> None:
    """So many zeros, whatever they are behind."""
    after = node.attr("after")
    ties.follow(loops["padded"], (loops[f"d{node.attr('dim')}"],), lambda size: size + after, where(node))


def _write_pad(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    return _padded(node, operands[0], ((node.attr("dim"), 0, node.attr("after")),))


def _padded(node: Node, x: Code, ends: Ends, *value: str) -> Code:
    counts = {dim: (str(before), str(behind)) for dim, before, behind in ends}
    widths = [width for dim in reversed(range(min(counts), node.type.rank)) for width in counts.get(dim, ("0", "0"))]
    return call("F.pad", x.text, tuple_of(tuple(widths)), *value)


pad = Operator(
    "pad",
    _pad_loops,
    "move",
    attrs=("dim", "after"),
    dims_attr="dim",
    memory=HANDED_ON,  # a narrow view of the gradient
    ties=_tie_padding,
    linear=_FIRST,
    evaluate=_pad,
    emit=_write_pad,
    between=with_zeros,
    fold=lambda x, dim, after: np.pad(x, [(0, after if i == dim else 0) for i in range(x.ndim)]),
)


# ---- What stands around, as programs are written; elsewhere it is joined of constants, one dim after the other ----


def _ends(attrs: Attrs) -> Ends:
    return cast("Ends", attrs["ends"])


def _surrounded_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    wider = {dim: shapes[0][dim] + before + behind for dim, before, behind in _ends(attrs)}
    names = [f"d{i}" for i in range(len(shapes[0]))]
    left = [name + "*" if i in wider else name for i, name in enumerate(names)]
    right = [f"wider{i}*" if i in wider else name for i, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(right)}", {f"wider{dim}": size for dim, size in wider.items()}


def _surround(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    (x,) = operands
    for dim, *counts in _ends(call.attrs):
        shapes = [tuple(n if i == dim else size for i, size in enumerate(x.shape[1:])) for n in counts]
        before, behind = (t.constant(float(call.attrs["number"]), shape) for shape in shapes)
        x = t.concat([before, x, behind], dim)
    return x


def _tie_ends(node: Node, loops: Loops, ties: Ties) -> None:
    for dim, before, behind in _ends(node.attrs):
        more = before + behind
        ties.follow(loops[f"wider{dim}"], (loops[f"d{dim}"],), lambda size, more=more: size + more, where(node))


def _write_surrounded(node: Node, operands: Sequence[Code], writing: Writing) -> Code:
    number = node.attr("number")
    return _padded(node, operands[0], _ends(node.attrs), *([f"value={literal(number).text}"] if number else []))


def _says_surrounded(node: Node) -> tuple[tuple[Node, ...], Attrs] | None:
    """One operand of several that are joined, where all others are one number throughout."""
    if not node.op.joins or not node.type.dtype.is_floating:
        return None
    numbers = [_number(operand) for operand in node.operands]
    own = [place for place, number in enumerate(numbers) if number is None]
    known = {number for number in numbers if number is not None}
    if len(own) != 1 or len(known) != 1:
        return None
    (place,), (number,), dim = own, known, cast(int, node.attr("dim"))
    counts = [operand.type.shape[dim] for operand in node.operands]
    x, ends = node.operands[place], {dim: (sum(counts[:place]), sum(counts[place + 1 :]))}
    if x.op is surrounded and x.attr("number") == number and dim not in {one[0] for one in _ends(x.attrs)}:
        ends |= {inner: (before, behind) for inner, before, behind in _ends(x.attrs)}
        (x,) = x.operands
    return (x,), {"ends": tuple((each, *ends[each]) for each in sorted(ends)), "number": number}


def _number(node: Node) -> float | None:
    """The number that a constant is throughout, however it is repeated, moved or cut."""
    while node.op.name in ("expand", "reshape", "permute", "replicate", "partition", "combine"):
        (node,) = node.operands
    array = cast("Constant", node.attr("value")).array if node.is_const else None
    if array is None or not array.size or not (array == array.flat[0]).all():
        return None
    return float(array.flat[0])


surrounded = Operator(
    "surrounded",
    _surrounded_loops,
    "move",
    attrs=("ends", "number"),
    flops_per_point=0,  # its loops are of both sizes, and their product nothing
    memory=HANDED_ON,
    ties=_tie_ends,
    evaluate=_surround,
    says=_says_surrounded,
    emit=_write_surrounded,
    between=lambda node, of: union([of(node.operands[0]), (node.attr("number"),) * 2]),
)

OPS = (chunk, slice_, concat, pad, surrounded)
