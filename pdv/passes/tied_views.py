"""One parameter for each stored tensor that changes as a whole: views of it become operators.

Trained views that share elements (a weight used as it is and transposed) are no parameters of their own, for each would
be trained apart. Views of a buffer that the program overwrites would each keep what the buffer held at first.
Entry points: ``untangle``, ``whole_buffers``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ir.builder import Builder
from ir.dims import Shape
from ir.graph import Graph, Node, View, is_column, param_view
from ir.types import TensorType
from ir.views import Reading, box, common_steps, overlap, readings, shape_before, sources_of, view_calls


def untangle(graph: Graph, stored: Mapping[str, Shape]) -> Graph:
    """The same graph, with overlapping views of stored tensors made by operators.

    stored: the shapes of stored tensors, where views of other shapes do not tell.
    """
    return _made_by_operators(graph, _tangle(graph, stored))


def whole_buffers(graph: Graph) -> Graph:
    """The same graph, with each buffer that it overwrites read through one parameter."""
    return _made_by_operators(graph, _views_of_buffers(graph))


def check_buffers(graph: Graph) -> None:
    """Raises AssertionError if a buffer that is overwritten would be stored otherwise than as what overwrites it."""
    views = _views_of_buffers(graph)
    assert not views, f"overwritten, and stored in views: {list(views)}"


def _made_by_operators(graph: Graph, tangled: Mapping[Node, TensorType]) -> Graph:
    """The graph with ``tangled`` parameters made by operators on what is stored, which is of the type given."""
    if not tangled:
        return graph
    k = Builder()
    bases: dict[str, Node] = {}

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if node not in tangled:
            return k.copy(node, operands)
        source, base = str(node.attr("source")), tangled[node]
        if source not in bases:
            bases[source] = k.param(source, base, source=source, trainable=bool(node.attr("trainable")))
        return _view(k, bases[source], param_view(node))

    return k.rebuild(graph, make)[0]


def _tangle(graph: Graph, stored: Mapping[str, Shape]) -> dict[Node, TensorType]:
    """Trained parameters of stored tensors of which two share an element, with the type of what is stored."""
    sources: dict[str, list[tuple[Node, Reading]]] = {}
    for param in graph.params:
        if param.attr("trainable"):
            for reading in readings(param):
                sources.setdefault(reading.source, []).append((param, reading))
    found: dict[Node, TensorType] = {}
    for source, readers in sources.items():
        shared = len(common_steps([reading.view for _, reading in readers])) if len(readers) > 1 else 0
        parts = [box(reading._replace(view=reading.view[shared:])) for _, reading in readers]
        if any(overlap(a, b) for a, b in itertools.combinations(parts, 2)):
            shapes = {shape_before(reading.shape, reading.view) for _, reading in readers} - {None}
            shapes = shapes or {stored.get(source)} - {None}
            if len(shapes) == 1 and not any(_join(param) for param, _ in readers):
                (shape,) = shapes
                assert shape is not None
                found |= {param: TensorType(shape, param.type.dtype) for param, _ in readers}
    return found


def _views_of_buffers(graph: Graph) -> dict[Node, TensorType]:
    """Parameters that read a buffer which is overwritten, unless its one reader holds it as it is."""
    found: dict[Node, TensorType] = {}
    readers_of: dict[str, dict[Node, None]] = {}
    for param in graph.params:
        for source in sources_of(param):
            readers_of.setdefault(source, {})[param] = None
    for name, value in graph.updates:
        readers = readers_of.get(name, {})
        if len(readers) > 1 or any(param_view(param) and not is_column(param) for param in readers):
            found |= dict.fromkeys(readers, value.type)
    return found


def _join(param: Node) -> bool:
    view = param_view(param)
    return bool(view) and view[0][0] == "concat"


def _view(k: Builder, node: Node, view: View) -> Node:
    """A view as operators."""
    for op, attrs in view_calls(view):
        node = k.apply(op, (node,), attrs)
    return node
