"""A law: an equation between expressions over operators, typed by symbolic shapes, as one line of text.

    associate-linear: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[*s, k] v[m, k] w[n, m] # proof

Left and right of ``==`` stand one or more results (``a, b == c, d``), equal one by one. After ``for`` every operand
variable gives its dims: a symbol is one extent, the same wherever it stands; ``*s`` is any number of leading dims, the
same wherever it stands. Attributes are literals, symbols (extents, or attribute variables where no shape has them),
sums, products and quotients of these, or tuples. Negative dims count from the end; ``...`` in a tuple of dims stands
for those before them, in order. ``p[q]`` are the elements of ``p`` at ``q``, ``prod(p)`` is their product. What stands
behind ``~`` is computed in floats, and a number that differs from it in the seventh digit is one, too.

Behind its dims a variable may say what else it is: an element type (``:i64``; without, one type for all of them),
``:mask`` without gradient and spread to these dims, ``:moved`` made by an operator that moves elements, ``:number`` a
constant of one element, by whose name attributes have its value. ``scale[...](x, factor=c)`` is any number of scales,
one on another, of which ``c`` is the product: a form for laws that are always taken (``normal_form``). Both the
generator and people write laws so.

Decides the language; matching (``rule``), and whether a law is true (``check``), are decided elsewhere.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import EllipsisType
from typing import Any, cast

from ir.errors import ShapeError, UsageError
from ir.evaluation.rational import exact_float, rational
from ir.types import DType

Scalar = int | float | bool | str | EllipsisType
ROLES = ("mask", "moved", "number")


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
    """``+``, ``*``, ``/``, ``[]``, ``~`` or ``prod`` over terms."""

    sign: str
    terms: tuple[Expression, ...]

    def __str__(self) -> str:
        first, *_ = terms = [
            f"({term})" if isinstance(term, Compound) and term.sign in "+*/" != self.sign else written(term)
            for term in self.terms
        ]
        match self.sign:
            case "[]":
                return f"{first}[{terms[1]}]"
            case "~":
                return f"~{first}"
            case "prod":
                return f"prod({first})"
        return f" {self.sign} ".join(terms)


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands for itself."""

    value: Scalar

    def __str__(self) -> str:
        return "..." if self.value is ... else repr(self.value)


DOTS = Literal(...)
Expression = Symbol | Star | Compound | Literal | tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A variable that stands for a node."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator over terms; ``repeated``: any number of it, one on another, whose attribute is the product."""

    op: str
    operands: tuple[Term, ...]
    attrs: tuple[tuple[str, Expression], ...] = ()
    repeated: bool = False

    def __str__(self) -> str:
        given = [*map(str, self.operands), *(f"{name}={written(value)}" for name, value in self.attrs)]
        return f"{self.op}{'[...]' * self.repeated}({', '.join(given)})"


Term = Operand | Apply


@dataclass(frozen=True, slots=True)
class Shape:
    """Dims of an operand variable: symbols, stars, or literal sizes; its element type; one of ``ROLES``, or none."""

    dims: tuple[Symbol | Star | Literal, ...]
    dtype: DType = DType.F32
    role: str = ""

    def __str__(self) -> str:
        kind = self.role or ("" if self.dtype is DType.F32 else self.dtype.value)
        return f"[{', '.join(map(str, self.dims))}]" + f":{kind}" * bool(kind)


@dataclass(frozen=True)
class Law:
    """``left == right`` for operands of the given shapes. ``proof`` is the record of its check (empty: none yet)."""

    name: str
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    shapes: Mapping[str, Shape] = field(hash=False)
    proof: str = ""

    def __str__(self) -> str:
        return self.text + (f" # {self.proof}" if self.proof else "")

    @property
    def text(self) -> str:
        """The law as a line, without the record of its proof."""
        sides = " == ".join(", ".join(map(str, side)) for side in (self.left, self.right))
        operands = " ".join(f"{name}{shape}" for name, shape in self.shapes.items())
        return f"{self.name}: {sides} for {operands}"

    @property
    def extents(self) -> tuple[str, ...]:
        """Symbols that shapes give, in order of first appearance."""
        found = (dim.name for shape in self.shapes.values() for dim in shape.dims if isinstance(dim, Symbol))
        return tuple(dict.fromkeys(found))

    @property
    def stars(self) -> tuple[str, ...]:
        """Names of the runs of leading dims."""
        found = (dim.name for shape in self.shapes.values() for dim in shape.dims if isinstance(dim, Star))
        return tuple(dict.fromkeys(found))

    @property
    def attr_variables(self) -> tuple[str, ...]:
        """Attribute symbols that no shape gives."""
        used = (name for term in (*self.left, *self.right) for name in _symbols(term))
        return tuple(dict.fromkeys(name for name in used if name not in self.extents))


def parse_law(text: str) -> Law:
    """Read one line.

    Raises:
        UsageError: saying where it is no law.
    """
    match = re.fullmatch(r"\s*([\w-]+): (.+?) == (.+?) for ([^#]+?)\s*(?:# ?(.*))?", text)
    if match is None:
        raise UsageError(
            f"this is no law: {text!r}",
            "name: left == right for x[*s, k] w[n, k]",
            "docs/rules.md shows how laws are written",
        )
    name, left, right, operands, proof = match.groups()
    try:
        shapes = _shapes(operands)
        return Law(name, _terms(left, shapes), _terms(right, shapes), shapes, (proof or "").strip())
    except (SyntaxError, ValueError, KeyError) as error:
        raise UsageError(
            f"law {name} does not read: {error}",
            "Operators over variables that have their dims after 'for', attributes by name",
            "docs/rules.md shows how laws are written",
        ) from error


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
        case Compound(sign, terms):
            return _counted(sign, [_number(evaluate(term, values, exact=exact)) for term in terms], exact=exact)
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


def _counted(sign: str, numbers: Sequence[int | float], *, exact: bool) -> int | float:
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


def written(expression: Expression) -> str:
    """An expression as it is read."""
    if isinstance(expression, tuple):
        inside = ", ".join(map(written, expression))
        return f"({inside},)" if len(expression) == 1 else f"({inside})"
    return str(expression)


def _shapes(text: str) -> dict[str, Shape]:
    """Of all variables, each given once.

    Raises:
        ValueError: if one is given twice, or what stands there is none.
    """
    found: dict[str, Shape] = {}
    for item in re.findall(r"\w+\[[^\]]*\](?::\w+)?|\S+", text):
        name, shape = _shape(item)
        if name in found:
            raise ValueError(f"{name} is given twice after 'for'")
        found[name] = shape
    return found


def _shape(text: str) -> tuple[str, Shape]:
    match = re.fullmatch(r"(\w+)\[([^\]]*)\](?::(\w+))?", text)
    if match is None:
        raise ValueError(f"{text!r} after 'for' is no variable with its dims")
    name, inside, dtype = match.groups()
    dims = tuple(_dim(part.strip()) for part in inside.split(",") if part.strip())
    return name, Shape(dims, role=dtype) if dtype in ROLES else Shape(dims, DType(dtype) if dtype else DType.F32)


def _dim(text: str) -> Symbol | Star | Literal:
    if text.startswith("*"):
        return Star(text[1:])
    return Literal(int(text)) if text.isdigit() else Symbol(text)


def _terms(text: str, shapes: Mapping[str, Shape]) -> tuple[Term, ...]:
    tree = ast.parse(f"({text},)", mode="eval").body
    assert isinstance(tree, ast.Tuple)
    return tuple(_term(item, shapes) for item in tree.elts)


def _term(tree: ast.expr, shapes: Mapping[str, Shape]) -> Term:
    match tree:
        case ast.Name(id=name):
            if name not in shapes:
                raise ValueError(f"{name} has no shape")
            return Operand(name)
        case ast.Call(func=ast.Subscript(value=inner, slice=ast.Constant(value=EllipsisType()))):
            term = _term(ast.Call(inner, tree.args, tree.keywords), shapes)
            return replace(cast(Apply, term), repeated=True)
        case ast.Call(func=ast.Name(id=op), args=args, keywords=keywords):
            attrs = tuple((str(keyword.arg), _expression(keyword.value)) for keyword in keywords)
            return Apply(op.rstrip("_"), tuple(_term(arg, shapes) for arg in args), attrs)
    raise ValueError(f"{ast.unparse(tree)} is neither a variable nor an operator")


_SIGNS = {ast.Add: "+", ast.Mult: "*", ast.Div: "/"}


def _expression(tree: ast.expr) -> Expression:
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
            return tuple(_expression(item) for item in items)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() | ast.Div() as sign, right=right):
            return Compound(_SIGNS[type(sign)], (_expression(left), _expression(right)))
        case ast.UnaryOp(op=ast.Invert(), operand=term) | ast.Call(func=ast.Name(id="prod"), args=[term]):
            return Compound("~" if isinstance(tree, ast.UnaryOp) else "prod", (_expression(term),))
        case ast.Subscript(value=run, slice=at):
            return Compound("[]", (_expression(run), _expression(at)))
    raise ValueError(f"{ast.unparse(tree)} is no attribute")


def _symbols(term: Term) -> Iterator[str]:
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from _symbols(operand)
        for _, value in term.attrs:
            yield from _symbols_of(value)


def _symbols_of(expression: Expression) -> Iterator[str]:
    match expression:
        case Symbol(name):
            yield name
        case Compound(_, terms):
            for term in terms:
                yield from _symbols_of(term)
        case tuple():
            for item in expression:
                yield from _symbols_of(item)
        case _:  # literals have none, and stars are no attribute variables
            return
