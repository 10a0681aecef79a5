"""A PCG as it is written: lowered, folded for inference, with its outline and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ir.dims import Shape
from ir.graph import Graph, Node, View
from ir.mesh import Mesh
from ir.views import is_column, readings
from pdv.emit.fold import fold
from pdv.emit.leaves import Reading
from pdv.emit.lower import lower
from pdv.emit.outline import Item, Run, own_params
from pdv.emit.program import write_outlined

ShapeOf = Callable[[str], Shape]
"""Shape of a stored tensor, by name."""


@dataclass(frozen=True)
class Emission:
    """What is written of a PCG.

    Attributes:
        graph: what the text says.
        mesh: with axes named as in the text.
        whole: the graph before values were computed from weights alone.
        computed: these values, nodes of ``whole``, by the names under which they are stored.
        document: plan.json, of which the text says some things.
    """

    graph: Graph
    mesh: Mesh
    whole: Graph
    computed: Mapping[str, Node]
    document: Mapping[str, object]
    _memo: dict[str, tuple[str, tuple[Item, ...]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, pcg: Graph, mesh: Mesh, document: Mapping[str, object] | None = None, *, train: bool) -> Emission:
        """As ``pdv.emit.package.emit_package`` writes it."""
        whole, named = lower(pcg, mesh)
        graph, computed = (whole, {}) if train else fold(whole, named)
        return cls(graph if computed else whole, named, whole, computed, document or {})

    def text(self, shape_of: ShapeOf) -> str:
        """model.py."""
        return self._written(shape_of)[0]

    def items(self, shape_of: ShapeOf) -> tuple[Item, ...]:
        """The outline of the text."""
        return self._written(shape_of)[1]

    def _written(self, shape_of: ShapeOf) -> tuple[str, tuple[Item, ...]]:
        if "written" not in self._memo:
            shapes = stored_shapes(self.graph, shape_of)
            self._memo["written"] = write_outlined(self.graph, self.mesh, self.document, shapes)
        return self._memo["written"]

    def alike(self, shape_of: ShapeOf) -> list[tuple[Node, Node]]:
        """Nodes that have one text, or one value, and so one size."""
        reading = Reading(self.graph)
        pairs: list[tuple[Node, Node]] = []
        for item in self.items(shape_of):
            if isinstance(item, Run):
                groups = [(*block, *own_params(reading, block)) for block in item.blocks]
                for group, incoming in zip(groups[1:], item.incoming[1:], strict=True):
                    pairs += zip((*groups[0], *item.incoming[0]), (*group, *incoming), strict=True)
        params = {param.attr("source"): param for param in self.graph.params}
        return pairs + [(node, params[name]) for name, node in self.computed.items()]


def stored_shapes(graph: Graph, shape_of: ShapeOf) -> dict[str, Shape]:
    """Shape of each stored tensor that a graph reads; asked for only where a view does not tell it."""
    found: dict[str, Shape] = {}
    for node in graph.params:
        if is_column(node):
            found[str(node.attr("source"))] = node.type.shape[:1]
        for reading in readings(node):
            if reading.source not in found:
                before = shapes_before(reading.view, reading.shape, reading.source, shape_of)
                found[reading.source] = before[0]
    return found


def shapes_before(view: View, after: Shape, source: str, shape_of: ShapeOf) -> list[Shape]:
    """Shapes before each step of a view, and ``after`` all."""
    shapes: list[Shape] = [after]
    for at in range(len(view) - 1, -1, -1):
        shape = shapes[0]
        match view[at]:
            case ("permute", perm):
                shape = tuple(shape[perm.index(dim)] for dim in range(len(perm)))
            case ("chunk", dim, parts, _):
                shape = (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])
            case ("slice", dim, _, _, extent):
                shape = (*shape[:dim], extent, *shape[dim + 1 :])
            case _:  # a reshape: only the stored tensor tells
                shape = _shape_after(shape_of(source), view[:at])
        shapes.insert(0, shape)
    return shapes


def _shape_after(shape: Shape, view: Sequence[tuple[object, ...]]) -> Shape:
    sizes = list(shape)
    for step in view:
        match step:
            case ("permute", tuple(perm)):
                sizes = [sizes[dim] for dim in perm]
            case ("chunk", int(dim), int(parts), _):
                sizes[dim] //= parts
            case ("slice", int(dim), int(start), int(stop), _):
                sizes[dim] = stop - start
            case ("reshape", tuple(after)):
                sizes = list(after)
            case _:
                raise AssertionError(f"no such view step: {step}")
    return tuple(sizes)
