"""How well the collective model knows sizes and systems that it has not seen, beside plain α–β and gradient boosting.

    python benchmarks/cost_collectives.py [DATA] [--smoke] [--json OUT]

DATA is a folder with collectives.parquet. New sizes: five folds by the column ``fold``. A system left out: one value of
``system`` at a time, also after 3 and 10 measured points, and after the luckiest 3 (the least that any choice of points
could reach). The rows all three models are scored on are the same. `pdv cost train --collectives` makes the weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record, arguments, table
from learned_cost.collectives.fit import fit_collectives, held_out
from learned_cost.collectives.model import CollectiveModel
from learned_cost.collectives.physics import LINKS, Facts, facts_of
from learned_cost.collectives.rows import Cases, Floats, Ints, cases_of, distinct
from learned_cost.collectives.score import MEASURED, POINTS, after_points, score
from learned_cost.collectives.systems import NOISE
from learned_cost.data.dataset import read_folder

SMOKE_SYSTEMS = 3


def boosting(cases: Cases, log_s: Floats, asked: Cases, *, systems: bool) -> Floats:
    """Log seconds by gradient boosting over the same columns; ``systems`` shows it which system a row is of."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    def columns(part: Cases) -> Floats:
        facts = facts_of(part)
        found = [facts.size, facts.devices, facts.nodes, np.log2(part.per_node), facts.rate, facts.clock, facts.blocks]
        found += [facts.library == code for code in range(10)] + [facts.collective == code for code in range(7)]
        found += [facts.link, part.dtype == "int8"]
        if systems:
            found += [np.array([names.get(name, -1) for name in part.system])]
        return np.stack([np.asarray(column, dtype=np.float64) for column in found], axis=1)

    names = {name: code for code, name in enumerate(sorted(set(cases.system)))}
    model = HistGradientBoostingRegressor(max_iter=200, learning_rate=0.1, max_leaf_nodes=63, random_state=0)
    model.fit(columns(cases), log_s)
    return np.asarray(model.predict(columns(asked)), dtype=np.float64)


def alpha_beta(facts: Facts) -> Floats:
    """Log seconds by plain α–β: 10 µs and 1 µs a step within a node (15 µs between), 70 % of the nominal rate."""
    step = np.where(facts.link == LINKS.index("between"), 15e-6, 1e-6)
    seconds: Floats = np.log(10e-6 + step * np.exp(facts.steps) + np.exp(facts.wire) / 0.7)
    return seconds


def new_sizes(cases: Cases, log_s: Floats, fold: Ints, record: Record) -> None:
    """Held-out folds."""
    means: list[Floats] = []
    stds: list[Floats] = []
    rows: list[Ints] = []
    boosted: list[Floats] = []
    for inside, mean, std in held_out(cases, log_s, fold):
        means, stds, rows = [*means, mean], [*stds, std], [*rows, inside]
        rest = np.setdiff1d(np.arange(len(fold)), inside)
        boosted.append(boosting(cases.take(rest), log_s[rest], cases.take(inside), systems=True))
        print(f"fold {fold[inside[0]]}: {score(mean, std, log_s[inside])}", flush=True)
    place = np.concatenate(rows)
    truth, mean, std = log_s[place], np.concatenate(means), np.concatenate(stds)
    ours = score(mean, std, truth)
    beside = {
        "gradient boosting": np.concatenate(boosted), "plain α-β": alpha_beta(facts_of(cases.take(place)))
    }  # fmt: skip
    record.claim("new sizes: MAPE", 100 * ours["mape"], "%", f"median {100 * ours['median']:.2g} %")
    record.claim("new sizes: 90 % intervals hold, before calibration", 100 * ours["held_90"], "%")
    for name, other in beside.items():
        record.claim(f"new sizes: MAPE of {name}", 100 * score(other, std, truth)["mape"], "%")
    for system in sorted(set(cases.system)):
        here = cases.system[place] == system
        if here.any():
            record.rows.append({"split": "new sizes", "system": system, **score(mean[here], std[here], truth[here])})


def systems_left_out(cases: Cases, log_s: Floats, names: list[str], record: Record) -> None:
    """One system at a time."""
    lines = []
    for name in names:
        begin = time.process_time()
        inside = cases.system == name
        model = fit_collectives(cases.take(~inside), log_s[~inside])
        left, truth = cases.take(inside), log_s[inside]
        mean, std = model.price(left)
        row: dict[str, Any] = {"split": "a system left out", "system": name, "as_it_is": score(mean, std, truth)}
        row |= after_points(model, left, truth)
        row["luckiest_3_points"] = {"mape": luckiest(model, left, truth)}
        row["plain α-β"] = score(alpha_beta(facts_of(left)), std, truth)
        boosted = boosting(cases.take(~inside), log_s[~inside], left, systems=False)
        row["gradient boosting"] = score(boosted, std, truth)
        row["seconds"] = time.process_time() - begin
        record.rows.append(row)
        lines.append(row)
        print(name, {key: round(row[key]["mape"], 3) for key in LEFT_OUT}, flush=True)
    table(
        ("system", "rows", *LEFT_OUT),
        [
            (
                row["system"][:32],
                f"{row['as_it_is']['rows']:.0f}",
                *(f"{100 * row[key]['mape']:.1f}" for key in LEFT_OUT),
            )
            for row in lines
        ],
    )
    for key in LEFT_OUT:
        errors = [row[key]["mape"] for row in lines]
        spread = f"median {100 * np.median(errors):.3g} %, worst {100 * max(errors):.3g} %"
        record.claim(f"a system left out: MAPE, mean over systems, {key}", 100 * float(np.mean(errors)), "%", spread)
        rows = [row["as_it_is"]["rows"] for row in lines]
        record.claim(f"a system left out: MAPE over rows, {key}", 100 * float(np.average(errors, weights=rows)), "%")
    for key in ("as_it_is", *AFTER):
        held = 100 * float(np.mean([row[key]["held_90"] for row in lines]))
        record.claim(f"a system left out: 90 % intervals hold, mean over systems, {key}", held, "%")


def luckiest(model: CollectiveModel, cases: Cases, log_s: Floats) -> float:
    """Mean error after the best of many draws of 3 points, told by the very rows they are to foretell.

    What a choice of points could reach at most, about: none can look at the measurements. Of a sample of the rows.
    """
    random = np.random.default_rng(0)
    rows = random.permutation(len(cases))[:SAMPLE]
    some, missed = cases.take(rows), model.missed(cases.take(rows), log_s[rows])
    matrix = model.prior(some)
    errors = []
    for _ in range(DRAWS):
        points = random.choice(len(rows), POINTS, replace=False)
        inside = matrix[np.ix_(points, points)] + NOISE * np.eye(POINTS)
        told = matrix[:, points] @ np.linalg.solve(inside, missed[points])
        rest = np.setdiff1d(np.arange(len(rows)), points)
        errors.append(float(np.abs(np.expm1(told - missed))[rest].mean()))
    return min(errors)


AFTER = tuple(MEASURED)
SAMPLE, DRAWS = 500, 200  # rows of a system, and triples of them
GLOO = Path(__file__).resolve().parent.parent / "learned_cost/profiles/cpu-core"
LEFT_OUT = ("as_it_is", *AFTER, "luckiest_3_points", "plain α-β", "gradient boosting")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("data", type=Path, nargs="?", default=GLOO, help="default: the shipped profile of gloo")
    options = parser.parse_args()
    begin = time.process_time()
    rows = read_folder(options.data).collectives
    assert rows is not None, "the folder has collectives"
    cases, log_s, fold = cases_of(rows), np.log(rows.latency_s), rows["fold"]
    first, _ = distinct(cases.system)
    names = sorted(cases.system[first])
    if options.smoke:
        few = np.isin(cases.system, sorted(names, key=lambda name: int((cases.system == name).sum()))[:SMOKE_SYSTEMS])
        cases, log_s, fold = cases.take(few), log_s[few], fold[few]
        names = sorted(set(cases.system))
    record = Record()
    systems_left_out(cases, log_s, names, record)
    new_sizes(cases, log_s, fold, record)
    record.claim("CPU time of all splits", time.process_time() - begin, "s")
    record.print_summary()
    record.write(options.json)


if __name__ == "__main__":
    main()
