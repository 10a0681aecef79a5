"""The same programs at small sizes, so that proving them costs seconds.

What is proved is proved of the small programs. That it holds for the large ones rests on this: a program names sizes
only in its loops and attributes, and all of them change together here, none to one, and with two or more elements in
every cut block where the size allows.

A serial graph and its PCG get one common assignment of sizes (``atoms.py``), such that every cut still divides.
Attributes and constants follow: a constant keeps its leading block along each atom, so that a causal mask stays one.
Meshes of more than 16 ranks lose factors of their largest axes (an operator takes its degree as a variable).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ir.atoms import Atoms, Factors
from ir.builder import Builder
from ir.dims import Shape
from ir.errors import ShapeError, VerificationError
from ir.graph import Graph, Node, View, ViewStep, param_view
from ir.mesh import Axis, Mesh
from ir.ops.movement import matched_dims
from ir.scale_rules import CONSTRAINTS, SCALED, join_sizes, no_constraint, scaled_start, slice_sizes
from ir.sharding import Shard
from ir.types import TensorType
from ir.verify import infer_shardings, node_splits, split_degrees
from ir.views import Base, Reading, bases, readings, rest_of_view

MOST_RANKS = (16, 8, 4)  # tried in turn: large programs are small enough only on few
FEW_ELEMENTS = 1 << 25  # of all nodes on all ranks: some 0.5 GiB at two trials, and seconds
MOST_ELEMENTS = 1 << 28  # where nothing is smaller

Dims = tuple[Factors, ...]


@dataclass(frozen=True, slots=True)
class Small:
    """A pair of programs at small sizes, whose parameters read their bases whole.

    Attributes:
        graphs: the programs, in the order given.
        mesh: the ranks to simulate.
        stored: for each stored tensor what its readers share, at small size.
        limits: inputs of integers -> the least table that they index.
        note: what was changed, in words.
        nodes: nodes of the programs given -> what they became.
    """

    graphs: tuple[Graph, ...]
    mesh: Mesh
    stored: Mapping[str, Base]
    limits: Mapping[str, int]
    note: str
    nodes: Mapping[Node, Node]


Alike = Sequence[tuple[Node, Node]]
"""Nodes of one shape that are to get the same sizes; loops too, where the operator is the same."""


def shrink(graphs: Sequence[Graph], mesh: Mesh, *, scale: bool = True, alike: Alike = ()) -> Small:
    """The graphs (any number, serial or PCGs for ``mesh``) at small common sizes; as they are if ``scale`` is False.

    Raises:
        ShardingError: if a graph is no legal PCG for ``mesh``.
        VerificationError: if readers of a stored tensor disagree about it, or the programs are large and do not scale.
    """
    found = bases(graphs)
    if not scale:
        return _Sizes(found, mesh, mesh).rebuilt(graphs, "full size")
    for graph in graphs:
        infer_shardings(graph, mesh if _is_parallel(graph) else Mesh(()))  # name nodes and sizes as the user knows them
    smallest: tuple[int, Small] | None = None
    for fewer in dict.fromkeys(fewer_ranks(mesh, most) for most in MOST_RANKS):
        small = _shrunk(graphs, found, mesh, fewer, alike)
        elements = sum(node.type.num_elements for graph in small.graphs for node in graph.nodes)
        elements *= small.mesh.num_devices
        if smallest is None or elements < smallest[0]:
            smallest = elements, small
        if elements <= FEW_ELEMENTS:
            break
    assert smallest is not None
    elements, small = smallest
    if elements > MOST_ELEMENTS:
        raise VerificationError(
            f"at {small.note} the programs are too large to be evaluated ({elements:.1e} elements)",
            f"At most {MOST_ELEMENTS:.1e}",
            "Report which part of the model does not scale down",
        )
    return small


def _shrunk(graphs: Sequence[Graph], found: Mapping[str, Base], mesh: Mesh, fewer: Mesh, alike: Alike) -> Small:
    sizes = _Sizes(found, mesh, fewer, alike)
    try:
        sizes.solve(graphs)
        return sizes.rebuilt(graphs, "scaled-down sizes" + ("" if fewer == mesh else f", {fewer} instead of {mesh}"))
    except (ShapeError, ValueError, _StuckError) as stuck:
        return _Sizes(found, mesh, mesh).rebuilt(graphs, f"full size ({stuck})")


def fewer_ranks(mesh: Mesh, most: int = MOST_RANKS[0]) -> Mesh:
    """``mesh`` with the largest axes divided until it has at most ``most`` ranks; no axis above one vanishes."""
    sizes = list(mesh.shape)
    while math.prod(sizes) > most:
        at = max(range(len(sizes)), key=lambda i: sizes[i])
        factor = next(f for f in range(2, sizes[at] + 1) if sizes[at] % f == 0)
        if factor == sizes[at]:
            break  # primes: nothing smaller divides what they divide
        sizes[at] //= factor
    return Mesh(tuple(Axis(axis.name, size) for axis, size in zip(mesh.axes, sizes, strict=True)))


class _StuckError(Exception):
    """A program that came out with other sizes than were chosen."""


def _is_parallel(graph: Graph) -> bool:
    return any(node.op.kind == "parallel" or node.attrs.get("stored") for node in graph.nodes)


@dataclass
class _Sizes:
    """Collects what must agree (``solve``), then rebuilds graphs at the sizes chosen (``rebuilt``)."""

    found: Mapping[str, Base]
    mesh: Mesh
    small_mesh: Mesh
    alike: Alike = ()
    atoms: Atoms = field(default_factory=Atoms)
    chosen: dict[int, int] | None = None
    _dims: dict[Node, Dims] = field(default_factory=dict)
    _loops: dict[Node, dict[str, Factors]] = field(default_factory=dict)
    _trails: dict[Hashable, list[Dims]] = field(default_factory=dict)
    _shared: dict[tuple[str, str], Dims] = field(default_factory=dict)
    _limits: dict[Node, list[Factors]] = field(default_factory=dict)

    def solve(self, graphs: Sequence[Graph]) -> None:
        """Unify all sizes and choose small ones."""
        for graph in graphs:
            for node in graph.nodes:
                self._dims[node] = self._leaf_dims(node) if node.is_leaf else self._node_dims(node)
            for name, node in (*graph.outputs, *graph.updates):
                self._unify_all(self._dims[node], self._shared.setdefault(("output", name), self._dims[node]))
            if _is_parallel(graph):
                self._require_cuts(graph)
        for one, other in self.alike:
            self._make_alike(one, other)
        self.chosen = self.atoms.choose()

    # ---- What must agree ----

    def _make_alike(self, one: Node, other: Node) -> None:
        self._unify_all(self._dims[one], self._dims[other])
        if one.op.name != other.op.name:
            return
        for loop, factors in self._loops.get(one, {}).items():
            self.atoms.unify(factors, self._loops[other][loop])
        if one.op.name == "param":
            for left, right in zip(readings(one), readings(other), strict=True):
                self._unify_all(self._base_dims(left), self._base_dims(right))

    def _fresh(self, shape: Shape) -> Dims:
        return tuple((self.atoms.new(size),) for size in shape)

    def _unify_all(self, left: Dims, right: Dims) -> None:
        for a, b in zip(left, right, strict=True):
            self.atoms.unify(a, b)

    def _leaf_dims(self, node: Node) -> Dims:
        if node.op.name == "param":
            return self._param_dims(node)
        name = str(node.attr("name") if node.op.name == "input" else node.attr("value"))
        return self._shared.setdefault((node.op.name, name), self._fresh(node.type.shape))

    def _param_dims(self, node: Node) -> Dims:
        parts = [self._trail(reading, self._base_dims(reading)) for reading in readings(node)]
        view = param_view(node)
        if not view or view[0][0] != "concat":
            return parts[0][-1]
        if view not in self._trails:
            self._trails[view] = self._followed(self._joined([part[-1] for part in parts], view[0][1]), view[1:])
        return self._trails[view][-1]

    def _base_dims(self, reading: Reading) -> Dims:
        shape = self.found[reading.source].shape
        return self._shared.setdefault(("param", reading.source), self._fresh(shape))

    def _trail(self, reading: Reading, dims: Dims) -> list[Dims]:
        """Dims of the base, then after each further step of a view."""
        if reading not in self._trails:
            self._trails[reading] = self._followed(dims, rest_of_view(reading, self.found[reading.source]))
        return self._trails[reading]

    def _followed(self, dims: Dims, steps: View) -> list[Dims]:
        trail = [dims]
        for step in steps:
            trail.append(self._viewed(trail[-1], step))
        return trail

    def _joined(self, parts: Sequence[Dims], dim: int) -> Dims:
        """Dims of several views joined along ``dim``, as those of the operator ``concat``."""
        first = parts[0]
        for other in parts[1:]:
            self._unify_all((*first[:dim], *first[dim + 1 :]), (*other[:dim], *other[dim + 1 :]))
        joined = join_sizes(self.atoms, [part[dim] for part in parts], [self._extents(part)[dim] for part in parts])
        return (*first[:dim], joined, *first[dim + 1 :])

    def _viewed(self, dims: Dims, step: Any) -> Dims:
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
                after = self._fresh(shape)
                for left, right in matched_dims(self._extents(dims), shape):
                    self.atoms.unify(_joined(dims, left), _joined(after, right))
                return after
        raise AssertionError(f"no such view step: {step}")

    def _extents(self, dims: Dims) -> Shape:
        return tuple(math.prod(self.atoms.extents[a] for a in self.atoms.flat(factors)) for factors in dims)

    def _node_dims(self, node: Node) -> Dims:
        loops: dict[str, Factors] = {name: (self.atoms.new(extent),) for name, extent in node.loops.extents.items()}
        for operand, groups in zip(node.operands, node.loops.operands, strict=True):
            for factors, group in zip(self._dims[operand], groups, strict=True):
                if group:
                    self.atoms.unify(factors, tuple(a for loop in group for a in loops[loop]))
        self._loops[node] = loops
        CONSTRAINTS.get(node.op.name, no_constraint)(node, loops, self.atoms)
        if node.op.kind == "index":
            self._limit(node.operands[1], loops["v"])
        return tuple(tuple(a for loop in group for a in loops[loop]) for group in node.loops.result)

    def _limit(self, node: Node, table: Factors) -> None:
        """Integers computed by ``node`` index a table of this many rows."""
        self._limits.setdefault(node, []).append(table)
        for operand in node.operands:
            if not operand.type.dtype.is_floating:
                self._limit(operand, table)

    def _require_cuts(self, graph: Graph) -> None:
        shardings = infer_shardings(graph, self.mesh)
        sizes = self.small_mesh.shape
        for node in graph.nodes:
            degrees: dict[int, int] = {}
            for state, size in zip(shardings[node], sizes, strict=True):
                if isinstance(state, Shard):
                    degrees[state.dim] = degrees.get(state.dim, 1) * size
            for dim, degree in degrees.items():
                self.atoms.require(self._dims[node][dim], degree)
            if node.is_leaf or node.op.kind == "parallel":
                continue
            splits = node_splits(node, [shardings[x] for x in node.operands], self.mesh)
            for loop, degree in split_degrees(splits, self.small_mesh).items():
                self.atoms.require(self._loops[node][loop], degree)

    # ---- Rebuilding ----

    def rebuilt(self, graphs: Sequence[Graph], note: str) -> Small:
        """The graphs at the chosen sizes (as they are, if none were chosen)."""
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
            if node.op.name == "input":
                limits[node.attr("name")] = min(limits.get(node.attr("name"), 1 << 30), self._least_table(node))
        return Small(small, self.small_mesh, stored, limits, note, made)

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
        for node in graph.nodes:
            made[node] = self._rebuild_node(k, node, tuple(made[x] for x in node.operands))
            if self.chosen is not None and made[node].type.shape != self._shape(self._dims[node]):
                raise _StuckError(f"{node.op.name} {node.name} does not scale")
        outputs = {name: made[node] for name, node in graph.outputs}
        return k.graph(outputs, {name: made[node] for name, node in graph.updates}, graph.name)

    def _rebuild_node(self, k: Builder, node: Node, operands: tuple[Node, ...]) -> Node:
        shape = node.type.shape if self.chosen is None else self._shape(self._dims[node])
        tensor = TensorType(shape, node.type.dtype)
        if node.op.name == "input":
            return k.input(node.attr("name"), tensor)
        if node.op.name == "param":
            attrs = {**node.attrs, "view": self._rebuild_view(node)}
            return k.param(attrs.pop("name"), tensor, **attrs)  # type: ignore[arg-type]  # each as it was
        if node.op.name == "const":
            return k.const(self._constant(node), node.name, node.type.dtype)
        attrs = dict(node.attrs)
        if self.chosen is not None and node.op.name in SCALED:
            sizes = {loop: self._size(factors) for loop, factors in self._loops[node].items()}
            attrs |= SCALED[node.op.name](node, sizes, shape, operands)
        return k.apply(node.op, operands, attrs, node.name)

    def _rebuild_view(self, node: Node) -> View:
        view = param_view(node)
        parts = [(reading, rest_of_view(reading, self.found[reading.source])) for reading in readings(node)]
        if self.chosen is not None:
            parts = [(reading, self._scaled(rest, self._trails[reading])) for reading, rest in parts]
        if not view or view[0][0] != "concat":
            return parts[0][1]
        if self.chosen is None:
            return (("concat", view[0][1], tuple((r.source, rest, r.shape) for r, rest in parts)), *view[1:])
        shapes = [self._shape(self._trails[reading][-1]) for reading, _ in parts]
        joined = tuple((r.source, rest, shape) for (r, rest), shape in zip(parts, shapes, strict=True))
        return (("concat", view[0][1], joined), *self._scaled(view[1:], self._trails[view]))

    def _scaled(self, steps: View, trail: Sequence[Dims]) -> View:
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
            atoms = [self.atoms.flat(factors) for factors in self._dims[node]]
            split = array.reshape([self.atoms.extents[a] for dim in atoms for a in dim])
            block = split[tuple(slice(self.chosen[a]) for dim in atoms for a in dim)]
            array = block.reshape(self._shape(self._dims[node]))
        return array % self._least_table(node) if node in self._limits and array.dtype.kind in "iu" else array


def _joined(dims: Dims, which: Sequence[int]) -> Factors:
    return tuple(atom for i in which for atom in dims[i])
