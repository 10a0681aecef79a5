"""Whether a law that reads is one that can be tried: operators and attributes that exist, variables that are bound.

Entry point: ``check_form``. Whether it is true, ``check`` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ir.errors import UsageError, did_you_mean
from ir.ops import OPERATORS
from pdv.rewrite.expression import Compound, Expression, Literal, Star, Symbol
from pdv.rewrite.law import Apply, Law, Operand, Term

NOT_IN_LAWS = ("leaf", "parallel")  # kinds of operators


def check_form(law: Law) -> Law:
    """The law itself.

    Raises:
        UsageError: naming the operator, attribute or variable that is wrong.
    """
    if len(law.left) != len(law.right):
        raise _error(
            law,
            f"{len(law.left)} results on the left, {len(law.right)} on the right",
            "As many on both sides",
            "Write a law for each, or add the missing one",
        )
    sides = [set[str](), set[str]()]
    for side, terms in zip(sides, (law.left, law.right), strict=True):
        for term in terms:
            side |= set(_variables(law, term))
    if not (sides[0] <= sides[1] or sides[1] <= sides[0]):
        lone = sorted(sides[0] ^ sides[1])
        raise _error(
            law,
            f"each side has a variable that the other does without: {', '.join(lone)}",
            "One side has all variables",
            "Correct the side that a variable was left out of",
        )
    return law


def _variables(law: Law, term: Term) -> Iterator[str]:
    """Operand variables of a term whose operators and attributes are in order."""
    if isinstance(term, Operand):
        yield term.name
        return
    _check_operator(law, term)
    for name, written in term.attrs:
        _check_attribute(law, f"{term.op}'s {name}", written)
    for operand in term.operands:
        yield from _variables(law, operand)


def _check_operator(law: Law, term: Apply) -> None:
    known = {name for name, op in OPERATORS.items() if op.kind not in NOT_IN_LAWS and not op.is_foreign}
    if term.op not in known:
        what = (
            "is not for laws, which are about declared operators of one device"
            if term.op in OPERATORS
            else "is no operator"
        )
        raise _error(law, f"{term.op!r} {what}", "The operators that ir/ops declares", _close(term.op, known))
    if not term.operands:
        raise _error(
            law, f"{term.op}() has no operands", "One or more", "Name its operands, and their dims after 'for'"
        )
    op = OPERATORS[term.op]
    given = [name for name, _ in term.attrs]
    takes = f"{term.op} takes {', '.join(op.attrs) or 'none'}"
    for name in given:
        if name not in op.attrs:
            raise _error(law, f"{term.op} has no attribute {name!r}", takes, _close(name, op.attrs))
    if term.repeated and (len(term.operands) != 1 or not (len(given) == 1 and isinstance(term.attrs[0][1], Symbol))):
        allowed = "One operand, and one attribute, by a name: the product of all of them"
        told = f"{term.op}[...] is given {len(term.operands)} operands and {', '.join(given) or 'no attribute'}"
        raise _error(law, told, allowed, f"Write {term.op}, or name the attribute")
    missing = [name for name in op.attrs if name not in op.defaults and name not in given]
    if missing:
        mend = f"Give it a value or a variable: {missing[0]}={missing[0][0]}"
        raise _error(law, f"{term.op} lacks {', '.join(missing)}", takes, mend)


def _check_attribute(law: Law, what: str, written: Expression, *, inside: bool = False) -> None:
    match written:
        case Literal(value) if inside and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _error(law, f"{what} counts with {value!r}", "Numbers and names of numbers", "Write a number")
        case Symbol(name) if name in law.stars:
            raise _error(law, f"{what} takes {name}, which is a run of dims", "Runs within tuples", f"Write (*{name},)")
        case Star(name) if name not in law.stars:
            runs = ", ".join(law.stars) or "none"
            raise _error(law, f"{what} takes *{name}, which no variable has", f"Runs here: {runs}", "Correct the name")
        case Compound(_, terms):
            for term in terms:
                _check_attribute(law, what, term, inside=True)
        case tuple():
            for item in written:
                _check_attribute(law, what, item)
        case _:
            return


def _close(name: str, known: Iterable[str]) -> str:
    """The name that was meant, or all there are."""
    listed = sorted(known)
    return did_you_mean(name, listed) or (f"Use one of: {', '.join(listed)}" if listed else "Leave it out")


def _error(law: Law, what: str, allowed: str, mend: str) -> UsageError:
    return UsageError(f"law {law.name}: {what}", allowed, mend)
