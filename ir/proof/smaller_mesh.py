"""Meshes to evaluate a plan on: its own where that is small, and others whose axes differ in size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from ir.mesh import Axis, Mesh

MOST_RANKS = 16  # simulated at once
FEW_RANKS = 8  # as many as are worth their time where a mesh is made smaller
DEGREES = (2, 3, 4)  # of axes of another size than the plan's
ATTEMPTS = 2  # at a mesh of its own size for each axis, before the smallest is taken


def meshes_to_try(mesh: Mesh, turn: int) -> list[Mesh]:
    """Meshes for the first evaluation (``turn`` 0) or the second (1), the best first, those of fewest ranks last.

    An operator takes its degree as a variable, so that a plan is right on meshes of all sizes or on none. The first
    evaluation is on the plan's own mesh where that has few ranks, else on one whose axes divide the plan's. The second
    is on a mesh of other sizes, so that nothing is right only because two axes are equal; of a program too large for
    that, on two ranks of one axis.
    """
    divided = _rank(mesh, [tuple(n for n in range(min(size, 2), size + 1) if size % n == 0) for size in mesh.shape])
    others = _rank(mesh, [DEGREES if size > 1 else (1,) for size in mesh.shape])
    own = [mesh] if mesh.num_devices <= MOST_RANKS else []
    first = [*own, *divided, *others, mesh][0]
    fewest = min([*divided, *others, mesh], key=lambda smaller: smaller.num_devices)
    best = [other for other in others if other != first][:ATTEMPTS] if turn else []
    return list(dict.fromkeys([*best, first, fewest, *_pairs(mesh)[:turn]]))


def _pairs(mesh: Mesh) -> list[Mesh]:
    """Meshes of two ranks, along the last axis first."""
    cut = [at for at, size in enumerate(mesh.shape) if size > 1]
    return [_size(mesh, [2 if at == own else 1 for at in range(len(mesh.shape))]) for own in reversed(cut)]


def _rank(mesh: Mesh, sizes: Sequence[tuple[int, ...]]) -> list[Mesh]:
    """Meshes of these sizes on each axis: those of unequal axes first, then those of about ``FEW_RANKS`` ranks."""
    found = [shape for shape in product(*sizes) if math.prod(shape) <= MOST_RANKS]
    found.sort(key=lambda shape: (_equal_pairs(shape), abs(math.prod(shape) - FEW_RANKS), shape))
    return [_size(mesh, shape) for shape in found]


def _equal_pairs(shape: Sequence[int]) -> int:
    cut = [size for size in shape if size > 1]
    return sum(one == other for at, one in enumerate(cut) for other in cut[:at])


def _size(mesh: Mesh, shape: Sequence[int]) -> Mesh:
    return Mesh(tuple(Axis(axis.name, size) for axis, size in zip(mesh.axes, shape, strict=True)))
