"""Names of laws by their effect: ``cancel-``, ``move-``, ``fuse-`` and what they do it to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import count

from pdv.rewrite.generate.select import FOLDED
from pdv.rewrite.law import Apply, Law, apply


def name_laws(laws: Iterable[Law], taken: Collection[str] = ()) -> list[Law]:
    """The laws with names, each its own; which of several alike gets which number depends on their text alone.

    Names in ``taken`` are left to others.
    """
    groups: dict[str, list[Law]] = {}
    for law in laws:
        groups.setdefault(effect(law), []).append(law)
    found = []
    for name, group in groups.items():
        alike = sorted(group, key=lambda law: (len(str(law)), str(law)))
        numbered = (name if at == 1 else f"{name}-{at}" for at in count(1))
        free = (candidate for candidate in numbered if candidate not in taken)
        found += [replace(law, name=next(free)) for law in alike]
    return found


def effect(law: Law) -> str:
    """What a law does, left to right, in words."""
    if len(law.left) > 1:
        return _fuse(law)
    (left,), (right,) = law.left, law.right
    assert isinstance(left, Apply), law
    if not isinstance(right, Apply):
        return _cancel(left)
    before, after = (Counter(part.op for part in apply(term)) for term in (left, right))
    gone, new = before - after, after - before
    if after.total() >= before.total() + FOLDED:
        return (
            f"fold-{_enumerate(gone)}-into-{_enumerate(before - gone)}"
            if before != gone
            else f"unfold-{_enumerate(gone)}"
        )
    if new and gone:
        return f"fuse-{_enumerate(gone)}-into-{_enumerate(new)}"
    if left.op != right.op:
        return f"move-{left.op}-past-{right.op}"
    if set(before) == {left.op}:
        return f"fuse-{left.op}" if before != after else f"associate-{left.op}"
    inner = next((part.op for part in apply(left) if part.op != left.op), left.op)
    return f"cancel-{_enumerate(gone)}-in-{left.op}" if gone else f"move-{inner}-across-{left.op}"


def _fuse(law: Law) -> str:
    first, second = law.left[:2]
    assert isinstance(first, Apply)
    assert isinstance(second, Apply)
    shared = next(at for at, (x, y) in enumerate(zip(first.operands, second.operands, strict=True)) if x == y)
    (reader, *_) = law.right
    assert isinstance(reader, Apply)
    return f"fuse-{first.op}-sharing-{('input', 'weight')[min(shared, 1)]}-by-{reader.op}"


def _cancel(left: Apply) -> str:
    inner = [operand for operand in left.operands if isinstance(operand, Apply)]
    return f"cancel-{left.op}-of-{inner[0].op}" if inner else f"cancel-{left.op}"


def _enumerate(ops: Counter[str]) -> str:
    return "-".join(ops)
