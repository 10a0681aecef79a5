"""A law: an equation between expressions over operators, typed by symbolic shapes, as one line of text.

    associate-linear: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[*s, k] v[m, k] w[n, m] # proof

Left and right of ``==`` stand one or more results (``a, b == c, d``), equal one by one. After ``for`` every operand
variable gives its dims: a symbol is one extent, the same wherever it stands; ``*s`` is any number of leading dims, the
same wherever it stands. Attributes are literals, symbols (extents, or attribute variables where no shape has them),
sums and products of these, or tuples. Negative dims count from the end. Both the generator and people write laws so.

Decides the language; matching (``rule``), and whether a law is true (``check``), are decided elsewhere.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ir.errors import ShapeError, UsageError
from ir.evaluation.rational import exact_float, rational
from ir.types import DType

Scalar = int | float | bool | str


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
    """``+`` or ``*`` over two or more terms."""

    sign: str
    terms: tuple[Expression, ...]

    def __str__(self) -> str:
        return f" {self.sign} ".join(
            f"({term})" if isinstance(term, Compound) and term.sign != self.sign else str(term) for term in self.terms
        )


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands for itself."""

    value: Scalar

    def __str__(self) -> str:
        return repr(self.value)


Expression = Symbol | Star | Compound | Literal | tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A variable that stands for a node."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator over terms."""

    op: str
    operands: tuple[Term, ...]
    attrs: tuple[tuple[str, Expression], ...] = ()

    def __str__(self) -> str:
        given = [*map(str, self.operands), *(f"{name}={written(value)}" for name, value in self.attrs)]
        return f"{self.op}({', '.join(given)})"


Term = Operand | Apply


@dataclass(frozen=True, slots=True)
class Shape:
    """Dims of an operand variable: symbols, stars, or literal sizes; its element type."""

    dims: tuple[Symbol | Star | Literal, ...]
    dtype: DType = DType.F32

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]" + ("" if self.dtype is DType.F32 else f":{self.dtype.value}")


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


def evaluate(expression: Expression, values: Mapping[str, object]) -> object:
    """The value of an attribute under values of its symbols (``*s`` a tuple of extents, spliced into tuples).

    Raises:
        KeyError: if a symbol has no value.
        ShapeError: if a sum or product of floats is none.
    """
    match expression:
        case Literal(value):
            return value
        case Symbol(name) | Star(name):
            return values[name]
        case Compound(sign, terms):
            numbers = [_number(evaluate(term, values)) for term in terms]
            return _exactly(sign, numbers)
        case _:
            found: list[object] = []
            for item in expression:
                part = evaluate(item, values)
                found.extend(part if isinstance(item, Star) and isinstance(part, tuple) else (part,))
            return tuple(found)


def _exactly(sign: str, numbers: Sequence[int | float]) -> int | float:
    """The sum or product of the rationals that numbers stand for.

    Raises:
        ShapeError: if floats do not hold it: the law says nothing of such a case.
    """
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers) if sign == "+" else math.prod(numbers)
    exact = [rational(float(number)) for number in numbers]
    known = [number for number in exact if number is not None]
    total: Fraction | int = sum(known) if sign == "+" else math.prod(known)
    found = exact_float(Fraction(total)) if len(known) == len(exact) else None
    if found is None:
        raise ShapeError(f"{f' {sign} '.join(map(repr, numbers))} is no float")
    return found


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
    return name, Shape(dims, DType(dtype) if dtype else DType.F32)


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
        case ast.Call(func=ast.Name(id=op), args=args, keywords=keywords):
            attrs = tuple((str(keyword.arg), _expression(keyword.value)) for keyword in keywords)
            return Apply(op.rstrip("_"), tuple(_term(arg, shapes) for arg in args), attrs)
    raise ValueError(f"{ast.unparse(tree)} is neither a variable nor an operator")


def _expression(tree: ast.expr) -> Expression:
    match tree:
        case ast.Constant(value=value) if isinstance(value, int | float | str):
            return Literal(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return Literal(-value)
        case ast.Name(id=name):
            return Symbol(name)
        case ast.Starred(value=ast.Name(id=name)):
            return Star(name)
        case ast.Tuple(elts=items):
            return tuple(_expression(item) for item in items)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as sign, right=right):
            return Compound("+" if isinstance(sign, ast.Add) else "*", (_expression(left), _expression(right)))
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
