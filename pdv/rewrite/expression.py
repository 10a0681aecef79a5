"""Attributes in laws: numbers, names, and what is computed from them.

Entry points: ``parse_expression`` reads one, ``evaluate`` gives its value. How they are written, ``law`` says.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import EllipsisType
from typing import Any, cast

from ir.errors import ShapeError, UsageError
from ir.evaluation.rational import exact_float, rational

Scalar = int | float | bool | str | EllipsisType


@dataclass(frozen=True, slots=True)
class Symbol:
    """An extent, or an attribute variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Star:
    """Any number of leading dims."""

    name: str

    def __str__(self) -> str:
        return f"*{self.name}"


@dataclass(frozen=True, slots=True)
class Compound:
    """``+``, ``*``, ``/``, ``[]``, ``~``, ``prod`` or ``short`` over terms."""

    sign: str
    terms: tuple[Expression, ...]

    def __str__(self) -> str:
        first, *_ = terms = [
            f"({term})" if isinstance(term, Compound) and term.sign in "+*/" != self.sign else write(term)
            for term in self.terms
        ]
        match self.sign:
            case "[]":
                return f"{first}[{terms[1]}]"
            case "~":
                return f"~{first}"
            case "prod" | "short":
                return f"{self.sign}({', '.join(map(write, self.terms))})"
        return f" {self.sign} ".join(terms)


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands for itself."""

    value: Scalar

    def __str__(self) -> str:
        return "..." if self.value is ... else repr(self.value)


DOTS = Literal(...)
Expression = Symbol | Star | Compound | Literal | tuple["Expression", ...]


def write(expression: Expression) -> str:
    """An expression as it is read."""
    if isinstance(expression, tuple):
        inside = ", ".join(map(write, expression))
        return f"({inside},)" if len(expression) == 1 else f"({inside})"
    return str(expression)


def leaves(expression: Expression) -> Iterator[Symbol | Star | Literal]:
    """The names and numbers in an expression, from left to right."""
    if isinstance(expression, Compound | tuple):
        for term in expression.terms if isinstance(expression, Compound) else expression:
            yield from leaves(term)
    else:
        yield expression


def evaluate(expression: Expression, values: Mapping[str, object], *, exact: bool = True) -> object:
    """The value of an attribute under values of its symbols (``*s`` a tuple of extents, spliced into tuples).

    Raises:
        KeyError: if a symbol has no value.
        ShapeError: if a sum, product or quotient of floats is none, or a tuple has no such element.
    """
    match expression:
        case Literal(value):
            return value
        case Symbol(name) | Star(name):
            return values[name]
        case Compound("~", (term,)):
            return evaluate(term, values, exact=False)
        case Compound("[]", (run, at)):
            return _picked(evaluate(run, values), evaluate(at, values))
        case Compound("prod", (run,)):
            return math.prod(cast("tuple[int, ...]", evaluate(run, values)))
        case Compound("short", (size, multiple)):
            return -_whole(evaluate(size, values)) % _whole(evaluate(multiple, values))
        case Compound(sign, terms):
            return _count(sign, [_number(evaluate(term, values, exact=exact)) for term in terms], exact=exact)
        case _:
            found: list[object] = []
            for item in expression:
                part = evaluate(item, values)
                found.extend(part if isinstance(item, Star) and isinstance(part, tuple) else (part,))
            return tuple(found)


def is_rounded(expression: Expression) -> bool:
    """Whether a number need only be about it."""
    return isinstance(expression, Compound) and expression.sign == "~"


def in_full(dims: tuple[Expression, ...], rank: int) -> tuple[Expression, ...]:
    """A tuple of dims without ``...``: with the dims of ``rank`` that it stands for."""
    if DOTS not in dims:
        return dims
    at = dims.index(DOTS)
    return (*dims[:at], *map(Literal, range(at, rank - len(dims) + at + 1)), *dims[at + 1 :])


def _picked(run: object, at: object) -> tuple[object, ...]:
    assert isinstance(run, tuple), run
    assert isinstance(at, tuple), at
    if not all(0 <= place < len(run) for place in at):
        raise ShapeError(f"{run} has no elements {at}")
    return tuple(run[place] for place in at)


def _count(sign: str, numbers: Sequence[int | float], *, exact: bool) -> int | float:
    """The sum, product or quotient of numbers; if ``exact``, of the rationals that they stand for.

    Raises:
        ShapeError: if floats do not hold it: the law says nothing of such a case.
    """
    if not exact or (sign != "/" and all(isinstance(number, int) for number in numbers)):
        total: int | float = _total(sign, numbers)
        return total
    known = [rational(float(number)) for number in numbers]
    found = None if None in known else exact_float(Fraction(_total(sign, known)))
    if found is None:
        raise ShapeError(f"{f' {sign} '.join(map(repr, numbers))} is no float")
    return found


def _total(sign: str, numbers: Sequence[Any]) -> Any:  # Any: integers, floats or fractions
    if sign != "/":
        return sum(numbers) if sign == "+" else math.prod(numbers)
    if not numbers[1]:
        raise ShapeError("a number by zero")
    return numbers[0] / numbers[1]


def _number(value: object) -> int | float:
    if not isinstance(value, int | float):
        raise UsageError(f"{value!r} is counted with", "Numbers", "Write a name or a number that is one")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise UsageError(f"{value!r} is short of something", "Whole numbers", "Write an extent or a number that is one")
    return value


_SIGNS = {ast.Add: "+", ast.Mult: "*", ast.Div: "/"}


def parse_expression(tree: ast.expr) -> Expression:
    """An attribute as it is written.

    Raises:
        ValueError: if it is none.
    """
    match tree:
        case ast.Constant(value=value) if isinstance(value, Scalar):
            return Literal(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return Literal(-value)
        case ast.Name(id=name):
            return Symbol(name)
        case ast.Starred(value=ast.Name(id=name)):
            return Star(name)
        case ast.Tuple(elts=items):
            return tuple(parse_expression(item) for item in items)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() | ast.Div() as sign, right=right):
            return Compound(_SIGNS[type(sign)], (parse_expression(left), parse_expression(right)))
        case ast.UnaryOp(op=ast.Invert(), operand=term) | ast.Call(func=ast.Name(id="prod"), args=[term]):
            return Compound("~" if isinstance(tree, ast.UnaryOp) else "prod", (parse_expression(term),))
        case ast.Call(func=ast.Name(id="short"), args=[size, multiple]):
            return Compound("short", (parse_expression(size), parse_expression(multiple)))
        case ast.Subscript(value=run, slice=at):
            return Compound("[]", (parse_expression(run), parse_expression(at)))
    raise ValueError(f"{ast.unparse(tree)} is no attribute")
