"""What cutting a loop along a mesh axis means to people: samples, positions of a sequence, experts, or what is inside.

Decided by following dims, not by their place: a graph input's dim 0 holds samples, and a loop that walks a dim of
samples is one wherever reshapes and permutations have taken it. Description and pins use these words; the search knows
none of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from ir.dims import Dims, Loops
from ir.graph import Node
from ir.operator import Split
from pdv.pins.weights import Weights, follow

Role = Literal["data", "tensor", "sequence", "context", "expert"]
ROLES: tuple[Role, ...] = get_args(Role)


class Carried(NamedTuple):
    """Dims of a value that hold samples, and positions within a sample."""

    samples: frozenset[int]
    positions: frozenset[int]


NOTHING = Carried(frozenset(), frozenset())


class RoleOf:
    """``role(node, split)`` of the nodes of one graph and of its rewrites; remembers what it has followed."""

    def __init__(self) -> None:
        self.weights = Weights()
        self._known: dict[Node, Carried] = {}

    def __call__(self, node: Node, split: Split) -> Role | None:
        """What the cut is for; None where nothing is cut."""
        if split.loop is None:
            return None
        samples, positions = self.loops(node)
        if split.loop in samples:
            return "data"
        if split.loop in positions:
            return "context" if node.op.has_scores else "sequence"
        return "expert" if self._separates_weights(node, split.loop) else "tensor"

    def loops(self, node: Node) -> tuple[frozenset[str], frozenset[str]]:
        """Loops that walk samples, and loops that walk positions, of what a node reads."""
        carried = [self.carry(operand) for operand in node.operands]
        samples = _outer(node.loops, [entry.samples for entry in carried])
        return samples, _outer(node.loops, [entry.positions for entry in carried]) - samples

    def carry(self, node: Node) -> Carried:
        """Dims of a value that hold samples or positions."""
        return follow(node, self._known, self._of)

    def _separates_weights(self, node: Node, loop: str) -> bool:
        """A product whose weight and activation are cut along one loop, as its result: other weights for each part."""
        if node.op.kind != "contraction":
            return False
        everywhere: list[Dims] = [*node.loops.operands, node.loops.result]
        weighted = any(operand in self.weights for operand in node.operands)
        return weighted and all(node.loops.holds(dims, loop) for dims in everywhere)

    def _of(self, node: Node) -> Carried:
        if node.is_leaf:
            return _of_input(node) if node.is_input else NOTHING
        samples, positions = self.loops(node)
        return Carried(_places(node.loops, samples), _places(node.loops, positions))


def _of_input(node: Node) -> Carried:
    """Samples first; then positions but for a last dim of features, or channels before an image's height and width."""
    rank = node.type.rank
    if not node.type.dtype.is_floating:
        positions = range(1, rank)
    else:
        positions = range(2, rank) if rank > 3 else range(1, rank - 1)
    return Carried(frozenset(range(min(rank, 1))), frozenset(positions))


def _outer(loops: Loops, carried: list[frozenset[int]]) -> frozenset[str]:
    """The outermost loop (of extent above one) of each dim."""
    found = set()
    for dims, places in zip(loops.operands, carried, strict=True):
        for place in places:
            found.add(next((name for name in dims[place] if loops.extents[name] > 1), ""))
    return frozenset(found - {""})


def _places(loops: Loops, names: frozenset[str]) -> frozenset[int]:
    """The result's dims that these loops walk outermost."""
    places = (loops.position(loops.result, name) for name in names)
    return frozenset(place for place in places if place is not None)


__all__ = ["ROLES", "Carried", "Role", "RoleOf"]
