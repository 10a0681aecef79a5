"""Fits the collective model: parameters of physics, and the points that the correction is conditioned on.

Entry points: ``fit_collectives``, and ``train_collectives`` for the weights from folders of measurements. Rows are not
kept: a point is the median of a curve's rows within a bin of sizes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from ir.errors import DataError
from learned_cost.collectives.model import CollectiveModel
from learned_cost.collectives.physics import PARAMETERS, facts_of, physics, start
from learned_cost.collectives.process import SCALES, Theta, Vocabulary, covariance, points_of
from learned_cost.collectives.rows import Cases, Floats, Ints, cases_of, distinct
from learned_cost.collectives.score import WIDTH, score
from learned_cost.data.dataset import Dataset
from learned_cost.weights import Weights

MOST = 1500  # points of a system, at most
BINS = 2  # points of a curve in a doubling of sizes, at most
SOFT = 0.15  # relative errors beyond this count linearly
NEW_SYSTEMS = 1.0  # factor on deviations of new systems: as they are, they hold 92 % of a left-out system's rows
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
    few = _thin(cases.take(low), counts)
    return Knots(cases.take(low[few]).with_bytes(2.0 ** mean_size[few]), middle[few], counts[few])


def _thin(cases: Cases, rows: Ints, most: int = MOST) -> Ints:
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


def held_out(cases: Cases, log_s: Floats, fold: Ints) -> Iterator[tuple[Ints, Floats, Floats]]:
    """For each fold, in order: its rows, and (log seconds, deviations) of a model fitted to all others."""
    for held in sorted(set(fold.tolist())):
        inside = fold == held
        model = fit_collectives(cases.take(~inside), log_s[~inside])
        yield (np.flatnonzero(inside), *model.price(cases.take(inside)))


def train_collectives(data: Dataset) -> Weights:
    """Weights fitted to all rows; deviations are calibrated on the folds of sizes, each left out once.

    Raises:
        DataError: if there are no collectives, or none of a second fold.
    """
    rows = data.collectives
    if rows is None or len(set(rows["fold"].tolist())) < 2:
        raise DataError("the folders hold no collectives of several folds", "Training needs collectives.parquet")
    cases, log_s = cases_of(rows), np.log(rows.latency_s)
    parts = list(held_out(cases, log_s, rows["fold"]))
    place, mean, std = (np.concatenate(column) for column in zip(*parts, strict=True))
    known = float(np.quantile(np.abs(mean - log_s[place]) / std, 0.9)) / WIDTH
    found = score(mean, std * known, log_s[place])
    held = {"rows": len(place), "mape": found["mape"], "median": found["median"], "coverage_90": found["held_90"]}
    counts = {
        f"by_{label}": {text: int(rows.is_text(column, text).sum()) for text in rows.vocab[column]}
        for label, column in (("source", "source"), ("device", "gpu"), ("system", "system"))
    }
    versions = {name: metadata.version(name) for name in ("numpy", "scipy")}
    training: dict[str, Any] = {"rows": len(rows), **counts, "versions": versions}
    training["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    model = replace(fit_collectives(cases, log_s), calibration={"known": known, "new": NEW_SYSTEMS})
    weights = model.to_weights(training)
    return replace(weights, description={**weights.description, "metrics": {"all": held}})
