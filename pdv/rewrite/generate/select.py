"""Which proven laws a search can profit from, and which way round they are written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ir.errors import ShapeError
from ir.graph import Graph
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Apply, Law, Term
from pdv.rewrite.sample import Values, samples

LOOKS = 60  # draws at which the work of both sides is compared


def profitable(law: Law, seed: int) -> bool:
    """Whether the sides do different work somewhere: other operators, or the same at other shapes."""
    return any(_work(left) != _work(right) for left, right, _ in _instances(law, seed))


def oriented(law: Law, seed: int) -> Law:
    """The side of more operators, or else of more elements computed, on the left."""
    if len(law.left) > 1:
        return law
    left, right = _count(law.left[0]), _count(law.right[0])
    if left == right:
        pairs = [(_elements(before), _elements(after)) for before, after, _ in _instances(law, seed)]
        left, right = (sum(pair[side] for pair in pairs) for side in (0, 1))
    return law if left >= right else replace(law, left=law.right, right=law.left)


def different_extents(law: Law, seed: int) -> tuple[Graph, Graph, Values] | None:
    """The first instance at which no two extents are the same."""
    for left, right, values in _instances(law, seed):
        if len({values[name] for name in law.extents} - {1}) == len(law.extents):
            return left, right, values
    return None


def _instances(law: Law, seed: int) -> list[tuple[Graph, Graph, Values]]:
    found = []
    for _, values in zip(range(LOOKS), samples(law, seed), strict=False):
        try:
            left, right = instantiate(law, values)
        except ShapeError:
            continue
        found.append((left, right, values))
    return found


def _work(graph: Graph) -> Counter[str]:
    """Operators with the shapes that they read and make."""
    return Counter(
        f"{node.op.name} {[str(operand.type) for operand in node.operands]} {node.type}"
        for node in graph.nodes
        if not node.is_leaf
    )


def _elements(graph: Graph) -> int:
    return sum(node.loops.points for node in graph.nodes if not node.is_leaf)


def _count(term: Term) -> int:
    return 1 + sum(map(_count, term.operands)) if isinstance(term, Apply) else 0
