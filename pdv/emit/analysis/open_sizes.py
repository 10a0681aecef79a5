"""Which sizes of its inputs a program leaves open, and the program at sizes that no number in it equals.

The text of a program is written from it at such sizes, twice, with different ones: what is the same in both names none
of them. Entry point: ``open_sizes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from typing import Any

from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.scaling.resize import Sizes
from ir.verify import infer_shardings
from pdv.emit.analysis.shapes import Dim, Factor, Shapes
from pdv.frontend.program import BATCH

Places = Mapping[str, Sequence[tuple[str, int]]]
"""Name of a size -> the dims (input, dim) that have it."""

NamedSizes = Mapping[str, Mapping[str, Any]]  # Any: JSON
"""``sizes`` of plan.json."""


@dataclass(frozen=True)
class Opened:
    """A program and the sizes that it leaves open.

    Attributes:
        named: name -> the dims (input, dim) that have the size.
        symbols: name -> the atom (``ir/scaling/resize.py``) that changes freely; none if all sizes are fixed.
        fixed: name -> why a size is not among them.
        most: name -> the largest that a size may be, where there is one.
    """

    graph: Graph
    sizes: Sizes
    named: Places
    symbols: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)

    def note(self, rows_of: str) -> str:
        """What the program's sentence about its shapes ends with; ``rows_of``: what the rows are all of."""
        free = [self._meaning(name, rows_of) for name in self.named if name in self.symbols]
        found = [f"where {' and '.join(free)}"] if free else []
        found += [f"for {self._plan(name)}: {reason}" for name, reason in self.fixed.items() if reason]
        return f", {'; '.join(found)}." if found else "."

    def _meaning(self, name: str, rows_of: str) -> str:
        """``s is the size of dim 1 of ids, at most 1024``."""
        most = f", at most {self.most[name]}" if name in self.most else ""
        if name == BATCH:
            return f"{name} is the number of rows of {rows_of}{most}"
        places = [f"dim {dim} of {node}" for node, dim in self.named[name]]
        return f"{name} is the size of {' and '.join(places)}{most}"

    def _plan(self, name: str) -> str:
        """``batches of 8 rows``, ``s = 128``."""
        where, dim = self.named[name][0]
        count = next(node.type.shape[dim] for node in self.graph.inputs if node.attr("name") == where)
        return f"batches of {count} row{'s' if count > 1 else ''}" if name == BATCH else f"{name} = {count}"

    def close(self, reasons: Mapping[str, str]) -> Opened:
        """The same program with all open that has no reason to be fixed."""
        left = {name: places for name, places in self.named.items() if name not in reasons}
        found = open_sizes(self.graph, left)
        return replace(found, named=self.named, fixed={**self.fixed, **reasons, **found.fixed})

    def bounded(self, most: Mapping[str, int | None]) -> Opened:
        """The same program, whose sizes may be no larger than ``most``, and than its tables are long.

        Raises:
            ShapeError: if it has no other sizes.
        """
        found = {name: size for name, size in most.items() if size is not None and name in self.symbols}
        extents = self.sizes.atoms.extents
        laws = self._laws({atom: 2 * extents[atom] for atom in self.symbols.values()})
        for _, piece, rows in self.sizes.tables:
            atoms = self.sizes.atoms.flat(piece)
            moving = [laws[atom] for atom in atoms if atom in laws]
            if len(moving) == 1 and moving[0].slope > 0:
                law, times = moving[0], math.prod(extents[atom] for atom in atoms if atom not in laws)
                largest = math.floor((rows // times - law.offset) / law.slope)
                found[law.symbol] = min(found.get(law.symbol, largest), largest)
        return replace(self, most=found)

    def variants(self, mesh: Mesh, count: int = 2) -> list[tuple[Graph, Shapes, Mapping[Node, Node]]]:
        """The program as it is where nothing is open, else at one or two choices of sizes; and what its nodes became.

        Raises:
            ShapeError: if it has no other sizes.
            ShardingError: if it is no legal PCG of ``mesh``.
        """
        if not self.symbols:
            same = {node: node for node in self.graph.nodes}
            return [(self.graph, self._shapes(self.graph, same, mesh, {}, {}), same)]
        primes = _primes(self.sizes.atoms.extents)
        found: list[tuple[Graph, Shapes, Mapping[Node, Node]]] = []
        for first in (0, len(self.symbols))[:count]:
            times = dict(zip(self.symbols, islice(primes, first, None), strict=False))
            changed = {atom: self.sizes.atoms.extents[atom] * times[name] for name, atom in self.symbols.items()}
            graph, made = self.sizes.resize(changed)
            found.append((graph, self._shapes(graph, made, mesh, changed, self._laws(changed)), made))
        return found

    def _laws(self, changed: Mapping[int, int]) -> dict[int, Factor]:
        """How each open atom follows from the symbols.

        Raises:
            ShapeError: if one follows from several.
        """
        planned = {atom: self.sizes.atoms.extents[atom] for atom in changed}
        before, after = self.sizes.values(planned), self.sizes.values(changed)
        laws: dict[int, Factor] = {}
        tables = {atom for whole, _, _ in self.sizes.tables for atom in self.sizes.atoms.flat(whole)}
        for name, symbol in self.symbols.items():
            alone = self.sizes.values({**planned, symbol: changed[symbol]})
            for atom in (atom for atom in before if alone[atom] != before[atom] and atom not in tables):
                if alone[atom] != after[atom]:
                    raise ShapeError("a size follows from several open ones")
                whole = self._whole(symbol)
                slope = Fraction(alone[atom] - before[atom], (changed[symbol] - planned[symbol]) * whole)
                offset = before[atom] - slope * planned[symbol] * whole
                assert offset.denominator == 1, f"{before[atom]} -> {alone[atom]} is no sum"
                laws[atom] = Factor(after[atom], name, slope, int(offset))
        return laws

    def _whole(self, symbol: int) -> int:
        """What the dim that a symbol names is of the atom that changes: rows may come in pairs."""
        flat = next(
            flat
            for node in self.graph.inputs
            for factors in self.sizes.dims[node]
            if symbol in (flat := self.sizes.atoms.flat(factors))
        )
        whole = 1
        for atom in flat:
            whole *= self.sizes.atoms.extents[atom] if atom != symbol else 1
        return whole

    def _shapes(
        self,
        graph: Graph,
        made: Mapping[Node, Node],
        mesh: Mesh,
        changed: Mapping[int, int],
        laws: Mapping[int, Factor],
    ) -> Shapes:
        values = self.sizes.values(changed)
        dims = {
            new: tuple(self._dim(factors, values, laws) for factors in self.sizes.dims[old])
            for old, new in made.items()
        }
        return Shapes(mesh, infer_shardings(graph, mesh), dims)

    def _dim(self, factors: Sequence[int], values: Mapping[int, int], laws: Mapping[int, Factor]) -> Dim:
        """The factors of a dim, neighbouring numbers multiplied; all of an open dim is the symbol itself."""
        found: list[Factor] = []
        for atom in self.sizes.atoms.flat(tuple(factors)):
            factor = laws.get(atom, Factor(values[atom]))
            if found and not factor.symbol and not found[-1].symbol:
                found[-1] = Factor(found[-1].extent * factor.extent)
            else:
                found.append(factor)
        return _whole_symbol(found)


def open_sizes(graph: Graph, wanted: Places | None = None) -> Opened:
    """What a program leaves open of what is wanted; by default the batch, dim 0 of the first input."""
    wanted = batch_of(graph) if wanted is None else wanted
    sizes = Sizes(graph, {name: places for name, places in wanted.items() if name != BATCH})
    inputs = {node.attr("name"): node for node in graph.inputs}
    symbols: dict[str, int] = {}
    fixed: dict[str, str] = {}
    for name, places in wanted.items():
        node, dim = inputs[places[0][0]], places[0][1]
        atoms = sizes.open_atoms(node, dim)
        if not atoms:
            size = node.type.shape[dim]
            fixed[name] = sizes.why_fixed(node, dim) if size > 1 else "it was planned for 1"
            continue
        if atoms[0] in symbols.values():
            other = next(one for one, atom in symbols.items() if atom == atoms[0])
            fixed[name] = f"it is the same size as {other}"
            continue
        symbols[name] = atoms[0]
        for atom in atoms[1:]:
            sizes.fix_atom(atom, "the model splits it")
    sizes.fix_others(symbols.values())
    symbols = {name: atom for name, atom in symbols.items() if sizes.is_open(atom)}
    return Opened(graph, sizes, wanted, symbols, fixed)


def batch_of(graph: Graph) -> Places:
    """The batch: dim 0 of the first input."""
    first = next((node for node in graph.inputs if node.type.rank), None)
    return {} if first is None else {BATCH: ((first.attr("name"), 0),)}


def _whole_symbol(factors: list[Factor]) -> Dim:
    """``2 * b/2 == b``."""
    opened = [factor for factor in factors if factor.symbol]
    if len(opened) != 1 or opened[0].offset or opened[0].slope.denominator == 1:
        return tuple(factors)
    number = math.prod(factor.extent for factor in factors if not factor.symbol)
    rest, over = divmod(number, opened[0].slope.denominator)
    if over:
        return tuple(factors)
    whole = replace(opened[0], extent=opened[0].extent * number // rest, slope=Fraction(opened[0].slope.numerator))
    return (whole,) if rest == 1 else (whole, Factor(rest))


def _primes(extents: Sequence[int]) -> list[int]:
    """Primes, two for each of some symbols, that divide none of the extents."""
    found: list[int] = []
    number = 11
    while len(found) < 16:
        if all(number % p for p in range(2, int(number**0.5) + 1)) and all(e % number for e in extents):
            found.append(number)
        number += 2
    return found
