"""From an equation at one world's sizes to a law: leading dims freed, attributes made variables, all of it proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ir.ops import OPERATORS
from pdv.rewrite.check import holds
from pdv.rewrite.expression import Compound, Expression, Literal, Scalar, Star, Symbol
from pdv.rewrite.law import Apply, Law, Operand, Shape, Term, apply

STAR = Star("s")
_FREE = {"dim": "d", "dims": "dims", "perm": "perm", "shape": "shape", "parts": "parts", "index": "i"}
_DIMS = ("dim", "dims", "perm", "shape")
_FIXABLE = ("stride", "padding", "dilation", "groups", "kernel", "keepdim", "causal")
_FREE |= {"keepdim": "keep", "start": "start", "stop": "stop"}


def generalize(law: Law, values: Mapping[str, object], *, seed: int) -> Law | None:
    """The most general law found that is proven; None if not even the equation itself is true at other sizes.

    ``values`` are the world's, of attribute variables, to fall back on.
    """
    base = _true_at_all(law, values, seed)
    if base is None:
        return None
    for wider in _star(base):
        if _is_sound(wider) and holds(wider, seed=seed):
            base = wider
            break
    for name, extent in _extents(base):
        apart = _apart(base, name, extent)
        if apart is not None and holds(apart, seed=seed):
            base = apart
    for attr in ("parts", "index", "keepdim", "start", "stop"):
        free = _with_variable(base, attr)
        if free is not None and holds(free, seed=seed):
            base = free
    return base


def _true_at_all(law: Law, values: Mapping[str, object], seed: int) -> Law | None:
    """The law, with attribute variables fixed to the world's values where it is true only there."""
    if holds(law, seed=seed):
        return law
    variables = [name for name, attr in law.attr_uses.items() if attr in _FIXABLE]
    options = [(name,) for name in variables] + ([tuple(variables)] if len(variables) > 1 else [])
    for names in options:
        fixed = map_attrs(law, _fixing({name: values[name] for name in names}))
        if holds(fixed, seed=seed):
            return fixed
    return None


def _fixing(values: Mapping[str, object]) -> Callable[[str, Expression], Expression]:
    def fix(_: str, written: Expression) -> Expression:
        match written:
            case Symbol(name) if name in values:
                return literal(values[name])
            case Compound(sign, terms):
                return Compound(sign, tuple(fix("", term) for term in terms))
            case tuple():
                return tuple(fix("", item) for item in written)
        return written

    return fix


def literal(value: object) -> Expression:
    """A value as an expression."""
    if isinstance(value, tuple):
        return tuple(literal(item) for item in value)
    assert isinstance(value, int | float | bool | str), value
    scalar: Scalar = value
    return Literal(scalar)


def _extents(law: Law) -> list[tuple[str, str]]:
    return [(name, dim.name) for name, shape in law.shapes.items() for dim in shape.dims if isinstance(dim, Symbol)]


def _apart(law: Law, name: str, extent: str) -> Law | None:
    """The law with an extent of one operand called differently, if another operand has it too."""
    sharing = [other for other, shape in law.shapes.items() if Symbol(extent) in shape.dims]
    if name not in sharing[1:]:
        return None
    fresh = Symbol(next(letter for letter in "abcdefghijlmopqr" if letter not in (*law.extents, *law.attr_uses)))
    shape = law.shapes[name]
    dims = tuple(fresh if dim == Symbol(extent) else dim for dim in shape.dims)
    return replace(law, shapes={**law.shapes, name: replace(shape, dims=dims)})


def _star(law: Law) -> Iterator[Law]:
    """The law with leading dims left open, boldest first: each operand's its own, so that they may broadcast."""
    shapes = list(law.shapes.values())
    if len({len(shape.dims) for shape in shapes}) == 1 and shapes[0].dims and _is_joining(law):
        open_ = replace(law, shapes={name: replace(shape, dims=(STAR,)) for name, shape in law.shapes.items()})
        yield map_attrs(_named_apart(open_), _freeing(("dim",)))
    if all(shape.dims == shapes[0].dims for shape in shapes) and shapes[0].dims:
        yield from _all_open(law, shapes[0].dims)
    for name, shape in law.shapes.items():
        for length in (2, 1):
            if len(shape.dims) >= length:
                yield from _without_prefix(law, name, length)
    yield _led(law, tuple(law.shapes))
    for name in law.shapes:
        yield _led(law, (name,))


def _is_joining(law: Law) -> bool:
    """Whether operands of any dims may stand here, for nothing broadcasts: terms are joined, cut, and mapped."""
    ops = {OPERATORS[part.op] for term in (*law.left, *law.right) for part in apply(term)}
    dims = {written for _, name, written in law.attrs if name == "dim"}
    return (
        any(op.joins for op in ops)
        and len(dims) == 1
        and all(op.dims_attr == "dim" or op.loops == "... -> ..." for op in ops)
    )


def _all_open(law: Law, dims: tuple[object, ...]) -> Iterator[Law]:
    """All operands have the same dims, which may be any."""
    open_ = replace(law, shapes={name: replace(shape, dims=(STAR,)) for name, shape in law.shapes.items()})
    if len(law.shapes) > 1:
        yield _named_apart(open_)
    several = [attr for attr in _DIMS if len({written for _, name, written in law.attrs if name == attr}) > 1]
    yield map_attrs(_open_extents(open_, dims), _freeing(tuple(attr for attr in _DIMS if attr not in several)))
    yield open_


def _without_prefix(law: Law, name: str, length: int) -> Iterator[Law]:
    """The first dims of one operand become ``*s``, wherever they stand first; they may stand nowhere else."""
    prefix = law.shapes[name].dims[:length]
    changed = {}
    for other, shape in law.shapes.items():
        dims = (STAR, *shape.dims[length:]) if shape.dims[:length] == prefix else shape.dims
        if set(dims) & set(prefix):
            return
        changed[other] = replace(shape, dims=dims)
    opened = replace(law, shapes=changed)
    if sum(STAR in shape.dims for shape in changed.values()) > 1:
        yield _named_apart(opened)
    yield _open_extents(opened, prefix)


def _named_apart(law: Law) -> Law:
    """Every ``*s`` but the first called differently."""
    starred = [name for name, shape in law.shapes.items() if STAR in shape.dims]
    fresh = {name: Star(f"s{number or ''}") for number, name in enumerate(starred)}
    shapes = {
        name: replace(shape, dims=tuple(fresh[name] if dim == STAR else dim for dim in shape.dims))
        for name, shape in law.shapes.items()
    }
    return replace(law, shapes=shapes)


def _open_extents(law: Law, prefix: tuple[object, ...]) -> Law:
    """``(a, b, k)`` in a shape attribute becomes ``(*s, k)``."""

    def open_(_: str, written: Expression) -> Expression:
        if isinstance(written, tuple) and written[: len(prefix)] == prefix:
            return (STAR, *written[len(prefix) :])
        return written

    return map_attrs(law, open_)


def _led(law: Law, names: tuple[str, ...]) -> Law:
    """``*s`` put in front of some operands."""
    return replace(
        law,
        shapes={
            name: Shape((STAR, *shape.dims), shape.dtype) if name in names else shape
            for name, shape in law.shapes.items()
        },
    )


def _freeing(attrs: tuple[str, ...]) -> Callable[[str, Expression], Expression]:
    def free(attr: str, written: Expression) -> Expression:
        return Symbol(_FREE[attr]) if attr in attrs else written

    return free


def _with_variable(law: Law, attr: str) -> Law | None:
    """The law with the literals of one attribute made one variable, where they are all the same."""
    values = {written for _, name, written in law.attrs if name == attr}
    return map_attrs(law, _freeing((attr,))) if len(values) == 1 and isinstance(min(values, key=str), Literal) else None


def _is_sound(law: Law) -> bool:
    """Whether the sides differ still, and no dim that was freed is left in a shape."""
    named = [name for name, attr in law.attr_uses.items() if attr == "shape"]
    return law.left != law.right and set(named) <= {_FREE["shape"]}


def map_attrs(law: Law, change: Callable[[str, Expression], Expression]) -> Law:
    """The law with every attribute expression replaced by ``change(attribute, expression)``."""

    def inside(term: Term) -> Term:
        if isinstance(term, Operand):
            return term
        attrs = tuple((name, change(name, written)) for name, written in term.attrs)
        return Apply(term.op, tuple(inside(operand) for operand in term.operands), attrs)

    return replace(law, left=tuple(map(inside, law.left)), right=tuple(map(inside, law.right)))
