"""Laws made wrong: an operand swapped, a dim, an attribute or a factor changed, an operator exchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdv.rewrite.expression import Compound, Expression, Literal, Symbol
from pdv.rewrite.law import Apply, Law, Operand, Term

_EXCHANGES = (
    ("add", "mul", "sub"),
    ("linear", "matmul"),
    ("relu", "gelu", "tanh", "silu", "sigmoid", "neg"),
    ("reduce_sum", "reduce_mean"),
    ("max_pool2d", "avg_pool2d"),
    ("softmax", "log_softmax"),
)
_NUMBERS = ("factor", "offset_by", "start", "stop", "parts", "index")
EXCHANGED = {op: [other for other in group if other != op] for group in _EXCHANGES for op in group}
KINDS = (
    "operands swapped",
    "operand replaced",
    "operator exchanged",
    "dim changed",
    "factor changed",
    "attribute changed",
)
_DIMS = ("dim", "dims", "perm")
_FACTORS = ("factor", "offset_by", "exponent", "scale", "eps")


@dataclass(frozen=True)
class Mutant:
    """A law with one place of one side changed."""

    law: Law
    kind: str
    source: str


def mutants(laws: Sequence[Law], seed: int) -> Iterator[Mutant]:
    """Endless: law after law, a random place of it changed in a random way; no two alike, none the law itself."""
    rng = random.Random(seed)
    seen = {_text(law) for law in laws}
    while True:
        for law in laws:
            kind = rng.choice(KINDS)
            places = list(_changes(law, kind))
            if not places:
                continue
            changed = replace(rng.choice(places), name=f"{law.name}-mutant", proof="")
            if _text(changed) not in seen:
                seen.add(_text(changed))
                yield Mutant(changed, kind, law.name)


def _text(law: Law) -> str:
    return str(law).partition(": ")[2].partition(" #")[0]


def _changes(law: Law, kind: str) -> Iterator[Law]:
    """All laws that differ from ``law`` in one place in this way."""
    for number, term in enumerate(law.left):
        for changed in _inside(term, kind, law):
            yield replace(law, left=(*law.left[:number], changed, *law.left[number + 1 :]))
    for number, term in enumerate(law.right):
        for changed in _inside(term, kind, law):
            yield replace(law, right=(*law.right[:number], changed, *law.right[number + 1 :]))


def _inside(term: Term, kind: str, law: Law) -> Iterator[Term]:
    if isinstance(term, Operand):
        if kind == "operand replaced":
            yield from (Operand(name) for name in law.shapes if name != term.name)
        return
    yield from _here(term, kind, law)
    for at, operand in enumerate(term.operands):
        for changed in _inside(operand, kind, law):
            yield Apply(term.op, (*term.operands[:at], changed, *term.operands[at + 1 :]), term.attrs)


def _here(term: Apply, kind: str, law: Law) -> Iterator[Term]:
    if kind == "operands swapped" and len(term.operands) > 1:
        first, second, *rest = term.operands
        yield Apply(term.op, (second, first, *rest), term.attrs)
    if kind == "operator exchanged":
        for op in EXCHANGED.get(term.op, ()):
            yield Apply(op, term.operands, (("approximate", Literal("none")),) if op == "gelu" else _kept(term, op))
    if kind in ("dim changed", "factor changed", "attribute changed"):
        for at, (name, written) in enumerate(term.attrs):
            if _kind_of(name) == kind:
                for changed in _other(name, written, law):
                    yield Apply(term.op, term.operands, (*term.attrs[:at], (name, changed), *term.attrs[at + 1 :]))


def _kind_of(name: str) -> str:
    """Of a change to the attribute."""
    if name in _DIMS:
        return "dim changed"
    return "factor changed" if name in _FACTORS else "attribute changed"


def _kept(term: Apply, op: str) -> tuple[tuple[str, Expression], ...]:
    return () if term.op == "gelu" else term.attrs


def _other(name: str, written: Expression, law: Law) -> Iterator[Expression]:
    """Other expressions for an attribute."""
    match written:
        case Literal(value) if isinstance(value, bool):
            yield Literal(not value)
        case Literal(value) if isinstance(value, int):
            yield from (Literal(value + 1), Literal(value - 1))
        case Literal(value) if isinstance(value, float):
            yield Literal(value * 2)
        case Symbol():
            alike = [other for other, attr in law.attr_uses.items() if attr == name and other != written.name]
            yield from map(Symbol, alike)
            if name in _NUMBERS:
                yield from map(Symbol, law.extents)
            if name in (*_FACTORS, "start", "stop"):
                yield Compound("+", (written, written))
        case Compound(sign, terms):
            yield Compound("*" if sign == "+" else "+", terms)
            yield from terms
        case tuple():
            for at, item in enumerate(written):
                for changed in _other(name, item, law):
                    yield (*written[:at], changed, *written[at + 1 :])
            for at in range(len(written) - 1):
                yield (*written[:at], written[at + 1], written[at], *written[at + 2 :])
        case _:
            return
