"""Seconds of collectives on any system: α–β physics, a learned correction, and how sure both are. NumPy only.

Entry points: ``load_collective_model``, its ``predict`` and ``adapt``. How the model is made is told in
docs/collectives.md; ``learned_cost.collectives.fit`` fits it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.collectives.physics import facts_of, physics
from learned_cost.collectives.process import Points, Theta, Vocabulary, covariance, points_of
from learned_cost.collectives.rows import Cases, Floats, Ints, cases_of
from learned_cost.collectives.systems import NOISE, deviations
from learned_cost.data.table import Table
from learned_cost.weights import SHIPPED, Weights, load_weights

STEP = 0.5  # of the grid of sizes that a curve is computed at, in doublings
NEAREST = 48  # knots that a curve's variance is computed from
LEAST_STD = 0.01
# Of a system that was not trained on, this much of the variance is taken off: too high by a factor is a larger
# relative error than too low by it. Chosen by leaving systems out (0 gives 30.8 %, 0.2 30.2, 0.5 30.8).
LOWER = 0.2
FEATURES = "collectives-3"  # changes whenever the same numbers would mean something else


@dataclass(frozen=True)
class Measured:
    """Measurements of a system that the model was given after its training.

    Attributes:
        points: where; weights: the inverse covariance times the residuals; inverse: that inverse.
    """

    points: Points
    weights: Floats
    inverse: Floats


@dataclass(frozen=True)
class CollectiveModel:
    """What a collective takes.

    Attributes:
        numbers: parameters of physics; theta: scales of the correction.
        knots: where the correction is known; weights: of each knot.
        calibration: factors on the deviations, "known" for systems of the training and "new" for others.
        measured: of a system, given later.
        lowered: whether systems that were not trained on are estimated below the middle (``LOWER``).
    """

    numbers: Floats
    theta: Theta
    knots: Points
    weights: Floats
    vocabulary: Vocabulary
    calibration: Mapping[str, float]
    identity: str = ""
    measured: Measured | None = None
    lowered: bool = True
    _curves: dict[tuple[object, ...], tuple[Floats, Floats, Floats]] = field(default_factory=dict, repr=False)

    def predict(self, rows: Table) -> tuple[Floats, Floats]:
        """(log seconds, their deviation) of every row. Monotone in bytes, never under the links' bound."""
        return self.price(cases_of(rows))

    def price(self, cases: Cases) -> tuple[Floats, Floats]:
        """As ``predict``, of cases."""
        mean, std = np.empty(len(cases)), np.empty(len(cases))
        first, curve = cases.curves()
        size = np.log2(cases.bytes)
        order = np.argsort(curve, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(curve[order])) + 1) if len(order) else []
        for head, rows in zip(first, parts, strict=True):
            low = np.floor(size[rows].min() / STEP) - 2
            grid, means, stds = self._curve(cases.take(np.array([head])), low, np.ceil(size[rows].max() / STEP) + 2)
            mean[rows] = np.interp(size[rows], grid, means)
            std[rows] = np.interp(size[rows], grid, stds)
        return np.maximum(mean, facts_of(cases).bound) if len(cases) else mean, std

    def known(self, cases: Cases) -> NDArray[np.bool_]:
        """Which rows are of systems that the training had."""
        codes = self._system_codes(cases)
        known: NDArray[np.bool_] = (codes >= 0) & (codes <= self.knots.system.max())
        return known

    def _system_codes(self, cases: Cases) -> Ints:
        """-1: neither trained on nor given."""
        systems = self.vocabulary.codes["system"]
        names = zip(cases.system, cases.gpu, strict=True)
        return np.array([systems.get(f"{a}|{b}", -1) for a, b in names], dtype=np.int64)

    def adapt(self, rows: Table) -> CollectiveModel:
        """The same after measurements: α, 1/β and curves of their systems move by as much as they tell."""
        return self.given(cases_of(rows), np.log(rows.latency_s))

    def given(self, cases: Cases, log_s: Floats) -> CollectiveModel:
        """As ``adapt``, of cases."""
        vocabulary = self.vocabulary.copy()
        points, missed = self._points(cases, vocabulary)[1], self.missed(cases, log_s)
        matrix = deviations(points, points)
        matrix[np.diag_indices_from(matrix)] += NOISE
        inverse = np.asarray(np.linalg.inv(matrix), dtype=np.float64)
        return replace(self, vocabulary=vocabulary, measured=Measured(points, inverse @ missed, inverse), _curves={})

    def missed(self, cases: Cases, log_s: Floats) -> Floats:
        """Log error of each case before any measurement of its system, no estimate lowered."""
        return log_s - replace(self, measured=None, lowered=False, _curves={}).price(cases)[0]

    @property
    def noise(self) -> float:
        """Variance of one measurement."""
        return float(np.exp(2.0 * self.theta["noise"]))

    def prior(self, cases: Cases) -> Floats:
        """[cases, cases] covariance of systems' deviations before any measurement of them."""
        points = self._points(cases, self.vocabulary.copy())[1]
        return deviations(points, points)

    def _points(self, cases: Cases, vocabulary: Vocabulary) -> tuple[Floats, Points]:
        facts = facts_of(cases)
        base, share = physics(self.numbers, facts)
        return base, points_of(cases, facts, share, vocabulary)

    def _curve(self, head: Cases, low: float, high: float) -> tuple[Floats, Floats, Floats]:
        """(log2 bytes, log seconds, deviation) on a grid, of the curve of one row."""
        key = tuple(getattr(head, column.name)[0] for column in fields(head)[:-1])
        found = self._curves.get(key)
        if found is None or found[0][0] > low * STEP or found[0][-1] < high * STEP:
            found = self._curves[key] = self._compute(head, np.arange(low, high + 1) * STEP)
        return found

    def _compute(self, head: Cases, grid: Floats) -> tuple[Floats, Floats, Floats]:
        many = head.take(np.zeros(len(grid), dtype=np.int64)).with_bytes(2.0**grid)
        base, points = self._points(many, self.vocabulary.copy())  # a new system is one, too
        cross = covariance(points, self.knots, self.theta)
        mean = base + cross @ self.weights
        variance = self._variance(points, cross)
        known = bool(self.known(head)[0])
        scale = self.calibration["known" if known else "new"]
        if self.measured is not None:
            toward = deviations(points, self.measured.points)
            mean += toward @ self.measured.weights
            told = np.einsum("ij,jk,ik->i", toward, self.measured.inverse, toward)
            if told.any():
                variance = np.minimum(variance, np.maximum(deviations(points, points).diagonal() - told, 1e-4))
        if self.lowered and not known:
            mean -= LOWER * variance
        bound = facts_of(many).bound
        std = np.maximum(np.sqrt(variance + self.noise) * scale, LEAST_STD)
        return grid, np.maximum(_rising(mean), bound), std

    def _variance(self, points: Points, cross: Floats) -> Floats:
        """Of the correction, from the knots that tell most about the curve."""
        own = covariance(points, points, self.theta).diagonal()
        told = np.abs(cross).max(axis=0)
        few = np.argsort(-told)[:NEAREST]
        matrix = covariance(self.knots.take(few), self.knots.take(few), self.theta)
        matrix[np.diag_indices_from(matrix)] += self.noise
        explained = np.einsum("ij,ji->i", cross[:, few], np.linalg.solve(matrix, cross[:, few].T))
        return np.asarray(np.maximum(own - explained, 1e-4))

    def to_weights(self, training: Mapping[str, Any]) -> Weights:  # Any: JSON
        """As files hold it."""
        arrays: dict[str, NDArray[Any]] = {"physics": self.numbers, "weights": self.weights.astype(np.float32)}
        for column in fields(self.knots):
            values = getattr(self.knots, column.name)
            arrays[f"knot.{column.name}"] = values.astype(np.int16 if values.dtype.kind == "i" else np.float32)
        model = {"theta": dict(self.theta), "names": self.vocabulary.codes}
        description = {
            "features": FEATURES,
            "model": model,
            "calibration": dict(self.calibration),
            "training": dict(training),
            "metrics": {},
        }
        return Weights("collectives", arrays, description)


def from_weights(weights: Weights) -> CollectiveModel:
    """The inverse of ``to_weights``."""
    arrays, model = weights.arrays, weights.description["model"]
    columns: dict[str, Any] = {}  # Any: floats or codes, by column
    for column in fields(Points):
        values = arrays[f"knot.{column.name}"]
        columns[column.name] = values.astype(np.int64 if values.dtype.kind == "i" else np.float64)
    return CollectiveModel(
        arrays["physics"].astype(np.float64),
        dict(model["theta"]),
        Points(**columns),
        arrays["weights"].astype(np.float64),
        Vocabulary(dict(model["names"])),
        dict(weights.description["calibration"]),
        weights.digest[:12],
    )


@functools.cache
def load_collective_model(path: Path | None = None) -> CollectiveModel:
    """The model in a weight file, or the shipped one.

    Raises:
        WeightsError: if it cannot be read, or is of another version.
    """
    return from_weights(load_weights(path or SHIPPED / "collectives", "collectives", features=FEATURES))


def _rising(values: Floats) -> Floats:
    """The nearest sequence (least squares) that never falls: pools of falling neighbours take their mean."""
    sums: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        sums.append(value)
        counts.append(1)
        while len(sums) > 1 and sums[-2] / counts[-2] >= sums[-1] / counts[-1]:
            top, rows = sums.pop(), counts.pop()
            sums[-1] += top
            counts[-1] += rows
    return np.repeat(np.array(sums) / np.array(counts), counts)
