"""A ``Tape`` over any field that records what it runs, so that gradients come from the operators' own declarations.

Every array leads with the *world* axis: trials × simulated ranks, trials outermost. Arrays of the field are ``Var``;
plain NumPy arrays (token ids, masks) pass through the structural primitives and are lifted into the field where a
product or a sum needs them. Each Var carries bounds on its size as a polynomial in the values drawn at random and in
the values of functions known only by name; ``exact.py`` turns them into a probability of error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.evaluation.einsum import Data, contract, drop_broadcast, einsum_of_integers, parse_spec
from ir.evaluation.field import Calls, Field, Var, counts, joined, sliced
from ir.evaluation.polynomial import ONE, Size
from ir.tape import Known, Pair

Pullback = Callable[[Data], Sequence[Data | None]]


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    slot: int
    operands: tuple[Var, ...]
    pullback: Pullback
    factors: tuple[Size, ...]  # what a gradient is multiplied by on its way to each operand
    terms: int  # of which each element of a gradient becomes the sum, at most


Array = Any  # Var | Data: the Tape protocol leaves it open


class Recorder:
    """``ir.tape.Tape`` over a field. Broadcasting aligns dims from the right, after the world axis."""

    def __init__(self, field: Field, worlds: int) -> None:
        self.field = field
        self.worlds = worlds
        self.foreign = field.foreign
        self.calls: dict[str, Calls] = {}
        self._steps: list[_RecordedStep] = []
        self._slots = 0

    def leaf(self, data: Data, *, tracked: bool) -> Var:
        """A value from outside; ``tracked`` ones get gradients."""
        return Var(data, Size(), self._slot() if tracked else -1)

    def known(self, data: Data, size: Size) -> Var:
        """A constant from outside."""
        return Var(data, size)

    def linear_map(
        self, x: Array, forward: Callable[[Data], Data], dual: Callable[[Data], Data], terms: int = 1
    ) -> Array:
        """``forward(x)``, whose pullback is declared to be ``dual``; of integers, just ``forward(x)``.

        Both give sums of at most ``terms`` elements.
        """
        if isinstance(x, np.ndarray):
            return forward(x)
        return self._emit(forward(x.data), x.size.times(ONE, terms), (x,), lambda g: (dual(g),), (ONE,), terms)

    def einsum(self, spec: str, *operands: Array) -> Array:
        """See ``Tape.einsum``; one or two operands, no repeated label within one. Of integers it gives integers."""
        if all(isinstance(x, np.ndarray) and x.dtype.kind in "iu" for x in operands):
            return einsum_of_integers(spec, operands)
        xs = [self._lift(x) for x in operands]
        labels, out = parse_spec(spec, tuple(len(x.shape) - 1 for x in xs))
        extents: dict[str, int] = {}
        for x, names in zip(xs, labels, strict=True):
            for label, size in zip(names, x.shape, strict=True):
                extents[label] = extents.get(label, 1) if size == 1 else size
        if len(xs) == 1:
            (x,), (names,) = xs, labels
            one = np.ones((x.shape[0], 1), dtype=x.data.dtype)
            return self._product(x, names, Var(one, ONE), (names[0], "one"), out, extents)
        return self._product(xs[0], labels[0], xs[1], labels[1], out, extents)

    def _product(
        self, x: Var, x_names: tuple[str, ...], y: Var, y_names: tuple[str, ...], out: Any, extents: dict[str, int]
    ) -> Var:
        f = self.field
        a, a_labels = drop_broadcast(x.data, x_names, {**extents, "one": 1})
        b, b_labels = drop_broadcast(y.data, y_names, {**extents, "one": 1})

        def toward(g: Data, other: Data, other_labels: Any, labels: Any, like: Data, shape: Any) -> Data:
            known = tuple(label for label in labels if label in out or label in other_labels)
            grad = contract(g, out, other, other_labels, known, f.matmul, f.sum)
            if known != labels:  # dims that were summed alone: the gradient is the same along them
                grad = grad.reshape([n if l in known else 1 for l, n in zip(labels, like.shape, strict=True)])
                grad = np.broadcast_to(grad, like.shape)
            return grad.reshape(shape)

        def pullback(g: Data) -> tuple[Data | None, Data | None]:
            return (
                toward(g, b, b_labels, a_labels, a, x.shape) if x.slot >= 0 else None,
                toward(g, a, a_labels, b_labels, b, y.shape) if y.slot >= 0 else None,
            )

        data = contract(a, a_labels, b, b_labels, out, f.matmul, f.sum)
        points = math.prod(extents.get(label, 1) for label in {*a_labels, *b_labels})
        size = x.size.times(y.size, points // max(data.size, 1))
        return self._emit(data, size, (x, y), pullback, (y.size, x.size), points // max(min(a.size, b.size), 1))

    def add(self, x: Array, y: Array) -> Array:
        """See ``Tape.add``."""
        return self._sum(x, y, 1)

    def sub(self, x: Array, y: Array) -> Array:
        """See ``Tape.sub``."""
        return self._sum(x, y, -1)

    def _sum(self, x: Array, y: Array, sign: int) -> Array:
        x, y = self._align(x, y)
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return x + y if sign > 0 else x - y
        x, y = self._lift(x), self._lift(y)
        reduce = self.field.reduce

        def pullback(g: Data) -> tuple[Data | None, Data | None]:
            return self._fit(g, x), self._fit(g if sign > 0 else reduce(-g), y)

        data = reduce(x.data + y.data if sign > 0 else x.data - y.data)
        return self._emit(data, x.size.plus(y.size), (x, y), pullback, (ONE, ONE))

    def mul(self, x: Array, y: Array) -> Array:
        """See ``Tape.mul``."""
        x, y = self._align(x, y)
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return x * y
        x, y = self._lift(x), self._lift(y)
        reduce = self.field.reduce

        def pullback(g: Data) -> tuple[Data | None, Data | None]:
            return (
                self._fit(reduce(g * y.data), x) if x.slot >= 0 else None,
                self._fit(reduce(g * x.data), y) if y.slot >= 0 else None,
            )

        data = reduce(x.data * y.data)
        return self._emit(data, x.size.times(y.size), (x, y), pullback, (y.size, x.size))

    def scale(self, x: Array, factor: float) -> Array:
        """See ``Tape.scale``; integers stay integers, as ids must."""
        if counts(x, factor):
            return x * int(factor)
        x = self._lift(x)
        by, reduce = self._scalar(factor, x.data.ndim), self.field.reduce
        size = x.size.times(by.size)
        return self._emit(reduce(x.data * by.data), size, (x,), lambda g: (reduce(g * by.data),), (by.size,))

    def shift(self, x: Array, offset: float) -> Array:
        """See ``Tape.shift``; integers stay integers, as ids must."""
        if counts(x, offset):
            return x + int(offset)
        x = self._lift(x)
        by = self._scalar(offset, x.data.ndim)
        return self._emit(self.field.reduce(x.data + by.data), x.size.plus(by.size), (x,), lambda g: (g,), (ONE,))

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """See ``Tape.reshape``."""
        return self.linear_map(x, lambda d: d.reshape(x.shape[0], *shape), lambda g: g.reshape(x.shape))

    def transpose(self, x: Array, perm: Sequence[int]) -> Array:
        """See ``Tape.transpose``."""
        axes = (0, *(dim + 1 for dim in perm))
        inverse = tuple(np.argsort(axes))
        return self.linear_map(x, lambda d: d.transpose(axes), lambda g: g.transpose(inverse))

    def expand(self, x: Array, shape: Sequence[int]) -> Array:
        """See ``Tape.expand``."""
        spread = functools.partial(np.broadcast_to, shape=(x.shape[0], *shape))
        return self.linear_map(x, spread, lambda g: self._unbroadcast(g, x.shape))

    def slice(self, x: Array, dim: int, start: int, stop: int) -> Array:
        """See ``Tape.slice``."""
        at = (slice(None),) * (dim + 1) + (slice(start, stop),)

        def dual(g: Data) -> Data:
            whole = np.zeros(x.shape, dtype=g.dtype)
            whole[at] = g
            return whole

        return sliced(self.linear_map(x, lambda d: d[at], dual), x, dim, start, stop)

    def windows(self, x: Array, kernel: Pair, stride: Pair, dilation: Pair, counts: Pair) -> Array:
        """See ``Tape.windows``."""

        def places(i: int, j: int) -> tuple[slice, slice]:
            steps = zip((i, j), stride, dilation, counts, strict=True)
            rows, columns = (slice(at * by, at * by + step * (n - 1) + 1, step) for at, step, by, n in steps)
            return rows, columns

        def forward(d: Data) -> Data:
            seen = np.empty((*d.shape[:3], *kernel, *counts), dtype=d.dtype)
            for i, j in np.ndindex(*kernel):
                rows, columns = places(i, j)
                seen[:, :, :, i, j] = d[:, :, :, rows, columns]
            return seen

        def dual(g: Data) -> Data:
            whole = np.zeros(x.shape, dtype=g.dtype)
            for i, j in np.ndindex(*kernel):
                rows, columns = places(i, j)
                whole[:, :, :, rows, columns] += g[:, :, :, i, j]
            return self.field.reduce(whole)

        return self.linear_map(x, forward, dual, math.prod(kernel))

    def concat(self, xs: Sequence[Array], dim: int) -> Array:
        """See ``Tape.concat``."""
        if all(isinstance(x, np.ndarray) for x in xs):
            return np.concatenate(xs, axis=dim + 1)
        variables = [self._lift(x) for x in xs]
        ends = np.cumsum([x.shape[dim + 1] for x in variables])[:-1]
        data = np.concatenate([x.data for x in variables], axis=dim + 1)
        size = functools.reduce(Size.plus, (x.size for x in variables))
        given, ones = tuple(variables), (ONE,) * len(variables)
        return joined(self._emit(data, size, given, lambda g: np.split(g, ends, axis=dim + 1), ones), given, dim)

    def take(self, table: Array, ids: Array, offset: Array) -> Array:
        """See ``Tape.take``."""
        assert isinstance(ids, np.ndarray), "ids are integers, which no function of the field gives"
        rows = ids - np.asarray(offset).reshape(-1, *(1,) * (ids.ndim - 1))
        inside = (rows >= 0) & (rows < table.shape[1])
        rows = np.where(inside, rows, 0)
        worlds = np.arange(self.worlds).reshape(-1, *(1,) * (ids.ndim - 1))
        if isinstance(table, np.ndarray):
            return np.where(inside[..., None], table[worlds, rows], 0)

        def pullback(g: Data) -> tuple[Data]:
            grad = np.zeros(table.shape, dtype=g.dtype)
            np.add.at(grad, (worlds, rows), g * inside[..., None])
            return (self.field.reduce(grad),)

        data = table.data[worlds, rows] * inside[..., None]
        return self._emit(data, table.size, (table,), pullback, (ONE,), math.prod(ids.shape[1:]))

    def unary(self, function: Known, x: Array) -> Array:
        """See ``Tape.unary``."""
        x = self._lift(x)
        y, derivative = self.field.unary(function, x.data)
        self._count(function.name, x, y.size, hashed=False)
        return self._emit(y, Size(), (x,), lambda g: (self.field.reduce(g * derivative()),), (Size(),))

    def row(self, function: Known, x: Array) -> Array:
        """See ``Tape.row``."""
        x = self._lift(x)
        y, pullback = self.field.row(function, x.data)
        self._count(function.name, x, math.prod(x.shape[:-1]), hashed=True)
        entry = Size(degree=2, bits=2.0)  # of the Jacobian: a variable and two products of two
        return self._emit(y, Size(), (x,), lambda g: (pullback(g),), (entry,), x.shape[-1])

    def row_reduce(self, function: Known, x: Array) -> Array:
        """See ``Tape.row_reduce``."""
        x = self._lift(x)
        y, pullback = self.field.row_reduce(function, x.data)
        self._count(function.name, x, math.prod(x.shape[:-1]), hashed=True)
        return self._emit(y, Size(), (x,), lambda g: (pullback(g),), (Size(),), x.shape[-1])

    def joint(self, function: Known, operands: Sequence[Array]) -> Array:
        """See ``Tape.joint``."""
        xs = tuple(self._lift(x) for x in operands)
        y, pullback = function.real([x.data for x in xs], [x.slot >= 0 for x in xs])
        return self._emit(y, Size(), xs, pullback, (Size(),) * len(xs))

    def relate(self, name: str, real: Callable[[Any, Any], Any], x: Array, y: Array) -> Data:
        """See ``Tape.relate``."""
        x, y = (self._lift(each) for each in self._align(x, y))
        return self.field.relate(name, real, (x.data, y.data), self._asked(name, self.sub(x, y)))

    def whole(self, name: str, real: Callable[[Any], Any], x: Array) -> Data:
        """See ``Tape.whole``."""
        return self.field.whole(name, real, self._asked(name, x))

    def _asked(self, name: str, x: Array) -> Data:
        """An argument of a function known by its name, which is noted."""
        x = self._lift(x)
        self._count(name, x, x.data.size, hashed=False)
        data: Data = x.data
        return data

    def detach(self, x: Array) -> Array:
        """See ``Tape.detach``."""
        return Var(x.data, x.size) if isinstance(x, Var) else x

    def where(self, mask: Array, x: Array, y: Array) -> Array:
        """See ``Tape.where``."""
        assert isinstance(mask, np.ndarray), "a mask is a boolean array, which no function of the field gives"
        mask, x, y = self._align(mask, x, y)
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return np.where(mask, x, y)
        x, y = self._lift(x), self._lift(y)
        keep = mask.astype(bool)

        def pullback(g: Data) -> tuple[Data | None, Data | None]:
            return self._fit(np.where(keep, g, 0), x), self._fit(np.where(keep, 0, g), y)

        return self._emit(np.where(keep, x.data, y.data), x.size.plus(y.size), (x, y), pullback, (ONE, ONE))

    def constant(self, value: float, shape: Sequence[int]) -> Array:
        """See ``Tape.constant``."""
        element = self._scalar(value, 1 + len(shape))
        return Var(np.broadcast_to(element.data, (self.worlds, *shape)), element.size)

    def backward(self, seeds: Sequence[tuple[Var, Data]]) -> tuple[dict[int, Data], dict[int, Size]]:
        """Gradients and bounds on them by slot, given the gradients (drawn at random) of some results.

        To be asked once: what was recorded is forgotten on the way, and with it the memory of what pullbacks hold.
        """
        grads: dict[int, Data] = {}
        sizes: dict[int, Size] = {}
        sums: set[int] = set()  # gradients added up here and not yet reduced; int64 holds 2^32 terms

        def accumulate(x: Var, grad: Data, size: Size) -> None:
            if x.slot in sums:
                grads[x.slot] += grad
            elif x.slot in grads:
                grads[x.slot] = grads[x.slot] + grad
                sums.add(x.slot)
            else:
                grads[x.slot] = grad
            sizes[x.slot] = sizes[x.slot].plus(size) if x.slot in sizes else size

        for x, grad in seeds:
            if x.slot >= 0:
                accumulate(x, grad, Size())
        while self._steps:
            step = self._steps.pop()
            if step.slot not in grads:
                continue
            grad = grads.pop(step.slot)
            if step.slot in sums:
                grad = self.field.reduce(grad)
            for x, part, factor in zip(step.operands, step.pullback(grad), step.factors, strict=True):
                if x.slot >= 0 and part is not None:
                    accumulate(x, part, sizes[step.slot].times(factor, step.terms))
        return {slot: self.field.reduce(grad) if slot in sums else grad for slot, grad in grads.items()}, sizes

    def _emit(
        self,
        data: Data,
        size: Size,
        operands: tuple[Var, ...],
        pullback: Pullback,
        factors: tuple[Size, ...],
        terms: int = 1,
    ) -> Var:
        if all(x.slot < 0 for x in operands):
            return Var(data, size)
        result = Var(data, size, self._slot())
        repeated = max(data.size // max(x.data.size, 1) for x in operands)  # a gradient is summed over what repeats
        self._steps.append(_RecordedStep(result.slot, operands, pullback, factors, max(terms, repeated)))
        return result

    def _scalar(self, value: float, ndim: int) -> Var:
        """[worlds, 1, ...]: a constant."""
        elements, size = self.field.constant(value)
        each = np.repeat(elements.reshape(-1), self.worlds // self.field.trials)
        return Var(each.reshape(-1, *(1,) * (ndim - 1)), size)

    def _slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _lift(self, x: Array) -> Var:
        if isinstance(x, Var):
            return x
        largest = max(int(np.abs(x).max(initial=1)), 1)
        return Var(self.field.lift(x), Size(0, math.log2(largest)))

    def _align(self, *xs: Array) -> list[Array]:
        """The operands with equal rank: ones put in after the world axis."""
        rank = max(len(x.shape) for x in xs)
        return [
            x if len(x.shape) == rank else self.reshape(x, (1,) * (rank - len(x.shape)) + tuple(x.shape[1:]))
            for x in xs
        ]

    def _fit(self, g: Data, x: Var) -> Data | None:
        return self._unbroadcast(g, x.shape) if x.slot >= 0 else None

    def _unbroadcast(self, g: Data, shape: tuple[int, ...]) -> Data:
        """Sum of ``g`` over the dims along which an operand of ``shape`` was repeated."""
        axes = tuple(at for at, (n, m) in enumerate(zip(g.shape, shape, strict=True)) if n != m)
        return self.field.sum(g, axes).reshape(shape) if axes else g

    def _count(self, name: str, x: Var, points: int, *, hashed: bool) -> None:
        calls = self.calls.get(name)
        self.calls[name] = Calls(
            (calls.points if calls else 0) + points // self.field.trials,  # an argument is what it is in all trials
            calls.size.plus(x.size) if calls else x.size,
            hashed,
        )
