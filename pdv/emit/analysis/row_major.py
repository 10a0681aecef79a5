"""Values that a program lays out in rows, once, because more than one of their readers would do so itself.

What moves the innermost dim, such as ``x.flatten(2).transpose(1, 2)`` of patches, is a view; functions of its elements
lie as it does (torch's TensorIterator), and hand that on along all residual connections. There products and norms copy
what they read, forward and again backward, and sums read across rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.graph import Graph, Node
from ir.memory.layout import Layout, fresh
from ir.memory.local import Local
from pdv.pcg.norms import STATISTICS

_FEWEST = 2  # readers that want rows: one copies as much as is copied here


def laid_in_rows(graph: Graph) -> frozenset[Node]:
    """The nodes of a graph whose values are best laid out in rows before they are read.

    Their innermost dim has moved, and nothing reads them that takes them as they are, or moves it back.
    """
    asked: dict[Node, Layout] = {}  # as nodes lie where none is laid out
    for node in graph.nodes:
        asked[node] = _layout(node, asked)
    left = {node for _, node in (*graph.outputs, *graph.updates)}
    lies: dict[Node, Layout] = {}
    chosen: set[Node] = set()
    for node in graph.nodes:
        lies[node] = _layout(node, lies)
        if node in left or not _is_moved(lies[node]) or node in graph.fixed:
            continue
        readers = graph.users[node]
        if not any(_takes_any(reader, lies[node]) for reader in readers):
            wanting = [reader for reader in readers if _wants_rows(reader, node, asked)]
            if len(wanting) >= _FEWEST:
                chosen.add(node)
                lies[node] = fresh(node.type.shape)
    return frozenset(chosen)


def _layout(node: Node, lies: Mapping[Node, Layout]) -> Layout:
    """How a result lies, of sizes over all ranks: which dim is innermost does not depend on how others are cut."""
    shape, operands = node.type.shape, tuple(lies[operand] for operand in node.operands)
    if node.op.kind == "parallel":
        return operands[0] if node.op.transition.only_names else fresh(shape)
    if node.op.strides is not None:
        return _as_view(node, operands[0]) or fresh(shape)
    return fresh(shape) if node.is_leaf else Local(node, operands, fresh(shape), node.type.dtype.itemsize).layout


def _is_moved(layout: Layout) -> bool:
    """Whether elements of a row lie apart, though none is left out."""
    return bool(layout.shape) and layout.shape[-1] > 1 and layout.strides[-1] != 1 and layout.dense


def _takes_any(reader: Node, layout: Layout) -> bool:
    """True of a window, which takes channels innermost, too, and of a view that moves the rows' elements together."""
    if reader.op.kind == "stencil":
        return True
    read = _as_view(reader, layout)
    return read is not None and not _is_moved(read)


def _wants_rows(reader: Node, node: Node, lies: Mapping[Node, Layout]) -> bool:
    """Whether a reader copies what does not lie in rows, or reads it beside what does."""
    if reader.op.strides is not None:
        return _as_view(reader, lies[node]) is None
    if reader.op.kind == "map":
        others = [other for other in reader.operands if other is not node and other.type.shape == node.type.shape]
        return any(lies[other].contiguous for other in others)
    if reader.op.kind == "contraction":
        return reader.op.is_dense and node.type.rank > 2  # others take matrices either way
    return reader.op.kind == "row" and reader.op not in STATISTICS


def _as_view(reader: Node, layout: Layout) -> Layout | None:
    """How a view of what lies so does; None of what is none, or has to be copied."""
    strides = reader.op.strides(reader.attrs, layout, reader.type.shape) if reader.op.strides is not None else None
    return None if strides is None else Layout(reader.type.shape, strides)
