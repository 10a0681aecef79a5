"""Laws of two results: ``a, b == pieces of c``, wherever a law says that c is a and b joined.

    concat(linear(x, u), linear(x, v), dim=-1) == linear(x, concat(u, v, dim=0))

gives the fusion of two products that share an input, which no single term shows, for nothing joins a and b.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from ir.ops import OPERATORS
from pdv.rewrite.check import holds
from pdv.rewrite.expression import Compound, Expression, Literal, Symbol
from pdv.rewrite.generate.select import instances
from pdv.rewrite.law import Apply, Law, Shape, Term


def fusions(law: Law, *, seed: int) -> Iterator[Law]:
    """The proven laws of two results that a law of the form ``concat(a, b) == c`` gives: by slices, by chunks."""
    for (joined,), (whole,) in ((law.left, law.right), (law.right, law.left)):
        if isinstance(joined, Apply) and OPERATORS[joined.op].joins and _share(joined.operands):
            for found in _fusions(law, joined, whole, seed):
                if holds(found, seed=seed):
                    yield found


def _share(terms: tuple[Term, ...]) -> bool:
    """Whether two terms are one operator that reads a common operand: fused, they read it once."""
    if len(terms) != 2 or not all(isinstance(term, Apply) for term in terms):
        return False
    one, other = (term for term in terms if isinstance(term, Apply))
    return one.op == other.op and any(x == y for x, y in zip(one.operands, other.operands, strict=False))


def _fusions(law: Law, joined: Apply, whole: Term, seed: int) -> Iterator[Law]:
    first, second = joined.operands
    dim = dict(joined.attrs)["dim"]
    sizes = _sizes(law, joined, seed)
    if sizes is None:
        return
    here, there = sizes
    ends: tuple[Expression, ...] = (Literal(0), here, Compound("+", (here, there)))
    slices = tuple(
        Apply("slice", (whole,), (("dim", dim), ("start", start), ("stop", stop))) for start, stop in pairwise(ends)
    )
    yield replace(law, left=(first, second), right=slices)
    chunks = tuple(
        Apply("chunk", (whole,), (("dim", dim), ("parts", Literal(2)), ("index", Literal(at)))) for at in (0, 1)
    )
    alike = {name: _rename(shape, {there: here}) for name, shape in law.shapes.items()}
    yield replace(law, left=(first, second), right=chunks, shapes=alike)


def _rename(shape: Shape, names: Mapping[Symbol, Symbol]) -> Shape:
    dims = tuple(names.get(dim, dim) if isinstance(dim, Symbol) else dim for dim in shape.dims)
    return replace(shape, dims=dims)


def _sizes(law: Law, joined: Apply, seed: int) -> tuple[Symbol, Symbol] | None:
    """The symbols that are the pieces' extents along the joined dim wherever one looks; None if no symbol is."""
    alone = replace(law, left=(joined,), right=(joined,))
    left: list[set[str]] = [set(law.extents), set(law.extents)]
    for graph, _, values in instances(alone, seed):
        node = graph.outputs[0][1]
        for names, operand in zip(left, node.operands, strict=True):
            size = operand.type.shape[node.attr("dim")]
            names -= {name for name in names if values[name] != size}
    if any(len(names) != 1 for names in left) or left[0] == left[1]:
        return None
    return Symbol(min(left[0])), Symbol(min(left[1]))
