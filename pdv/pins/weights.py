"""Which values are weights: made of parameters alone, whatever rewrites did to them; and of which stored tensors.

A rewrite reads a parameter through a view, joined to others, scaled or multiplied. Pins that speak of a parameter, or
of products with trained matrices, must see through that. Entry points: ``Weights``, ``follow``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ir.graph import Node
from ir.views import sources_of

Found = TypeVar("Found")


class Made(NamedTuple):
    """Of what a value is made that no input has a part in: whether of parameters, and of which stored tensors."""

    weight: bool
    sources: frozenset[str]


class Weights:
    """Weights among the values of one graph and of its rewrites; remembers what it has followed."""

    def __init__(self) -> None:
        self._known: dict[Node, Made | None] = {}

    def __contains__(self, value: Node) -> bool:
        """True for a value that is made of parameters alone, and of one at least."""
        made = self._made(value)
        return made is not None and made.weight

    def sources(self, value: Node) -> frozenset[str]:
        """Stored tensors of which a weight is made; none of a product of weights, whose loops are neither's."""
        made = self._made(value)
        return frozenset() if made is None else made.sources

    def read(self, node: Node) -> frozenset[str]:
        """Stored tensors that an operator reads."""
        return frozenset().union(*(self.sources(operand) for operand in node.operands))

    def matrices(self, node: Node) -> list[int]:
        """The operands (by number) that are weights of two dims at least, those of extent one not counted."""
        found = enumerate(node.operands)
        return [at for at, x in found if x in self and sum(extent > 1 for extent in x.type.shape) > 1]

    def _made(self, value: Node) -> Made | None:
        return follow(value, self._known, self._of)

    def _of(self, node: Node) -> Made | None:
        if node.is_param:
            return Made(True, frozenset(sources_of(node)))
        if node.is_leaf:
            return Made(False, frozenset()) if node.is_const else None
        read = [self._known[operand] for operand in node.operands]
        parts = [made for made in read if made is not None]
        if len(parts) < len(read) or not read or node.op.draws:
            return None
        mixes = node.op.kind in ("contraction", "stencil")
        sources = frozenset().union(*(made.sources for made in parts))
        return Made(any(made.weight for made in parts), frozenset() if mixes else sources)


def follow(value: Node, known: dict[Node, Found], of: Callable[[Node], Found]) -> Found:
    """What ``of`` says of a value, which asks what is ``known`` of its operands; all below it is known then."""
    waiting = [value]
    while waiting:
        top = waiting[-1]
        unknown = [operand for operand in top.operands if operand not in known]
        if unknown and top not in known:
            waiting += unknown
            continue
        waiting.pop()
        if top not in known:
            known[top] = of(top)
    return known[value]
