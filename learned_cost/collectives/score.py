"""Scores of the collective model on any table: as it is, and after three measured points of every system it is new to.

Entry points: ``evaluate_collectives``, and ``chosen_points``, which says what to measure on a new system.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from learned_cost.collectives.model import CollectiveModel, load_collective_model
from learned_cost.collectives.rows import Cases, Floats, Ints, cases_of, distinct
from learned_cost.collectives.systems import NOISE
from learned_cost.data.table import Table

POINTS = 3
# By label: points that are measured, of the system or of each (collective, library).
MEASURED = {"after_3_points": (POINTS, False), "after_10_points": (10, False), "after_3_points_each": (POINTS, True)}
CANDIDATES = 600  # that are weighed for each choice
EXCHANGES = 1  # times that each chosen point is weighed anew beside the others
WIDTH = 1.645  # deviations of a 90 % interval


def evaluate_collectives(rows: Table, model: CollectiveModel | None = None) -> dict[str, Any]:  # Any: JSON
    """Errors of ``model`` (default: the shipped one) by system, and of systems that it was not trained on after three
    points of the system, after ten, and after three of each of its (collective, library); a measured point is not
    scored again.
    """
    model = model or load_collective_model()
    cases, log_s = cases_of(rows), np.log(rows.latency_s)
    mean, std = model.price(cases)
    known = model.known(cases)
    _, system = distinct(cases.system, cases.gpu)
    systems = {}
    for code in range(int(system.max()) + 1 if len(system) else 0):
        here = np.flatnonzero(system == code)
        name = f"{cases.system[here[0]]} | {cases.gpu[here[0]]}"
        scores: dict[str, Any] = {"known": bool(known[here[0]]), "as_it_is": score(mean[here], std[here], log_s[here])}
        if not known[here[0]]:
            scores |= after_points(model, cases.take(here), log_s[here])
        systems[name] = scores
    result: dict[str, Any] = {"all": score(mean, std, log_s), "systems": systems}
    for label, wanted in (("known_systems", True), ("new_systems", False)):
        if (known == wanted).any():
            result[label] = score(mean[known == wanted], std[known == wanted], log_s[known == wanted])
    new = [scores for scores in systems.values() if not scores["known"]]
    for label in ("as_it_is", *MEASURED) if new else ():
        result[f"mean_over_new_systems_{label}"] = float(np.mean([scores[label]["mape"] for scores in new]))
    return result


def after_points(model: CollectiveModel, cases: Cases, log_s: Floats) -> dict[str, dict[str, float]]:
    """Scores on one system's rows after 3 points of it, 10 points, and 3 of each (collective, library)."""
    result = {}
    for label, (count, each) in MEASURED.items():
        points = chosen_points(model, cases, each=each, points=count)
        rest = np.setdiff1d(np.arange(len(cases)), points)
        if len(rest) == 0:
            rest = points  # nothing else is there to be scored
        mean, std = model.given(cases.take(points), log_s[points]).price(cases.take(rest))
        result[label] = score(mean, std, log_s[rest])
    return result


def chosen_points(model: CollectiveModel, cases: Cases, *, each: bool = False, points: int = POINTS) -> Ints:
    """Which rows to measure, without looking at any measurement: one after the other, the row that most lowers the
    model's own variance, summed over all rows. ``each`` chooses for every (collective, library) by itself.
    """
    if not each:
        return _design(model, cases, np.arange(len(cases)), points)
    _, group = distinct(cases.collective, cases.library)
    parts = [np.flatnonzero(group == code) for code in range(int(group.max()) + 1)]
    return np.sort(np.concatenate([_design(model, cases, rows, points) for rows in parts]))


def _design(model: CollectiveModel, cases: Cases, rows: Ints, points: int) -> Ints:
    if len(rows) <= 1:
        return rows
    some = cases.take(rows)
    _, curve = some.curves()
    code = curve * 64 + np.floor(np.log2(some.bytes)).astype(np.int64)
    _, first, weight = np.unique(code, return_index=True, return_counts=True)
    if len(first) > CANDIDATES:
        kept = np.linspace(0, len(first) - 1, CANDIDATES).astype(np.int64)
        first, weight = first[kept], weight[kept]
    count = min(points, len(rows) - 1, len(first))
    return np.sort(rows[first[_most_telling(model.prior(some.take(first)), weight, count)]])


def _most_telling(prior: Floats, weight: Ints, count: int) -> list[int]:
    """Greedily, then each chosen anew beside the others: after which the weighted variance left is least."""
    chosen: list[int] = []
    for turn in range(count * (1 + EXCHANGES)):
        others = chosen if turn < count else chosen[1:]
        inside = prior[np.ix_(others, others)] + NOISE * np.eye(len(others))
        left = prior - prior[:, others] @ np.linalg.solve(inside, prior[others])
        gain = (weight[:, None] * left**2).sum(axis=0) / (np.maximum(left.diagonal(), 0.0) + NOISE)
        gain[others] = -1.0
        chosen = [*others, int(np.argmax(gain))]
    return chosen


def score(mean: Floats, std: Floats, log_s: Floats) -> dict[str, float]:
    """Mean and median error relative to the measurement, and how often the 90 % interval holds it."""
    error = np.abs(np.expm1(mean - log_s))
    held = np.abs(mean - log_s) <= WIDTH * std
    return {
        "rows": float(len(error)),
        "mape": float(error.mean()),
        "median": float(np.median(error)),
        "held_90": float(held.mean()),
    }
