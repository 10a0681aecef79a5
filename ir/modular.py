"""The integers mod p = 2^31 - 1: sums and products are exact, functions known by name are pseudo-random.

A function of an element (gelu) or of a row (softmax) is a keyed pseudo-random function of that element or row *in all
trials together*, so that two different arguments are taken for equal only if they agree in every trial. Its derivative
is another such function, so gradients are compared too. Nothing is assumed of these functions, hence equality here is
equality for every choice of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from ir.einsum import Data

PRIME = 2**31 - 1
_HALF = 16
_LOW = (1 << _HALF) - 1
_LONGEST = 1 << 20  # terms of a product's sum whose exact value a float64 still holds
_U = np.uint64


class PrimeField:
    """Z_p in int64, several trials, functions keyed by ``seed``: see ``ir.recording.Field``."""

    trial_axis = True

    def __init__(self, seed: int = 0, trials: int = 2) -> None:
        self.seed = seed
        self.trials = trials

    def random(self, label: str, shape: tuple[int, ...]) -> Data:
        """[trials, *shape] uniform elements, the same for the same seed and label."""
        key = int.from_bytes(hashlib.sha256(f"{self.seed}:{label}".encode()).digest()[:8], "little")
        return np.random.default_rng(key).integers(0, PRIME, size=(self.trials, *shape), dtype=np.int64)

    def lift(self, array: Data | float) -> Data:
        """Integers mod p; floats as rationals of small terms where they are such, else as pseudo-random elements."""
        array = np.asarray(array)
        if array.dtype.kind in "biu":
            return array.astype(np.int64) % PRIME
        single = array.dtype != np.float64
        if array.ndim == 0:
            return np.asarray(_element(float(array), single), dtype=np.int64)
        values, places = np.unique(array, return_inverse=True)
        elements = np.array([_element(float(value), single) for value in values], dtype=np.int64)
        return elements[places].reshape(array.shape)

    def matmul(self, x: Data, y: Data) -> Data:
        """[b, m, k] · [b, k, n], exact: 16-bit halves are multiplied in float64, whose 53 bits hold the sums."""
        if x.shape[2] > _LONGEST:
            left, right = np.array_split(x, 2, axis=2), np.array_split(y, 2, axis=1)
            return (self.matmul(left[0], right[0]) + self.matmul(left[1], right[1])) % PRIME
        m, n = x.shape[1], y.shape[2]
        halves_x = np.concatenate((x & _LOW, x >> _HALF), axis=1).astype(np.float64)
        halves_y = np.concatenate((y & _LOW, y >> _HALF), axis=2).astype(np.float64)
        parts = (halves_x @ halves_y).astype(np.int64)
        low, high = parts[:, :m, :n], parts[:, m:, n:]
        middle = (parts[:, :m, n:] + parts[:, m:, :n]) % PRIME
        return (low + (middle << _HALF) + 2 * high) % PRIME  # 2^32 = 2 mod p

    def sum(self, x: Data, axes: tuple[int, ...]) -> Data:
        """Sum over axes (fewer than 2^32 terms)."""
        return np.asarray(x.sum(axis=axes)) % PRIME

    def reduce(self, x: Data) -> Data:
        """mod p."""
        return x % PRIME

    def unary(self, name: str, x: Data) -> tuple[Data, Callable[[], Data]]:
        """A pseudo-random function of the element, and another for its derivative."""
        hashed = self._joint(x)
        return self._draw(hashed, name), lambda: self._draw(hashed, name + "'")

    def row(self, name: str, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """Pseudo-random functions of the row; so is each entry of the Jacobian."""
        n = x.shape[-1]
        hashed = self._hash_rows(x)
        y = self._draw(_mix(hashed + _U(_key(name, self.seed)) + _indices(n)), name)

        def pullback(g: Data) -> Data:
            entries = _mix(hashed[..., None] + _U(_key(name + "'", self.seed)) + _indices(n * n).reshape(n, n))
            jacobian = self._draw(entries, name + "'").reshape(-1, n, n)
            return self.matmul(np.ascontiguousarray(g).reshape(-1, 1, n), jacobian).reshape(g.shape)

        return y, pullback

    def row_reduce(self, name: str, x: Data) -> tuple[Data, Callable[[Data], Data]]:
        """A pseudo-random function of the row, and one for each entry of its gradient."""
        hashed = self._hash_rows(x)
        y = self._draw(hashed, name)
        entries = hashed + _indices(x.shape[-1])
        return y, lambda g: g * self._draw(_mix(entries), name + "'") % PRIME

    def _joint(self, x: Data) -> Data:
        """[ranks, ...] uint64: a hash of each element in all trials together."""
        worlds = x.reshape(self.trials, -1, *x.shape[1:]).astype(_U)
        hashed: Data = worlds[0]
        for trial in worlds[1:]:
            hashed = _mix(hashed) + trial if self.trials > 2 else hashed + (trial << _U(31))
        return hashed

    def _hash_rows(self, x: Data) -> Data:
        """[ranks, ..., 1] uint64: a hash of each row in all trials together."""
        mixed = _mix(self._joint(x) + _indices(x.shape[-1]))
        return _mix(mixed.sum(axis=-1, keepdims=True, dtype=_U))

    def _draw(self, hashed: Data, name: str) -> Data:
        """[worlds, ...]: for each trial a pseudo-random element, by the argument's hash and the function's name."""
        trials = [_mix(hashed + _U(_key(f"{name}@{trial}", self.seed))) for trial in range(self.trials)]
        drawn: Data = (np.concatenate(trials) % _U(PRIME)).astype(np.int64)
        return drawn


def _mix(x: Data) -> Data:
    """splitmix64's finalizer: a bijection of 64-bit integers that looks random (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    mixed: Data = x ^ (x >> _U(31))
    return mixed


@lru_cache(maxsize=4096)
def _key(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


@lru_cache(maxsize=1024)
def _indices(n: int) -> Data:
    """n uint64 keys, one per position."""
    return _mix(np.arange(1, n + 1, dtype=_U) * _U(0x9E3779B97F4A7C15))


@lru_cache(maxsize=1 << 16)
def _element(value: float, single: bool) -> int:
    """The element of a float: num/den where that rounds to it, so that 1/3 is a third, in either precision."""
    if math.isfinite(value):
        ratio = Fraction(value).limit_denominator(1 << (12 if single else 20))
        rounded: Any = np.float32(float(ratio)) if single else float(ratio)
        if rounded == value:
            return ratio.numerator * pow(ratio.denominator, -1, PRIME) % PRIME
    return _key(f"constant {value!r}", 0) % PRIME
