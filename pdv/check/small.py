"""A source and what is emitted of its PCG at small sizes, as the emitter would have got them.

``ir.scaling.scale`` chooses the sizes. It drops what all readers of a stored tensor share of their views, and lets
constants become equal; here both come back, so that the small program's text has the structure of the large one's.
Entry points: ``small_pair``, ``full_pair``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.dims import Shape
from ir.evaluation.id_ranges import Ranges
from ir.graph import Constant, Graph, Node, View, ViewStep, param_view
from ir.mesh import Mesh
from ir.ops.batch_norm import points_at
from ir.ops.movement import matched_dims
from ir.scaling.scale import Shrinking, Small, shrink
from ir.types import TensorType
from ir.views import Base, bases, readings
from pdv.emit.analysis.constants import STORED, constant_names
from pdv.emit.analysis.fold import value_of
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.staged import over_stages
from pdv.emit.emission import Emission, ShapeOf, shapes_before, stored_shapes
from pdv.emit.program.model_text import write_program
from pdv.frontend.program import Weights

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


@dataclass(frozen=True)
class Pair:
    """A serial program and what is emitted of its PCG, to be run.

    Attributes:
        source, emitted: the programs.
        mesh: the ranks.
        stored: shapes of the tensors that the source reads.
        computed: what the package stores besides, made of those: nodes by stored names.
        ranges: inputs of integers -> from where they are drawn.
        note: at which sizes, in words.
    """

    source: Graph
    emitted: Graph
    mesh: Mesh
    stored: Mapping[str, Shape]
    computed: Mapping[str, Node]
    ranges: Ranges
    note: str
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    twins: Mapping[Node, Node] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Of all values on all ranks, and of the source's."""
        return _elements(self.emitted) * self.mesh.num_devices + _elements(self.source)

    def own_tensors(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        """What the package stores besides the source's tensors, given these; floats as float64."""
        weights = Weights({name: partial(np.asarray, array) for name, array in stored.items()})
        names = constant_names(Reading(self.emitted))
        found = {STORED + name: node.attr("value").array for node, name in names.items()}
        found |= {name: value_of(node, weights) for name, node in self.computed.items()}
        return {name: x if x.dtype.kind in "iub" else x.astype(np.float64) for name, x in found.items()}

    def text(self, emission: Emission, shape_of: ShapeOf) -> str:
        """model.py of the small program, without its docstring, by the outline of the large one's ``emission``."""
        outlines = over_stages(emission.outlines(shape_of), self.twins)
        return write_program(
            self.emitted, self.mesh, self.shapes, sizes=emission.sizes, outlines=outlines, running=emission.running
        )[0]


def full_pair(source: Graph, emission: Emission, shape_of: ShapeOf) -> Pair:
    """The programs at their own sizes."""
    small = Shrinking((source, emission.whole), emission.mesh).full()
    graphs = (source, emission.whole)
    stored = {name: shape for graph in graphs for name, shape in stored_shapes(graph, shape_of).items()}
    return Pair(source, emission.graph, emission.mesh, stored, emission.computed, small.ranges, "full size")


def small_pair(source: Graph, emission: Emission, shape_of: ShapeOf) -> Pair:
    """The programs at small sizes.

    Raises:
        ShardingError, VerificationError: as ``ir.scaling.scale.shrink``.
    """
    graphs = (source, emission.whole, *([emission.graph] if emission.computed else []))
    small = shrink(graphs, emission.mesh, alike=emission.alike(shape_of))
    views = _Views(bases(graphs), small.stored, shape_of)
    restored = _Restored(small, views, plain=_plain_attention(graphs))
    serial, whole, emitted = (restored.graph(graph) for graph in (graphs[0], graphs[1], graphs[-1]))
    stored = {
        name: views.stored[name] for graph in (serial, whole) for param in graph.params for name in _sources(param)
    }
    computed = {name: restored.made[node] for name, node in emission.computed.items()}
    return Pair(
        serial,
        emitted,
        small.mesh,
        stored,
        computed,
        small.ranges,
        small.note or "full size",
        views.stored,
        restored.made,
    )


def _sources(param: Node) -> tuple[str, ...]:
    return tuple(reading.source for reading in readings(param))


def _elements(graph: Graph) -> int:
    return sum(node.type.num_elements for node in graph.nodes)


def _plain_attention(graphs: Sequence[Graph]) -> set[Node]:
    """Attention that is scaled by the root of its width, and so at other widths too, if all graphs have the same."""
    found: set[Node] = set()
    each: list[list[tuple[float, int]]] = []
    for graph in graphs:
        nodes = [node for node in graph.nodes if node.op.has_scores]
        each.append(sorted((node.attr("scale"), _width(node)) for node in nodes))
        found |= {node for node in nodes if math.isclose(node.attr("scale"), _width(node) ** -0.5, rel_tol=1e-12)}
    return found if all(scales == each[0] for scales in each) else set()


def _width(attention: Node) -> int:
    return attention.operands[0].type.shape[-1]


class _Restored:
    """Twins of large graphs, whose nodes are as many and as distinct as those of the graphs themselves."""

    def __init__(self, small: Small, views: _Views, *, plain: set[Node]) -> None:
        self._small = small
        self._views = views
        self._plain = plain
        self._constants: dict[tuple[str, TensorType], Array] = {}  # as the first graph has them: indices fit all tables
        self.made: dict[Node, Node] = {}

    def graph(self, graph: Graph) -> Graph:
        """The twin of one."""
        k = Builder()

        def make(node: Node, operands: tuple[Node, ...]) -> Node:
            twin = self._small.nodes[node]
            return k.copy(replace(twin, attrs=self._attrs(node, twin, operands)), operands)

        twins, made = k.rebuild(graph, make)
        self.made |= made
        return twins

    def _attrs(self, node: Node, twin: Node, operands: Sequence[Node]) -> dict[str, Any]:
        attrs = dict(twin.attrs)
        if node.is_param:
            attrs["view"] = self._views.of(node, twin)
        elif node.is_const:
            digest = node.attr("value").digest
            array = self._constants.setdefault((digest, twin.type), twin.attr("value").array)
            attrs["value"] = Constant(array, digest)
        elif node in self._plain:
            attrs["scale"] = operands[0].type.shape[-1] ** -0.5
        elif "points" in attrs:
            attrs["points"] = points_at(node, operands[0])
        return attrs


class _Views:
    """The views of small parameters, whole, and the shapes of the small stored tensors that they are of."""

    def __init__(self, found: Mapping[str, Base], small: Mapping[str, Base], shape_of: ShapeOf) -> None:
        self._found = found
        self._small = small
        self._shape_of = shape_of
        self._prefixes: dict[str, View] = {}
        self.stored: dict[str, Shape] = {}

    def of(self, node: Node, twin: Node) -> View:
        """The view of a parameter's small twin, from the stored tensor on."""
        given = param_view(twin)
        whole = readings(node)
        if not given or given[0][0] != "concat":
            return (*self._prefix(whole[0].source, whole[0].view), *given)
        joined = tuple(
            (source, (*self._prefix(source, part.view), *rest), shape)
            for part, (source, rest, shape) in zip(whole, given[0][2], strict=True)
        )
        return (("concat", given[0][1], joined), *given[1:])

    def _prefix(self, source: str, view: View) -> View:
        """What all readers share of their views, at small sizes."""
        if source not in self._prefixes:
            base = self._found[source]
            steps = view[: base.steps]
            before = shapes_before(steps, base.shape, source, self._shape_of)[:-1]
            shape = self._small[source].shape
            scaled: list[ViewStep] = []
            for step, full in zip(reversed(steps), reversed(before), strict=True):
                shape, small = _step_before(step, full, shape)
                scaled.insert(0, small)
            self._prefixes[source] = tuple(scaled)
            self.stored[source] = shape
        return self._prefixes[source]


def _step_before(step: ViewStep, full: Shape, after: Shape) -> tuple[Shape, ViewStep]:
    """(small shape before a step, the step at small size), given the full shape before it and the small one after."""
    match step:
        case ("permute", perm):
            return tuple(after[perm.index(dim)] for dim in range(len(perm))), step
        case ("chunk", dim, parts, _):
            return (*after[:dim], after[dim] * parts, *after[dim + 1 :]), step
        case ("slice", dim, start, stop, extent):
            first = min(start, 1)
            size = first + after[dim] + min(extent - stop, 1)
            return (*after[:dim], size, *after[dim + 1 :]), ("slice", dim, first, first + after[dim], size)
        case ("reshape", shape):
            before = list(full)
            for left, right in matched_dims(full, shape):
                rest = math.prod(after[dim] for dim in right)
                for dim in left[:0:-1]:
                    before[dim] = math.gcd(rest, full[dim])
                    rest //= before[dim]
                if left:
                    before[left[0]] = rest
            return tuple(before), ("reshape", after)
    raise AssertionError(f"no such view step: {step}")
