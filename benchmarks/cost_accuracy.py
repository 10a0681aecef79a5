"""How well kernels are predicted, beside the roofline and gradient boosting on the same rows.

    python benchmarks/cost_accuracy.py --data FOLDER [--part shapes|devices|fused ...] [--smoke] [--json OUT]

shapes:  trained on four fifths of the shapes, scored on the rest (fold 0), devices known. Intervals are calibrated on
         one half of the rows held out and scored on the other. Also without a device, and without physics.
devices: a device left out: from its record alone, and after 50 kernels measured on it; beside these, what is left
         where the mean error of every operator, type and library is known, and where boosting learns the errors of
         2,000 kernels. ``--device`` leaves only that one out.
fused:   subgraphs compiled into one call (the shipped CPU profile): five-fold, beside the sum of the model's own
         predictions of the kernels, and without edges.

FOLDER is in the format of docs/profiles.md; without it, parts that need it are left out. Rows marked suspect never
count, nor for the roofline those that it is not known of.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.record import Record, arguments, table
from learned_cost.data.dataset import Dataset, read_folders
from learned_cost.data.kernel import family
from learned_cost.data.measured import SHIPPED
from learned_cost.data.table import Table
from learned_cost.evaluation.evaluate import Z90, Answer
from learned_cost.kernels.features import Features
from learned_cost.kernels.gnn import Rows
from learned_cost.kernels.predict import Predictor
from learned_cost.training.few_shot import adapt, choose
from learned_cost.training.fit import fit
from learned_cost.training.learner import GraphLearner, LearnedKernels
from learned_cost.training.train import FINE_TUNING, FROM_START, KernelTask, shape_hash
from learned_cost.weights import SHIPPED as SHIPPED_WEIGHTS
from learned_cost.weights import Weights, load_weights

Index = NDArray[np.int64]
Floats = NDArray[np.float64]

DEVICES = ("A100-SXM4-80GB", "T4", "A40", "L40S", "H200-SXM-141GB")
ASKED_DEVICES = (15, 18, 20, 25, 18)
MEASURED = 50  # kernels of a device
SCORED = 20_000  # rows of a device left out that are scored
BOOSTED = 250_000  # rows that gradient boosting is trained on, at most
TOLD = 2000  # kernels of a device whose errors boosting learns, to see what could be known
GROUPED = ("op", "dtype", "backend", "backend_version", "kernel")
FOLDS = 5
PARTS = ("shapes", "devices", "fused")


def main() -> None:
    """Run the parts; print what was asked beside what was measured."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with kernels.parquet")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all that there is data for")
    parser.add_argument("--device", choices=DEVICES, action="append", help="left out; default: all of them in turn")
    parser.add_argument("--epochs", type=int, default=FROM_START.epochs)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record()
    parts = options.part or PARTS
    if options.data is not None:
        data = read_folders([options.data])
        if options.smoke:
            data = sampled(data, 2500)
        features = GraphLearner().features(data.kernels, data.devices)
        if "shapes" in parts:
            new_shapes(record, data, features, options)
        if "devices" in parts:
            new_devices(record, data, features, options)
    if "fused" in parts:
        fused_subgraphs(record, options)
    record.print_summary()
    record.write(options.json)


def begun(options: argparse.Namespace, *, edges: bool = True, physics: bool = True) -> GraphLearner:
    """A learner, one that does next to nothing where only the script is tried."""
    if options.smoke:
        return GraphLearner(width=32, depth=1, edges=edges, physics=physics, prior_steps=12)
    return GraphLearner(edges=edges, physics=physics)


def sampled(data: Dataset, rows: int) -> Dataset:
    """Some rows of each device."""
    assert data.kernels is not None
    random = np.random.default_rng(0)
    codes = data.kernels["gpu"]
    each = max(40, rows // len(np.unique(codes)))
    parts = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    chosen = np.sort(np.concatenate([random.permutation(part)[:each] for part in parts]))
    return replace(data, kernels=data.kernels.take(chosen))


# ---- New shapes on known devices ----


def new_shapes(record: Record, data: Dataset, features: Rows, options: argparse.Namespace) -> None:
    """Fold 0 held out."""
    rows = data.kernels
    assert rows is not None
    usable = ~rows["suspect"]
    held = np.flatnonzero(usable & (rows["fold"] == 0))
    trained = np.flatnonzero(usable & (rows["fold"] != 0))
    truth = np.log(rows.latency_s)
    epochs = 1 if options.smoke else options.epochs
    learner = begun(options)
    started = time.process_time()
    module = learner.build(features, trained, seed=0)
    blind = (
        learner.predict(module, features, held).mean_log_s
        if options.smoke
        else prior_only(learner, module, features, held)
    )
    fit(KernelTask(learner, module, features, trained, {}), replace(FROM_START, epochs=epochs), checkpoint=None)
    seconds = time.process_time() - started
    learner.calibrate(module, features, held[::2])
    answer = learner.predict(module, features, held[1::2])
    record.claim("shapes: training", seconds, "CPU-s")
    scored = held[1::2]
    figures = {
        "roofline": np.log(rows["roofline_us"][scored].astype(np.float64) * 1e-6),
        "gradient boosting": boosted(features.features, trained, scored, truth, options),
        "no device (the prior alone)": blind[1::2],
        "the model": answer.mean_log_s,
    }
    show(record, "shapes", figures, truth[scored], "asked: mean 8 %, median 5 %")
    coverage(record, rows, scored, answer, truth[scored])
    quarter = replace(FROM_START, epochs=max(1, epochs // 4))
    plain = begun(options, physics=False)
    module = plain.build(features, trained, seed=0)
    fit(
        KernelTask(plain, module, features, trained, {}),
        quarter,
        checkpoint=None,
    )
    bound = learner.build(features, trained, seed=0)
    fit(
        KernelTask(learner, bound, features, trained, {}),
        quarter,
        checkpoint=None,
    )
    figures = {
        "a quarter of the training": learner.predict(bound, features, scored).mean_log_s,
        "the same without physics": plain.predict(module, features, scored).mean_log_s,
    }
    show(record, "shapes", figures, truth[scored])


def prior_only(learner: GraphLearner, module: LearnedKernels, features: Rows, rows: Index) -> Floats:
    """The device-blind part's answers."""
    known, module.net.devices = module.net.devices, ()
    answer = learner.predict(module, features, rows)
    module.net.devices = known
    return answer.mean_log_s


def coverage(record: Record, rows: Table, scored: Index, answer: Answer, truth: Floats) -> None:
    """How many of the 90 % intervals hold."""
    inside = np.abs(truth - answer.mean_log_s) <= Z90 * answer.std_log
    families = np.array([family(op) for op in rows.text("op")[scored]])
    by_family = {str(name): float(inside[families == name].mean()) for name in np.unique(families)}
    record.claim("shapes: 90 % intervals hold", 100 * float(inside.mean()), "%", "asked: 87 to 93")
    worst = min(by_family, key=lambda name: by_family[name])
    record.claim("shapes: worst family's intervals hold", 100 * by_family[worst], "%", f"{worst}; asked: 80")
    record.rows.append({"part": "shapes", "coverage": by_family})


# ---- Devices left out ----


def new_devices(record: Record, data: Dataset, features: Rows, options: argparse.Namespace) -> None:
    """From the record alone, and after ``MEASURED`` kernels."""
    rows = data.kernels
    assert rows is not None
    truth = np.log(rows.latency_s)
    usable = ~rows["suspect"]
    lines: list[tuple[str, ...]] = []
    chosen = options.device or DEVICES[: 1 if options.smoke else None]
    for name in chosen:
        asked = ASKED_DEVICES[DEVICES.index(name)]
        of_it = rows.is_text("gpu", name)
        trained = np.flatnonzero(usable & ~of_it)
        held = np.random.default_rng(0).permutation(np.flatnonzero(usable & of_it))[:SCORED]
        learner = begun(options)
        module = learner.build(features, trained, seed=0)
        arrays, meaning = learner.export(module)
        predictor = Predictor(Weights("kernels", arrays, meaning))
        pool, scored = held[: len(held) // 2], held[len(held) // 2 :]
        cold = predictor.predict_table(rows.take(scored), data.devices)
        measured = pool[choose(predictor, rows.take(pool), data.devices, MEASURED)]
        warm = adapt(predictor, rows.take(measured), data.devices, name).predict_table(rows.take(scored), data.devices)
        boosting = boosted(features.features, trained, scored, truth, options)
        figures = {
            "roofline": np.log(rows["roofline_us"][scored].astype(np.float64) * 1e-6), "gradient boosting": boosting,
            "the model": cold.mean_log_s, f"after {MEASURED} kernels": warm.mean_log_s,
        }  # fmt: skip
        errors = {title: error(mean, truth[scored]) for title, mean in figures.items()}
        missed = truth[pool] - predictor.predict_table(rows.take(pool), data.devices).mean_log_s
        figures |= ceilings(rows, features.features, (pool, scored), missed, cold.mean_log_s)
        for title, mean in figures.items():
            record.rows.append({"part": "devices", "device": name, "model": title, **measures(mean, truth[scored])})
        lines.append((name, *(f"{100 * value:.1f}" for value in errors.values()), f"{asked} / 10"))
        record.claim(
            f"{name} left out",
            100 * errors["the model"],
            "%",
            f"asked: {asked}; boosting {100 * errors['gradient boosting']:.1f}",
        )
        for title, mean in list(figures.items())[2:]:
            found = measures(mean, truth[scored])
            record.claim(f"{name}, {title}: median", 100 * found["median"], "%", f"mean {100 * found['mape']:.1f}")
        record.claim(f"{name} after {MEASURED} kernels", 100 * errors[f"after {MEASURED} kernels"], "%", "asked: 10")
        fewer = adapt(predictor, rows.take(measured[: MEASURED // 5]), data.devices, name)
        narrowed = float(np.median(warm.std_log / fewer.predict_table(rows.take(scored), data.devices).std_log))
        record.claim(f"{name} deviation after {MEASURED} kernels", narrowed, f"of that after {MEASURED // 5}")
        for title, answer in (("before", cold), ("after", warm)):
            inside = np.abs(truth[scored] - answer.mean_log_s) <= Z90 * answer.std_log
            record.rows.append({"part": "devices", "device": name, "intervals": title, "hold": float(inside.mean())})
    table(("left out", "roofline %", "boosting %", "model %", f"after {MEASURED} %", "asked %"), lines)


def ceilings(
    rows: Table, features: Features, parts: tuple[Index, Index], missed: Floats, cold: Floats
) -> dict[str, Floats]:
    """What a correction could reach that knew far more of a device than 50 kernels do.

    ``parts`` are rows that may be measured and rows that are scored; ``missed`` are log errors of the model at the
    former, ``cold`` its answers for the latter.
    """
    both = rows.take(np.concatenate(parts))
    words = zip(*(both.text(column).astype(str) for column in GROUPED), strict=True)
    _, group = np.unique(["|".join(name) for name in words], return_inverse=True)
    medians = np.zeros(group.max() + 1)
    here = group[: len(missed)]
    for code in np.unique(here):
        medians[code] = np.median(missed[here == code])
    told = np.random.default_rng(0).permutation(len(missed))[:TOLD]
    model = HistGradientBoostingRegressor(loss="absolute_error", max_iter=150, l2_regularization=1.0)
    model.fit(columns_of(features, parts[0][told]), missed[told])
    return {
        "errors of every operator, type and library known": cold + medians[group[len(missed) :]],
        f"boosting on the errors of {TOLD} kernels": cold + model.predict(columns_of(features, parts[1])),
    }


# ---- Fused subgraphs ----


def fused_subgraphs(record: Record, options: argparse.Namespace) -> None:
    """The CPU profile, five-fold by subgraph; the kernels that they consist of are all trained on."""
    data = read_folders(sorted(folder for folder in SHIPPED.glob("*") if folder.is_dir()))
    rows = data.kernels
    assert rows is not None
    if options.smoke:
        rows = rows.take(np.arange(0, len(rows), 10))
    truth = np.log(rows.latency_s)
    fused = rows.is_text("op", "subgraph") & rows.is_text("stack", "inductor")
    folds = shape_hash(rows) % np.uint64(FOLDS)
    predicted = {
        title: np.full(len(rows), np.nan) for title in ("graph network", "no edges", "sum of kernels", "boosting")
    }
    start = shipped()
    for fold in range(1 if options.smoke else FOLDS):
        held = np.flatnonzero(fused & (folds == fold))
        trained = np.flatnonzero(~rows["suspect"] & ~(rows.is_text("op", "subgraph") & (folds == fold)))
        for title, edges in (("graph network", True), ("no edges", False)):
            learner = begun(options, edges=edges)
            features = learner.features(rows, data.devices)
            module = learner.build(features, trained, 0) if start is None else learner.restore(start)
            learner.thaw(module, features, trained)
            config = replace(FINE_TUNING, epochs=2 if options.smoke else FINE_TUNING.epochs)
            fit(KernelTask(learner, module, features, trained, {}), config, checkpoint=None)
            predicted[title][held] = learner.predict(module, features, held).mean_log_s
            if edges:
                module.net.fusion = None
                predicted["sum of kernels"][held] = learner.predict(module, features, held).mean_log_s
        inside = np.flatnonzero(rows.is_text("op", "subgraph") & (folds != fold))
        predicted["boosting"][held] = boosted_graphs(features, inside, held, truth)
    scored = np.flatnonzero(np.isfinite(predicted["graph network"]))
    show(record, "fused", {title: mean[scored] for title, mean in predicted.items()}, truth[scored])
    errors = {title: error(mean[scored], truth[scored]) for title, mean in predicted.items()}
    for other in ("sum of kernels", "boosting", "no edges"):
        gain = 100 * (1 - errors["graph network"] / errors[other])
        record.claim(f"fused: error less than of {other}", gain, "%", "asked: 20" if other != "no edges" else "")


def shipped() -> Weights | None:
    """Shipped weights without what they learned of this profile: its adapter and fusion."""
    if not (SHIPPED_WEIGHTS / "kernels.json").is_file():
        return None
    weights = load_weights(SHIPPED_WEIGHTS / "kernels", "kernels")
    kept = {name: array for name, array in weights.arrays.items() if not name.startswith(("adapters.", "fusion."))}
    model = {**weights.description["model"], "adapters": {}, "fusion": None}
    return replace(weights, arrays=kept, description={**weights.description, "model": model})


# ---- Baselines and figures ----


def boosted(features: Features, trained: Index, scored: Index, truth: Floats, options: argparse.Namespace) -> Floats:
    """Histogram gradient boosting on the same numbers and words (rows of one kernel each)."""
    random = np.random.default_rng(0)
    some = random.permutation(trained)[:BOOSTED]
    columns = columns_of(features, some)
    categorical = list(range(columns.shape[1] - len(features.texts), columns.shape[1]))
    rounds = 5 if options.smoke else 300
    model = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=rounds, max_leaf_nodes=127, categorical_features=categorical
    )
    model.fit(columns, truth[some])
    found: Floats = model.predict(columns_of(features, scored))
    return found


def columns_of(features: Features, rows: Index) -> Floats:
    """Numbers and words (codes, at most 254, last) of rows of one kernel each."""
    words = np.stack([codes[rows] for codes, _ in features.texts.values()], axis=1).astype(np.float32)
    numbers = [part[rows] for part in (features.resources, features.blind, features.own)]
    return np.concatenate([*numbers, np.minimum(words, 254)], axis=1)


def boosted_graphs(rows: Rows, trained: Index, scored: Index, truth: Floats) -> Floats:
    """The same on what a subgraph comes to: sums of its kernels' resources, counts of its operators, its numbers."""
    features = rows.features
    codes, vocab = features.texts["op"]
    count = len(features)
    counts = np.zeros((count, len(vocab)))
    np.add.at(counts, (features.graph, codes), 1.0)
    sums = np.zeros((count, features.resources.shape[1]))
    np.add.at(sums, features.graph, np.exp(features.resources.astype(np.float64)))
    stack, _ = features.texts["stack"]
    columns = np.concatenate([counts, np.log(sums), features.graphs, stack[rows.start[:-1], None]], axis=1)
    model = HistGradientBoostingRegressor(loss="absolute_error", max_iter=300, learning_rate=0.05)
    model.fit(columns[trained], truth[trained])
    found: Floats = model.predict(columns[scored])
    return found


def error(mean: Floats, truth: Floats) -> float:
    """Mean absolute relative error."""
    return float(np.nanmean(np.abs(np.expm1(mean - truth))))


def measures(mean: Floats, truth: Floats) -> dict[str, float]:
    """Mean and median error, and bias in logs."""
    errors = np.abs(np.expm1(mean - truth))
    return {
        "mape": float(np.nanmean(errors)),
        "median": float(np.nanmedian(errors)),
        "bias": float(np.nanmedian(mean - truth)),
    }


def show(record: Record, part: str, figures: dict[str, Floats], truth: Floats, asked: str = "") -> None:
    """A line each."""
    lines: list[tuple[str, ...]] = []
    for title, mean in figures.items():
        found = measures(mean, truth)
        record.rows.append({"part": part, "model": title, "rows": len(truth), **found})
        lines.append((title, f"{100 * found['mape']:.1f}", f"{100 * found['median']:.1f}", str(len(truth))))
        record.claim(
            f"{part}: {title}", 100 * found["mape"], "%", f"median {100 * found['median']:.1f}; {asked}".rstrip("; ")
        )
    table((part, "mean %", "median %", "rows"), lines)


if __name__ == "__main__":
    main()
