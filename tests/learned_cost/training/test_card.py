"""Model cards say what a file says, and no more; pictures are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learned_cost.evaluation.plots import BY_SIZE, PREDICTED, pictures
from learned_cost.training.card import card, facts, percent
from learned_cost.weights import Weights, load_weights, save_weights

FIGURES = {"rows": 900, "mape": 0.081, "median": 0.05, "bias": -0.01, "coverage_90": 0.9, "roofline_mape": 0.6}
DESCRIPTION = {
    "features": "abcdef0123456789",
    "training": {
        "rows": 12345, "by_device": {"T4": 12000, "L40S": 345}, "by_source": {"neusight": 12000, "test": 345},
        "held_out": {"fold": 3}, "date": "2026-11-21", "versions": {"torch": "2.13.0"},
    },
    "metrics": {"rows": 900, "all": FIGURES, "by_device": {"T4": FIGURES}},
}  # fmt: skip


def weights(folder: Path) -> Weights:
    save_weights(folder / "mine", Weights("kernels", {"w": np.ones((3, 4), np.float32)}, DESCRIPTION))
    return load_weights(folder / "mine", "kernels")


def test_facts_are_the_files(tmp_path: Path) -> None:
    found = facts(weights(tmp_path))
    assert found["rows"] == "12,345"
    assert found["devices"] == "L40S, T4"
    assert found["numbers"] == "12"
    assert found["held out"] == "fold 3"
    assert "error 8.1 %, median 5.0 %; 90 % intervals hold 90.0 %; roofline's error 60.0 %" in found["held-out rows"]
    bare = facts(Weights("kernels", {}, {}))
    assert bare["rows"] == "not said"
    assert "held-out rows" not in bare


def test_a_card_names_data_licences_and_errors(tmp_path: Path) -> None:
    unseen = {**FIGURES, "mape": 0.2}
    report = {"kernels": {"rows": 900, "all": FIGURES, "unseen_devices": unseen, "by_op": {"linear": FIGURES}}}
    text = card(weights(tmp_path), report, evaluated_on="some data", plots=[PREDICTED])
    assert "NeuSight, MIT" in text
    assert "## Kernels of some data" in text
    assert "Devices that the training had not: 900 rows: error 20.0 %" in text
    assert "| linear | 900 | 8.1 % | 5.0 % | -1.0 % | 90.0 % | 60.0 % |" in text
    assert f"]({PREDICTED})" in text
    assert "| T4 | 12,000 |" in text
    assert "Collectives" not in text


def test_percent() -> None:
    assert [percent(0.0834), percent(None)] == ["8.3 %", "–"]


@pytest.mark.slow  # matplotlib
def test_pictures_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    measured = np.exp(rng.normal(-9.0, 2.0, 500))
    made = pictures(measured, measured * np.exp(rng.normal(0.0, 0.1, 500)), "a test")
    assert set(made) == {PREDICTED, BY_SIZE}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in made.values())
    assert pictures(measured[:1], measured[:1], "one row")[BY_SIZE].startswith(b"\x89PNG")
