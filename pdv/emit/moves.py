"""reshape, expand, permute, chunk and slice as one would write them, with cut and batch sizes left open.

The same text runs on a shard and on the whole: a size that an axis cuts is written ``-1`` or ``12 // tp.size``.
"""

from __future__ import annotations

from collections.abc import Callable

from ir.graph import Node
from ir.ops.movement import matched_dims
from pdv.emit.code import Code, method, tuple_of
from pdv.emit.shapes import Shapes

BatchSize = Callable[[Node], Code | None]
"""How the program says the batch size at a node, where it can."""


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


def slice_code(node: Node, x: Code) -> Code:
    """``x.narrow(dim, start, length)``."""
    start, stop = node.attr("start"), node.attr("stop")
    return method(x, "narrow", str(node.attr("dim")), str(start), str(stop - start))


def expand_code(node: Node, x: Code, shapes: Shapes, batch_size: Code | None) -> Code:
    """``x.expand(-1, -1, 4, -1)``: dims that stay are -1, and the batch dim follows the input's."""
    sizes = []
    for dim, (before, after) in enumerate(zip(node.operands[0].type.shape, node.type.shape, strict=True)):
        if before == after:
            sizes.append("-1")
        elif shapes.is_batch(node, dim) and batch_size is not None:
            sizes.append(batch_size.text)
        else:
            sizes.append(str(after))
    return method(x, "expand", *sizes)


def reshape_code(node: Node, x: Code, shapes: Shapes) -> Code:
    """``unflatten``, ``flatten``, ``squeeze`` or ``unsqueeze`` where one of them says it, else ``reshape``."""
    before, after = node.operands[0].type.shape, node.type.shape
    runs = [(s, t) for s, t in matched_dims(before, after) if len(s) != 1 or len(t) != 1]
    if len(runs) == 1:
        found = _single(node, x, shapes, *runs[0])
        if found is not None:
            return found
    return method(x, "reshape", *_sizes(node, shapes, range(len(after))))


def _single(node: Node, x: Code, shapes: Shapes, sources: list[int], targets: list[int]) -> Code | None:
    before, after = node.operands[0].type.shape, node.type.shape
    if len(targets) == len(sources) + 1 == 1 or (len(sources) == 1 and len(targets) == 2 and 1 in _at(after, targets)):
        one = next(dim for dim in targets if after[dim] == 1)
        return method(x, "unsqueeze", str(one))
    if len(sources) == len(targets) + 1 == 1 or (len(targets) == 1 and len(sources) == 2 and 1 in _at(before, sources)):
        one = next(dim for dim in sources if before[dim] == 1)
        return method(x, "squeeze", str(one))
    if len(sources) == 1 and targets:
        return method(x, "unflatten", str(sources[0]), tuple_of(tuple(_sizes(node, shapes, targets))))
    if len(targets) == 1 and sources:
        ends = (sources[0],) if sources[-1] == len(before) - 1 else (sources[0], sources[-1])
        return method(x, "flatten", *map(str, ends))
    return None


def _at(shape: tuple[int, ...], dims: list[int]) -> list[int]:
    return [shape[dim] for dim in dims]


def _sizes(node: Node, shapes: Shapes, dims: range | list[int]) -> list[str]:
    """Sizes of some dims of the result: one is -1, the batch's before any cut one; other cut ones are divided."""
    shape = node.type.shape
    cut = [dim for dim in dims if shapes.cuts(node, dim)]
    open_dims = [dim for dim in dims if shapes.has_batch(node, dim)] or cut
    sizes = []
    for dim in dims:
        if open_dims and dim == open_dims[0]:
            sizes.append("-1")
        else:
            divisors = "".join(f" // {axis}.size" for axis in shapes.cuts(node, dim))
            sizes.append(f"{shape[dim]}{divisors}")
    return sizes
