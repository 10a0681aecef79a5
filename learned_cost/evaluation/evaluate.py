"""How good predictions are: errors, intervals and ranks, by operator, device, source and fold.

``score_kernels`` and ``score_collectives`` make the objects that ``pdv cost evaluate --json`` prints
(docs/cost-model.md lists their keys). Rows that are ``suspect``, or of cold caches, are counted and not scored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import family
from learned_cost.data.table import Table
from learned_cost.weights import finite

Floats = NDArray[np.floating[Any]]  # Any: of either width
Mask = NDArray[np.bool_]
Report = dict[str, Any]  # JSON

Z90 = 1.6448536269514722  # of a normal distribution: 90 % lie within so many deviations
RANKED = 2000  # rows of a (device, operator) that ranks are compared in, at most
LEAST_RANKED = 10

# What is read of a table.
COLUMNS = ("source", "gpu", "op", "fold", "roofline_us", "latency_us", "system", "collective", "algo_lib", "n_devices")


@dataclass(frozen=True)
class Answer:
    """By row: log of seconds (a median), its deviation, and whether the model has seen the like."""

    mean_log_s: Floats
    std_log: Floats
    in_range: Mask


def score_kernels(
    table: Table, predicted: Answer, *, seen: Collection[str] = (), known_ops: Collection[str] = ()
) -> Report:
    """Errors of kernels. ``seen`` are the devices, ``known_ops`` the operators that the model was trained on.

    Returns:
        ``rows``, ``suspect``, ``cold``, ``all`` and one table each by operator, family, device, source and fold;
        ``unseen_devices`` together and rows of ``unknown_ops`` where there are some; ``ranks`` within each device and
        operator.
    """
    used = np.flatnonzero(table.usable)
    errors = _Errors(table, predicted, used)
    unseen = {name: name not in seen for name in table.vocab["gpu"]} if seen else {}
    by_device = {name: {**errors.of(rows), "seen": not unseen.get(name, False)} for name, rows in errors.by("gpu")}
    report: Report = {
        "rows": len(used),
        "suspect": int(table["suspect"].sum()),
        "cold": len(table) - len(used) - int(table["suspect"].sum()),
        "all": errors.of(np.arange(len(used))),
        "by_op": {name: errors.of(rows) for name, rows in errors.by("op")},
        "by_family": {name: errors.of(rows) for name, rows in errors.by_family()},
        "by_device": by_device,
        "by_source": {name: errors.of(rows) for name, rows in errors.by("source")},
        "by_fold": {name: errors.of(rows) for name, rows in errors.by_number("fold")},
        "ranks": _ranks(errors),
    }
    if any(unseen.values()):
        codes = [code for code, name in enumerate(table.vocab["gpu"]) if unseen[name]]
        report["unseen_devices"] = errors.of(np.flatnonzero(np.isin(errors.table["gpu"], codes)))
    unknown = {name: figures["rows"] for name, figures in report["by_op"].items() if name not in known_ops}
    if known_ops and unknown:
        report["unknown_ops"] = unknown
    return report


def score_collectives(table: Table, mean_log_s: Floats, std_log: Floats, *, known: Mask | None = None) -> Report:
    """Errors of collectives: ``rows``, ``suspect``, ``all``, and by system, collective, library, devices and fold.

    ``known`` are the rows of systems that the model was trained on; the others are ``unseen_systems`` together.
    """
    used = np.flatnonzero(~table["suspect"])
    everywhere = np.ones(len(table), dtype=bool)
    errors = _Errors(table, Answer(mean_log_s, std_log, everywhere), used)
    columns = {"by_system": "system", "by_collective": "collective", "by_library": "algo_lib", "by_device": "gpu"}
    report: Report = {"rows": len(used), "suspect": len(table) - len(used), "all": errors.of(np.arange(len(used)))}
    for key, column in columns.items():
        report[key] = {name: errors.of(rows) for name, rows in errors.by(column)}
    if known is not None and not known[used].all():
        report["unseen_systems"] = errors.of(np.flatnonzero(~known[used]))
    report["by_devices"] = {name: errors.of(rows) for name, rows in errors.by_number("n_devices")}
    report["by_fold"] = {name: errors.of(rows) for name, rows in errors.by_number("fold")}
    return report


class _Errors:
    """Predictions against measurements, of the rows that are scored."""

    def __init__(self, table: Table, predicted: Answer, used: NDArray[np.intp]) -> None:
        self.table = table.only(COLUMNS).take(used)
        self.measured = self.table.latency_s
        mean = np.asarray(predicted.mean_log_s, dtype=np.float64)[used]
        self.std = np.asarray(predicted.std_log, dtype=np.float64)[used]
        self.log_ratio = mean - np.log(self.measured)
        self.predicted = np.exp(mean)
        self.relative = np.abs(np.expm1(self.log_ratio))
        self.inside = np.abs(self.log_ratio) <= Z90 * self.std
        self.in_range = np.asarray(predicted.in_range, dtype=bool)[used]
        roofline = self.table["roofline_us"] if "roofline_us" in self.table else np.full(len(used), np.nan)
        self.roofline = np.abs(roofline * 1e-6 / self.measured - 1.0)

    def of(self, rows: NDArray[Any]) -> Report:  # Any: integers of either width
        """Figures of some rows; errors are shares of the measured time."""
        if not len(rows):
            return {"rows": 0}
        error, roofline = self.relative[rows], self.roofline[rows]
        roofline = roofline[np.isfinite(roofline)]
        return {
            "rows": len(rows),
            "mape": finite(error.mean()),
            "median": finite(np.median(error)),
            "p90": finite(np.quantile(error, 0.9)),
            "bias": finite(np.expm1(self.log_ratio[rows].mean())),
            "coverage_90": finite(self.inside[rows].mean()),
            "std_log": finite(self.std[rows].mean()),
            "in_range": finite(self.in_range[rows].mean()),
            "roofline_mape": finite(roofline.mean()) if len(roofline) else None,
        }

    def by(self, column: str) -> Iterator[tuple[str, NDArray[np.intp]]]:
        """Rows of each text of a column."""
        for code, rows in _groups(self.table[column]):
            if code >= 0:
                yield self.table.vocab[column][code], rows

    def by_number(self, column: str) -> Iterator[tuple[str, NDArray[np.intp]]]:
        """Rows of each number of a column."""
        for number, rows in _groups(self.table[column]):
            if number >= 0:
                yield str(number), rows

    def by_family(self) -> Iterator[tuple[str, NDArray[np.intp]]]:
        """Rows of each family of operators."""
        names = sorted({family(op) for op in self.table.vocab["op"]})
        place = np.array([names.index(family(op)) for op in self.table.vocab["op"]], dtype=np.int64)
        for code, rows in _groups(place[self.table["op"]]):
            yield names[code], rows


def _groups(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:  # Any: integers
    """Each key in order, and the rows that have it."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    ends = np.append(starts, len(order))[1:]
    for key, start, end in zip(found, starts, ends, strict=True):
        yield int(key), order[start:end]


def _ranks(errors: _Errors) -> Report:
    """Rank correlation within each (device, operator), averaged; what a search needs more than the error."""
    from scipy.stats import kendalltau, spearmanr

    table = errors.table
    width = max(1, len(table.vocab["op"]))
    found: list[tuple[float, float]] = []
    by_device: dict[str, list[float]] = {}
    for key, rows in _groups(table["gpu"].astype(np.int64) * width + table["op"]):
        chosen = rows if len(rows) <= RANKED else np.sort(np.random.default_rng(0).choice(rows, RANKED, replace=False))
        predicted, measured = errors.predicted[chosen], errors.measured[chosen]
        if len(chosen) < LEAST_RANKED or np.ptp(predicted) == 0.0 or np.ptp(measured) == 0.0:
            continue
        pair = (float(kendalltau(predicted, measured).statistic), float(spearmanr(predicted, measured).statistic))
        if all(map(math.isfinite, pair)):
            found.append(pair)
            by_device.setdefault(table.vocab["gpu"][key // width], []).append(pair[0])
    if not found:
        return {"groups": 0}
    kendall, spearman = np.mean(found, axis=0)
    means = {name: float(np.mean(values)) for name, values in sorted(by_device.items())}
    return {"groups": len(found), "kendall": float(kendall), "spearman": float(spearman), "kendall_by_device": means}
