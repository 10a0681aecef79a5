"""Which sizes of one program change together, and the same program at other sizes of its inputs.

Sizes are unified over the nodes (``atoms.py``). Parameters and constants have the sizes that they have, and so has all
that must agree with them; what is left of the inputs' dims is open. Entry points: ``Sizes`` and ``Sizes.resized``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ir.builder import Builder
from ir.dims import Shape
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.ops.parts import table_below
from ir.scaling.size_factors import Factors
from ir.scaling.ties import Dims, Ties
from ir.types import TensorType


@dataclass(frozen=True, slots=True)
class _Relation:
    """``out == compute(*inputs)``, at a node."""

    out: Factors
    inputs: tuple[Factors, ...]
    compute: Callable[..., int]
    where: str


@dataclass
class Sizes(Ties):
    """Every dim of a program as a product of atoms, each fixed or open.

    Attributes:
        named: sizes that the source leaves open besides the batch, by name: the dims (input, dim) that have each.
    """

    are_open: ClassVar[bool] = True
    graph: Graph
    named: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    _relations: list[_Relation] = field(default_factory=list)
    _reasons: list[tuple[Factors, str]] = field(default_factory=list)
    _tables: dict[Node, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if (table := table_below(node)) is not None:
                self._tables.setdefault(table, set()).add(node.attr("dim"))
        for node in self.graph.nodes:
            self.dims[node] = self._leaf_dims(node) if node.is_leaf else self.tie(node)
        self._tie_batches()
        self._tie_named()
        self._settle()
        self._fix_what_no_input_gives()

    # ---- Questions ----

    def is_open(self, atom: int) -> bool:
        """True if nothing fixes an (unrefined) atom."""
        return not self.atoms.is_kept(atom)

    def open_atoms(self, node: Node, dim: int) -> tuple[int, ...]:
        """The atoms of a dim that nothing fixes."""
        return tuple(atom for atom in self.atoms.flat(self.dims[node][dim]) if self.is_open(atom))

    def why_fixed(self, node: Node, dim: int) -> str:
        """What fixes a dim, in words."""
        atoms = set(self.atoms.flat(self.dims[node][dim]))
        found = (text for factors, text in self._reasons if atoms.intersection(self.atoms.flat(factors)))
        return next(found, "the model reshapes it together with other sizes")

    def doubt(self, atoms: Sequence[int]) -> str | None:
        """Why the numbers do not say how the program goes on with these atoms at other sizes, if they do not."""
        wanted = set(atoms)
        found = (text for factors, text in self.doubts if wanted.intersection(self.atoms.flat(factors)))
        return next(found, None)

    def fix_atom(self, atom: int, reason: str) -> None:
        """Leave an atom as it is, and what follows from it."""
        self.keep((atom,), reason)
        self._settle()

    def fix_others(self, free: Iterable[int]) -> None:
        """Leave all open atoms as they are but ``free`` and what follows from them."""
        moving = set(free)
        grown = True
        while grown:
            grown = False
            for relation in self._relations:
                atoms = {a for factors in relation.inputs for a in self.atoms.flat(factors)}
                outs = set(self.atoms.flat(relation.out))
                if atoms & moving and not outs <= moving:
                    moving |= outs
                    grown = True
        everywhere = {a for dims in self.dims.values() for factors in dims for a in self.atoms.flat(factors)}
        for atom in sorted(everywhere - moving):
            if self.is_open(atom):
                self.keep((atom,), "the source has it fixed")
        self._settle()

    # ---- The program at other sizes ----

    def values(self, changed: Mapping[int, int]) -> dict[int, int]:
        """The size of every unrefined atom, given those that change by themselves.

        Raises:
            ShapeError: if sizes that follow from others then disagree.
        """
        sizes = {a: n for a, n in enumerate(self.atoms.extents) if self.atoms.flat((a,)) == (a,)}
        sizes |= changed
        found = set(changed)
        pending = list(self._relations)
        while pending:
            waiting = [r for r in pending if not self._apply(r, sizes, found)]
            if len(waiting) == len(pending):
                break
            pending = waiting
        for relation in self._relations:
            if self._value(relation, sizes) != self.size(relation.out, sizes):
                raise ShapeError(f"{relation.where} does not follow its operands to other sizes")
        return sizes

    def size(self, factors: Factors, sizes: Mapping[int, int]) -> int:
        """A dim at the sizes given."""
        return math.prod(sizes[atom] for atom in self.atoms.flat(factors))

    def resize(self, changed: Mapping[int, int]) -> tuple[Graph, dict[Node, Node]]:
        """The program where some atoms have other sizes, and what its nodes became.

        Raises:
            ShapeError: if there is no such program.
        """
        sizes = self.values(changed)
        k = Builder()

        def make(node: Node, operands: tuple[Node, ...]) -> Node:
            shape = tuple(self.size(factors, sizes) for factors in self.dims[node])
            made = self._rebuilt(k, node, operands, shape)
            if made.type.shape != shape:
                raise ShapeError(f"{node.op.name} {node.name} gives {list(made.type.shape)}", f"{list(shape)}")
            return made

        return k.rebuild(self.graph, make)

    def _apply(self, relation: _Relation, sizes: dict[int, int], found: set[int]) -> bool:
        """Give the size that follows, if all that it follows from is known; False if it must wait."""
        outs = [atom for atom in self.atoms.flat(relation.out) if self.is_open(atom) and atom not in found]
        if not outs:
            return True
        if any(self.is_open(a) and a not in found for factors in relation.inputs for a in self.atoms.flat(factors)):
            return False
        sizes[outs[0]] = self._value(relation, sizes)  # one atom: others are fixed (_settle)
        found.add(outs[0])
        return True

    def _value(self, relation: _Relation, sizes: Mapping[int, int]) -> int:
        return relation.compute(*(self.size(factors, sizes) for factors in relation.inputs))

    def _rebuilt(self, k: Builder, node: Node, operands: tuple[Node, ...], shape: Shape) -> Node:
        if node.is_input:
            return k.input(node.attr("name"), TensorType(shape, node.type.dtype))
        if node.is_leaf and shape != node.type.shape:  # a table for sizes beyond it, of which only the shape counts
            places = np.ix_(*(np.arange(size) % of for size, of in zip(shape, node.type.shape, strict=True)))
            return k.const(node.attr("value").array[places], node.name, node.type.dtype)
        if node.is_leaf:
            return k.copy(node, ())
        return k.apply(node.op, operands, self.attrs_at(node, operands, shape), node.name)

    # ---- What must agree ----

    def _leaf_dims(self, node: Node) -> Dims:
        dims = self.fresh(node.type.shape)
        if not node.is_input:
            what = f"parameter {node.attr('name')}" if node.is_param else "constant"
            for dim, (factors, size) in enumerate(zip(dims, node.type.shape, strict=True)):
                if dim not in self._tables.get(node, ()):
                    self.keep(factors, f"a {what} of shape {list(node.type.shape)} has {size} there")
        return dims

    def follow(self, out: Factors, inputs: Sequence[Factors], compute: Callable[..., int], where: str) -> None:
        """``out`` is ``compute`` of the sizes of ``inputs``, at the node that ``where`` names."""
        self._relations.append(_Relation(out, tuple(inputs), compute, where))

    def keep(self, factors: Factors, reason: str) -> None:
        """These must not change; ``reason`` says why, in words."""
        self.atoms.keep(factors)
        self._reasons.append((factors, reason))

    def _tie_batches(self) -> None:
        """Rows of several inputs, and what is expanded to as many, are one batch where nothing says otherwise."""
        ranked = [node for node in self.graph.inputs if node.type.rank]
        if not ranked:
            return
        named = {place for places in self.named.values() for place in places}
        first, *others = (node for node in ranked if node is ranked[0] or (node.attr("name"), 0) not in named)
        made = [node for node in self._expand() if self._is_new(node)]
        for node in (*others, *made):
            if node.type.shape[0] == first.type.shape[0] and self._is_loose(self.dims[node][0]):
                self.atoms.unify(self.dims[node][0], self.dims[first][0])

    def _expand(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op.repeats]

    def _tie_named(self) -> None:
        """Dims of a name are one size, and so is what is expanded to as many where nothing says otherwise."""
        inputs = {node.attr("name"): node for node in self.graph.inputs}
        for places in self.named.values():
            first, *others = (self.dims[inputs[name]][dim] for name, dim in places)
            for other in others:
                self.atoms.unify(other, first)
            size = inputs[places[0][0]].type.shape[places[0][1]]
            for node in self._expand():
                for dim, (before, after) in enumerate(zip(node.operands[0].type.shape, node.type.shape, strict=True)):
                    own = self.dims[node][dim]
                    if before == 1 and after == size and self._is_loose(own) and not self._is_from_input(own):
                        self.atoms.unify(own, first)

    def _is_new(self, node: Node) -> bool:
        """True for an expand whose rows no input has."""
        return node.operands[0].type.shape[:1] == (1,) and not self._is_from_input(self.dims[node][0])

    def _is_loose(self, factors: Factors) -> bool:
        """True for an open size of its own, which follows from no other."""
        atoms = self.atoms.flat(factors)
        related = {atom for relation in self._relations for atom in self.atoms.flat(relation.out)}
        return len(atoms) == 1 and self.is_open(atoms[0]) and atoms[0] not in related

    def _is_from_input(self, factors: Factors) -> bool:
        given = {a for node in self.graph.inputs for dim in self.dims[node] for a in self.atoms.flat(dim)}
        return not given.isdisjoint(self.atoms.flat(factors))

    def _settle(self) -> None:
        """What follows from fixed sizes is fixed; what a fixed or divided size follows from is too."""
        changed = True
        while changed:
            changed = False
            for relation in self._relations:
                outs = self.atoms.flat(relation.out)
                free = [f for f in relation.inputs if any(self.is_open(a) for a in self.atoms.flat(f))]
                if free and (len(outs) != 1 or not self.is_open(outs[0])):
                    for factors in free:
                        self.keep(factors, f"{relation.where} joins or takes a part of it, of fixed size")
                    changed = True
                elif not free and any(self.is_open(atom) for atom in outs):
                    self.keep(relation.out, f"{relation.where} gives it this size")
                    changed = True

    def _fix_what_no_input_gives(self) -> None:
        given = {a for node in self.graph.inputs for factors in self.dims[node] for a in self.atoms.flat(factors)}
        given |= {a for relation in self._relations for a in self.atoms.flat(relation.out)}
        for node in self.graph.nodes:
            for factors in self.dims[node]:
                loose = tuple(a for a in self.atoms.flat(factors) if self.is_open(a) and a not in given)
                if loose:
                    self.keep(loose, f"{node.op.name} {node.name} gives it this size")
        self._settle()
