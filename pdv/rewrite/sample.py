"""Sizes and attribute values at which a law is tried: extents equal and different, ones, no to two leading dims."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from pdv.rewrite.law import Apply, Compound, Expression, Law, Literal, Symbol, Term

Values = dict[str, object]
_Draw = Callable[[random.Random, Mapping[str, object]], object]


def _leading(values: Mapping[str, object]) -> tuple[int, ...]:
    """The longest run of leading dims drawn."""
    runs = [value for value in values.values() if isinstance(value, tuple)]
    return max(runs, key=len, default=(4, 6))


def _shape(rng: random.Random, values: Mapping[str, object]) -> object:
    """A shape of as many elements as the leading dims."""
    run = _leading(values)
    total = math.prod(run)
    return rng.choice(
        [(total,), tuple(reversed(run)), (total, 1), *((a, total // a) for a in (2, 3) if total % a == 0)]
    )


def _expanded(rng: random.Random, values: Mapping[str, object]) -> object:
    return tuple(size if size > 1 else rng.choice((2, 3)) for size in _leading(values))


def _perm(rng: random.Random, values: Mapping[str, object]) -> object:
    dims = list(range(len(_leading(values))))
    rng.shuffle(dims)
    return tuple(dims)


def _some_dims(rng: random.Random, values: Mapping[str, object]) -> object:
    return tuple(dim for dim in range(3) if rng.random() < 0.5) or (0,)


def _pair(*choices: tuple[int, int]) -> _Draw:
    return lambda rng, values: rng.choice(choices)


_DRAWS: Mapping[str, _Draw] = {
    "dim": lambda rng, values: rng.choice((0, 1, 2, -1)),
    "dims": _some_dims,
    "perm": _perm,
    "shape": _shape,
    "parts": lambda rng, values: rng.choice((2, 3)),
    "index": lambda rng, values: rng.choice((0, 1, 2)),
    "start": lambda rng, values: rng.choice((0, 1, 2)),
    "stop": lambda rng, values: rng.choice((2, 3, 4)),
    "keepdim": lambda rng, values: rng.random() < 0.5,
    "stride": _pair((1, 1), (2, 1), (2, 2)),
    "padding": _pair((0, 0), (1, 1), (0, 1)),
    "dilation": _pair((1, 1), (2, 1)),
    "kernel": _pair((1, 1), (2, 2), (3, 2)),
    "groups": lambda rng, values: rng.choice((1, 2, 3)),
    "factor": lambda rng, values: rng.choice((0.5, 3.0, -2.0, 0.25)),
    "offset_by": lambda rng, values: rng.choice((1e-5, 1e-3, 0.5, 2.0)),
    "scale": lambda rng, values: rng.choice((0.5, 0.125, 2.0)),
    "eps": lambda rng, values: rng.choice((1e-5, 1e-6, 1e-3)),
    "exponent": lambda rng, values: rng.choice((2.0, 3.0, 0.5)),
    "approximate": lambda rng, values: rng.choice(("none", "tanh")),
    "causal": lambda rng, values: rng.random() < 0.5,
    "dtype": lambda rng, values: rng.choice(("f64", "bf16", "f32")),
}
_LATE = ("shape", "perm", "dims", "dim", "start", "stop")  # these look at the leading dims drawn


def samples(law: Law, seed: int) -> Iterator[Values]:
    """Endless, deterministic: values of all symbols, one set after another; not all of them type-check."""
    rng = random.Random(f"{seed}/{law.name}/{','.join(map(str, (*law.left, *law.right)))}")
    variables = attr_uses(law)
    stars = law.stars
    round_ = 0
    while True:
        values: Values = {}
        for name, attr in variables.items():
            if attr not in _LATE:
                values[name] = _DRAWS[attr](rng, values)
        step = _multiple(law, values)
        run = (1, 2, 0)[round_ % 3]
        for star in stars:
            values[star] = tuple(_extent(rng, step, round_) for _ in range(run))
        for name in law.extents:
            values[name] = _extent(rng, step, round_)
        for name, attr in variables.items():
            if attr in _LATE:
                drawn = _expanded if attr == "shape" and _expands(law) else _DRAWS[attr]
                values[name] = drawn(rng, values)
        yield values
        round_ += 1


def _extent(rng: random.Random, step: int, round_: int) -> int:
    """Different extents mostly; in every fourth round all equal, in every fifth ones among them."""
    if round_ % 4 == 3:
        return step * 2
    return step * rng.choice((1, 1, 2) if round_ % 5 == 4 else (1, 2, 3))


def _multiple(law: Law, values: Values) -> int:
    """What extents should be multiples of, so that pieces are even."""
    sizes = {1}
    for term in (*law.left, *law.right):
        for op, name, written in _attrs(term):
            if name in ("parts", "groups") and op in ("chunk", "conv2d"):
                for expression in _leaves(written):
                    value = expression.value if isinstance(expression, Literal) else values.get(expression.name)
                    sizes.add(value if isinstance(value, int) else 1)
    return math.lcm(*sizes)


def _expands(law: Law) -> bool:
    return any(op == "expand" for term in (*law.left, *law.right) for op, _, _ in _attrs(term))


def attr_uses(law: Law) -> dict[str, str]:
    """Attribute variable -> the attribute that it stands for (in order of first use)."""
    found: dict[str, str] = {}
    for term in (*law.left, *law.right):
        for _, attr, written in _attrs(term):
            for leaf in _leaves(written):
                if isinstance(leaf, Symbol) and leaf.name not in law.extents:
                    found.setdefault(leaf.name, attr)
    return found


def _attrs(term: Term) -> Iterator[tuple[str, str, Expression]]:
    """(operator, attribute, expression) of a term and all in it."""
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from _attrs(operand)
        for name, written in term.attrs:
            yield term.op, name, written


def _leaves(written: Expression) -> Iterator[Symbol | Literal]:
    match written:
        case Symbol() | Literal():
            yield written
        case Compound(_, terms):
            for term in terms:
                yield from _leaves(term)
        case tuple():
            for item in written:
                yield from _leaves(item)
        case _:  # runs of leading dims
            return
