"""Sizes that must agree: every dim of a program as a product of atoms, unified over its nodes.

An atom is a factor of dims that all have to change together. Some are fixed (*kept*), some follow from others by a
formula (the windows of a convolution), the rest may be chosen freely, as multiples of the ways in which they are cut.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

Factors = tuple[int, ...]
"""A dim: atoms by number, outermost first; atoms of extent one may be there or not."""


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A size that follows from others."""

    inputs: tuple[Factors, ...]
    compute: Callable[..., int]

    def value(self, sizes: dict[int, int]) -> int:
        """The size; ``inputs`` are unrefined atoms."""
        return self.compute(*[sizes[f[0]] if len(f) == 1 else math.prod([sizes[a] for a in f]) for f in self.inputs])


@dataclass(slots=True)
class Atoms:
    """Union-find over atoms; an atom may also be refined into a product of others."""

    extents: list[int] = field(default_factory=list)
    _parent: list[int] = field(default_factory=list)
    _parts: dict[int, Factors] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)
    _multiples: list[tuple[Factors, int, int]] = field(default_factory=list)
    _floors: list[tuple[Factors, int]] = field(default_factory=list)
    _formulas: list[tuple[int, Formula]] = field(default_factory=list)

    def copy(self) -> Atoms:
        """The same atoms, whose cuts and choice are another's affair."""
        return replace(self, _kept=set(self._kept), _multiples=list(self._multiples))

    def new(self, extent: int) -> int:
        """A fresh atom."""
        self.extents.append(extent)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def flat(self, factors: Factors) -> Factors:
        """The unrefined atoms that a dim is made of, those of extent one left out."""
        found: list[int] = []
        for atom in factors:
            root = self._root(atom)
            if root in self._parts:
                found.extend(self.flat(self._parts[root]))
            elif self.extents[root] != 1:
                found.append(root)
        return tuple(found)

    def unify(self, left: Factors, right: Factors) -> None:
        """Two dims are the same: align their atoms, refining where one is a multiple of the other; else keep both."""
        a, b = list(self.flat(left)), list(self.flat(right))
        while a and b:
            a[:1], b[:1] = self.flat((a[0],)), self.flat((b[0],))  # atoms that occur twice may have changed meanwhile
            x, y = a.pop(0), b.pop(0)
            if x == y:
                continue
            p, q = self.extents[x], self.extents[y]
            if p == q:
                self._parent[x] = y
                if x in self._kept:
                    self._kept.add(y)
            elif p % q == 0:
                a.insert(0, self._refine(x, y))
            elif q % p == 0:
                b.insert(0, self._refine(y, x))
            else:
                self.keep((x, y))
                break
        self.keep((*a, *b))

    def _refine(self, atom: int, outer: int) -> int:
        """``atom`` becomes ``outer`` × a new atom, which is returned."""
        inner = self.new(self.extents[atom] // self.extents[outer])
        self._parts[atom] = (outer, inner)
        if atom in self._kept:
            self.keep((outer, inner))
        return inner

    def keep(self, factors: Factors) -> None:
        """These must not change."""
        self._kept.update(self.flat(factors))

    def is_kept(self, atom: int) -> bool:
        """True if an unrefined atom must not change."""
        return atom in self._kept

    def require(self, factors: Factors, multiple: int, true: int) -> None:
        """The dim, which is cut ``true`` ways at its true size, is to be cut ``multiple`` ways."""
        if true > 1:
            self._multiples.append((factors, multiple, true))

    def at_least(self, factors: Factors, floor: int) -> None:
        """The dim must not become smaller than ``floor``."""
        self._floors.append((factors, floor))

    def follows(self, atom: int, inputs: Sequence[Factors], compute: Callable[..., int]) -> None:
        """The atom's size is ``compute`` of the inputs' sizes."""
        self._formulas.append((atom, Formula(tuple(inputs), compute)))

    def choose(self, turn: int = 0, shapes: Iterable[Sequence[Factors]] = ()) -> dict[int, int]:
        """A small size for every unrefined atom; ``size`` reads a dim off the answer. Another ``turn``, other sizes.

        shapes: in which atoms occur; one that is no dim of its own in any is made as small as may be.

        Raises:
            ValueError: if formulas contradict one another or a cut.
        """
        formulas: dict[int, list[Formula]] = {}
        for atom, formula in self._formulas:
            if len(flat := self.flat((atom,))) == 1:
                formulas.setdefault(flat[0], []).append(formula)
            else:  # refined (or one): it stays, and what it follows from
                self.keep(flat)
                self._keep_inputs(formula, formulas)
        for root in [root for root in formulas if root in self._kept]:
            for formula in formulas.pop(root, ()):  # kept already, where another followed from it
                self._keep_inputs(formula, formulas)
        formulas = {  # nothing is refined from here on
            root: [Formula(tuple(map(self.flat, f.inputs)), f.compute) for f in found]
            for root, found in formulas.items()
        }
        multiples = self._cuts()
        floors = self._least()
        dims = {self.flat(factors) for shape in shapes for factors in shape}
        parts = {atom for atoms in dims for atom in atoms} - {atoms[0] for atoms in dims if len(atoms) == 1}
        free = self._free_sizes(formulas, multiples, floors, turn, parts)
        order = self._order(formulas, multiples, free)
        while True:
            sizes, wrong = _follow(order, multiples, floors, free)
            if wrong is None:
                return sizes
            self._grow(wrong, formulas, multiples, free)

    def size(self, factors: Factors, sizes: dict[int, int]) -> int:
        """The chosen size of a dim."""
        return math.prod(sizes[atom] for atom in self.flat(factors))

    def _keep_inputs(self, formula: Formula, formulas: dict[int, list[Formula]]) -> None:
        for factors in formula.inputs:
            self.keep(factors)
            for atom in self.flat(factors):
                for inner in formulas.pop(atom, ()):
                    self._keep_inputs(inner, formulas)

    def _cuts(self) -> dict[int, int]:
        """Atom -> the number that its size must be a multiple of; cuts go to the outermost atoms that take them."""
        found: dict[int, int] = {}
        for factors, multiple, true in self._multiples:
            left, of_true = multiple, true
            for atom in self.flat(factors):
                part = math.gcd(of_true, self.extents[atom])
                share = left if part == of_true else math.gcd(left, part)
                found[atom] = math.lcm(found.get(atom, 1), share)
                left, of_true = left // share, of_true // part
            if left > 1:
                self.keep(factors)
        return found

    def _least(self) -> dict[int, int]:
        """Atom -> the least size that it may have."""
        floors = dict.fromkeys(range(len(self.extents)), 2)
        for factors, floor in self._floors:
            for atom in self.flat(factors)[-1:]:
                floors[atom] = max(floors[atom], floor)
        return floors

    def _free_sizes(
        self,
        formulas: dict[int, list[Formula]],
        multiples: dict[int, int],
        floors: dict[int, int],
        turn: int,
        parts: set[int],
    ) -> dict[int, int]:
        used: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for atom in range(len(self.extents)):
            if self.flat((atom,)) != (atom,) or atom in formulas:
                continue
            size = self.extents[atom]
            if atom not in self._kept:
                size = _small(size, multiples.get(atom, 1), floors[atom], {} if atom in parts else used, turn)
                used[size] = used.get(size, 0) + 1
            sizes[atom] = size
        return sizes

    def _order(
        self, formulas: dict[int, list[Formula]], multiples: dict[int, int], free: dict[int, int]
    ) -> list[tuple[int, Formula]]:
        """Formulas in an order in which each one's inputs are known; what closes a circle becomes free."""
        following = _Following(formulas, free)
        for start in formulas:
            following.settle()
            if start not in following.known:  # a circle: a convolution that keeps its size, beside a skip
                free[start] = _small(self.extents[start], multiples.get(start, 1), 2, {})
                following.tell(start)
        following.settle()
        return following.order

    def _grow(
        self, root: int, formulas: dict[int, list[Formula]], multiples: dict[int, int], free: dict[int, int]
    ) -> None:
        """Make the free sizes that ``root`` follows from larger.

        Raises:
            ValueError: if they are as large as they may be.
        """
        seen: set[int] = set()
        stack = [root]
        grown = False
        while stack:
            atom = stack.pop()
            if atom in seen:
                continue
            seen.add(atom)
            larger = free.get(atom, 0) + multiples.get(atom, 1)
            if atom in free and atom not in self._kept and larger <= self.extents[atom]:
                free[atom] = larger
                grown = True
            for formula in formulas.get(atom, ()):
                stack += [a for factors in formula.inputs for a in factors]
        if not grown:
            raise ValueError("sizes that follow from one another have no common solution")

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]  # halve the path for those who come after
            atom = self._parent[atom]
        return atom


def _follow(
    order: Sequence[tuple[int, Formula]], multiples: dict[int, int], floors: dict[int, int], free: dict[int, int]
) -> tuple[dict[int, int], int | None]:
    """All sizes that follow from the free ones; or an atom that comes out too small, uncut or in two ways."""
    sizes = dict(free)
    for root, formula in order:
        size = formula.value(sizes)
        if size < floors[root] or size % multiples.get(root, 1) or sizes.setdefault(root, size) != size:
            return sizes, root
    return sizes, None


class _Following:
    """Atoms that become known as soon as all that they follow from are.

    Attributes:
        known: atoms.
        order: formulas whose inputs are known, in the order in which they became so.
    """

    def __init__(self, formulas: dict[int, list[Formula]], known: Iterable[int]) -> None:
        self.known = set(known)
        self.order: list[tuple[int, Formula]] = []
        self._readers: dict[int, list[tuple[int, Formula]]] = {}
        self._missing: dict[Formula, int] = {}
        self._ready: deque[tuple[int, Formula]] = deque()
        for root, following in formulas.items():
            for formula in following:
                unknown = {atom for factors in formula.inputs for atom in factors} - self.known
                self._missing[formula] = len(unknown)
                for atom in sorted(unknown):
                    self._readers.setdefault(atom, []).append((root, formula))
                if not unknown:
                    self._ready.append((root, formula))

    def settle(self) -> None:
        """Order what is ready, and what becomes so."""
        while self._ready:
            root, formula = self._ready.popleft()
            self.order.append((root, formula))
            if root not in self.known:
                self.tell(root)

    def tell(self, atom: int) -> None:
        """An atom's size is known: formulas that wait for nothing else are ready."""
        self.known.add(atom)
        for root, formula in self._readers.get(atom, ()):
            self._missing[formula] -= 1
            if not self._missing[formula]:
                self._ready.append((root, formula))


def _small(extent: int, multiple: int, floor: int, used: dict[int, int], turn: int = 0) -> int:
    """A small multiple up to ``extent``: two or more per cut block, so that order within it shows; rare ones first."""
    least = max(floor, 2) + turn if multiple == 1 else max(floor, (2 + turn) * multiple)
    first = -(-least // multiple) * multiple
    smallest = extent if extent % multiple == 0 else first  # of a dim that is cut more ways than at its true size
    candidates = [n for n in range(first, first + 3 * multiple, multiple) if n <= extent] or [smallest]
    return min(candidates, key=lambda n: (used.get(n, 0), n))
