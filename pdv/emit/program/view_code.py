"""reshape, expand, permute, chunk and slice as one would write them, with cut and open sizes left open.

The same text runs on a shard and on the whole: a size that an axis cuts is written ``-1`` or ``12 // tp.size``, one
that differs from run to run ``-1`` or ``x.size(0)``.
"""

from __future__ import annotations

from ir.graph import Node
from ir.ops.movement import from_end, matched_dims, table_below
from pdv.emit.program.code import ATOM, Code, method, tuple_of
from pdv.emit.program.size_code import SizeCode


def permute_code(node: Node, x: Code) -> Code:
    """``x.transpose(1, 2)`` where two dims change places, else ``x.permute(...)``."""
    perm: tuple[int, ...] = node.attr("perm")
    moved = [dim for dim, source in enumerate(perm) if dim != source]
    if len(moved) == 2:
        return method(x, "transpose", *map(str, moved))
    return method(x, "permute", *map(str, perm))


def chunks_code(node: Node, x: Code) -> Code:
    """All the parts that ``node`` is one of."""
    return method(x, "chunk", str(node.attr("parts")), f"dim={node.attr('dim')}")


def slice_code(node: Node, x: Code, sizes: SizeCode) -> Code:
    """``x.narrow(dim, start, length)``, ``x[:, 1:-1]`` where the dim is open, ``x[:ids.size(1)]`` of a table."""
    dim, start, stop = node.attr("dim"), node.attr("start"), node.attr("stop")
    if table_below(node) is not None and sizes.shapes.is_open(node, dim):
        return Code(f"{x.at(ATOM)}[{':, ' * dim}: {sizes.local(node, dim).text}]")
    if not sizes.shapes.is_open(node.operands[0], dim):
        return method(x, "narrow", str(dim), str(start), str(stop - start))
    extent = node.operands[0].type.shape[dim]
    first, last = (str(i - extent if from_end(i, extent) else i) for i in (start, stop))
    piece = f"{'' if start == 0 else first}:{'' if stop == extent else last}"
    return Code(f"{x.at(ATOM)}[{':, ' * dim}{piece}]")


def expand_code(node: Node, x: Code, sizes: SizeCode) -> Code:
    """``x.expand(-1, -1, 4, -1)``: dims that stay are -1."""
    near = [(node.operands[0], x)]
    pairs = zip(node.operands[0].type.shape, node.type.shape, strict=True)
    written = ["-1" if before == after else sizes.local(node, d, near).text for d, (before, after) in enumerate(pairs)]
    return method(x, "expand", *written)


def reshape_code(node: Node, x: Code, sizes: SizeCode) -> Code:
    """``unflatten``, ``flatten``, ``squeeze`` or ``unsqueeze`` where one of them says it, else ``reshape``."""
    before, after = node.operands[0].type.shape, node.type.shape
    runs = [(s, t) for s, t in matched_dims(before, after) if len(s) != 1 or len(t) != 1]
    if len(runs) == 1:
        found = _single(node, x, sizes, *runs[0])
        if found is not None:
            return found
    return method(x, "reshape", *_sizes(node, x, sizes, range(len(after))))


def _single(node: Node, x: Code, sizes: SizeCode, sources: list[int], targets: list[int]) -> Code | None:
    before, after = node.operands[0].type.shape, node.type.shape
    if len(targets) == len(sources) + 1 == 1 or (len(sources) == 1 and len(targets) == 2 and 1 in _at(after, targets)):
        one = next(dim for dim in targets if after[dim] == 1)
        return method(x, "unsqueeze", str(one))
    if len(sources) == len(targets) + 1 == 1 or (len(targets) == 1 and len(sources) == 2 and 1 in _at(before, sources)):
        one = next(dim for dim in sources if before[dim] == 1)
        return method(x, "squeeze", str(one))
    if len(sources) == 1 and targets:
        return method(x, "unflatten", str(sources[0]), tuple_of(tuple(_sizes(node, x, sizes, targets))))
    if len(targets) == 1 and sources:
        ends = (sources[0],) if sources[-1] == len(before) - 1 else (sources[0], sources[-1])
        return method(x, "flatten", *map(str, ends))
    return None


def _at(shape: tuple[int, ...], dims: list[int]) -> list[int]:
    return [shape[dim] for dim in dims]


def _sizes(node: Node, x: Code, sizes: SizeCode, dims: range | list[int]) -> list[str]:
    """Sizes of some dims of the result: one is -1, an open one before any cut one; other cut ones are divided."""
    shapes = sizes.shapes
    left = [dim for dim in dims if shapes.is_open(node, dim)] or [dim for dim in dims if shapes.cuts(node, dim)]
    near = [(node.operands[0], x)]
    return ["-1" if dim in left[:1] else sizes.local(node, dim, near).text for dim in dims]
