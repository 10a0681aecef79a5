"""What follows from laws already found: one application of a law at the root of an entry, modulo equal classes.

Since an entry's children are classes, one step at the root stands for any rewriting below it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from ir.errors import ShapeError
from ir.ops import OPERATORS
from pdv.rewrite.expression import Expression, Symbol, evaluate
from pdv.rewrite.generate.space import Application, Space
from pdv.rewrite.instantiate import hashable
from pdv.rewrite.law import Apply, Law, Operand, Term, variables
from pdv.rewrite.match import bind_shape
from pdv.rewrite.rule import Rule

Binding = dict[str, int]
Values = dict[str, object]
ByRoot = Mapping[str, Sequence[Rule]]


def ways(law: Law) -> Iterator[Rule]:
    """Both directions of a law of one result, where the side read binds all that the other needs."""
    for (before,), after in ((law.left, law.right), (law.right, law.left)):
        if isinstance(before, Apply) and set(variables(after[0])) <= set(variables(before)):
            yield Rule(law.name, law, (before,), after)


def follows(space: Space, entry: Application, by_root: ByRoot, steps: int = 1) -> int | None:
    """A class that the entry is in because of ``steps`` laws one after another; None if there is none."""
    for rule in by_root.get(entry.op, ()):
        for binding, asked in _match_entry(space, rule.before[0], entry, {}):
            values = _solve(space, rule, binding, asked)
            if values is None:
                continue
            found = _look_up(space, rule.after[0], binding, values, by_root, steps - 1)
            if found is not None:
                return found
    return None


_Asked = tuple[tuple[Apply, Application], ...]


def _match(space: Space, pattern: Term, number: int, binding: Binding) -> Iterator[tuple[Binding, _Asked]]:
    if isinstance(pattern, Operand):
        if binding.get(pattern.name, number) == number:
            yield {**binding, pattern.name: number}, ()
        return
    for entry in space.classes[number].entries:
        if entry.op == pattern.op:
            yield from _match_entry(space, pattern, entry, binding)


def _match_entry(
    space: Space, pattern: Apply, entry: Application, binding: Binding
) -> Iterator[tuple[Binding, _Asked]]:
    if len(pattern.operands) != len(entry.children):
        return
    yield from _match_all(space, pattern, entry, pattern.operands, entry.children, binding)
    if OPERATORS[entry.op].commutative and entry.children[0] != entry.children[1]:
        yield from _match_all(space, pattern, entry, pattern.operands, entry.children[::-1], binding)


def _match_all(
    space: Space,
    pattern: Apply,
    entry: Application,
    operands: Sequence[Term],
    children: Sequence[int],
    binding: Binding,
) -> Iterator[tuple[Binding, _Asked]]:
    if not operands:
        yield binding, ((pattern, entry),)
        return
    for bound, asked in _match(space, operands[0], children[0], binding):
        for rest, more in _match_all(space, pattern, entry, operands[1:], children[1:], bound):
            yield rest, asked + more


def _solve(space: Space, rule: Rule, binding: Binding, asked: _Asked) -> Values | None:
    """Values of all symbols, if shapes and attributes agree."""
    values: Values = {}
    for name, number in binding.items():
        shape, tensor = rule.law.shapes[name], space.classes[number].tensor
        if tensor.dtype != shape.dtype or not bind_shape(shape, tensor.shape, values):
            return None
    late: list[tuple[Apply, Application]] = []
    for pattern, entry in asked:
        for name, written in pattern.attrs:
            if isinstance(written, Symbol) and values.setdefault(written.name, entry.attr(name)) != entry.attr(name):
                return None
            if isinstance(written, tuple):
                _bind_tuple(written, entry.attr(name), values)
        late.append((pattern, entry))
    return values if all(_agree(space, pattern, entry, values) for pattern, entry in late) else None


def _bind_tuple(written: tuple[Expression, ...], value: Hashable, values: Values) -> None:
    if isinstance(value, tuple) and len(value) == len(written):
        for item, part in zip(written, value, strict=True):
            if isinstance(item, Symbol):
                values.setdefault(item.name, part)


def _agree(space: Space, pattern: Apply, entry: Application, values: Values) -> bool:
    """Whether the pattern's attributes, written or left out, are the entry's."""
    found = _entry(space, pattern, values, entry.children)
    return found is not None and found.attrs == entry.attrs


def _entry(space: Space, term: Apply, values: Values, children: Sequence[int]) -> Application | None:
    """The operator of a term over classes; None if it is no term at these values."""
    try:
        given = {name: hashable(evaluate(written, values)) for name, written in term.attrs}
    except (KeyError, ShapeError):  # no value, or none that a float holds
        return None
    return space.entry(term.op, given, children)


def _look_up(space: Space, term: Term, binding: Binding, values: Values, by_root: ByRoot, steps: int) -> int | None:
    """The class of a term; terms not met before may follow from further laws."""
    if isinstance(term, Operand):
        return binding[term.name]
    children: list[int] = []
    for operand in term.operands:
        found = _look_up(space, operand, binding, values, by_root, steps)
        if found is None:
            return None
        children.append(found)
    entry = _entry(space, term, values, children)
    if entry is None or entry in space.table or steps == 0:
        return None if entry is None else space.table.get(entry)
    return follows(space, entry, by_root, steps)
