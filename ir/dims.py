"""Loop notation: parse ``"b s (h d) -> b h s d"`` and solve the extent of every loop from operand shapes.

A *group* is the loops that make up one dim, outermost first; the empty group is a dim of size one that no loop
walks (a broadcast operand). ``...`` stands for any number of leading dims, aligned from the right as NumPy
broadcasting does; a ``*`` after a loop says it is taken whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ir.errors import ShapeError

Group = tuple[str, ...]
Dims = tuple[Group, ...]
Shape = tuple[int, ...]

ELLIPSIS: Group = ("...",)
_TOKEN = re.compile(r"\.\.\.|\(|\)|1|[A-Za-z_][A-Za-z_0-9]*'?\*?")


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed line of loop notation, ``...`` still in place."""

    operands: tuple[Dims, ...]
    result: Dims
    whole: frozenset[str]


@dataclass(frozen=True, slots=True)
class Loops:
    """The loop nest of one node: which loops walk each dim of each operand, and how far.

    ``extents`` may be global or local; the groups are the same for both.
    """

    operands: tuple[Dims, ...]
    result: Dims
    extents: Mapping[str, int]
    whole: frozenset[str]

    @property
    def contracted(self) -> tuple[str, ...]:
        """Loops in an operand but not in the result: cutting one leaves a sum to be taken."""
        in_result = {loop for group in self.result for loop in group}
        in_operands = [loop for dims in self.operands for group in dims for loop in group]
        return tuple(dict.fromkeys(loop for loop in in_operands if loop not in in_result))

    @property
    def names(self) -> tuple[str, ...]:
        """Every loop, in order of first appearance (result first)."""
        everywhere = (self.result, *self.operands)
        return tuple(dict.fromkeys(loop for dims in everywhere for group in dims for loop in group))

    def size(self, group: Group) -> int:
        """Extent of a dim: the product of its loops."""
        if len(group) == 1:
            return self.extents[group[0]]
        return math.prod(self.extents[loop] for loop in group)

    def shape_of(self, dims: Dims) -> Shape:
        """Shape of an operand or the result under these extents."""
        return tuple(self.size(group) for group in dims)

    def size_of(self, dims: Dims) -> int:
        """Number of elements of an operand or the result under these extents."""
        extents = self.extents
        return math.prod([extents[loop] for group in dims for loop in group])

    @property
    def result_shape(self) -> Shape:
        """Shape of the result under these extents."""
        return tuple(self.size(group) for group in self.result)

    @property
    def points(self) -> int:
        """Number of points of the loop nest: the product of all extents."""
        return math.prod(self.extents[loop] for loop in self.names)

    def position(self, dims: Dims, loop: str) -> int | None:
        """The dim of ``dims`` whose outermost loop (of extent above one) is ``loop``, or None.

        Only such a dim can be cut along ``loop`` into contiguous blocks.
        """
        for index, group in enumerate(dims):
            if self.outermost(group) == loop:
                return index
        return None

    def outermost(self, group: Group) -> str | None:
        """The outermost loop of a dim that goes around more than once, or None."""
        return next((name for name in group if self.extents[name] > 1), None)

    def holds(self, dims: Dims, loop: str) -> bool:
        """True if ``loop`` walks any dim of ``dims``."""
        return any(loop in group for group in dims)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Every number that divides a positive one, in order; in as many steps as its root, for it may be any size."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))


def parse(text: str) -> Notation:
    """Parse one line of loop notation.

    Raises:
        ValueError: if the line is malformed; notation is written by us, so this is our mistake.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"loop notation without '->': {text!r}")
    whole: set[str] = set()
    operands = tuple(_parse_dims(part, whole) for part in left.split(",")) if left.strip() else ()
    return Notation(operands, _parse_dims(right, whole), frozenset(whole))


def _parse_dims(text: str, whole: set[str]) -> Dims:
    dims: list[Group] = []
    group: list[str] | None = None
    if _TOKEN.sub("", text).strip():
        raise ValueError(f"loop notation has stray characters: {text!r}")
    for token in _TOKEN.findall(text):
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None, f"unbalanced parentheses: {text!r}"
            dims.append(tuple(group))
            group = None
        elif token == "...":
            dims.append(ELLIPSIS)
        elif token == "1":
            dims.append(())
        else:
            name = token.rstrip("*")
            if token.endswith("*"):
                whole.add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    return tuple(dims)


def solve(
    where: str,
    notation: Notation,
    shapes: Sequence[Shape],
    given: Mapping[str, int] | None = None,
) -> Loops:
    """Solve every loop extent from operand shapes (and ``given`` ones, from attributes).

    Raises:
        ShapeError: if the shapes disagree; the message names the loop and the two sizes.
    """
    if not notation.operands and list(shapes) == [()]:  # a scalar has no dims that notation could name
        notation = replace(notation, operands=((),))
    if len(shapes) != len(notation.operands):
        raise ShapeError(f"{where} takes {len(notation.operands)} operands, got {len(shapes)}")
    lead = [len(shape) - len(dims) + 1 for dims, shape in zip(notation.operands, shapes, strict=True)]
    widest = max([n for n, dims in zip(lead, notation.operands, strict=True) if ELLIPSIS in dims], default=0)
    operands = [
        _expand(where, dims, len(shape), len(shape) - len(dims) + 1)
        for dims, shape in zip(notation.operands, shapes, strict=True)
    ]
    extents = dict(given or {})
    for dims, shape in zip(operands, shapes, strict=True):
        for group, size in zip(dims, shape, strict=True):
            if len(group) == 1 and group[0].startswith("_"):  # a leading dim: size one broadcasts
                extents[group[0]] = max(extents.get(group[0], 1), size)
    for _ in range(2):  # a group may need an extent that only a later operand gives
        for dims, shape in zip(operands, shapes, strict=True):
            for group, size in zip(dims, shape, strict=True):
                _solve_group(where, group, size, extents)
    aligned = tuple(
        tuple(
            () if len(g) == 1 and g[0].startswith("_") and size == 1 and extents[g[0]] > 1 else g
            for g, size in zip(dims, shape, strict=True)
        )
        for dims, shape in zip(operands, shapes, strict=True)
    )
    _check(where, aligned, shapes, extents)
    rank = len(notation.result) + (widest - 1 if ELLIPSIS in notation.result else 0)
    result = _expand(where, notation.result, rank, widest)
    return Loops(aligned, result, extents, notation.whole)


def _expand(where: str, dims: Dims, rank: int, lead: int) -> Dims:
    if ELLIPSIS not in dims:
        if len(dims) != rank:
            raise ShapeError(f"{where}: an operand has {rank} dims", f"Expected {len(dims)}")
        return dims
    if lead < 0:
        raise ShapeError(f"{where}: an operand has {rank} dims", f"Expected at least {len(dims) - 1}")
    at = dims.index(ELLIPSIS)
    names = tuple((f"_{lead - 1 - index}",) for index in range(lead))
    return (*dims[:at], *names, *dims[at + 1 :])


def _solve_group(where: str, group: Group, size: int, extents: dict[str, int]) -> None:
    unknown = [loop for loop in group if loop not in extents]
    if len(unknown) == 1:
        known = math.prod(extents[loop] for loop in group if loop in extents)
        if known == 0 or size % known:
            raise ShapeError(f"{where}: a dim of size {size} is not a multiple of {known}")
        extents[unknown[0]] = size // known


def _check(where: str, operands: Sequence[Dims], shapes: Sequence[Shape], extents: Mapping[str, int]) -> None:
    for number, (dims, shape) in enumerate(zip(operands, shapes, strict=True)):
        for index, (group, size) in enumerate(zip(dims, shape, strict=True)):
            expected = math.prod(extents[loop] for loop in group) if group else 1
            if expected != size:
                raise ShapeError(
                    f"{where}: operand {number} dim {index} has size {size}",
                    f"Loop {' '.join(group) or '1'} has extent {expected} elsewhere",
                )
