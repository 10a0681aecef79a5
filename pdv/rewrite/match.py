"""Where a rule applies: structure first, then shapes, then attributes.

Entry point: ``matches``. A match names its operators in the order in which the pattern does, so that a derivation that
lists them is replayed exactly (``at``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ir.dims import Shape
from ir.errors import ShapeError
from ir.evaluation.rational import short_float
from ir.graph import Node
from ir.ops import OPERATORS
from ir.types import DType
from pdv.rewrite.expression import Compound, Expression, Literal, Star, Symbol, evaluate, in_full, is_rounded
from pdv.rewrite.instantiate import dims_of
from pdv.rewrite.law import Apply, Operand, Term
from pdv.rewrite.law import Shape as LawShape
from pdv.rewrite.rule import Rule

Inside = Callable[[Node], bool]
Users = Mapping[Node, Sequence[Node]]
Values = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """``nodes``: the matched operators in the pattern's order; ``roots``: the outermost of each result."""

    rule: Rule
    nodes: tuple[Node, ...]
    roots: tuple[Node, ...]
    operands: Mapping[str, Node]
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Bindings:
    """What is bound so far; never changed in place, for alternatives share it."""

    nodes: tuple[Node, ...] = ()
    terms: tuple[Apply, ...] = ()
    operands: Mapping[str, Node] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Search:
    inside: Inside
    users: Users
    at: Sequence[Node] | None  # the nodes that must be matched, in order

    def roots(self, rule: Rule, number: int, found: _Bindings) -> Iterator[_Bindings]:
        """All ways to match the roots from ``number`` on."""
        if number == len(rule.before):
            yield found
            return
        for candidate in self._candidates(rule, number, found):
            for following in self.term(rule.before[number], candidate, found):
                yield from self.roots(rule, number + 1, following)

    def _candidates(self, rule: Rule, number: int, found: _Bindings) -> Sequence[Node]:
        if self.at is not None:
            return self.at[len(found.nodes) : len(found.nodes) + 1]
        variable, ops = rule.anchors[number - 1]
        level: Sequence[Node] = [found.operands[variable]]
        for op in ops:
            users = dict.fromkeys(user for node in level for user in self.users.get(node, ()))
            level = [user for user in users if user.op.name == op and self.inside(user)]
        taken = set(found.nodes)
        return [node for node in level if node not in taken]

    def term(self, term: Term, node: Node, found: _Bindings) -> Iterator[_Bindings]:
        """All ways to match ``term`` with ``node``."""
        if isinstance(term, Operand):
            bound = found.operands.get(term.name)
            if bound is None:
                yield _Bindings(found.nodes, found.terms, {**found.operands, term.name: node}, found.products)
            elif bound is node:
                yield found
            return
        if term.repeated:
            product, node = _peeled(term, node)
            products = {**found.products, str(term.attrs[0][1]): product}
            yield from self.term(term.operands[0], node, _Bindings(found.nodes, found.terms, found.operands, products))
            return
        if not self._fits(term, node, found):
            return
        grown = _Bindings((*found.nodes, node), (*found.terms, term), found.operands, found.products)
        yield from self._operands(term, node.operands, 0, grown)
        if OPERATORS[term.op].commutative and node.operands[0] is not node.operands[1]:
            yield from self._operands(term, node.operands[::-1], 0, grown)

    def _fits(self, term: Apply, node: Node, found: _Bindings) -> bool:
        if node.op.name != term.op or len(node.operands) != len(term.operands) or not self.inside(node):
            return False
        if self.at is not None and self.at[len(found.nodes)] is not node:
            return False
        rank = node.operands[0].type.rank
        return all(
            node.attr(name) == _dim(term.op, name, written.value, rank)
            for name, written in term.attrs
            if isinstance(written, Literal)
        )

    def _operands(self, term: Apply, operands: Sequence[Node], number: int, found: _Bindings) -> Iterator[_Bindings]:
        if number == len(operands):
            yield found
            return
        for following in self.term(term.operands[number], operands[number], found):
            yield from self._operands(term, operands, number + 1, following)


def _peeled(term: Apply, node: Node) -> tuple[float, Node]:
    """The product of a repeated term's attribute over all its applications, and what is below them."""
    product, (name, _) = 1.0, term.attrs[0]
    while node.op.name == term.op:
        product *= node.attr(name)
        (node,) = node.operands
    return product, node


def _always(_: Node) -> bool:
    return True


def matches(
    rule: Rule, node: Node, users: Users, inside: Inside = _always, at: Sequence[Node] | None = None
) -> Iterator[Match]:
    """All matches whose first root is ``node``; every matched operator is ``inside``.

    Args:
        rule: what to match.
        node: the first root.
        users: readers of each node, in order; where there are more results than one.
        inside: whether a node may be matched.
        at: the operators that are to be matched, in the pattern's order.
    """
    search = _Search(inside, users, at)
    starts = [0]
    for size in rule.sizes:
        starts.append(starts[-1] + size)
    for first in search.term(rule.before[0], node, _Bindings()):
        for found in search.roots(rule, 1, first):
            roots = tuple(found.nodes[start] for start in starts[:-1])
            values = _solve(rule, found)
            if values is not None and len(set(roots)) == len(roots):
                yield Match(rule, found.nodes, roots, found.operands, values)


def _solve(rule: Rule, found: _Bindings) -> Values | None:
    """Values of all symbols, or None if shapes or attributes do not fit."""
    values: Values = dict(found.products)
    floating: DType | None = None
    for name, node in found.operands.items():
        shape = rule.law.shapes[name]
        if shape.dtype.is_floating:
            floating = floating or node.type.dtype
            if node.type.dtype is not floating:
                return None
        elif node.type.dtype is not shape.dtype:
            return None
        if not _fits(name, shape, node, values):
            return None
    return values if _attributes(found, values) else None


def _fits(name: str, shape: LawShape, node: Node, values: Values) -> bool:
    """Whether a node may stand for a variable, by its dims and what else is said of it."""
    match shape.role:
        case "number":
            known = node.is_const and node.type.dtype.is_floating and math.prod(node.type.shape) == 1
            value = short_float(float(node.attr("value").array.reshape(())), node.type.dtype) if known else math.nan
            values[name] = value
            return math.isfinite(value)
        case "mask":
            pairs = list(zip(reversed(node.type.shape), reversed(dims_of(shape, values)), strict=False))
            return not node.needs_grad and len(pairs) == node.type.rank and all(size in (1, to) for size, to in pairs)
        case "moved" if node.op.kind != "move":
            return False
    return bind_shape(shape, node.type.shape, values)


def bind_shape(shape: LawShape, extents: Shape, values: Values) -> bool:
    """Bind the dims of an operand variable to extents; False where they do not fit."""
    spare = len(extents) - len(shape.dims) + 1
    stars = sum(isinstance(dim, Star) for dim in shape.dims)
    if stars > 1 or spare < 0 or (spare != 1 and not stars):
        return False
    at = 0
    for dim in shape.dims:
        taken = spare if isinstance(dim, Star) else 1
        part = extents[at : at + taken] if isinstance(dim, Star) else extents[at]
        at += taken
        if (dim.value if isinstance(dim, Literal) else values.setdefault(dim.name, part)) != part:
            return False
    return True


def _attributes(found: _Bindings, values: Values) -> bool:
    """Attributes bind their variables; those that compute from others are compared last."""
    waiting: list[tuple[Expression, object]] = []
    for term, node in zip(found.terms, found.nodes, strict=True):
        written = dict(term.attrs)
        rank = node.operands[0].type.rank
        for name, value in node.attrs.items():
            if name not in written:
                if name not in node.op.defaults or node.op.defaults[name] != value:
                    return False
            elif isinstance(written[name], Compound):
                waiting.append((written[name], value))
            elif not isinstance(written[name], Literal) and not _unify(
                term.op, name, written[name], value, values, rank
            ):
                return False
    return all(_gives(written, values, value) for written, value in waiting)


def _unify(op: str, name: str, written: Expression, value: object, values: Values, rank: int) -> bool:
    match written:
        case Literal(expected):
            return _dim(op, name, expected, rank) == value
        case Symbol(symbol):
            return values.setdefault(symbol, value) == value
        case tuple():
            return isinstance(value, tuple) and _tuple_unified(op, name, written, value, values, rank)
        case Compound():
            return _gives(written, values, value)
    return False


def _gives(written: Expression, values: Values, value: object) -> bool:
    """Whether an expression has this value, or about; one without an exact value has none."""
    try:
        found = evaluate(written, values)
    except (KeyError, AssertionError, ShapeError):
        return False
    return found == value or (
        is_rounded(written) and math.isclose(cast(float, found), cast(float, value), rel_tol=1e-6)
    )


def _tuple_unified(
    op: str, name: str, written: tuple[Expression, ...], value: tuple[Any, ...], values: Values, rank: int
) -> bool:
    at = 0
    for item in in_full(written, rank):
        if isinstance(item, Star):
            run = values.get(item.name)
            if not isinstance(run, tuple) or value[at : at + len(run)] != run:
                return False
            at += len(run)
        elif at >= len(value) or not _unify(op, name, item, value[at], values, rank):
            return False
        else:
            at += 1
    return at == len(value)


def _dim(op: str, name: str, value: object, rank: int) -> object:
    """A dim of the first operand, counted from the front."""
    return value + rank if OPERATORS[op].dims_attr == name and isinstance(value, int) and value < 0 else value
