"""The weights of collectives, from folders of measurements. Entry point: ``train_collectives``."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np

from ir.errors import DataError
from learned_cost.collectives.fit import fit_collectives
from learned_cost.collectives.rows import Cases, Floats, Ints, cases_of
from learned_cost.collectives.score import WIDTH, score
from learned_cost.data.dataset import Dataset
from learned_cost.weights import Weights

NEW_SYSTEMS = 1.0  # factor on deviations of new systems: as they are, they hold 92 % of a left-out system's rows


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
