"""A few dozen measurements of a new device, put to use: a Gaussian process on what the model gets wrong there.

Errors of a device are alike within an operator, a library and a range of sizes; the process says how alike (a sum of
such terms), so each measurement corrects its neighbours and narrows their intervals, and far from all of them the
model's own answer stands. ``choose`` says which kernels to measure first: those that would tell the most about the
others, whatever their outcome. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), sections
2.2 and 5.4; Krause, Singh and Guestrin (JMLR 2008) for the greedy choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Answer
from learned_cost.kernels.features import Features, features_of
from learned_cost.kernels.nodes import of_table
from learned_cost.kernels.predict import Predictor

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

NUMBERS = 6  # of the blind numbers: arithmetic, traffic, and the four sizes of the product
LARGEST = 2.0  # log error beyond which a measurement says no more than this
CANDIDATES = 2500  # that ``choose`` compares


@dataclass(frozen=True, slots=True)
class Alike:
    """Deviations of log error that kernels share: all, of similar size, of an operator, of a library's kernel.

    Chosen on devices other than those that figures are given of (benchmarks/cost_accuracy.py, leave one device out).
    """

    everywhere: float = 0.15
    size: float = 0.3
    operator: float = 0.15
    operator_size: float = 0.35
    kernel: float = 0.2
    kernel_size: float = 0.25
    words: float = 0.1
    noise: float = 0.15
    length: float = 1.2

    def between(self, one: Points, other: Points) -> Floats:
        """[n, m] covariance."""
        distance = _squared(one.numbers, other.numbers) / one.numbers.shape[1]
        near = np.exp(-distance / (2 * self.length**2))
        wide = np.exp(-distance / (2 * (3 * self.length) ** 2))
        operator, stack, dtype, kernel = (_same(one.words[i], other.words[i]) for i in range(4))
        shared = operator * (self.operator**2 + self.operator_size**2 * wide)
        closest = operator * stack * dtype * kernel * (self.kernel**2 + self.kernel_size**2 * near)
        plain = self.everywhere**2 + self.size**2 * wide + self.words**2 * (stack + dtype)
        total: Floats = plain + shared + closest
        return total


@dataclass(frozen=True)
class Points:
    """Rows as the process sees them: numbers [n, d] in units of their length, words [4, n]."""

    numbers: Floats
    words: Codes

    def take(self, rows: Codes) -> Points:
        """Some of them."""
        return Points(self.numbers[rows], self.words[:, rows])


class FewShot:
    """A predictor corrected by measurements of one device."""

    def __init__(self, predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord]) -> None:
        self.predictor, self.alike = predictor, Alike()
        self.vocab: dict[str, int] = {}
        features, answer = _asked(predictor, table, devices)
        self.points = self._points(features, answer)
        error = np.clip(np.log(table.latency_s) - answer.mean_log_s, -LARGEST, LARGEST)
        inside = self.alike.between(self.points, self.points) + self.alike.noise**2 * np.eye(len(error))
        self.inverse = np.linalg.inv(inside)
        self.weights: Floats = self.inverse @ error

    def predict_table(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:
        """Of each row: the mean corrected; the deviation is the process's, which measurements nearby narrow."""
        features, answer = _asked(self.predictor, table, devices)
        points = self._points(features, answer)
        across = self.alike.between(points, self.points)
        known = np.einsum("nm,mk,nk->n", across, self.inverse, across)
        first = points.take(np.zeros(1, dtype=np.int64))
        before = self.alike.between(first, first)[0, 0]  # the same for every point: a point is as alike to itself
        left = np.sqrt(np.maximum(before - known, 0.0) + self.alike.noise**2)
        return replace(answer, mean_log_s=answer.mean_log_s + across @ self.weights, std_log=left)

    def _points(self, features: Features, answer: Answer) -> Points:
        return points_of(features, answer, self.vocab)


def choose(predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord], count: int, seed: int = 0) -> Codes:
    """Which rows of ``table`` (kernels that plans need; latencies are not read) to measure: ``count`` indices."""
    random = np.random.default_rng(seed)
    some = random.permutation(len(table))[:CANDIDATES]
    features, answer = _asked(predictor, table.take(some), devices)
    points, alike = points_of(features, answer, {}), Alike()
    left = alike.between(points, points)
    chosen: list[int] = []
    for _ in range(min(count, len(some))):
        gain = np.square(left).sum(axis=0) / (np.diag(left) + alike.noise**2)
        gain[chosen] = -1.0
        best = int(gain.argmax())
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + alike.noise**2)
    return some[chosen]


def points_of(features: Features, answer: Answer, vocab: dict[str, int]) -> Points:
    """Of rows of one kernel each; ``vocab`` numbers words, the same in every call that shares it."""
    numbers = np.concatenate([features.blind[:, :NUMBERS] / 2.0, answer.mean_log_s[:, None] / 1.5], axis=1)
    words = []
    for name in ("op", "stack", "dtype", "kernel"):
        codes, spelled = features.texts[name]
        places = np.array([*(vocab.setdefault(f"{name} {word}", len(vocab)) for word in spelled), -1])
        words.append(places[codes])
    return Points(numbers.astype(np.float64), np.stack(words))


def _asked(predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord]) -> tuple[Features, Answer]:
    features = features_of(of_table(table, devices))
    return features, predictor.predict_features(features)


def _squared(one: Floats, other: Floats) -> Floats:
    result: Floats = np.square(one[:, None] - other[None]).sum(axis=2)
    return result


def _same(one: Codes, other: Codes) -> Floats:
    result: Floats = (one[:, None] == other[None]).astype(np.float64)
    return result
