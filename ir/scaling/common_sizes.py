"""One assignment of small sizes to several programs, and the programs rebuilt at these; ``scale`` chooses one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.dims import Loops, Shape
from ir.evaluation.id_ranges import Ranges, are_computed, id_ranges, made_of
from ir.graph import Graph, Node, View, ViewStep, param_view
from ir.mesh import Mesh
from ir.ops.movement import matched_dims
from ir.scaling.size_factors import Factors
from ir.scaling.ties import Dims, Ties, join_sizes, scaled_start, slice_sizes
from ir.sharding import Shard
from ir.types import DType, TensorType
from ir.verify import infer_shardings, node_splits
from ir.views import Base, Reading, readings, rest_of_view


@dataclass(frozen=True, slots=True)
class Small:
    """A pair of programs at small sizes, whose parameters read their bases whole.

    Attributes:
        graphs: the programs, in the order given.
        mesh: the ranks to simulate.
        stored: for each stored tensor what its readers share, at small size.
        ranges: inputs of integers -> from where they are drawn.
        note: what was changed, in words; empty if nothing.
        nodes: nodes of the programs given -> what they became.
        loops: small nodes -> the loop nest at the true sizes.
    """

    graphs: tuple[Graph, ...]
    mesh: Mesh
    stored: Mapping[str, Base]
    ranges: Ranges
    note: str
    nodes: Mapping[Node, Node]
    loops: Mapping[Node, Loops]

    @property
    def elements(self) -> int:
        """Of all nodes on all ranks."""
        return self.mesh.num_devices * sum(node.type.num_elements for graph in self.graphs for node in graph.nodes)


Alike = Sequence[tuple[Node, Node]]
"""Nodes of one shape that are to get the same sizes; loops too, where the operator is the same."""


def is_parallel(graph: Graph) -> bool:
    """Whether a graph is a PCG."""
    return any(node.op.kind == "parallel" or node.attrs.get("stored") for node in graph.nodes)


class StuckError(Exception):
    """A program that came out with other sizes than were chosen, or two of whose nodes became one."""


@dataclass
class CommonSizes(Ties):
    """Collects what must agree (``unify``), chooses sizes for a mesh (``on``), rebuilds graphs at these (``rebuilt``).

    ``symbols`` are digests of the constants that become inputs; None: none does, and all may lose their tails.
    """

    found: Mapping[str, Base]
    mesh: Mesh
    small_mesh: Mesh
    symbols: frozenset[str] | None
    alike: Alike = ()
    chosen: dict[int, int] | None = None
    _trails: dict[Hashable, list[Dims]] = field(default_factory=dict)
    _shared: dict[tuple[str, str], Dims] = field(default_factory=dict)
    _limits: dict[Node, list[Factors]] = field(default_factory=dict)
    _cuts: list[tuple[Factors, tuple[bool, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.are_run = self.symbols is None

    def unify(self, graphs: Sequence[Graph]) -> None:
        """See to it that sizes that are one change together."""
        for graph in graphs:
            for node in graph.nodes:
                self.dims[node] = self._leaf_dims(node) if node.is_leaf else self._node_dims(node)
            for name, node in (*graph.outputs, *graph.updates):
                self._unify_all(self.dims[node], self._shared.setdefault(("output", name), self.dims[node]))
            if is_parallel(graph):
                self._find_cuts(graph)
        for one, other in self.alike:
            self._make_alike(one, other)
        self._tie_repeated(graphs)

    def on(self, small_mesh: Mesh, turn: int) -> CommonSizes:
        """The same with small sizes chosen for a mesh.

        Raises:
            ValueError: if there are none.
        """
        atoms = self.atoms.copy()
        for factors, axes in self._cuts:
            small, true = (math.prod(compress(of.shape, axes)) for of in (small_mesh, self.mesh))
            atoms.require(factors, small, true)
        return replace(self, small_mesh=small_mesh, atoms=atoms, chosen=atoms.choose(turn, self.dims.values()))

    @property
    def elements(self) -> int:
        """Of all nodes on all ranks, at the sizes chosen."""
        return self.small_mesh.num_devices * sum(math.prod(self._shape(dims)) for dims in self.dims.values())

    # ---- What must agree ----

    def _make_alike(self, one: Node, other: Node) -> None:
        self._unify_all(self.dims[one], self.dims[other])
        if one.op.name != other.op.name:
            return
        for loop, factors in self.loops.get(one, {}).items():
            self.atoms.unify(factors, self.loops[other][loop])
        if one.is_param:
            for left, right in zip(readings(one), readings(other), strict=True):
                self._unify_all(self._base_dims(left), self._base_dims(right))

    def _tie_repeated(self, graphs: Sequence[Graph]) -> None:
        """Sizes that repeating makes, and that no leaf and no result has, are one in all programs: nothing else ties
        a dim that is summed away again.
        """
        ends = [node for graph in graphs for node in (*graph.roots, *(x for x in graph.nodes if x.is_leaf))]
        held = {atom for node in ends for factors in self.dims[node] for atom in self.atoms.flat(factors)}
        for node in (node for graph in graphs for node in graph.nodes if node.op.repeats):
            sizes = zip(node.operands[0].type.shape, node.type.shape, self.dims[node], strict=True)
            for before, after, factors in sizes:
                if before == 1 < after and held.isdisjoint(self.atoms.flat(factors)):
                    self.share(("repeated", after), factors)

    def _unify_all(self, left: Dims, right: Dims) -> None:
        for a, b in zip(left, right, strict=True):
            self.atoms.unify(a, b)

    def _leaf_dims(self, node: Node) -> Dims:
        if node.is_param:
            return self._param_dims(node)
        name = str(node.attr("name") if node.is_input else node.attr("value"))
        dims = self._shared.setdefault((node.op.name, name), self.fresh(node.type.shape))
        if node.is_const and self.symbols is not None and not self._is_symbol(node):
            for factors in dims:
                self.atoms.keep(factors)  # its values count, so all of them stay
        return dims

    def is_known(self, node: Node) -> bool:
        """A symbol stands for all values that a constant of its type may have."""
        return node.is_const and not self._is_symbol(node)

    def _is_symbol(self, node: Node) -> bool:
        return self.symbols is not None and node.is_const and node.attr("value").digest in self.symbols

    def _param_dims(self, node: Node) -> Dims:
        parts = [self._trail(reading, self._base_dims(reading)) for reading in readings(node)]
        view = param_view(node)
        if not view or view[0][0] != "concat":
            return parts[0][-1]
        if view not in self._trails:
            self._trails[view] = self._follow(self._join([part[-1] for part in parts], view[0][1]), view[1:])
        return self._trails[view][-1]

    def _base_dims(self, reading: Reading) -> Dims:
        shape = self.found[reading.source].shape
        return self._shared.setdefault(("param", reading.source), self.fresh(shape))

    def _trail(self, reading: Reading, dims: Dims) -> list[Dims]:
        """Dims of the base, then after each further step of a view."""
        if reading not in self._trails:
            self._trails[reading] = self._follow(dims, rest_of_view(reading, self.found[reading.source]))
        return self._trails[reading]

    def _follow(self, dims: Dims, steps: View) -> list[Dims]:
        trail = [dims]
        for step in steps:
            trail.append(self._view(trail[-1], step))
        return trail

    def _join(self, parts: Sequence[Dims], dim: int) -> Dims:
        """Dims of several views joined along ``dim``, as those of the operator ``concat``."""
        first = parts[0]
        for other in parts[1:]:
            self._unify_all((*first[:dim], *first[dim + 1 :]), (*other[:dim], *other[dim + 1 :]))
        joined = join_sizes(self.atoms, [part[dim] for part in parts], [self._extents(part)[dim] for part in parts])
        return (*first[:dim], joined, *first[dim + 1 :])

    def _view(self, dims: Dims, step: Any) -> Dims:
        """Dims after one view step."""
        match step:
            case ("permute", perm):
                return tuple(dims[i] for i in perm)
            case ("chunk", dim, parts, _):
                piece = math.prod(self.atoms.extents[a] for a in self.atoms.flat(dims[dim])) // parts
                inner, outer = self.atoms.new(piece), self.atoms.new(parts)
                self.atoms.keep((outer,))
                self.atoms.unify(dims[dim], (outer, inner))
                return (*dims[:dim], (inner,), *dims[dim + 1 :])
            case ("slice", dim, start, stop, extent):
                piece_of = (self.atoms.new(stop - start),)
                slice_sizes(self.atoms, dims[dim], piece_of, (extent, start, stop))
                return (*dims[:dim], piece_of, *dims[dim + 1 :])
            case ("reshape", shape):
                after = self.fresh(shape)
                for left, right in matched_dims(self._extents(dims), shape):
                    self.atoms.unify(_join(dims, left), _join(after, right))
                return after
        raise AssertionError(f"no such view step: {step}")

    def _extents(self, dims: Dims) -> Shape:
        return tuple(math.prod(self.atoms.extents[a] for a in self.atoms.flat(factors)) for factors in dims)

    def _node_dims(self, node: Node) -> Dims:
        dims = self.tie(node)
        if node.op.kind == "index":
            table = self.loops[node]["v"]
            self._limit(node.operands[1], table)
            if are_computed(node.operands[1]):
                self.atoms.keep(table)
        return dims

    def _limit(self, node: Node, table: Factors) -> None:
        """Integers computed by ``node`` index a table of this many rows."""
        self._limits.setdefault(node, []).append(table)
        for operand in made_of(node):
            if operand.type.dtype is not DType.BOOL:
                self._limit(operand, table)

    def _find_cuts(self, graph: Graph) -> None:
        """Dims and loops, and which axes cut them."""
        shardings = infer_shardings(graph, self.mesh)
        for node in graph.nodes:
            for dim in {state.dim for state in shardings[node] if isinstance(state, Shard)}:
                axes = tuple(state == Shard(dim) for state in shardings[node])
                self._cuts.append((self.dims[node][dim], axes))
            if node.is_leaf or node.op.kind == "parallel":
                continue
            splits = node_splits(node, [shardings[x] for x in node.operands], self.mesh)
            for loop in dict.fromkeys(split.loop for split in splits if split.loop is not None):
                self._cuts.append((self.loops[node][loop], tuple(split.loop == loop for split in splits)))

    # ---- Rebuilding ----

    def rebuilt(self, graphs: Sequence[Graph]) -> Small:
        """The graphs at the chosen sizes (as they are, if none were chosen).

        Raises:
            StuckError: if a node came out with another size, or two that differ became one.
        """
        stored = {
            source: Base(self._shape(self._shared[("param", source)]), 0, base.dtype, base.trainable)
            if self.chosen is not None
            else Base(base.shape, 0, base.dtype, base.trainable)
            for source, base in self.found.items()
        }
        limits: dict[str, int] = {}
        if self.chosen is None:
            self._limit_full(graphs)
        made: dict[Node, Node] = {}
        small = tuple(self._rebuild(graph, made) for graph in graphs)
        for node in self._limits:
            if (leaf := made[node]).is_input:
                limits[leaf.attr("name")] = min(limits.get(leaf.attr("name"), 1 << 30), self._least_table(node))
        note = "" if self.chosen is None else "scaled-down sizes"
        if self.small_mesh != self.mesh:
            note += f" on {self.small_mesh}"
        loops = _true_loops(made, apart=self.symbols is not None)
        return Small(small, self.small_mesh, stored, id_ranges(small[0], limits), note, made, loops)

    def _limit_full(self, graphs: Sequence[Graph]) -> None:
        for graph in graphs:
            for node in graph.nodes:
                if node.op.kind == "index":
                    self._limit(node.operands[1], (self.atoms.new(node.loops.extents["v"]),))

    def _least_table(self, node: Node) -> int:
        return min(self._size(table) for table in self._limits[node])

    def _size(self, factors: Factors) -> int:
        if self.chosen is None:
            return math.prod(self.atoms.extents[a] for a in factors)
        return self.atoms.size(factors, self.chosen)

    def _shape(self, dims: Dims) -> Shape:
        return tuple(self._size(factors) for factors in dims)

    def _rebuild(self, graph: Graph, made: dict[Node, Node]) -> Graph:
        k = Builder()

        def make(node: Node, operands: tuple[Node, ...]) -> Node:
            found = self._rebuild_node(k, node, operands)
            if self.chosen is not None and found.type.shape != self._shape(self.dims[node]):
                raise StuckError(f"{node.op.name} {node.name} does not scale")
            return found

        rebuilt, became = k.rebuild(graph, make)
        made |= became
        return rebuilt

    def _rebuild_node(self, k: Builder, node: Node, operands: tuple[Node, ...]) -> Node:
        shape = node.type.shape if self.chosen is None else self._shape(self.dims[node])
        tensor = TensorType(shape, node.type.dtype)
        if node.is_input:
            return k.input(node.attr("name"), tensor)
        if node.is_param:
            attrs = {**node.attrs, "view": self._rebuild_view(node)}
            return k.param(attrs.pop("name"), tensor, **attrs)  # type: ignore[arg-type]  # each as it was
        if self._is_symbol(node):
            return k.input(f"constant {node.attr('value').digest} {node.type.dtype.value}", tensor)
        if node.is_const:
            return k.const(self._constant(node), node.name, node.type.dtype)
        scaled = node.attrs if self.chosen is None else self.attrs_at(node, operands, shape)
        return k.apply(node.op, operands, scaled, node.name)

    def _rebuild_view(self, node: Node) -> View:
        view = param_view(node)
        parts = [(reading, rest_of_view(reading, self.found[reading.source])) for reading in readings(node)]
        if self.chosen is not None:
            parts = [(reading, self._scale(rest, self._trails[reading])) for reading, rest in parts]
        if not view or view[0][0] != "concat":
            return parts[0][1]
        if self.chosen is None:
            return (("concat", view[0][1], tuple((r.source, rest, r.shape) for r, rest in parts)), *view[1:])
        shapes = [self._shape(self._trails[reading][-1]) for reading, _ in parts]
        joined = tuple((r.source, rest, shape) for (r, rest), shape in zip(parts, shapes, strict=True))
        return (("concat", view[0][1], joined), *self._scale(view[1:], self._trails[view]))

    def _scale(self, steps: View, trail: Sequence[Dims]) -> View:
        """Steps of a view in the sizes chosen, given the dims before and after each."""
        found: list[ViewStep] = []
        for step, (before, after) in zip(steps, pairwise(trail), strict=True):
            match step:
                case ("reshape", _):
                    found.append(("reshape", self._shape(after)))
                case ("slice", dim, start, stop, extent):
                    size = self._size(before[dim])
                    first = scaled_start((extent, start, stop), size)
                    found.append(("slice", dim, first, first + self._size(after[dim]), size))
                case _:
                    found.append(step)
        return tuple(found)

    def _constant(self, node: Node) -> np.ndarray[Any, Any]:
        """The leading block along every atom; indices wrapped into their table."""
        array: np.ndarray[Any, Any] = node.attr("value").array
        if self.chosen is not None:
            atoms = [self.atoms.flat(factors) for factors in self.dims[node]]
            split = array.reshape([self.atoms.extents[a] for dim in atoms for a in dim])
            block = split[tuple(slice(self.chosen[a]) for dim in atoms for a in dim)]
            array = block.reshape(self._shape(self.dims[node]))
        return array % self._least_table(node) if node in self._limits and array.dtype.kind in "iu" else array


def _true_loops(made: Mapping[Node, Node], *, apart: bool) -> dict[Node, Loops]:
    """Small node -> the loop nest of what it was made of.

    Raises:
        StuckError: if two nodes that differ became the same and are to stay ``apart``: what tells them apart would
            not be proved.
    """
    origins: dict[str, Node] = {}
    for node, small in made.items():
        if origins.setdefault(small.digest, node).digest != node.digest and apart:
            raise StuckError(f"{node} and {origins[small.digest]} are one at small sizes")
    return {small: node.loops for node, small in made.items()}


def _join(dims: Dims, which: Sequence[int]) -> Factors:
    return tuple(atom for i in which for atom in dims[i])
