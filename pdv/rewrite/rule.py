"""A rule: a law read in one direction. What is matched is its pattern, what replaces it the other side.

Entry points: ``rules_of`` makes the rules of a law; ``match`` says where they apply, ``rewriter`` what that makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ir.graph import Node
from ir.operator import Operator
from ir.ops import OPERATORS
from pdv.rewrite.expression import Expression, Literal, Symbol, leaves
from pdv.rewrite.law import Apply, Law, Operand, Term, apply, variables

REVERSED = "~"
HEAVY = ("contraction", "stencil", "row")  # kinds of operators for which blocks are worth merging


@dataclass(frozen=True, eq=False)
class Rule:
    """``before`` may be replaced by ``after``: one or more results, equal one by one.

    ``name`` is the law's, with ``~`` behind it where the law is read from right to left.
    """

    name: str
    law: Law
    before: tuple[Apply, ...]
    after: tuple[Term, ...]

    @cached_property
    def equation(self) -> str:
        """The law in this direction, for people."""
        before, after = (", ".join(map(str, side)) for side in (self.before, self.after))
        return f"{before} == {after}"

    @property
    def root(self) -> Operator:
        """The outermost operator of the first result's pattern."""
        return OPERATORS[self.before[0].op]

    @cached_property
    def below(self) -> tuple[Operator | None, ...]:
        """The operators right below the first root; None where it may be any."""
        terms = self.before[0].operands
        return tuple(OPERATORS[t.op] if isinstance(t, Apply) and not t.repeated else None for t in terms)

    def may_match(self, node: Node) -> bool:
        """Whether the operators below a node with the root's are those of the pattern, in some order."""
        return all(op is None or any(operand.op is op for operand in node.operands) for op in self.below)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Operators in each root's pattern."""
        return tuple(sum(1 for _ in apply(root)) for root in self.before)

    @cached_property
    def needs(self) -> Counter[str]:
        """At least so many operators of each name are there where it matches (equal terms may be one node)."""
        found: Counter[str] = Counter()
        for term in {term for root in self.before for term in apply(root)}:
            found[term.op] += 1
        return found

    @cached_property
    def spans(self) -> bool:
        """True if it is worth a block of its own: more than one operator, heavy ones among them, and no more after."""
        before, after = (
            [term.op for term in {term for root in side for term in apply(root)}] for side in (self.before, self.after)
        )
        heavy, then = (sum(OPERATORS[op].kind in HEAVY for op in ops) for ops in (before, after))
        return len(before) > 1 and heavy >= max(1, then)

    @cached_property
    def anchors(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """For each root after the first, a variable that an earlier one binds, and the operators above it upwards."""
        known = set(variables(self.before[0]))
        found = []
        for root in self.before[1:]:
            found.append(next(anchor for anchor in _anchors(root, ()) if anchor[0] in known))
            known |= set(variables(root))
        return tuple(found)


def forwards(law: Law) -> Rule:
    """A law read from left to right, which is taken wherever it applies."""
    (before,), after = law.left, law.right
    assert isinstance(before, Apply), law
    assert _tells(law, (before,), after), law
    return Rule(law.name, law, (before,), after)


def rules_of(law: Law) -> tuple[Rule, ...]:
    """The directions of a law whose pattern tells all that the replacement needs, operator by operator."""
    sides = ((law.name, law.left, law.right), (law.name + REVERSED, law.right, law.left))
    found = []
    for name, before, after in sides:
        pattern = tuple(term for term in before if isinstance(term, Apply))
        listed = not any(term.repeated for root in pattern for term in apply(root))
        if len(pattern) == len(before) and listed and _tells(law, pattern, after) and _connect(pattern):
            found.append(Rule(name, law, pattern, after))
    return tuple(found)


def _tells(law: Law, pattern: Iterable[Apply], after: Iterable[Term]) -> bool:
    operands = {name for root in pattern for name in variables(root)}
    if not {name for term in after for name in variables(term)} <= operands:
        return False
    bound = {dim.name for name in operands for dim in law.shapes[name].dims if not isinstance(dim, Literal)}
    bound |= {name for name in operands if law.shapes[name].role == "number"}
    wanted: set[str] = set()
    for root in pattern:
        for term in apply(root):
            for _, written in term.attrs:
                bound |= set(_plain(written))
                wanted |= _names(written)
    wanted |= {name for term in after for part in apply(term) for _, written in part.attrs for name in _names(written)}
    return wanted <= bound


def _connect(pattern: tuple[Apply, ...]) -> bool:
    known = set(variables(pattern[0])) if pattern else set()
    for root in pattern[1:]:
        if known.isdisjoint(variables(root)):
            return False
        known |= set(variables(root))
    return bool(pattern)


def _anchors(term: Term, above: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(term, Operand):
        yield term.name, above
    else:
        for operand in term.operands:
            yield from _anchors(operand, (term.op, *above))


def _plain(written: Expression) -> Iterator[str]:
    """Symbols that a value given for ``written`` tells: those that stand alone, or in a tuple."""
    match written:
        case Symbol(name):
            yield name
        case tuple():
            for item in written:
                yield from _plain(item)
        case _:
            return


def _names(written: Expression) -> set[str]:
    """All names in an expression."""
    return {leaf.name for leaf in leaves(written) if not isinstance(leaf, Literal)}


def by_name(rules: Iterable[Rule]) -> Mapping[str, Rule]:
    """Rules by name."""
    return {rule.name: rule for rule in rules}
