"""Z_p is exact: products against Python's integers, floats as the rationals that they mean."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction
from typing import NoReturn

import numpy as np
import pytest

from ir.evaluation.modular import PrimeField
from ir.evaluation.rational import exact_float, rational
from ir.ops.normalization import SOFTMAX
from ir.proof.primes import draw_primes, is_prime
from ir.tape import Known

PRIMES = draw_primes("test", 2)
FIELD = PrimeField("3", PRIMES)


def unknown(x: object) -> NoReturn:
    """What a function is over the reals, which this field does not ask."""
    raise AssertionError(x)


def test_primes_are_prime_and_drawn_from_all() -> None:
    small = [n for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert [n for n in range(3000) if is_prime(n)] == small
    assert is_prime(2**31 - 1)
    assert not is_prime(2**31 - 3)
    assert not is_prime(1_194_649)  # 1093²: fools base 2
    drawn = draw_primes("many", 200)
    assert len(set(drawn)) == 200
    assert min(drawn) < 2**30 + 2**25
    assert max(drawn) > 2**31 - 2**25


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 50, 4), (1, 2, 4097, 2)])
def test_matmul_is_exact(shape: tuple[int, int, int, int]) -> None:
    b, m, k, n = shape
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(prime - 9, prime, (b, m, k)) for prime in PRIMES]).reshape(-1, m, k)
    y = np.stack([rng.integers(0, prime, (b, k, n)) for prime in PRIMES]).reshape(-1, k, n)
    found = FIELD.matmul(x, y).reshape(2, b, m, n)
    for prime, value, expected in zip(
        PRIMES, found, (x.astype(object) @ y.astype(object)).reshape(2, b, m, n), strict=True
    ):
        assert (value == expected % prime).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_the_rationals_that_they_mean(dtype: type) -> None:
    thirds, size = FIELD.constant(np.array([1 / 3, 2 / 3, 7.0], dtype=dtype))
    halves, _ = FIELD.constant(np.array([-0.5], dtype=dtype))
    for prime, third, half in zip(PRIMES, thirds, halves, strict=True):
        assert (3 * third % prime).tolist() == [1, 2, 21]
        assert 2 * int(half[0]) % prime == prime - 1
    assert (size.degree, size.denominator) == (0, 3)


def test_scalars_and_arrays_agree() -> None:
    for value in (0.1, 1 / 768, 0.7071067811865476, float("-inf"), -3.4e38):
        assert (FIELD.constant(value)[0] == FIELD.constant(np.array([value]))[0][:, 0]).all()


def test_numbers_of_any_size_are_exact() -> None:
    """The mean of a prime's field is no excuse: 2^31, 2^62 and the largest float are what they are."""
    for value in (2.0**31, 2.0**62, 3.4028234663852886e38, 0.1 + 2**-30):
        elements, size = FIELD.constant(value)
        exact = rational(value)
        assert exact is not None
        for prime, element in zip(PRIMES, elements, strict=True):
            assert int(element) * exact.denominator % prime == exact.numerator % prime
        assert size.height >= math.log2(abs(exact))


def test_no_two_floats_are_one_rational() -> None:
    near = [1 / 3]
    for _ in range(9):
        near.append(math.nextafter(near[-1], 1))
    assert len({rational(value) for value in near}) == 10
    assert rational(1 / 3) == Fraction(1, 3)
    assert exact_float(Fraction(0.1) * Fraction(0.1)) is None
    assert exact_float(Fraction(1, 3) * Fraction(1, 2)) == 1 / 6


def test_functions_see_all_trials_at_once() -> None:
    """Arguments equal in one trial only give different values in both."""
    x = np.array([[5, 5], [8, 9]])  # [trials, points]
    y, _ = FIELD.unary(Known("gelu", unknown), x)
    assert (y[:, 0] != y[:, 1]).all()
    rows, _ = FIELD.row(SOFTMAX, np.stack([x, x[::-1]], axis=-1).reshape(2, 2, 2))
    assert len(np.unique(rows)) == rows.size


def test_functions_depend_on_name_seed_and_place() -> None:
    x = FIELD.random("x", (4, 6))
    values = [FIELD.row(function, x)[0] for function in (SOFTMAX, Known("log_softmax", unknown))]
    values += [
        PrimeField("4", PRIMES).row(SOFTMAX, x)[0],
        FIELD.row(SOFTMAX, x[..., ::-1])[0][..., ::-1],
    ]
    for i, one in enumerate(values):
        for other in values[:i]:
            assert not (one == other).any()
    assert (FIELD.row(SOFTMAX, x)[0] == values[0]).all()


def test_the_derivative_of_a_row_takes_memory_by_its_length() -> None:
    """A Jacobian of 2^24 entries for each of 64 rows is never made; what is used of it is linear and dense."""
    rows = FIELD.random("rows", (64, 4096))
    tracemalloc.start()
    _, pullback = FIELD.row(SOFTMAX, rows)
    gradients = [FIELD.random(name, (64, 4096)) for name in "gh"]
    found = [pullback(g) for g in gradients]
    assert tracemalloc.get_traced_memory()[1] < 300 * rows.nbytes
    tracemalloc.stop()
    assert (pullback(FIELD.reduce(sum(gradients))) == FIELD.reduce(sum(found))).all()
    unit = np.zeros_like(rows)
    unit[..., 7] = 1
    assert np.count_nonzero(pullback(unit)) == rows.size
