"""A few dozen measurements of a new device, put to use: fitting a ``Correction``, and which kernels to measure next.

Entry points: ``adapt_file`` for a command, ``adapt`` and ``choose``.

``choose`` says which kernels to measure first: those that would tell the most about the others, whatever their outcome.
Sources: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), 5.4.1 for what is chosen by the
likelihood; Krause, Singh and Guestrin (JMLR 2008) for the greedy choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.errors import DataError
from ir.files.writing import make_folder, write_whole
from learned_cost.data.dataset import Dataset
from learned_cost.data.kernel import FUSED, Kernel, Subgraph
from learned_cost.data.table import Table
from learned_cost.devices.device import FOLDER, DeviceRecord, find
from learned_cost.evaluation.evaluate import Answer
from learned_cost.kernels.correction import Alike, Correction, Points, as_planned, points_of
from learned_cost.kernels.features import Features, features_of
from learned_cost.kernels.nodes import of_subgraphs, of_table
from learned_cost.kernels.predict import Predictor
from learned_cost.weights import Weights, save_weights

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

LARGEST = 3.0  # log error beyond which a measurement says no more than this
CANDIDATES = 2500  # that ``choose`` compares
AMPLITUDES, LENGTHS, NOISES = (0.5, 1.0, 2.0), (0.6, 1.2, 2.4), (0.1, 0.15, 0.2, 0.3)
LEAST, MOST = 5, 1000  # measurements: fewer say nothing of how alike they are, more take minutes and gigabytes
AMPLITUDE_STD = 0.7  # of the log of the amplitude, before anything is measured: devices differ by a factor of two


@dataclass(frozen=True)
class Adapted:
    """What came of it: the weights as written, whose device, and errors of the kernels measured (shares).

    Attributes:
        before: of the model as it was; after: each kernel by all the others.
        used, given: kernels it was adapted by, and those there were.
    """

    weights: Weights
    predictor: Predictor
    device: DeviceRecord
    before: Floats
    after: Floats
    used: int
    given: int

    @staticmethod
    def errors(shares: Floats) -> dict[str, float]:
        """Mean and median, as ``pdv cost evaluate`` has them."""
        return {"mape": float(shares.mean()), "median": float(np.median(shares))}

    def told(self, path: Path) -> dict[str, str]:
        """For a reader."""
        before, after = self.errors(self.before), self.errors(self.after)
        what = f"{self.used} kernels of {self.device.name}"
        return {
            "written": f"{path}.safetensors, {path.name}.json",
            "adapted to": what if self.used == self.given else f"{what}, the most telling of {self.given:,}",
            "error before": f"{before['mape']:.1%}, median {before['median']:.1%}",
            "error after": f"{after['mape']:.1%}, median {after['median']:.1%}; of each kernel by the others",
        }


def adapt_file(predictor: Predictor, data: Dataset, name: str | None, path: Path) -> Adapted:
    """Adapt to the one device of ``data``, or the named one, and write weights; of too many rows the most telling.

    Raises:
        DataError: if the data has fewer than five usable kernels of it, or several devices and no name is given.
    """
    device, rows = _rows_of(data, name)
    given = len(rows)
    if given > MOST:
        rows = rows.take(choose(predictor, rows, data.devices, MOST))
    adapted = adapt(predictor, rows, data.devices, device.name)
    correction = adapted.correction
    assert correction is not None
    before = np.abs(np.expm1(_asked(predictor, rows, data.devices)[1].mean_log_s - np.log(rows.latency_s)))
    after = np.abs(np.expm1(-correction.left_out()))
    facts: dict[str, Any] = {"rows": len(rows), "given": given, "files": sorted(data.files.values())}
    description = {**adapted.weights.description, "adapted": facts}
    written = save_weights(path, replace(adapted.weights, description=description))
    if not (FOLDER / f"{device.name}.yaml").is_file():  # planning looks for it beside the weights
        make_folder(path.parent / "devices")
        write_whole(path.parent / "devices" / f"{device.name}.yaml", device.to_yaml().encode())
    return Adapted(written, adapted, device, before.astype(np.float64), after, used=len(rows), given=given)


def _rows_of(data: Dataset, name: str | None) -> tuple[DeviceRecord, Table]:
    """Usable rows of single kernels that do something, of one device."""
    table = data.kernels
    allowed = f"At least {LEAST} kernels of one device, as `pdv profile` writes them"
    if table is None:
        raise DataError("the data has no kernels", allowed)
    works = np.nan_to_num(np.asarray(table["bytes"], dtype=np.float64)) > 0
    table = table.take(np.flatnonzero(table.usable & works & ~table.is_text("op", FUSED)))
    names = sorted({str(gpu) for gpu in table.text("gpu")})
    if name is None and len(names) > 1:
        raise DataError(f"the data is of {len(names)} devices: {', '.join(names)}"[:300], allowed, "Add --device NAME")
    device = None if not names else find(name or names[0], data.devices.values())
    rows = table.take(np.flatnonzero(table.is_text("gpu", device.name))) if device is not None else table.take(slice(0))
    if device is None or len(rows) < LEAST:
        raise DataError(f"{len(rows)} usable kernels of {name or 'a device'}", allowed, "Measure more, or name another")
    return device, rows


def adapt(predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord], device: str) -> Predictor:
    """``predictor`` corrected by rows of one device, one kernel each; how alike errors are is chosen by likelihood."""
    vocab: dict[str, int] = {}
    features, answer = _asked(predictor, table, devices)
    points = points_of(features, answer, vocab)
    error: Floats = np.clip(np.log(table.latency_s) - answer.mean_log_s, -LARGEST, LARGEST).astype(np.float64)
    options = itertools.product(AMPLITUDES, LENGTHS, NOISES)
    choices = [replace(Alike(), amplitude=a, length=length, noise=noise) for a, length, noise in options]
    best = max(choices, key=lambda alike: _likelihood(alike, points, error))
    return predictor.corrected(Correction.fit(device, best, points, tuple(vocab), error))


def _likelihood(alike: Alike, points: Points, error: Floats) -> float:
    """Log marginal likelihood of the errors, with the amplitude's own; constants left out."""
    inside = alike.between(points, points) + alike.noise**2 * np.eye(len(error))
    root = np.linalg.cholesky(inside)
    scaled = np.linalg.solve(root, error)
    prior = 0.5 * (np.log(alike.amplitude) / AMPLITUDE_STD) ** 2
    return float(-0.5 * scaled @ scaled - np.log(np.diag(root)).sum() - prior)


def choose(predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord], count: int, seed: int = 0) -> Codes:
    """Which rows of ``table`` (kernels that plans need; latencies are not read) to measure: ``count`` indices.

    What ``predictor`` was corrected by is known already.
    """
    some = np.random.default_rng(seed).permutation(len(table))[:CANDIDATES]
    return some[_most_telling(predictor, features_of(of_table(table.take(some), devices)), count)]


def choose_kernels(
    predictor: Predictor, kernels: Sequence[Kernel], device: DeviceRecord, count: int, seed: int = 0
) -> list[Kernel]:
    """The same of kernels that are described."""
    if not kernels:
        return []
    some = np.random.default_rng(seed).permutation(len(kernels))[:CANDIDATES].tolist()
    features = features_of(of_subgraphs([Subgraph.of(kernels[place]) for place in some], device))
    return [kernels[some[place]] for place in _most_telling(predictor, features, count)]


def _most_telling(predictor: Predictor, features: Features, count: int) -> list[int]:
    """Greedily those after which the deviations of all, squared, are least."""
    features = as_planned(features)
    answer = predictor.uncorrected(features)
    known = predictor.correction
    alike = Alike() if known is None else known.alike
    vocab = {} if known is None else {word: place for place, word in enumerate(known.vocab)}
    points = points_of(features, answer, vocab)
    left = alike.between(points, points)
    if known is not None:
        across = alike.between(points, known.points)
        left = left - across @ known.inverse @ across.T
    chosen: list[int] = []
    for _ in range(min(count, len(features))):
        gain = np.square(left).sum(axis=0) / (np.diag(left) + alike.noise**2)
        gain[chosen] = -1.0
        best = int(gain.argmax())
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + alike.noise**2)
    return chosen


def _asked(predictor: Predictor, table: Table, devices: Mapping[str, DeviceRecord]) -> tuple[Features, Answer]:
    """Features of rows as plans ask for them, and what the model says of them before any correction."""
    features = as_planned(features_of(of_table(table, devices)))
    return features, predictor.uncorrected(features)
