"""Laws made false by large and special constants, and a second opinion on those that are proven nonetheless."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from benchmarks.mutation.of_laws import mutants
from benchmarks.rules import confirmed
from ir.errors import PdvError, VerificationError
from ir.evaluation.rational import rational
from ir.proof.primes import draw_primes
from pdv.rewrite.check import check_law
from pdv.rewrite.expression import Compound, Expression, Literal, Symbol
from pdv.rewrite.law import Apply, Law, Operand, Term, parse_law

SPECIAL = (
    2.0**31, 2.0**31 - 1, 2.0**31 + 1, 2.0**30, 2.0**32, 2.0**53 - 1, 2.0**61, float(2**61 - 1), 2.0**62, 2.0**100,
    1e-30, 1e30, 3.4e38, 1.7e308, 5e-324, 0.1234567, 1.234567, 0.3333333, 1 + 2.0**-52, 1 - 2.0**-53, 1 + 2.0**-23,
    -1.0, -0.0, 0.0, 2.0, 0.5, 1 / 3, 1e-8,
)  # fmt: skip
GENERIC = (1.7, -0.6)  # in the place of a special number: what is true of no number but a neutral one, shows
FACTORS = ("factor", "offset_by", "exponent", "scale", "eps")
Change = Callable[[Term], Term]


@dataclass(frozen=True)
class FalseLaw:
    """A law with one change; ``made`` makes it with another number in the special one's place."""

    kind: str
    law: Law
    number: float
    made: Callable[[float], Law]


def numbers(rng: random.Random) -> float:
    """A special number, one more than a prime or a product of two that a proof may draw, or a float of 7 digits."""
    drawn = rng.random()
    if drawn < 0.5:
        return rng.choice(SPECIAL)
    primes = draw_primes(str(rng.random()), 2)
    if drawn < 0.7:
        return float(primes[0] + rng.choice((1, -1, 0)))
    if drawn < 0.8:
        return float(primes[0] * (primes[1] >> 10) + 1)
    return round(rng.uniform(-2, 2), 7)


def false_laws(laws: Sequence[Law], seed: int) -> Iterator[FalseLaw]:
    """Endless; laws are taken in turn."""
    rng = random.Random(seed)
    others = mutants(laws, seed)
    while True:
        for law in laws:
            kind = rng.choice((*_KINDS, "products of numbers", "one place of one side"))
            if kind == "one place of one side":
                mutant = next(others)
                yield FalseLaw(kind, mutant.law, 1.0, lambda _, changed=mutant.law: changed)  # type: ignore[misc]  # bound
                continue
            if kind == "products of numbers":
                yield _product(rng)
                continue
            number, state = numbers(rng), rng.getstate()
            made = _maker(law, kind, state)
            changed = made(number)
            rng.random()
            if changed.text != replace(law, name=changed.name).text:
                yield FalseLaw(kind, changed, number, made)


def _maker(law: Law, kind: str, state: tuple[Any, ...]) -> Callable[[float], Law]:
    def made(number: float) -> Law:
        rng = random.Random()
        rng.setstate(state)
        left, right = _KINDS[kind](law, number, rng)
        return replace(law, left=left, right=right, name=f"{law.name}-false", proof="")

    return made


Sides = tuple[tuple[Term, ...], tuple[Term, ...]]


def _one_side(law: Law, rng: random.Random, change: Change) -> Sides:
    if rng.random() < 0.5:
        return tuple(map(change, law.left)), law.right
    return law.left, tuple(map(change, law.right))


def _side_scaled(law: Law, number: float, rng: random.Random) -> Sides:
    return _one_side(law, rng, lambda term: Apply("scale", (term,), (("factor", Literal(number)),)))


def _side_shifted(law: Law, number: float, rng: random.Random) -> Sides:
    return _one_side(law, rng, lambda term: Apply("shift", (term,), (("offset_by", Literal(number)),)))


def _operand_scaled(law: Law, number: float, rng: random.Random) -> Sides:
    name = rng.choice([name for name, shape in law.shapes.items() if shape.dtype.is_floating] or [""])

    def change(term: Term) -> Term:
        if isinstance(term, Operand):
            return Apply("scale", (term,), (("factor", Literal(number)),)) if term.name == name else term
        return Apply(term.op, tuple(map(change, term.operands)), term.attrs)

    return _one_side(law, rng, change)


def _scaled_apart(law: Law, number: float, rng: random.Random) -> Sides:
    """Both sides scaled, by numbers that differ in their last places."""
    near = number * (1 + rng.choice((2.0**-52, 2.0**-30, 2.0**-23)))
    scaled = [
        tuple(Apply("scale", (term,), (("factor", Literal(by)),)) for term in side)
        for side, by in ((law.left, number), (law.right, near))
    ]
    return scaled[0], scaled[1]


def _attribute(sign: str) -> Callable[[Law, float, random.Random], Sides]:
    def sides(law: Law, number: float, rng: random.Random) -> Sides:
        def change(term: Term) -> Term:
            if isinstance(term, Operand):
                return term
            attrs = tuple(
                (name, _changed(value, number, sign) if name in FACTORS else value) for name, value in term.attrs
            )
            return Apply(term.op, tuple(map(change, term.operands)), attrs)

        return _one_side(law, rng, change)

    return sides


def _changed(value: Expression, number: float, sign: str) -> Expression:
    if sign == "=":
        return Literal(number)
    return Compound(sign, (value, Literal(number))) if isinstance(value, Symbol | Literal | Compound) else value


_KINDS: dict[str, Callable[[Law, float, random.Random], Sides]] = {
    "a side scaled": _side_scaled,
    "a side shifted": _side_shifted,
    "an operand scaled": _operand_scaled,
    "sides scaled by almost the same": _scaled_apart,
    "a factor multiplied": _attribute("*"),
    "a factor added to": _attribute("+"),
    "a factor fixed": _attribute("="),
}
LAW_KINDS = (*_KINDS, "products of numbers", "one place of one side")


def _product(rng: random.Random) -> FalseLaw:
    """Two factors, and one that float64 takes for their product; or what a prime takes for it."""
    one, other = numbers(rng), round(rng.uniform(-3, 3), rng.choice((0, 1, 7)))
    product = one * other * rng.choice((1.0, 1.0, 1 + 2.0**-52, -1.0))

    def made(_: float) -> Law:
        factors = [repr(x) if abs(x) != float("inf") else "1e308" for x in (one, other, product)]
        return parse_law(
            f"product: scale(scale(x, factor={factors[0]}), factor={factors[1]}) == scale(x, factor={factors[2]}) "
            "for x[*s]"
        )

    return FalseLaw("products of numbers", made(0), product, made)


def verdict(false: FalseLaw) -> str:
    """What becomes of it: "refused", "ill-typed", "true", or "ACCEPTED WRONGLY"."""
    try:
        check_law(false.law)
    except VerificationError as error:
        return "ill-typed" if error.check == "signature" else "refused"
    except PdvError:
        return "ill-typed"
    return "true" if really(false) else "ACCEPTED WRONGLY"


def really(false: FalseLaw) -> bool:
    """Whether a law is true by float64, or by exact fractions where it is about numbers alone."""
    if false.kind == "products of numbers":
        term, by = false.law.left[0], false.law.right[0]
        assert isinstance(term, Apply)
        assert isinstance(by, Apply)
        inner = term.operands[0]
        assert isinstance(inner, Apply)
        values = [x.attrs[0][1] for x in (inner, term, by)]
        exact = [rational(x.value) for x in values if isinstance(x, Literal) and isinstance(x.value, float)]
        return len(exact) == 3 and None not in exact and Fraction(exact[0] or 0) * (exact[1] or 0) == exact[2]
    if not confirmed(false.law):
        return False
    if false.kind == "sides scaled by almost the same":
        return _scale_of(false.law.left[0]) == _scale_of(false.law.right[0])
    neutral = 0.0 if false.kind in ("a side shifted", "a factor added to") else 1.0
    return false.number == neutral or all(confirmed(false.made(number)) for number in GENERIC)


def _scale_of(term: Term) -> object:
    assert isinstance(term, Apply)
    factor = term.attrs[0][1]
    return factor.value if isinstance(factor, Literal) else None
