"""A law: an equation between expressions over operators, typed by symbolic shapes, as one line of text.

    associate-linear: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[*s, k] v[m, k] w[n, m] # proof

Left and right of ``==`` stand one or more results (``a, b == c, d``), equal one by one. After ``for`` every operand
variable gives its dims: a symbol is one extent, the same wherever it stands; ``*s`` is any number of leading dims, the
same wherever it stands. Attributes are literals, symbols (extents, or attribute variables where no shape has them),
sums, products and quotients of these, or tuples. Negative dims count from the end; ``...`` in a tuple of dims stands
for those before them, in order. ``p[q]`` are the elements of ``p`` at ``q``, ``prod(p)`` is their product, ``short(n,
m)`` what ``n`` is short of the next multiple of ``m``. What stands
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
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import EllipsisType
from typing import cast

from ir.errors import UsageError
from ir.types import DType
from pdv.rewrite.expression import Expression, Literal, Star, Symbol, leaves, parse_expression, write

ROLES = ("mask", "moved", "number")


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
        given = [*map(str, self.operands), *(f"{name}={write(value)}" for name, value in self.attrs)]
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

    @cached_property
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
    def attrs(self) -> Iterator[tuple[str, str, Expression]]:
        """(operator, attribute, expression) of all terms, those of operands first."""
        for term in (*self.left, *self.right):
            yield from _attrs(term)

    @property
    def attr_uses(self) -> dict[str, str]:
        """Attribute variable -> the attribute that it stands for, in order of first use."""
        found: dict[str, str] = {}
        for _, attr, expression in self.attrs:
            for leaf in leaves(expression):
                if isinstance(leaf, Symbol) and leaf.name not in self.extents:
                    found.setdefault(leaf.name, attr)
        return found


def apply(term: Term) -> Iterator[Apply]:
    """A term's operators, outermost first, then operand by operand: the order of a match's nodes."""
    if isinstance(term, Apply):
        yield term
        for operand in term.operands:
            yield from apply(operand)


def variables(term: Term) -> Iterator[str]:
    """Operand variables of a term, in order."""
    if isinstance(term, Operand):
        yield term.name
    else:
        for operand in term.operands:
            yield from variables(operand)


def _attrs(term: Term) -> Iterator[tuple[str, str, Expression]]:
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from _attrs(operand)
        for attr, expression in term.attrs:
            yield term.op, attr, expression


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
            attrs = tuple((str(keyword.arg), parse_expression(keyword.value)) for keyword in keywords)
            return Apply(op.rstrip("_"), tuple(_term(arg, shapes) for arg in args), attrs)
    raise ValueError(f"{ast.unparse(tree)} is neither a variable nor an operator")
