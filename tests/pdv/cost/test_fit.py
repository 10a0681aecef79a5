"""α and β come back from collectives that were made of them, and survive outliers."""

from __future__ import annotations

import random

import pytest

from ir.errors import DataError
from pdv.cluster import Link
from pdv.cost.comm import AxisLink, all_gather_seconds, all_to_all_seconds, reduce_scatter_seconds
from pdv.cost.fit import Sample, fit_each, fit_link

SIZES = [1024.0 * 4**power for power in range(8)]


def made(alpha_s: float, rate: float, size: int, noise: float = 0.0, outliers: int = 0) -> list[Sample]:
    axis, draw = AxisLink(size, Link("x", rate, alpha_s)), random.Random(0)
    samples = []
    for num_bytes in SIZES:
        half = all_gather_seconds(axis, num_bytes)
        seconds = {
            "all_gather": half, "reduce_scatter": reduce_scatter_seconds(axis, num_bytes), "all_reduce": 2 * half,
            "all_to_all": all_to_all_seconds(axis, num_bytes), "send_recv": alpha_s + num_bytes / rate,
        }  # fmt: skip
        samples += [
            Sample(name, size, num_bytes, value * draw.lognormvariate(0, noise)) for name, value in seconds.items()
        ]
    for place in draw.sample(range(len(samples)), outliers):
        old = samples[place]
        samples[place] = Sample(old.collective, old.size, old.num_bytes, old.seconds * 30)
    return samples


@pytest.mark.parametrize(("alpha_s", "rate", "size"), [(1e-6, 2e11, 8), (7e-4, 4e8, 4), (2e-5, 3e9, 6)])
def test_constants_come_back(alpha_s: float, rate: float, size: int) -> None:
    fit = fit_link(made(alpha_s, rate, size))
    assert fit.latency_s == pytest.approx(alpha_s, rel=1e-6)
    assert fit.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-6)
    assert max(fit.errors.values()) < 1e-6


def test_outliers_count_little() -> None:
    fit = fit_link(made(1e-5, 1e10, 4, noise=0.05, outliers=6))
    assert fit.latency_s == pytest.approx(1e-5, rel=0.15)
    assert fit.bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.15)


def test_each_collective_alone() -> None:
    fits = fit_each(made(1e-5, 1e10, 4))
    assert set(fits) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"}
    for fit in fits.values():
        assert fit.latency_s == pytest.approx(1e-5, rel=1e-6)
        assert fit.bandwidth_bytes_per_s == pytest.approx(1e10, rel=1e-6)


def test_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="3 measurements"):
        fit_link(made(1e-5, 1e10, 4)[:3])
    flat = [Sample("all_reduce", 2, num_bytes, 1.0 / num_bytes) for num_bytes in SIZES]
    with pytest.raises(DataError, match="grows with its size"):
        fit_link(flat)
