"""Terms of a world in order of size, paired by value: each pair that no kept law explains is a candidate law.

Only representatives stand inside larger terms, so what is enumerated is terms modulo the laws already found.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ir.ops import OPERATORS
from ir.types import TensorType
from pdv.rewrite.generate.generalize import generalize
from pdv.rewrite.generate.reach import follows, ways
from pdv.rewrite.generate.space import Application, Class, OperatorForm, Space, add_term
from pdv.rewrite.generate.worlds import Slot, World
from pdv.rewrite.law import Law, Term, apply, variables
from pdv.rewrite.rule import Rule

STEPS = 3  # laws that may be needed, one after another, to explain an equation
REPEATS = 1  # operands that may stand twice in a term, as in a·x + b·x
Report = Callable[[str, float | None], None]


@dataclass
class KeptLaws:
    """Laws kept so far over all worlds, and counts of what was looked at."""

    laws: list[Law] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    by_root: dict[str, list[Rule]] = field(default_factory=dict)

    def keep(self, law: Law) -> None:
        """Add a proven law."""
        self.laws.append(law)
        for rule in ways(law):
            self.by_root.setdefault(rule.before[0].op, []).append(rule)


def explore(world: World, found: KeptLaws, *, max_ops: int, seed: int, report: Report) -> None:
    """Enumerate a world's terms of up to ``max_ops`` operators; add the laws that nothing known implies."""
    space = Space(world.shapes, world.values, seed)

    def met(term: Term, entry: Application, known: Class) -> None:
        if follows(space, entry, found.by_root) is None and (law := _law(world, term, known, found, seed)) is not None:
            found.keep(law)

    for term in world.givens:  # which count as operands
        add_term(space, term, met)
    top = min(max_ops, world.max_ops)
    for size in range(1, top + 1):
        report(f"{world.name}, {size} of {top} operators", None)
        waiting = [
            (step, children)
            for step, children in _in_order(space, world, size)
            if not _settle(space, found, step, children, size)
        ]
        for step, children in waiting:  # what all other terms of this size have not explained either
            if not _settle(space, found, step, children, size, STEPS):
                _discover(space, world, found, step, children, seed)


def _settle(
    space: Space, found: KeptLaws, step: OperatorForm, children: Sequence[int], size: int, steps: int = 1
) -> bool:
    """Whether a term is of no interest: no term, met before, zero, the first of its value, or explained by laws."""
    entry = space.entry(step.op, space.concrete(step), children)
    if entry is None or entry in space.table:
        return True
    found.counts["enumerated"] += steps == 1
    tensor, value, key = space.compute(entry)
    if not key:
        return True
    known = space.known(key)
    if known is None:
        made = space.add_class(key, tensor, value, space.term_of(step, children), size, _leaves(space, children))
        space.add_entry(entry, made)
        return True
    if any(follows(space, entry, found.by_root, count) is not None for count in range(1, steps + 1)):
        found.counts["implied"] += 1
        space.add_entry(entry, known)
        return True
    return False


def _discover(
    space: Space, world: World, found: KeptLaws, step: OperatorForm, children: Sequence[int], seed: int
) -> None:
    """A term whose value another has, for no reason that is known: a law, if it is one at all sizes."""
    entry = space.entry(step.op, space.concrete(step), children)
    assert entry is not None, step
    known = space.known(space.compute(entry)[2])
    assert known is not None, step
    law = _law(world, space.term_of(step, children), known, found, seed)
    if law is not None:
        found.keep(law)
        space.add_entry(entry, known)


def _law(world: World, term: Term, known: Class, found: KeptLaws, seed: int) -> Law | None:
    """The candidate ``term == representative``, generalised and proven; None if it does not hold at other sizes."""
    found.counts["candidates"] += 1
    used, other = (tuple(dict.fromkeys(variables(each))) for each in (term, known.term))
    if not (set(other) <= set(used) or set(used) <= set(other)):
        return None  # each side has an operand that the other does without: both are trivial
    left, right = (term, known.term) if set(other) <= set(used) else (known.term, term)
    names = tuple(dict.fromkeys(variables(left)))
    shapes = {name: world.shapes[name] for name in names}
    law = generalize(Law("candidate", (left,), (right,), shapes), world.values, seed=seed)
    if law is not None:
        found.counts["proven"] += 1
    return law


def _in_order(space: Space, world: World, size: int) -> list[tuple[OperatorForm, tuple[int, ...]]]:
    """What a law of a simpler term may explain comes later: operands that stand twice, operands that are terms."""
    found: list[tuple[int, int, OperatorForm, tuple[int, ...]]] = []
    for step, children in _candidates(space, world, size):
        leaves = _leaves(space, children)
        if len(set(children)) < len(children) or any(
            count > 1 and space.classes[child].size == 0 for child, count in _reads(space, children, leaves)
        ):
            continue  # x + x, x · f(x): no law of programs needs them
        repeats = len(leaves) - len(set(leaves))
        inside = [part.op for child in children for part in apply(space.classes[child].term)]
        if repeats <= REPEATS and not (step.op in world.flat and step.op in inside):
            found.append((repeats, len(inside), step, children))
    found.sort(key=lambda candidate: candidate[:2])
    return [(step, children) for _, _, step, children in found]


def _reads(space: Space, children: Sequence[int], leaves: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Each child, and how often it, or its first operand, stands among the leaves of all."""
    for child in children:
        yield child, leaves.count(space.classes[child].leaves[0])


def _leaves(space: Space, children: Sequence[int]) -> tuple[str, ...]:
    return tuple(leaf for child in children for leaf in space.classes[child].leaves)


def _candidates(space: Space, world: World, size: int) -> Iterator[tuple[OperatorForm, tuple[int, ...]]]:
    """Steps over classes whose sizes add up to ``size - 1``; those of an earlier size first."""
    groups = _by_size_and_type(space)
    for step, slots in world.steps:
        free = sum(slot is None for slot in slots)
        for sizes in _compositions(size - 1, free):
            for types in itertools.product(*(groups.get(part, {}) for part in sizes)):
                yield from _over(space, step, slots, [groups[part][t] for part, t in zip(sizes, types, strict=True)])


def _over(
    space: Space, step: OperatorForm, slots: Sequence[Slot], choices: Sequence[Sequence[int]]
) -> Iterator[tuple[OperatorForm, tuple[int, ...]]]:
    """All children of one list of types, if these fit at all."""
    fixed = {slot: number for number, slot in ((c.number, str(c.term)) for c in space.classes[:64])}
    first = _fill(slots, [choice[0] for choice in choices], fixed)
    if space.entry(step.op, space.concrete(step), first) is None:
        return
    for numbers in itertools.product(*choices):
        children = _fill(slots, numbers, fixed)
        if not OPERATORS[step.op].commutative or children[0] <= children[1]:
            yield step, children


def _fill(slots: Sequence[Slot], numbers: Sequence[int], fixed: dict[str, int]) -> tuple[int, ...]:
    left = iter(numbers)
    return tuple(next(left) if slot is None else fixed[slot] for slot in slots)


def _by_size_and_type(space: Space) -> dict[int, dict[TensorType, list[int]]]:
    groups: dict[int, dict[TensorType, list[int]]] = {}
    for member in space.classes:
        groups.setdefault(member.size, {}).setdefault(member.tensor, []).append(member.number)
    return groups


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write ``total`` as ``parts`` sizes."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


__all__ = ["Application", "KeptLaws", "explore"]
