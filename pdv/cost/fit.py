"""α and β of a link from measured collectives, by robust least squares. Entry points: `fit_link`,
`fit_each`.

The model is that of `pdv.cost.comm` over one level, which is linear in α and 1/β: what is fitted is what plans are
priced with. Residuals are of the logarithm of time, so that twice and half count alike, and are weighed down where they
are large (Huber, by iteratively reweighted least squares; Holland and Welsch, Communications in Statistics 1977).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from ir.errors import DataError
from pdv.cluster import Link
from pdv.cost.comm import AxisLink, all_gather_seconds, all_to_all_seconds

Vector = npt.NDArray[np.float64]

ROUNDS = 30
HUBER = 1.345  # deviations beyond which a residual counts less (95 % efficiency for normal errors)
LEAST_ROWS = 4
LEAST_ALPHA_S = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a collective of `num_bytes` (the larger side) among `size` members."""

    collective: str
    size: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A link's constants; `errors` is the median relative error of each collective, in both directions."""

    latency_s: float
    bandwidth_bytes_per_s: float
    errors: Mapping[str, float]
    rows: int


def _terms(sample: Sample) -> tuple[float, float]:
    """What α and 1/β are multiplied with: steps, and bytes that pass a device's port."""
    if sample.collective == "send_recv":
        return 1.0, sample.num_bytes
    price = {"all_to_all": all_to_all_seconds}.get(sample.collective, all_gather_seconds)
    halves = 2 if sample.collective == "all_reduce" else 1
    steps = price(AxisLink(sample.size, Link("steps", math.inf, 1.0)), 0.0)
    moved = price(AxisLink(sample.size, Link("bytes", 1.0, 0.0)), sample.num_bytes)
    return halves * steps, halves * moved


def fit_link(samples: Sequence[Sample]) -> Fit:
    """The link that explains the samples best.

    Raises:
        DataError: too few of them, or none that tells a bandwidth.
    """
    if len(samples) < LEAST_ROWS or len({sample.num_bytes for sample in samples}) < 2:
        raise DataError(
            f"{len(samples)} measurements of a link", f"At least {LEAST_ROWS}, of several sizes", "Measure more"
        )
    measured = np.array([sample.seconds for sample in samples])
    made = np.array([_terms(sample) for sample in samples])
    relative = made / measured[:, None]
    found = _positive(relative, np.ones(len(samples)))
    if found[1] <= 0:
        raise DataError("no measurement grows with its size", "", "Measure larger sizes")
    found = _by_logarithms(made, measured, found)
    latency_s, per_byte = float(found[0]), float(found[1])
    errors: dict[str, float] = {}
    predicted = made @ np.array([latency_s, per_byte])
    for name in dict.fromkeys(sample.collective for sample in samples):
        ratios = [p / s.seconds for p, s in zip(predicted, samples, strict=True) if s.collective == name]
        errors[name] = float(median(max(ratio, 1 / ratio) - 1 for ratio in ratios))
    return Fit(latency_s, 1 / per_byte, errors, len(samples))


def fit_each(samples: Sequence[Sample]) -> dict[str, Fit]:
    """Constants of each collective alone: how far it is from any latency and bandwidth, and from the link's.

    Raises:
        DataError: as `fit_link`.
    """
    names = dict.fromkeys(sample.collective for sample in samples)
    return {name: fit_link([sample for sample in samples if sample.collective == name]) for name in names}


def _by_logarithms(made: Vector, measured: Vector, start: Vector) -> Vector:
    """Gauss-Newton on log α and log 1/β from `start`, each step halved until the weighed residuals shrink."""
    logs = np.log(np.maximum(start, (LEAST_ALPHA_S, 1e-15)))
    for _ in range(ROUNDS):
        predicted = made @ np.exp(logs)
        residual = np.log(measured / predicted)
        scale = max(1.4826 * float(np.median(np.abs(residual))), 1e-9)
        weight = np.minimum(1.0, HUBER * scale / np.maximum(np.abs(residual), 1e-12))
        slopes = made * np.exp(logs) / predicted[:, None]
        left = slopes.T @ (slopes * weight[:, None]) + 1e-9 * np.eye(2)
        step: Vector = np.linalg.solve(left, slopes.T @ (residual * weight))
        step = np.clip(step, -2.0, 2.0)
        before = float(weight @ residual**2)
        while (
            float(weight @ np.log(measured / (made @ np.exp(logs + step))) ** 2) > before and np.abs(step).max() > 1e-9
        ):
            step = step / 2
        logs = np.maximum(logs + step, np.log((LEAST_ALPHA_S, 1e-15)))
    return np.exp(logs)


def _positive(left: Vector, right: Vector) -> Vector:
    """Least squares with both unknowns at least zero: of two unknowns, one is left out where it came out negative."""
    found: Vector = np.linalg.lstsq(left, right, rcond=None)[0].astype(np.float64)
    if (found >= 0).all():
        return found
    kept = int(found[0] < 0)  # the other one alone
    alone = np.zeros(2)
    alone[kept] = max(0.0, float(left[:, kept] @ right) / float(left[:, kept] @ left[:, kept]))
    return alone
