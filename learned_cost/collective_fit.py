"""Fits the collective model: parameters of physics, scales of the correction, and the points it is conditioned on.

Entry point: ``fit_collectives``. Rows are not kept: a point is the median of a curve's rows within a bin of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learned_cost.collective_physics import PARAMETERS, facts_of, physics, start
from learned_cost.collective_process import SCALES, Points, Theta, Vocabulary, covariance, points_of
from learned_cost.collective_rows import Cases, Floats, Ints, distinct
from learned_cost.collectives import CollectiveModel

MOST = 1500  # points of a system, at most
BINS = 2  # points of a curve in a doubling of sizes, at most
SOFT = 0.15  # relative errors beyond this count linearly
PULL = 2.0  # toward where the fit starts, of 1000 points: parameters that few systems tell stay there


@dataclass(frozen=True)
class Knots:
    """Medians of rows: a case, its log seconds, and how many rows it stands for."""

    cases: Cases
    log_s: Floats
    rows: Ints


def knots_of(cases: Cases, log_s: Floats, bins: int = BINS) -> Knots:
    """One for each bin of sizes of each curve."""
    _, curve = cases.curves()
    size = np.log2(cases.bytes)
    code = curve * 4096 + np.round(size * bins).astype(np.int64)
    order = np.lexsort((log_s, code))
    _, begins, counts = np.unique(code[order], return_index=True, return_counts=True)
    low, high = order[begins + (counts - 1) // 2], order[begins + counts // 2]
    mean_size = np.add.reduceat(size[order], begins) / counts
    middle = 0.5 * (log_s[low] + log_s[high])
    few = _thinned(cases.take(low), counts)
    return Knots(cases.take(low[few]).with_bytes(2.0 ** mean_size[few]), middle[few], counts[few])


def _thinned(cases: Cases, rows: Ints, most: int = MOST) -> Ints:
    """At most ``most`` points of a system: drawn, those that stand for more rows first to stay."""
    _, system = distinct(cases.system, cases.gpu)
    random = np.random.default_rng(0).random(len(system)) * np.minimum(rows, 8)
    kept = [
        here[np.argsort(-random[here])[:most]] for code in range(system.max() + 1) for here in [_where(system, code)]
    ]
    return np.sort(np.concatenate(kept))


def _where(codes: Ints, code: int) -> Ints:
    return np.flatnonzero(codes == code)


def fit_physics(knots: Knots) -> Floats:
    """Parameters by robust least squares of relative errors.

    Every system counts nearly alike, and each curve of it. Relative errors, not logs: too high by a factor is worse
    than too low by it, so where systems of a kind differ much the estimate is a low one.
    """
    from scipy.optimize import least_squares

    facts, begin = facts_of(knots.cases), start()
    weight = np.sqrt(_weights(knots.cases))
    pull = np.sqrt(PULL * len(knots.log_s) / 1000.0)

    def residuals(numbers: Floats) -> Floats:
        missed = np.expm1(np.clip(physics(numbers, facts)[0] - knots.log_s, -5.0, 3.0)) / SOFT
        return np.concatenate([weight * np.sign(missed) * _soft(missed), pull * (numbers - begin)])

    found = least_squares(residuals, begin, method="trf", max_nfev=20, x_scale=1.0)
    numbers: Floats = found.x
    assert len(numbers) == PARAMETERS
    return numbers


def fit_collectives(cases: Cases, log_s: Floats, theta: Theta = SCALES) -> CollectiveModel:
    """A model of these rows. Deviations are not calibrated: that takes rows that the model was not fitted to."""
    from scipy.linalg import cho_factor, cho_solve

    knots = knots_of(cases, log_s)
    facts, numbers, vocabulary = facts_of(knots.cases), fit_physics(knots), Vocabulary({})
    base, share = physics(numbers, facts)
    points, residual = points_of(knots.cases, facts, share, vocabulary), knots.log_s - base
    matrix = covariance(points, points, theta, narrow=True)
    matrix[np.diag_indices_from(matrix)] += np.exp(2.0 * theta["noise"])
    factor = cho_factor(matrix, overwrite_a=True, check_finite=False)
    weights = cho_solve(factor, residual.astype(np.float32), check_finite=False).astype(np.float64)
    return CollectiveModel(numbers, theta, points, weights, vocabulary, {"known": 1.0, "new": 1.0})


def _soft(missed: Floats) -> Floats:
    """Square root of a loss that is linear far out."""
    return np.asarray(np.sqrt(2.0 * (np.sqrt(1.0 + missed**2) - 1.0)))


def _weights(cases: Cases) -> Floats:
    """Of each point: 1 over the points of its curve, over the curves of its system to the power 0.6; mean 1."""
    first, curve = cases.curves()
    _, system = distinct(cases.system, cases.gpu)
    points = np.bincount(curve)[curve]
    curves = np.bincount(system[first])[system]
    weight = 1.0 / points / curves**0.6
    return np.asarray(weight / weight.mean())


def fit_scales(points: Points, residual: Floats, *, sample: int = 1100, seed: int = 0, rounds: int = 12) -> Theta:
    """Scales that make the residuals of some curves of every system most likely."""
    from scipy.optimize import minimize

    chosen = _some(points, sample, seed)
    few, missed = points.take(chosen), residual[chosen]
    names = list(SCALES)

    def surprise(numbers: Floats) -> float:
        theta = dict(zip(names, numbers.tolist(), strict=True))
        matrix = covariance(few, few, theta)
        matrix[np.diag_indices_from(matrix)] += np.exp(2 * theta["noise"]) + 1e-6
        try:
            lower = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return 1e9
        half = np.linalg.solve(lower, missed)
        drift = sum((value - SCALES[key]) ** 2 for key, value in theta.items())
        return float(0.5 * half @ half + np.log(np.diag(lower)).sum() + 0.3 * drift)

    found = minimize(
        surprise, np.array([SCALES[name] for name in names]), method="L-BFGS-B", bounds=[(-5.0, 3.0)] * len(names),
        options={"maxiter": rounds, "eps": 1e-3},
    )  # fmt: skip
    return dict(zip(names, found.x.tolist(), strict=True))


def _some(points: Points, sample: int, seed: int) -> NDArray[np.int64]:
    """Points of every system, whole curves at a time, about ``sample`` in all."""
    random = np.random.default_rng(seed)
    each = max(1, sample // len(np.unique(points.system)))
    chosen: list[int] = []
    for system in np.unique(points.system):
        here = np.flatnonzero(points.system == system)
        curves = random.permutation(np.unique(points.curve[here]))
        taken = 0
        for curve in curves:
            rows = here[points.curve[here] == curve]
            chosen.extend(rows.tolist())
            taken += len(rows)
            if taken >= each:
                break
    return np.array(sorted(chosen))
