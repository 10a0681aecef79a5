"""From measurements to a weight file: which rows are trained on and which are held out, and what the file says of it.

``train`` is the entry point. What is learned, and how, is the learner's (``learned_cost.kernels.gnn``); the loop is
``learned_cost.training.fit``. Rows that are not
``usable`` (suspect, or of cold caches) are never trained on, nor are those held out.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ir.errors import DataError
from learned_cost.data.dataset import Dataset
from learned_cost.data.kernel import DIMS
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Answer, Report, score_kernels
from learned_cost.training.fit import FitConfig, Fitted, Progress, fit, shuffle
from learned_cost.weights import Arrays, Weights, save_weights, stem

VALIDATION = 0.05  # share of shapes held out for calibration where nothing else is
LEAST_VALIDATION = 8  # rows, below which intervals stay as they are


# From the start on a million rows; and from weights, on what a few minutes of profiling measured.
FROM_START = FitConfig(epochs=8, batch_rows=2048, learning_rate=2e-3, weight_decay=0.01, ema=0.999, bf16=True)
FINE_TUNING = FitConfig(epochs=60, batch_rows=256, learning_rate=1e-3, ema=0.99, budget_s=150.0)


def fit_config(
    *, fine_tuning: bool, epochs: int | None, budget_s: float | None, learning_rate: float | None, seed: int
) -> FitConfig:
    """The usual way to train, but for what is given."""
    usual = FINE_TUNING if fine_tuning else FROM_START
    return replace(
        usual, epochs=epochs or usual.epochs, budget_s=budget_s or usual.budget_s,
        learning_rate=learning_rate or usual.learning_rate, seed=seed,
    )  # fmt: skip


F = TypeVar("F")  # rows as a learner sees them


class Learner(Protocol[F]):
    """What learns; ``learned_cost.training.learner`` has one."""

    @property
    def layout(self) -> str:
        """Hash of the layout of features: weights of another one do not fit."""

    def features(self, table: Table, devices: Mapping[str, DeviceRecord], /) -> F:
        """Of all rows of a table."""

    def build(self, features: F, rows: NDArray[np.int64], seed: int, /) -> nn.Module:
        """A new module, normalised to these rows."""

    def restore(self, weights: Weights, /) -> nn.Module:
        """The module that a weight file holds."""

    def thaw(self, module: nn.Module, features: F, rows: NDArray[np.int64], /) -> None:
        """Leave trainable what fine-tuning on few rows should change."""

    def loss(self, module: nn.Module, features: F, rows: NDArray[np.int64], /) -> Tensor:
        """Mean over the rows."""

    def predict(self, module: nn.Module, features: F, rows: NDArray[np.int64], /) -> Answer:
        """Of the rows, in order."""

    def calibrate(self, module: nn.Module, features: F, rows: NDArray[np.int64], /) -> None:
        """Set the width of intervals by rows that were not trained on."""

    def export(self, module: nn.Module, /) -> tuple[Arrays, Mapping[str, Any]]:
        """Numbers, and what they mean: ``model`` and ``calibration`` of a weight file's description."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train on, and how.

    Attributes:
        devices: only rows of these; all if empty.
        holdout_devices, holdout_fold: rows held out.
        start: weights to go on from, and their name.
        every_s: seconds between checkpoints.
    """

    fit: FitConfig = field(default_factory=FitConfig)
    devices: tuple[str, ...] = ()
    holdout_devices: tuple[str, ...] = ()
    holdout_fold: int | None = None
    start: Weights | None = None
    every_s: float = 30.0


@dataclass(frozen=True)
class Trained:
    """A weight file, what training came to, and the scores on rows held out (empty if there are none)."""

    weights: Weights
    fitted: Fitted
    report: Report


def train(
    data: Dataset,
    out: Path,
    options: TrainOptions,
    *,
    learner: Learner[F],
    resume: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train on the kernels of ``data``, and write ``out``.safetensors and .json; then the checkpoint goes.

    Raises:
        DataError: if no rows are left to train on, or a device is not in the data.
        WeightsError: if the weights to start from, or the checkpoint, do not fit.
        WriteError: if a file cannot be written.
    """
    if data.kernels is None:
        raise DataError("the folders hold no kernels", "Training needs kernels.parquet, or parts kernels-*.parquet")
    table = data.kernels
    rows, held = split(table, options)
    if progress is not None:
        progress(f"features of {len(rows):,} rows", None)
    features = learner.features(table, data.devices)
    torch.manual_seed(options.fit.seed)
    if options.start is None:
        module = learner.build(features, rows, options.fit.seed)
    else:
        module = learner.restore(options.start)
        learner.thaw(module, features, rows)
    task = KernelTask(learner, module, features, rows, _identity(data, options))
    base = stem(out)
    checkpoint = base.with_name(base.name + ".checkpoint")
    fitted = fit(task, options.fit, checkpoint=checkpoint, resume=resume, every_s=options.every_s, progress=progress)
    if progress is not None:
        progress(f"scoring {len(held):,} rows held out", None)
    if len(held) >= LEAST_VALIDATION:
        learner.calibrate(module, features, held)
    report: Report = {}
    if len(held):
        seen = {table.vocab["gpu"][code] for code in np.unique(table["gpu"][rows])}
        report = score_kernels(table.take(held), learner.predict(module, features, held), seen=seen)
    arrays, meaning = learner.export(module)
    description = {
        **meaning, "features": learner.layout, "metrics": report,
        "training": _training(data, options, rows, held, fitted),
    }  # fmt: skip
    weights = save_weights(base, Weights("kernels", arrays, description))
    checkpoint.unlink(missing_ok=True)
    return Trained(weights, fitted, report)


def split(table: Table, options: TrainOptions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on, and rows held out.

    What is held out is what was asked for; else, for calibration, a twentieth of the shapes, each on all devices.

    Raises:
        DataError: if a device is not in the data, or nothing is left to train on.
    """
    good = table.usable
    for name in (*options.devices, *options.holdout_devices):
        if name not in table.vocab["gpu"]:
            raise DataError(f"the data has no device {name!r}", f"It has {', '.join(table.vocab['gpu'])}")
    if options.devices:
        good &= np.any([table.is_text("gpu", name) for name in options.devices], axis=0)
    held = np.zeros(len(table), dtype=bool)
    for name in options.holdout_devices:
        held |= table.is_text("gpu", name)
    if options.holdout_fold is not None:
        held |= table["fold"] == options.holdout_fold
        if not held.any():
            folds = ", ".join(map(str, np.unique(table["fold"])))
            raise DataError(f"no row is of fold {options.holdout_fold}", f"The data has the folds {folds}")
    if not options.holdout_devices and options.holdout_fold is None:
        held = shape_hash(table) % 1000 < VALIDATION * 1000
    rows = np.flatnonzero(good & ~held)
    if not len(rows):
        raise DataError("no rows are left to train on", mend="Give more data, or hold less of it out")
    return rows, np.flatnonzero(good & held)


def shape_hash(table: Table) -> NDArray[np.uint64]:
    """A number for each operator and its sizes, the same on every device and in every run."""
    names = np.array([_text_hash(op) for op in table.vocab["op"]] or [0], dtype=np.uint64)
    total = names[table["op"]]
    for name in DIMS:
        total = (total ^ table[name].astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
    extra = np.array([*(_text_hash(text) for text in table.vocab["dims_json"]), 0], dtype=np.uint64)
    total = (total ^ extra[table["dims_json"]]) * np.uint64(0xBF58476D1CE4E5B9)
    result: NDArray[np.uint64] = total ^ (total >> np.uint64(32))
    return result


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class KernelTask(Generic[F]):
    """The task of the loop: a learner's module on the training rows."""

    def __init__(
        self, learner: Learner[F], module: nn.Module, features: F, rows: NDArray[np.int64], what: Mapping[str, Any]
    ) -> None:
        self.learner, self.module, self.features, self.chosen, self.what = learner, module, features, rows, what

    @property
    def rows(self) -> int:
        """Rows that are trained on."""
        return len(self.chosen)

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """Shuffled."""
        return shuffle(self.rows, epoch, seed)

    def loss(self, rows: NDArray[np.int64]) -> Tensor:
        """The learner's."""
        return self.learner.loss(self.module, self.features, self.chosen[rows])

    def identity(self) -> Mapping[str, Any]:
        """Data, options and layout."""
        return self.what


def _identity(data: Dataset, options: TrainOptions) -> dict[str, Any]:
    """Of a training: a checkpoint of another one does not go on here."""
    return {
        "data": hashlib.sha256(json.dumps(sorted(data.files.values())).encode()).hexdigest()[:16],
        "skipped": dict(data.skipped), "devices": list(options.devices),
        "holdout_devices": list(options.holdout_devices), "holdout_fold": options.holdout_fold,
        "start": None if options.start is None else options.start.digest,
    }  # fmt: skip


def _training(
    data: Dataset, options: TrainOptions, rows: NDArray[np.int64], held: NDArray[np.int64], fitted: Fitted
) -> dict[str, Any]:
    """What a weight file says of its training."""
    assert data.kernels is not None
    table = data.kernels.only(("gpu", "source", "op")).take(rows)

    def counts(name: str) -> dict[str, int]:
        codes, found = np.unique(table[name], return_counts=True)
        return {table.vocab[name][c]: int(n) for c, n in zip(codes, found, strict=True) if c >= 0}

    start = options.start
    shapes = not options.holdout_devices and options.holdout_fold is None
    before = {} if start is None else start.description.get("training", {})
    return {
        "rows": len(rows), "by_device": counts("gpu"), "by_source": counts("source"), "by_op": counts("op"),
        "files": sorted(data.files.values()), "skipped": dict(data.skipped),
        "held_out": {
            "rows": len(held), "devices": list(options.holdout_devices), "fold": options.holdout_fold,
            "share of shapes": VALIDATION if shapes else None,
        },
        "started_from": None if start is None else {"name": start.name, "sha256": start.digest},
        "before": {key: before[key] for key in ("rows", "by_device", "by_source", "by_op") if key in before},
        "options": asdict(options.fit), "losses": fitted.losses, "steps": fitted.steps,
        "seconds": round(fitted.seconds, 1), "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": np.__version__},
    }  # fmt: skip
