"""What a few measurements of one device say of a model's errors there: a Gaussian process, as numbers of a weight file.

Errors of a device are alike within an operator, a library and a range of sizes; the process says how alike (a sum of
such terms), so each measurement corrects its neighbours and narrows their intervals, and far from all of them the
model's own answer stands. Entry points: ``Correction``; ``learned_cost.training.few_shot`` fits one. Source: Rasmussen
and Williams, Gaussian Processes for Machine Learning (2006), sections 2.2 and 5.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.errors import WeightsError
from learned_cost.evaluation.evaluate import Answer
from learned_cost.kernels.features import Features

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

NUMBERS = 6  # of the blind numbers: arithmetic, traffic, and the four sizes of the product
WORDS = ("op", "stack", "dtype", "kernel")
PREFIX = "correction."  # of its arrays in a weight file
KNOWN = 0.5  # share of the prior deviation below which what is left says that the like was measured
RUN_AS = {"pdv/cudagraph": "pdv/torch"}  # a profile of a GPU replays what a plan runs behind a host that is ahead
BLOCK = 4096  # rows asked at once: 4096 x 1000 covariances are 32 MB


@dataclass(frozen=True, slots=True)
class Alike:
    """Deviations of log error that kernels share: all, of similar size, of an operator, of a library's kernel.

    ``amplitude`` stretches all but ``noise``; it, ``length`` and ``noise`` are chosen by what was measured, the others
    on devices other than those that figures are given of (benchmarks/cost_accuracy.py, leave one device out).
    ``floor`` is of kernels that the model says take as long, in one type: what a launch costs.
    """

    everywhere: float = 0.15
    size: float = 0.3
    operator: float = 0.15
    operator_size: float = 0.35
    kernel: float = 0.2
    kernel_size: float = 0.25
    words: float = 0.1
    floor: float = 0.6
    noise: float = 0.15
    length: float = 1.2
    amplitude: float = 1.0

    def between(self, one: Points, other: Points) -> Floats:
        """[n, m] covariance."""
        distance = _squared(one.numbers, other.numbers) / one.numbers.shape[1]
        near = np.exp(-distance / (2 * self.length**2))
        wide = np.exp(-distance / (2 * (3 * self.length) ** 2))
        operator, stack, dtype, kernel = (_same(one.words[i], other.words[i]) for i in range(len(WORDS)))
        shared = operator * (self.operator**2 + self.operator_size**2 * wide)
        closest = operator * stack * dtype * kernel * (self.kernel**2 + self.kernel_size**2 * near)
        plain = self.everywhere**2 + self.size**2 * wide + self.words**2 * (stack + dtype)
        seconds = _squared(one.numbers[:, -1:], other.numbers[:, -1:]) * (SECONDS / FLOOR_LENGTH) ** 2
        total: Floats = plain + shared + closest + self.floor**2 * np.exp(-seconds / 2) * (0.5 + dtype)
        return self.amplitude**2 * total


SECONDS = 1.5  # log seconds, arithmetic and sizes are compared in units of these
SIZES = 2.0
FLOOR_LENGTH = 0.7  # log seconds over which what a launch costs is alike


@dataclass(frozen=True)
class Points:
    """Kernels as the process sees them: numbers [n, d] in units of their length, words [4, n]."""

    numbers: Floats
    words: Codes

    def take(self, rows: Codes | slice) -> Points:
        """Some of them."""
        return Points(self.numbers[rows], self.words[:, rows])


@dataclass(frozen=True)
class Correction:
    """A fitted process.

    Attributes:
        device: whose kernels it corrects.
        vocab: what words are called in ``points``, by place.
        inverse: [n, n] of the covariance of ``points``, noise included.
        weights: [n] ``inverse`` times what the model got wrong at each.
    """

    device: str
    alike: Alike
    points: Points
    vocab: tuple[str, ...]
    inverse: Floats
    weights: Floats

    @classmethod
    def fit(cls, device: str, alike: Alike, points: Points, vocab: tuple[str, ...], error: Floats) -> Correction:
        """Of log errors [n] at points."""
        inside = alike.between(points, points) + alike.noise**2 * np.eye(len(error))
        inverse = np.linalg.inv(inside)
        weights: Floats = inverse @ error
        return cls(device, alike, points, vocab, inverse.astype(np.float64), weights)

    def left_out(self) -> Floats:
        """[n] log error at each point as all others foretell it (Rasmussen and Williams, 5.4.2)."""
        found: Floats = self.weights / np.diag(self.inverse)
        return found

    def apply(self, features: Features, answer: Answer, single: Codes) -> Answer:
        """``answer`` with those of this device corrected: subgraphs ``single`` of one kernel; what was measured nearby
        is in range.
        """
        if self.device not in features.devices:
            return answer
        rows = single[features.device[single] == features.devices.index(self.device)]
        means, stds = (np.array(part, dtype=np.float64) for part in (answer.mean_log_s, answer.std_log))
        known = np.array(answer.in_range, dtype=np.bool_)
        points = points_of(features, answer, {word: place for place, word in enumerate(self.vocab)})
        for begin in range(0, len(rows), BLOCK):
            here = rows[begin : begin + BLOCK]
            shift, left, before = self._at(points.take(here))
            means[here] += shift
            known[here] |= left < KNOWN * before
            stds[here] = np.sqrt(left**2 + self.alike.noise**2)
        return replace(answer, mean_log_s=means, std_log=stds, in_range=known)

    def _at(self, points: Points) -> tuple[Floats, Floats, float]:
        """Mean and deviation of the log error at points, and the deviation before anything was measured."""
        across = self.alike.between(points, self.points)
        first = points.take(slice(0, 1))
        before = float(self.alike.between(first, first)[0, 0])  # the same for every point: it is as alike to itself
        known = np.einsum("nm,nm->n", across @ self.inverse, across)
        return across @ self.weights, np.sqrt(np.maximum(before - known, 0.0)), before**0.5

    def arrays(self) -> dict[str, NDArray[Any]]:  # Any: floats and integers
        """For a weight file."""
        found = {"numbers": self.points.numbers, "words": self.points.words, "inverse": self.inverse}
        return {PREFIX + name: array for name, array in (found | {"weights": self.weights}).items()}

    def meaning(self) -> dict[str, Any]:  # Any: JSON
        """Beside them."""
        return {"device": self.device, "vocab": list(self.vocab), "alike": asdict(self.alike)}

    @classmethod
    def read(cls, arrays: Mapping[str, NDArray[Any]], meaning: Mapping[str, Any] | None) -> Correction | None:
        """Of a weight file's, if it has one.

        Raises:
            WeightsError: if it is none of ours.
        """
        if meaning is None:
            return None
        try:
            own = {name: np.asarray(arrays[PREFIX + name]) for name in ("numbers", "words", "inverse", "weights")}
            alike = Alike(**{entry.name: float(meaning["alike"][entry.name]) for entry in fields(Alike)})
            points = Points(own["numbers"].astype(np.float64), own["words"].astype(np.int64))
            device, vocab = str(meaning["device"]), tuple(map(str, meaning["vocab"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"a correction without {error}", mend="Copy it again, or adapt again") from error
        count = len(points.numbers)
        sizes = points.numbers.shape, points.words.shape, own["inverse"].shape, own["weights"].shape
        if sizes != ((count, NUMBERS + 1), (len(WORDS), count), (count, count), (count,)):
            raise WeightsError(f"a correction of sizes {sizes}", mend="Copy it again, or adapt again")
        return cls(device, alike, points, vocab, own["inverse"].astype(np.float64), own["weights"].astype(np.float64))


def as_planned(features: Features) -> Features:
    """The same kernels as a plan asks for them."""
    codes, spelled = features.texts["stack"]
    asked = tuple(RUN_AS.get(word, word) for word in spelled)
    return replace(features, texts={**features.texts, "stack": (codes, asked)})


def points_of(features: Features, answer: Answer, vocab: dict[str, int]) -> Points:
    """Of each subgraph's first kernel; ``vocab`` numbers words, the same in every call that shares it."""
    first = np.searchsorted(features.graph, np.arange(len(features)))
    seconds = np.asarray(answer.mean_log_s, dtype=np.float64)[:, None] / SECONDS
    numbers = np.concatenate([features.blind[first, :NUMBERS] / SIZES, seconds], axis=1)
    words = []
    for name in WORDS:
        codes, spelled = features.texts[name]
        places = np.array([*(vocab.setdefault(f"{name} {word}", len(vocab)) for word in spelled), -1])
        words.append(places[codes[first]])
    return Points(numbers.astype(np.float64), np.stack(words))


def _squared(one: Floats, other: Floats) -> Floats:
    total = np.square(one).sum(axis=1)[:, None] + np.square(other).sum(axis=1)[None] - 2.0 * one @ other.T
    result: Floats = np.maximum(total, 0.0)
    return result


def _same(one: Codes, other: Codes) -> Floats:
    result: Floats = (one[:, None] == other[None]).astype(np.float64)
    return result
