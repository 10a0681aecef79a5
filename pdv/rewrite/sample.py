"""Sizes and attribute values at which a law is tried: extents equal and different, ones, no to three leading dims."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from ir.ops import OPERATORS
from pdv.rewrite.expression import Literal, leaves
from pdv.rewrite.law import Law

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


def _expand(rng: random.Random, values: Mapping[str, object]) -> object:
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
    "after": lambda rng, values: rng.choice((1, 3)),
    "ends": lambda rng, values: rng.choice((((0, 1, 1),), ((1, 0, 2),), ((0, 2, 0), (1, 1, 2)))),
    "keepdim": lambda rng, values: rng.random() < 0.5,
    "stride": _pair((1, 1), (2, 1), (2, 2)),
    "padding": _pair((0, 0), (1, 1), (0, 1)),
    "dilation": _pair((1, 1), (2, 1)),
    "kernel": _pair((1, 1), (2, 2), (3, 2)),
    "groups": lambda rng, values: rng.choice((1, 1, 2, 3)),
    "factor": lambda rng, values: rng.choice((0.5, 3.0, -2.0, 0.25)),
    "offset_by": lambda rng, values: rng.choice((1e-5, 1e-3, 0.5, 2.0)),
    "points": lambda rng, values: rng.choice((2, 5, 36)),
    "scale": lambda rng, values: rng.choice((0.5, 0.125, 2.0)),
    "eps": lambda rng, values: rng.choice((1e-5, 1e-6, 1e-3)),
    "exponent": lambda rng, values: rng.choice((2.0, 3.0, 0.5)),
    "number": lambda rng, values: rng.choice((0.0, 0.5, 1.0)),
    "relation": lambda rng, values: rng.choice(("==", "!=", "<", "<=", ">", ">=")),
    "minimum": lambda rng, values: rng.choice((-1.0, 0.0)),
    "maximum": lambda rng, values: rng.choice((0.5, 6.0)),
    "p": lambda rng, values: rng.choice((0.1, 0.5)),
    "approximate": lambda rng, values: rng.choice(("none", "tanh")),
    "k": lambda rng, values: rng.choice((1, 2)),
    "padding_idx": lambda rng, values: rng.choice((0, 1)),
    "causal": lambda rng, values: rng.random() < 0.5,
    "dtype": lambda rng, values: rng.choice(("f64", "bf16", "f32")),
    "kind": lambda rng, values: rng.choice(("uniform", "normal")),
    "draw": lambda rng, values: rng.choice((1, 2)),
    "trains": lambda rng, values: rng.random() < 0.5,
    "low": lambda rng, values: rng.choice((0, 1)),
    "high": lambda rng, values: rng.choice((2, 5)),
}
# Leading dims. Permutations get three, half of the time equal: one of two dims is its own inverse, and where a side's
# type differs from the other's nothing is compared.
_RUNS = (2, 1, 3, 0)
_LATE = ("shape", "perm", "dims", "dim", "start", "stop")  # these look at the leading dims drawn


def samples(law: Law, seed: int) -> Iterator[Values]:
    """Endless, deterministic: values of all symbols, one set after another; not all of them type-check."""
    rng = random.Random(f"{seed}/{','.join(map(str, (*law.left, *law.right)))}")
    variables = law.attr_uses
    stars = law.stars
    expands = any(OPERATORS[op].repeats for op, _, _ in law.attrs)
    permuted = "perm" in variables.values()
    round_ = 0
    while True:
        values: Values = {}
        for name, attr in variables.items():
            if attr not in _LATE:
                values[name] = _DRAWS[attr](rng, values)
        step = _multiple(law, values)
        run = 3 if permuted else _RUNS[round_ % len(_RUNS)]
        first: tuple[int, ...] = ()
        for number, star in enumerate(stars):
            first = first if number else tuple(_extents(rng, run, step, 1 if permuted and round_ % 2 else round_))
            values[star] = _vary(rng, first) if rng.random() < 0.7 and len(stars) > 1 else first
        values |= zip(law.extents, _extents(rng, len(law.extents), step, round_), strict=True)
        for name, attr in variables.items():
            if attr in _LATE:
                drawn = _expand if attr == "shape" and expands else _DRAWS[attr]
                values[name] = drawn(rng, values)
        yield values
        round_ += 1


def _vary(rng: random.Random, run: tuple[int, ...]) -> tuple[int, ...]:
    """Dims that go with ``run``: fewer of them and ones, as in broadcasting, or one dim longer, as in joining."""
    if run and rng.random() < 0.5:
        at = rng.randrange(len(run))
        return (*run[:at], run[at] * rng.choice((2, 3)), *run[at + 1 :])
    kept = run[rng.randint(0, len(run)) :]
    return tuple(1 if rng.random() < 0.3 else size for size in kept)


def _extents(rng: random.Random, count: int, step: int, round_: int) -> list[int]:
    """All different (where they are few: many would be large), all equal, or any with ones among them, in turn."""
    match round_ % 3:
        case 0 if count <= 4:
            return [step * factor for factor in rng.sample(range(2 if step == 1 else 1, count + 3), count)]
        case 0:
            return [step * rng.choice((1, 2, 3, 4)) for _ in range(count)]
        case 1:
            return [step * 2] * count
    return [step * rng.choice((1, 1, 2, 3)) for _ in range(count)]


def _multiple(law: Law, values: Values) -> int:
    """What extents should be multiples of, so that pieces are even."""
    sizes = {1}
    for _, name, written in law.attrs:
        if name in ("parts", "groups"):
            for leaf in leaves(written):
                value = leaf.value if isinstance(leaf, Literal) else values.get(leaf.name)
                sizes.add(value if isinstance(value, int) else 1)
    return math.lcm(*sizes)
