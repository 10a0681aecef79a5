"""Sizes that change together: the dims of programs as products of atoms, unified node by node.

What holds whatever is done with sizes. Whether they are left open (``sizes.py``) or one small choice of them is looked
for (``common_sizes.py``) is decided there; what one operator asks of them is declared with it (``Operator.ties``,
``Operator.attrs_at``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ir.dims import Group, Shape
from ir.graph import Node
from ir.scaling.size_factors import Atoms, Factors

Dims = tuple[Factors, ...]
Loops = Mapping[str, Factors]

_PREFIX = 16  # a slice up to here keeps its numbers, a longer one its proportions
_SUFFIX = 64  # what a slice leaves out at the end at most, for that to stay: zeros that a dim was padded by


@dataclass(kw_only=True)
class Ties:
    """The atoms of every dim and loop.

    Attributes:
        are_open: True where sizes differ from run to run, False where the same program is wanted at one smaller choice.
        are_run: True where the program is run at the sizes chosen, by functions of other libraries too.
        doubts: places where the numbers of a program at one size do not say what it is at another.
        tables: parts of tables: (the dim of the table, the dim of the part, what the table has at most).
        shared: sizes that programs name alike (``share``).
    """

    are_open: ClassVar[bool] = False
    are_run: bool = False
    atoms: Atoms = field(default_factory=Atoms)
    dims: dict[Node, Dims] = field(default_factory=dict)
    loops: dict[Node, Loops] = field(default_factory=dict)
    doubts: list[tuple[Factors, str]] = field(default_factory=list)
    tables: list[tuple[Factors, Factors, int]] = field(default_factory=list)
    shared: dict[Hashable, Factors] = field(default_factory=dict)

    def fresh(self, shape: Shape) -> Dims:
        """Dims of these sizes that nothing else has."""
        return tuple((self.atoms.new(size),) for size in shape)

    def tie(self, node: Node) -> Dims:
        """The dims of a node's result: its loops are unified with the dims of its operands."""
        loops: Loops = {name: (self.atoms.new(extent),) for name, extent in node.loops.extents.items()}
        joined = node.attr("dim") if self.are_open and node.op.joins else None
        for operand, groups in zip(node.operands, node.loops.operands, strict=True):
            for dim, (factors, group) in enumerate(zip(self.dims[operand], groups, strict=True)):
                if group and dim != joined:
                    self.atoms.unify(factors, _product(group, loops))
        self.loops[node] = loops
        found = [_product(group, loops) for group in node.loops.result]
        if joined is not None:
            found[joined] = self.join(node, joined)
        if node.op.ties is not None:
            node.op.ties(node, loops, self)
        return tuple(found)

    def attrs_at(self, node: Node, operands: Sequence[Node], shape: Shape) -> dict[str, Hashable]:
        """The attributes of a node over ``operands`` of other sizes, where its result is of ``shape``.

        Raises:
            ShapeError: if the operator does not exist at these sizes.
        """
        attrs = {**node.attrs, "shape": shape} if node.op.names_shape else dict(node.attrs)
        return attrs | (node.op.attrs_at(node, operands, shape, self.are_open) if node.op.attrs_at else {})

    def keep(self, factors: Factors, reason: str) -> None:  # noqa: ARG002  # told where sizes are open
        """These must not change; ``reason`` says why, in words."""
        self.atoms.keep(factors)

    def follow(self, out: Factors, inputs: Sequence[Factors], compute: Callable[..., int], where: str) -> None:  # noqa: ARG002
        """``out`` is ``compute`` of the sizes of ``inputs``, at the node that ``where`` names."""
        self.atoms.follows(out[0], inputs, compute)

    def is_known(self, node: Node) -> bool:
        """Whether it is a constant that has its values whatever sizes become."""
        return node.is_const

    def share(self, key: Hashable, factors: Factors) -> None:
        """All that is told under a key is one size, in whichever program."""
        self.atoms.unify(factors, self.shared.setdefault(key, factors))

    def join(self, node: Node, dim: int) -> Factors:
        """The dim that operands of sizes of their own make together."""
        pieces = [self.dims[x][dim] for x in node.operands]
        flat = {self.atoms.flat(factors) for factors in pieces}
        if len(flat) == 1:
            parts = self.atoms.new(len(pieces))
            self.atoms.keep((parts,))
            return (parts, *pieces[0])
        out = (self.atoms.new(node.type.shape[dim]),)
        self.follow(out, pieces, lambda *sizes: sum(sizes), where(node))
        return out


def _product(group: Group, loops: Loops) -> Factors:
    return tuple(atom for loop in group for atom in loops[loop])


def where(node: Node) -> str:
    """A node, in messages."""
    return f"{node.op.name} {node.name}".strip()


def doubt_terms(node: Node, loops: Loops, ties: Ties) -> None:
    """A sum has as many terms as the model has at one size; means, in contrast, count what they run over."""
    ties.doubts += [(loops[loop], f"{where(node)} sums over it") for loop in node.loops.contracted]


def join_sizes(atoms: Atoms, pieces: Sequence[Factors], sizes: Sequence[int]) -> Factors:
    """The dim that pieces of these sizes make together: multiples of a large unit stay so, others add up."""
    unit = _unit(*sizes, sum(sizes))
    if unit == 1:
        joined = atoms.new(sum(sizes))
        atoms.follows(joined, pieces, lambda *each: sum(each))
        return (joined,)
    step = atoms.new(unit)
    for factors, size in zip(pieces, sizes, strict=True):
        count = atoms.new(size // unit)
        atoms.keep((count,))
        atoms.unify(factors, (count, step))
    total = atoms.new(sum(sizes) // unit)
    atoms.keep((total,))
    return (total, step)


def _unit(*numbers: int) -> int:
    """What a slice or a concat counts in: the largest unit of all its numbers, or one where that keeps too many."""
    unit = math.gcd(*numbers)
    return unit if max(numbers) // unit <= max(_PREFIX, 2 * unit) else 1


def slice_sizes(atoms: Atoms, whole: Factors, piece: Factors, numbers: tuple[int, ...]) -> None:
    """A slice in a large unit scales with it; one near an end keeps its numbers (extent, start, stop)."""
    extent, start, stop = numbers
    unit = _unit(extent, start, stop)
    if unit > 1:
        step, count, part = atoms.new(unit), atoms.new(extent // unit), atoms.new((stop - start) // unit)
        atoms.keep((count, part))
        atoms.unify(whole, (count, step))
        atoms.unify(piece, (part, step))
    elif stop == extent and start <= _PREFIX:
        atoms.at_least(whole, start + 2)
        atoms.follows(piece[0], [whole], lambda size: size - start)
    elif start == 0 and extent - stop <= _SUFFIX < stop:
        atoms.at_least(whole, extent - stop + 1)
        atoms.follows(piece[0], [whole], lambda size: size - (extent - stop))
    else:
        atoms.keep(piece)
        atoms.at_least(whole, stop)


def scaled_start(numbers: tuple[int, ...], size: int) -> int:
    """Where the slice (extent, start, stop) starts when the dim has another size."""
    extent, start, stop = numbers
    unit = _unit(extent, start, stop)
    return start // unit * (size // (extent // unit)) if unit > 1 else start
