"""Weights for others: what a file was trained on, how well it did on what it had not seen, and what it is not for.

``publish`` writes a folder of them, with scores, pictures and a model card (``card``), whole or not at all; ``facts``
are the lines that `pdv cost show` prints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ir.files.writing import check_folder, unwritable, write_whole
from learned_cost.evaluation.plots import pictures
from learned_cost.evaluation.scoring import Evaluation
from learned_cost.weights import FORMAT_VERSION, Weights, load_weights, save_weights

REPORT, CARD = "evaluation.json", "README.md"
SHOWN = 60  # rows of a table of the card

# Of the public data that weights may come from (its licence allows weights to be shared).
LICENCES: Mapping[str, str] = {
    "neusight": "NeuSight, MIT",
    "aiconfigurator": "AIConfigurator, Apache-2.0",
    "vidur": "Vidur, MIT",
    "llmservingsim": "LLMServingSim, MIT",
    "pipeweave": "PipeWeave, Apache-2.0",
    "infersim": "InferSim, Apache-2.0",
    "deepbench": "DeepBench, Apache-2.0",
    "llmcompass": "LLMCompass, BSD-3-Clause",
    "galvatron": "Galvatron, Apache-2.0",
}


def facts(weights: Weights) -> dict[str, str]:
    """Names and values, for a terminal."""
    description = weights.description
    training, metrics = _map(description, "training"), _map(description, "metrics")
    found = {
        "name": weights.name,
        "of": weights.kind,
        "format": f"version {FORMAT_VERSION}",
        "sha256": weights.digest,
        "numbers": f"{sum(array.size for array in weights.arrays.values()):,}",
        "size": f"{sum(array.nbytes for array in weights.arrays.values()) / 1e6:.2f} MB",
        "features": str(description.get("features", "not said"))[:16],
        "trained": str(training.get("date", "not said")),
        "rows": f"{training['rows']:,}" if isinstance(training.get("rows"), int) else "not said",
        "devices": ", ".join(_map(training, "by_device")) or "not said",
        "sources": ", ".join(_map(training, "by_source")) or "not said",
        "held out": _held_out(training),
        "started from": str(training.get("started_from") or "nothing"),
    }
    for name, figures in (("held-out rows", _map(metrics, "all")), ("on new devices", _map(metrics, "unseen_devices"))):
        if figures.get("rows"):
            found[name] = sentence(figures)
    return found


def sentence(figures: Mapping[str, Any]) -> str:
    """Figures of some rows, in a line."""
    parts = [f"{figures['rows']:,} rows: error {percent(figures.get('mape'))}, median {percent(figures.get('median'))}"]
    if figures.get("coverage_90") is not None:
        parts.append(f"90 % intervals hold {percent(figures['coverage_90'])}")
    if figures.get("roofline_mape") is not None:
        parts.append(f"roofline's error {percent(figures['roofline_mape'])}")
    return "; ".join(parts)


def card(weights: Weights, report: Mapping[str, Any], *, evaluated_on: str, plots: Iterable[str] = ()) -> str:
    """The model card, as Markdown. ``report`` is of `pdv cost evaluate`, made when the card was."""
    training = _map(weights.description, "training")
    lines = [f"# {weights.name}: seconds of {weights.kind}", "", *_purpose(weights.kind), "", "## The file", ""]
    lines += [f"- {name}: {value}" for name, value in facts(weights).items() if name not in {"name", "of"}]
    versions = ", ".join(f"{name} {version}" for name, version in _map(training, "versions").items())
    lines += [f"- made with: {versions or 'not said'}", "", "## Trained on", ""]
    lines += [*_counts("device", _map(training, "by_device")), "", *_counts("source", _map(training, "by_source"))]
    known = [LICENCES[name] for name in _map(training, "by_source") if name in LICENCES]
    if known:
        lines += ["", f"Public measurements under their licences: {'; '.join(known)}. The file holds no rows of them."]
    held = _map(weights.description, "metrics")
    if held.get("rows"):
        lines += ["", f"## On rows held out of the training ({_held_out(training)})", "", *_figures(held)]
    for part in ("kernels", "collectives"):
        if _map(report, part).get("rows"):
            lines += ["", f"## {part.capitalize()} of {evaluated_on}", "", *_figures(_map(report, part))]
    lines += [line for name in plots for line in ("", f"![{name.rsplit('.', 1)[0].replace('-', ' ')}]({name})")]
    return "\n".join([*lines, "", *_limits(), ""])


def _purpose(kind: str) -> list[str]:
    return [
        f"Predicts how long {kind} take on a device that is described by its data sheet, and how sure it is. Made for",
        "comparing plans in `pdv optimize`. Not for: billing, real-time guarantees, devices under thermal limits that",
        "their data sheet does not state.",
    ]


def _limits() -> list[str]:
    return [
        "## Read with care",
        "",
        "- An error is a share of the measured time, over rows not marked suspect; intervals are of its logarithm.",
        "- Rows of devices that the training had are not evidence about devices that it had not; look at the latter.",
        "- Measurements of public sources differ by 3–9 % among themselves (other versions of the same library).",
    ]


def _figures(report: Mapping[str, Any]) -> list[str]:
    lines = [sentence(_map(report, "all")) + "."]
    if _map(report, "unseen_devices").get("rows"):
        lines += ["", "Devices that the training had not: " + sentence(_map(report, "unseen_devices")) + "."]
    if _map(report, "unseen_systems").get("rows"):
        lines += ["", "Systems that the training had not: " + sentence(_map(report, "unseen_systems")) + "."]
    for name in ("by_device", "by_family", "by_op", "by_system", "by_collective"):
        if _map(report, name):
            lines += ["", *_table(name.removeprefix("by_"), _map(report, name))]
    return lines


def _table(what: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"| {what} | rows | error | median | bias | 90 % holds | roofline |", "| --- " * 7 + "|"]
    for name, figures in sorted(groups.items(), key=lambda item: -int(item[1]["rows"]))[:SHOWN]:
        told = [percent(figures.get(key)) for key in ("mape", "median", "bias", "coverage_90", "roofline_mape")]
        lines.append(f"| {name} | {figures['rows']:,} | {' | '.join(told)} |")
    return lines


def _counts(what: str, counts: Mapping[str, Any]) -> list[str]:
    if not counts:
        return [f"Which {what}s, the file does not say."]
    lines = [f"| {what} | rows |", "| --- | --- |"]
    return lines + [f"| {name} | {count:,} |" for name, count in sorted(counts.items(), key=lambda item: -item[1])]


def _held_out(training: Mapping[str, Any]) -> str:
    held = _map(training, "held_out")
    return ", ".join(f"{name} {value}" for name, value in held.items() if value not in (None, [], 0)) or "nothing"


def percent(share: float | None) -> str:
    """``0.0834`` as "8.3 %"."""
    return "–" if share is None else f"{100.0 * share:.1f} %"


def _map(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a description, empty where a file does not have it."""
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def publish(
    weights: Weights, evaluation: Evaluation, folder: Path, *, evaluated_on: str, overwrite: bool = False
) -> list[str]:
    """Write the folder, and return the names of its files.

    Raises:
        UsageError: if the folder is there and not empty, and ``overwrite`` is not given.
        WriteError: if it cannot be written; then nothing of it is there.
    """
    check_folder(folder, overwrite=overwrite)
    part = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.part")
    try:
        part.mkdir()
        save_weights(part / weights.name, weights)
        assert load_weights(part / weights.name, weights.kind).digest == weights.digest, "the numbers changed"
        names = draw(evaluation, weights.name, weights.kind, part)
        (part / REPORT).write_text(json.dumps(evaluation.report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        text = card(weights, evaluation.report, evaluated_on=evaluated_on, plots=names)
        (part / CARD).write_text(text, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(path.name for path in folder.iterdir())


def draw(evaluation: Evaluation, title: str, part: str, folder: Path) -> list[str]:
    """Write the pictures of one part, "kernels" or "collectives", if it was scored; returns their names."""
    if part not in evaluation.measured_s or not len(evaluation.measured_s[part]):
        return []
    made = pictures(evaluation.measured_s[part], evaluation.predicted_s[part], f"{title}: {part}")
    for name, content in made.items():
        write_whole(folder / f"{part}-{name}", content)
    return [f"{part}-{name}" for name in made]
