"""The vocabulary in which operators say what they compute, whatever the field: floats, or the integers mod p.

Every array carries one leading axis that an operator never sees in its loops: the rank axis, of length R (1 for a
single-device graph). So a call evaluates all simulated ranks at once; shapes and dims below leave that axis out.
A tape records what it ran, so gradients come from the same declarations (``interpret.py``, ``exact.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ir.dims import Loops
from ir.types import DType

Pair = tuple[int, int]
Array = Any
"""An array of the tape's field, or a NumPy integer/bool array (ids, masks) that the field does not touch."""


@dataclass(frozen=True, slots=True)
class Known:
    """A function of elements or rows that is known by its name; floats alone know what it is.

    Attributes:
        name: with its parameters in it: ``pow:3.0``.
        real: over float64: x -> what it gives, and its derivative as a thunk (of elements) or its pullback (of rows).
        vanishes: of rows: it is zero where the row is -inf, which changes nothing else.
    """

    name: str
    real: Callable[..., tuple[Any, Callable[..., Any]]]
    vanishes: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """The context of one evaluation of an operator.

    Attributes:
        loops: the loop nest with *local* extents (one rank's share).
        whole_loops: the same nest with global extents, those of the true program where a smaller copy of it is
            evaluated; means divide by these.
        attrs: the node's attributes.
        offset: [R] integers, where each rank's block of the operator's ``offset_loop`` starts.
        starts: the same of every loop that is cut.
        dtypes: the operands' own types; arrays of integers are wider.
    """

    loops: Loops
    whole_loops: Loops
    attrs: Mapping[str, Any]
    offset: np.ndarray[Any, Any]
    starts: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    dtypes: tuple[DType, ...] = ()


class Tape(Protocol):
    """Primitives. ``...`` shapes exclude the rank axis; broadcasting follows NumPy after it (equal rank).

    ``foreign`` calls functions of other libraries (``ir.ops.opaque.Run``); None where functions are names.
    """

    foreign: Callable[..., Any] | None

    def joint(self, function: Known, operands: Sequence[Array]) -> Array:
        """A function of whole operands, where it can be called: ``real(operands, which need gradients)``."""

    def einsum(self, spec: str, *operands: Array) -> Array:
        """Sums of products, exact in the field; ``spec`` without the rank axis."""

    def add(self, x: Array, y: Array) -> Array:
        """Element-wise sum."""

    def sub(self, x: Array, y: Array) -> Array:
        """Element-wise difference."""

    def mul(self, x: Array, y: Array) -> Array:
        """Element-wise product."""

    def scale(self, x: Array, factor: float) -> Array:
        """Times a constant; a rational of small terms is exact in every field."""

    def shift(self, x: Array, offset: float) -> Array:
        """Plus a constant."""

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Row-major reshape."""

    def transpose(self, x: Array, perm: Sequence[int]) -> Array:
        """Permute the dims."""

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        """Repeat along dims of size one."""

    def slice(self, x: Array, dim: int, start: int, stop: int) -> Array:
        """Elements ``start`` to ``stop`` of one dim."""

    def windows(self, x: Array, kernel: Pair, stride: Pair, dilation: Pair, counts: Pair) -> Array:
        """[n, c, h, w] -> [n, c, *kernel, *counts]: the elements under each point of a kernel, for each place of it."""

    def concat(self, xs: Sequence[Array], dim: int) -> Array:
        """Join along one dim."""

    def take(self, table: Array, ids: Array, offset: Array) -> Array:
        """table [V, d], ids [...] -> [..., d]; a row outside ``offset`` … ``offset + V`` reads as zero. offset: [R]."""

    def unary(self, function: Known, x: Array) -> Array:
        """A function of each element, known by name."""

    def row(self, function: Known, x: Array) -> Array:
        """A function of each row along the last dim, same shape, known by name."""

    def row_reduce(self, function: Known, x: Array) -> Array:
        """A function of each row along the last dim, to size one, known by name."""

    def relate(self, name: str, real: Callable[[Any, Any], Any], x: Array, y: Array) -> Array:
        """A truth value of each pair of elements: ``real`` of floats, elsewhere a function of their difference."""

    def whole(self, name: str, real: Callable[[Any], Any], x: Array) -> Array:
        """An integer of each element (a NumPy array): ``real`` of floats, elsewhere known by its name."""

    def where(self, mask: Array, x: Array, y: Array) -> Array:
        """Elements of x where the mask (a NumPy bool array with the rank axis) holds, else y."""

    def detach(self, x: Array) -> Array:
        """The same values, through which no gradient flows."""

    def constant(self, value: float, shape: Sequence[int]) -> Array:
        """A constant array without gradient (shape without the rank axis)."""
