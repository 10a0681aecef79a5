"""The integers mod a prime for each trial: sums and products are exact, functions known by name are pseudo-random.

A function of an element (gelu) or of a row (softmax) is a keyed pseudo-random function of that element or row *in all
trials together*, so that two different arguments are taken for equal only if they agree in every trial. Its derivative
is another such function, so gradients are compared too. Nothing is assumed of these functions, hence equality here is
equality for every choice of them. No law of one prime (2^31 is 1 modulo 2^31 - 1) can be built upon: the primes are
drawn from a hash of the programs (``ir.proof.primes``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ir.evaluation.einsum import Data
from ir.evaluation.polynomial import Size, size_of
from ir.evaluation.rational import rational
from ir.tape import Known

_BITS = 31  # of an element
_FEWEST = 8  # bits of a piece of one: sums of more terms than leave so many are halved
_U = np.uint64

_INTEGERS = 4  # that floats become: so few that most are of a table's rows
_ZEROS = 0.25  # share of the integers that are drawn


class PrimeField:
    """Z_p in int64 for each p of ``primes``, one trial each; randomness keyed by ``key``: a ``recording.Field``.

    Arrays lead with an axis in which trials come one after the other, all of the same length. Primes are below 2^31.
    """

    trial_axis = True
    foreign: Callable[..., object] | None = None

    def __init__(self, key: str, primes: Sequence[int]) -> None:
        self.key = key
        self.primes = tuple(primes)
        self.trials = len(self.primes)

    def random(self, label: str, shape: tuple[int, ...]) -> Data:
        """[trials, *shape] uniform elements, the same for the same key and label."""
        seed = int.from_bytes(hashlib.sha256(f"{self.key}:{label}".encode()).digest()[:8], "little")
        generator = np.random.default_rng(seed)
        return np.stack([generator.integers(0, prime, size=shape, dtype=np.int64) for prime in self.primes])

    def integers(self, label: str, shape: tuple[int, ...], least: int, most: int) -> Data:
        """[trials, *shape] integers of a range, the same in all trials: they steer, and are not of the field.

        A quarter of many is zero, wherever the range begins: masks made of integers are false there.
        """
        seed = int.from_bytes(hashlib.sha256(f"{self.key}:{label}".encode()).digest()[:8], "little")
        random = np.random.default_rng(seed)
        drawn = random.integers(least, most, size=shape, dtype=np.int64)
        if most - least > 1 / _ZEROS:
            drawn = np.where(random.random(shape) < _ZEROS, 0, drawn)
        return np.broadcast_to(drawn, (self.trials, *shape))

    def lift(self, array: Data) -> Data:
        """Integers or booleans [worlds, ...] mod each p."""
        return self.reduce(array.astype(np.int64))

    def constant(self, array: Data | float) -> tuple[Data, Size]:
        """[trials, *shape]: floats as the rationals that they stand for, else as pseudo-random elements."""
        array = np.asarray(array)
        single = array.dtype == np.float32
        values, places = np.unique(array, return_inverse=True)
        elements = [[_element(float(value), single, prime) for value in values] for prime in self.primes]
        size = size_of(*(rational(float(value), single=single) for value in values))
        return np.array(elements, dtype=np.int64)[:, places].reshape(self.trials, *array.shape), size

    def matmul(self, x: Data, y: Data) -> Data:
        """[b, m, k] · [b, k, n], exact: the smaller factor in pieces, so that the 53 bits of floats hold all sums."""
        m, k, n = x.shape[1], x.shape[2], y.shape[2]
        bits = 53 - _BITS - (k - 1).bit_length()
        if bits < _FEWEST:
            left, right = np.array_split(x, 2, axis=2), np.array_split(y, 2, axis=1)
            return self.reduce(self.matmul(left[0], right[0]) + self.matmul(left[1], right[1]))
        starts = range(0, _BITS, bits)
        if m < n:
            pieces = np.concatenate([(x >> at) & ((1 << bits) - 1) for at in starts], axis=1).astype(np.float64)
            parts = np.split((pieces @ y.astype(np.float64)).astype(np.int64), len(starts), axis=1)
        else:
            pieces = np.concatenate([(y >> at) & ((1 << bits) - 1) for at in starts], axis=2).astype(np.float64)
            parts = np.split((x.astype(np.float64) @ pieces).astype(np.int64), len(starts), axis=2)
        total = parts[-1]
        for part in reversed(parts[:-1]):
            total = (self.reduce(total) << bits) + part
        return self.reduce(total)

    def sum(self, x: Data, axes: tuple[int, ...]) -> Data:
        """Sum over axes (fewer than 2^32 terms), not the first."""
        return self.reduce(np.asarray(x.sum(axis=axes)))

    def reduce(self, x: Data) -> Data:
        """mod p."""
        return x % _modulus(self.primes, len(x), x.ndim)

    def unary(self, function: Known, x: Data) -> tuple[Data, Callable[[], Data]]:
        """A pseudo-random function of the element, and another for its derivative."""
        parts = self._parts(x)
        return self._draw(function.name, *parts), lambda: self._draw(function.name + "'", *parts)

    def relate(self, name: str, real: Callable[[Data, Data], Data], pair: tuple[Data, Data], gap: Data) -> Data:
        """A pseudo-random truth value of the difference."""
        del pair
        truths: Data = self.whole(name, lambda x: real(x, np.zeros_like(x)), gap) & 1 == 1
        return truths

    def whole(self, name: str, real: Callable[[Data], Data], x: Data) -> Data:
        """A pseudo-random small integer of the element, the same in all trials."""
        del real
        drawn = self._draw(name, *self._parts(x))
        first = drawn[: len(drawn) // self.trials] % _INTEGERS
        return np.concatenate([first] * self.trials)

    def row(self, function: Known, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """Pseudo-random functions of the row; the Jacobian is a diagonal and two products of a column and a row.

        Of that form are those of softmax, log softmax and the norms, so that what holds for all of it holds for them.
        """
        n = x.shape[-1]
        hashed = self._hash_rows(x)
        y = self._draw(function.name, _mix(hashed + _U(_key(function.name, self.key)) + _indices(n)))

        def pullback(g: Data) -> Data:
            entries = _mix(hashed[..., None] + _U(_key(function.name + "'", self.key)) + _indices(5 * n).reshape(5, n))
            diagonal, *pairs = np.moveaxis(self._draw(function.name + "'", entries), -2, 0)
            found = self.reduce(g * diagonal)
            for column, row in zip(pairs[::2], pairs[1::2], strict=True):
                along = self.reduce(self.reduce(g * column).sum(axis=-1, keepdims=True))
                found = found + self.reduce(along * row)
            return self.reduce(found)

        return y, pullback

    def row_reduce(self, function: Known, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """A pseudo-random function of the row, and one for each entry of its gradient."""
        hashed = self._hash_rows(x)
        y = self._draw(function.name, hashed)
        entries = hashed + _indices(x.shape[-1])
        return y, lambda g: self.reduce(g * self._draw(function.name + "'", _mix(entries)))

    def _parts(self, x: Data) -> list[Data]:
        """[ranks, ...] uint64 each: two trials' elements side by side, then one trial's each."""
        worlds = list(x.reshape(self.trials, -1, *x.shape[1:]).astype(_U))
        return [worlds[0] + (worlds[1] << _U(31)), *worlds[2:]] if len(worlds) > 1 else worlds

    def _hash_rows(self, x: Data) -> Data:
        """[ranks, ..., 1] uint64: a hash of each row in all trials together."""
        first, *others = self._parts(x)
        for other in others:
            first = _mix(first) + other
        mixed = _mix(first + _indices(x.shape[-1]))
        return _mix(mixed.sum(axis=-1, keepdims=True, dtype=_U))

    def _draw(self, name: str, first: Data, *others: Data) -> Data:
        """[worlds, ...]: for each trial a pseudo-random element, by the parts of an argument and the function's name.

        What each trial makes of the parts is keyed, so that two arguments of more than 64 bits meet in one trial alone.
        """
        drawn = []
        for trial, prime in enumerate(self.primes):
            hashed = _mix(first + _U(_key(f"{name}@{trial}", self.key)))
            for other in others:
                hashed = _mix(hashed + other)
            drawn.append(hashed % _U(prime))
        return np.concatenate(drawn).astype(np.int64)


@lru_cache(maxsize=4096)
def _modulus(primes: tuple[int, ...], length: int, ndim: int) -> Data:
    """[length, 1, ...]: the prime of each entry of a first axis."""
    return np.repeat(np.array(primes, dtype=np.int64), length // len(primes)).reshape(-1, *(1,) * (ndim - 1))


def _mix(x: Data) -> Data:
    """splitmix64's finalizer: a bijection of 64-bit integers that looks random (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    mixed: Data = x ^ (x >> _U(31))
    return mixed


@lru_cache(maxsize=4096)
def _key(name: str, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{key}/{name}".encode()).digest()[:8], "little")


@lru_cache(maxsize=1024)
def _indices(n: int) -> Data:
    """n uint64 keys, one per position."""
    return _mix(np.arange(1, n + 1, dtype=_U) * _U(0x9E3779B97F4A7C15))


@lru_cache(maxsize=1 << 16)
def _element(value: float, single: bool, prime: int) -> int:
    """What a float stands for, in the field; a pseudo-random element for infinities and what is no number."""
    ratio = rational(value, single=single)
    if ratio is None:
        return _key(f"constant {value!r}", "") % prime
    return ratio.numerator * pow(ratio.denominator, -1, prime) % prime
