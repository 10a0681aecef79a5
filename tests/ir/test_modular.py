"""Z_p is exact: products against Python's integers, floats as the rationals that they mean."""

from __future__ import annotations

import numpy as np
import pytest

from ir.modular import PRIME, PrimeField

FIELD = PrimeField(seed=3)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 50, 4), (1, 2, 4097, 2)])
def test_matmul_is_exact(shape: tuple[int, int, int, int]) -> None:
    b, m, k, n = shape
    rng = np.random.default_rng(0)
    x, y = rng.integers(PRIME - 9, PRIME, (b, m, k)), rng.integers(0, PRIME, (b, k, n))
    expected = (x.astype(object) @ y.astype(object)) % PRIME
    assert (FIELD.matmul(x, y) == expected).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_the_rationals_that_they_mean(dtype: type) -> None:
    thirds = FIELD.lift(np.array([1 / 3, 2 / 3, 7.0], dtype=dtype))
    assert (3 * thirds % PRIME).tolist() == [1, 2, 21]
    assert 2 * int(FIELD.lift(np.array([-0.5], dtype=dtype))[0]) % PRIME == PRIME - 1


def test_scalars_and_arrays_agree() -> None:
    for value in (0.1, 1 / 768, 0.7071067811865476, float("-inf"), -3.4e38):
        assert FIELD.lift(value) == FIELD.lift(np.array([value]))[0]


def test_functions_see_all_trials_at_once() -> None:
    """Arguments equal in one trial only give different values in both."""
    x = np.array([[5, 5], [8, 9]])  # [trials, points]
    y, _ = FIELD.unary("gelu", x)
    assert (y[:, 0] != y[:, 1]).all()
    rows, _ = FIELD.row("softmax", np.stack([x, x[::-1]], axis=-1).reshape(2, 2, 2))
    assert len(np.unique(rows)) == rows.size


def test_functions_depend_on_name_seed_and_place() -> None:
    x = FIELD.random("x", (4, 6))
    values = [FIELD.row(name, x)[0] for name in ("softmax", "log_softmax")]
    values += [PrimeField(seed=4).row("softmax", x)[0], FIELD.row("softmax", x[..., ::-1])[0][..., ::-1]]
    for i, one in enumerate(values):
        for other in values[:i]:
            assert not (one == other).any()
    assert (FIELD.row("softmax", x)[0] == values[0]).all()
