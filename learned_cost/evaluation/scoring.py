"""A folder of measurements scored with weights: kernels, collectives, and the totals of operator graphs.

``evaluate`` is the entry point; the figures themselves are ``learned_cost.evaluation.evaluate``'s.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ir.errors import DataError
from learned_cost.collectives.model import CollectiveModel as LearnedCollectives
from learned_cost.collectives.rows import Cases, cases_of
from learned_cost.collectives.score import evaluate_collectives
from learned_cost.data.dataset import Dataset
from learned_cost.data.kernel import Subgraph
from learned_cost.data.opgraphs import graph_kernels
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Answer, Floats, Mask, Report, score_collectives, score_kernels

PIECE = 200_000  # rows predicted at a time


class KernelModel(Protocol):
    """What ``learned_cost.kernels.predict.Predictor`` does."""

    def predict_table(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:
        """Of each row."""

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        """Of each subgraph on a device."""


class CollectiveModel(Protocol):
    """What ``learned_cost.collectives.model`` loads."""

    def predict(self, rows: Table) -> tuple[Floats, Floats]:
        """Log-seconds and their deviation."""

    def known(self, cases: Cases) -> Mask:
        """Which are of systems that the model was trained on."""


@dataclass(frozen=True)
class Evaluation:
    """Scores, and what pictures are drawn from: seconds of the rows that were scored, by part."""

    report: Report
    measured_s: Mapping[str, NDArray[np.float64]]
    predicted_s: Mapping[str, NDArray[np.float64]]


def select(data: Dataset, *, devices: Sequence[str] = (), fold: int | None = None) -> Dataset:
    """Only rows of these devices, or of this fold.

    Raises:
        DataError: if a device is not in the data, or no row is left.
    """

    def kept(table: Table | None) -> Table | None:
        if table is None:
            return None
        rows = np.ones(len(table), dtype=bool)
        if devices:
            rows &= np.any([table.is_text("gpu", name) for name in devices], axis=0)
        if fold is not None:
            rows &= table["fold"] == fold
        return table.take(rows) if rows.any() else None

    measured = [table for table in (data.kernels, data.collectives) if table is not None]
    known = sorted({name for table in measured for name in table.vocab["gpu"]})
    for name in devices:
        if name not in known:
            raise DataError(f"the data has no device {name!r}", f"It has {', '.join(known)}")
    chosen = replace(data, kernels=kept(data.kernels), collectives=kept(data.collectives))
    if chosen.kernels is None and chosen.collectives is None and data.graphs is None:
        raise DataError("no row is left to score", mend="Choose other devices, or another fold")
    return chosen


def evaluate(
    data: Dataset,
    kernels: KernelModel | None,
    collectives: CollectiveModel | None,
    *,
    seen: Collection[str] = (),
    known_ops: Collection[str] = (),
) -> Evaluation:
    """Score what the data has, by the models given. ``seen`` and ``known_ops`` are what ``kernels`` was trained on.

    Returns:
        A report of up to three parts: ``kernels``, ``collectives``, ``graphs``; and ``skipped`` rows, if any.
    """
    report: Report = {}
    measured: dict[str, NDArray[np.float64]] = {}
    predicted: dict[str, NDArray[np.float64]] = {}
    if data.kernels is not None and kernels is not None:
        started = time.process_time()
        guess = _predict(kernels, data.kernels, data.devices)
        spent = time.process_time() - started
        report["kernels"] = score_kernels(data.kernels, guess, seen=seen, known_ops=known_ops)
        report["kernels"]["rows_per_cpu_s"] = round(len(data.kernels) / max(spent, 1e-9))
        good = data.kernels.usable
        measured["kernels"], predicted["kernels"] = data.kernels.latency_s[good], np.exp(guess.mean_log_s)[good]
    if data.collectives is not None and collectives is not None:
        mean, std = collectives.predict(data.collectives)
        known = collectives.known(cases_of(data.collectives))
        report["collectives"] = score_collectives(data.collectives, mean, std, known=known)
        good = ~data.collectives["suspect"]
        if (good & ~known).any() and isinstance(collectives, LearnedCollectives):
            new = evaluate_collectives(data.collectives.take(good & ~known), collectives)
            report["collectives"]["after_measuring_unseen_systems"] = new
        measured["collectives"], predicted["collectives"] = data.collectives.latency_s[good], np.exp(mean)[good]
    if data.graphs is not None and kernels is not None:
        names = data.kernels.vocab["gpu"] if data.kernels is not None else ()
        report["graphs"] = graph_totals(data.graphs, kernels, {name: data.devices[name] for name in names})
    if data.skipped:
        report["skipped"] = dict(data.skipped)
    return Evaluation(report, measured, predicted)


def _predict(model: KernelModel, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:
    """Of all rows, in pieces: features take several times the memory of the rows."""
    pieces = [table.take(slice(begin, begin + PIECE)) for begin in range(0, len(table), PIECE)] or [table]
    found = [model.predict_table(piece, devices) for piece in pieces]
    return Answer(
        np.concatenate([part.mean_log_s for part in found]),
        np.concatenate([part.std_log for part in found]),
        np.concatenate([part.in_range for part in found]),
    )


def graph_totals(graphs: Table, model: KernelModel, devices: Mapping[str, DeviceRecord]) -> Report:
    """Predicted seconds of each graph on each device, the sum of its kernels one after the other. Nothing was measured.

    Returns:
        By graph: ``kernels``, and by device ``seconds``, ``std_s`` (of independent errors) and the share ``in_range``.
    """
    found = graph_kernels(graphs)
    distinct = list({kernel.key: kernel for kernels in found.values() for kernel in kernels}.values())
    place = {kernel.key: i for i, kernel in enumerate(distinct)}
    report: dict[str, Any] = {name: {"kernels": len(kernels), "by_device": {}} for name, kernels in found.items()}
    for device, record in devices.items():
        guess = model.predict([Subgraph.of(kernel) for kernel in distinct], record)
        mean, std = np.exp(np.asarray(guess.mean_log_s)), np.asarray(guess.std_log)
        for name, kernels in found.items():
            rows = np.array([place[kernel.key] for kernel in kernels], dtype=np.int64)
            if len(rows):
                report[name]["by_device"][device] = {
                    "seconds": float(mean[rows].sum()),
                    "std_s": float(np.sqrt(((mean * std)[rows] ** 2).sum())),
                    "in_range": float(np.asarray(guess.in_range)[rows].mean()),
                }
    return report
