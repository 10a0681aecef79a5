"""Weights as a folder that others can use: the two files, scores, pictures and a model card; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from learned_cost.evaluation.plots import pictures
from learned_cost.evaluation.scoring import Evaluation
from learned_cost.files import check_folder, unwritable, write_whole
from learned_cost.training.card import card
from learned_cost.weights import Weights, load_weights, save_weights

REPORT, CARD = "evaluation.json", "README.md"


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
