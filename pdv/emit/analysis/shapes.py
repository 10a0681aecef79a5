"""Local shapes as people write them, ``[b/dp, 1024, 768/tp]``, and which of their sizes the program leaves open.

A dim is a product of factors, each a number or what follows from an open size: ``b``, ``b/2``, ``b - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ir.graph import Node
from ir.mesh import Mesh
from ir.sharding import Partial, Shard, Sharding


@dataclass(frozen=True, slots=True)
class Factor:
    """A size that a dim's is a multiple of: ``extent``, or where there is a symbol ``slope`` times it + ``offset``."""

    extent: int
    symbol: str = ""
    slope: Fraction = Fraction(1)
    offset: int = 0

    @property
    def is_plain(self) -> bool:
        """True for an open size itself."""
        return bool(self.symbol) and self.slope == 1 and self.offset == 0

    @property
    def is_sum(self) -> bool:
        """True for what needs parentheses in a product."""
        return bool(self.symbol) and self.offset != 0

    def __str__(self) -> str:
        if not self.symbol:
            return str(self.extent)
        top, bottom = self.slope.numerator, self.slope.denominator
        text = (f"{top}*" if top != 1 else "") + self.symbol + (f"/{bottom}" if bottom != 1 else "")
        return text if not self.offset else f"{text} {'-' if self.offset < 0 else '+'} {abs(self.offset)}"


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Shapes:
    """Symbolic dims of every node of a PCG, and the axes that cut them."""

    mesh: Mesh
    shardings: Mapping[Node, Sharding]
    dims: Mapping[Node, tuple[Dim, ...]]

    def is_open(self, node: Node, dim: int) -> bool:
        """True if the size of ``dim`` is not the same in every run."""
        return any(factor.symbol for factor in self.dims[node][dim])

    def cuts(self, node: Node, dim: int) -> tuple[str, ...]:
        """The axes that cut ``dim``, outer first."""
        states = zip(self.mesh.axes, self.shardings[node], strict=True)
        return tuple(axis.name for axis, state in states if state == Shard(dim))

    def cuts_of_sizes(self) -> dict[str, tuple[str, ...]]:
        """Open size -> the axes that cut a dim that is of this size, outer first: as many as cut one anywhere."""
        found: dict[str, tuple[str, ...]] = {}
        for node, dims in self.dims.items():
            for dim, factors in enumerate(dims):
                if len(factors) == 1 and factors[0].is_plain:
                    found[factors[0].symbol] = max(found.get(factors[0].symbol, ()), self.cuts(node, dim), key=len)
        return {symbol: axes for symbol, axes in found.items() if axes}

    def partial_axes(self, node: Node) -> tuple[str, ...]:
        """The axes along which the value is a term of a sum."""
        states = zip(self.mesh.axes, self.shardings[node], strict=True)
        return tuple(axis.name for axis, state in states if isinstance(state, Partial))

    def size_text(self, node: Node, dim: int) -> str:
        """``b``, ``b*16``, ``768``: the whole size of a dim."""
        factors = self.dims[node][dim]
        if len(factors) == 1:
            return str(factors[0])
        return "*".join(f"({factor})" if factor.is_sum else str(factor) for factor in factors) or "1"

    def text(self, node: Node) -> str:
        """``[b/dp, 1024, 768/tp]``, with the axes of a pending sum after it."""
        dims = []
        for dim, factors in enumerate(self.dims[node]):
            size, cuts = self.size_text(node, dim), self.cuts(node, dim)
            size = f"({size})" if cuts and len(factors) == 1 and factors[0].is_sum else size
            dims.append("/".join((size, *cuts)))
        partial = self.partial_axes(node)
        return f"[{', '.join(dims)}]" + (f", a term of the sum over {' and '.join(partial)}" if partial else "")
