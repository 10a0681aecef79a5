"""Which proven laws a search can profit from, and which way round they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ir.errors import ShapeError
from ir.graph import Graph
from pdv.rewrite.generate.reach import follows, ways
from pdv.rewrite.generate.space import OperatorForm, Space, add_term
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Apply, Law, Operand, Term
from pdv.rewrite.rule import Rule
from pdv.rewrite.sample import Values, samples

FOLDED = 4  # operators more than the other side has
LOOKS = 60  # draws at which the work of both sides is compared


def profitable(law: Law, seed: int) -> bool:
    """Whether the sides do different work somewhere: other operators, or the same at other shapes.

    That more than a few operators cancel altogether is true of terms that nobody writes.
    """
    if any(isinstance(term, Operand) for term in (*law.left, *law.right)) and _size(law) >= FOLDED:
        return False
    return any(_work(left) != _work(right) for left, right, _ in instances(law, seed))


def orient(law: Law, seed: int) -> Law:
    """The side of more operators, or else of more elements computed, on the left.

    A side that is much longer does arithmetic on weights, once: that is what a law folds into, so it is on the right.
    """
    if len(law.left) > 1:
        return law
    left, right = _count(law.left[0]), _count(law.right[0])
    if left == right:
        pairs = [(_elements(before), _elements(after)) for before, after, _ in instances(law, seed)]
        left, right = (sum(pair[side] for pair in pairs) for side in (0, 1))
    if abs(left - right) >= FOLDED:
        left, right = right, left
    return law if left >= right else replace(law, left=law.right, right=law.left)


def most_different(law: Law, seed: int) -> Values | None:
    """The values of an instance with as many different extents as any; None where nothing type-checks."""
    found = [values for _, _, values in instances(law, seed)]
    return max(found, key=lambda values: len({values[name] for name in law.extents} - {1}), default=None)


def independent(laws: Sequence[Law], seed: int, known: Sequence[Law] = ()) -> list[Law]:
    """The laws without those that others, or ``known`` ones, imply, the largest tried first.

    Laws of several results all stay.
    """
    left = list(laws)
    for law in sorted(laws, key=lambda law: (-_size(law), str(law))):
        if len(law.left) == 1 and is_implied(law, [*known, *(other for other in left if other is not law)], seed):
            left.remove(law)
    return left


def is_implied(law: Law, others: Sequence[Law], seed: int) -> bool:
    """Whether the left side's root, in a space of both sides' terms alone, follows by others from the right."""
    found = most_different(law, seed)
    if found is None:
        return False
    by_root: dict[str, list[Rule]] = {}
    for other in others:
        for rule in ways(other) if len(other.left) == 1 else ():
            by_root.setdefault(rule.before[0].op, []).append(rule)
    for before, after in ((law.left[0], law.right[0]), (law.right[0], law.left[0])):
        space = Space(law.shapes, found, seed)
        add_term(space, after)
        if isinstance(before, Apply):
            children = [add_term(space, operand) for operand in before.operands]
            entry = space.entry(before.op, space.concrete(OperatorForm(before.op, before.attrs)), children)
            assert entry is not None, law
            if any(follows(space, entry, by_root, steps) is not None for steps in (1, 2)):
                return True
    return False


def _size(law: Law) -> int:
    return sum(map(_count, (*law.left, *law.right)))


def instances(law: Law, seed: int) -> list[tuple[Graph, Graph, Values]]:
    """(left, right, values) wherever both sides type-check, of the first draws."""
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
        f"{node.op.name} {sorted(str(operand.type) for operand in node.operands)} {node.type}"
        for node in graph.nodes
        if not node.is_leaf
    )


def _elements(graph: Graph) -> int:
    return sum(node.loops.points for node in graph.nodes if not node.is_leaf)


def _count(term: Term) -> int:
    return 1 + sum(map(_count, term.operands)) if isinstance(term, Apply) else 0
