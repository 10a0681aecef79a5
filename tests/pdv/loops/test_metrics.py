"""What a run shows of itself: lines or TensorBoard's events, measured beside what the plan said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdv
from ir.errors import UsageError, WriteError
from pdv.loops.metrics import LINES, Metrics, predictions
from pdv.plan.package import import_package
from tests.pdv.worlds import cluster

ROWS = 4


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = pdv.optimize(nn.Linear(4, 2), (torch.zeros(ROWS, 4),), cluster=cluster(2))
    return plan.save(tmp_path_factory.mktemp("packages") / "linear_pdv")


@pytest.fixture
def model(package: Path) -> Any:
    return import_package(package).build(device="cpu")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LINES).read_text(encoding="utf-8").splitlines()]


def test_a_line_says_what_was_measured_and_predicted(package: Path, model: Any, tmp_path: Path) -> None:
    said = json.loads((package / "plan.json").read_text())["predicted"]
    with Metrics(model, tmp_path, every=2, form="json", first_step=10) as metrics:
        for number in range(5):
            metrics.after_step(torch.tensor(float(number)), rows=ROWS, tokens=8, grad_norm=float("inf"))
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [12, 14]
    assert [line["loss"] for line in found] == [1.0, 3.0]
    for line in found:
        assert line["grad_norm"] is None
        assert line["step_ms/predicted"] == pytest.approx(said["step_time_s"]["mean"] * 1e3)
        assert line["memory_gib/predicted"] == pytest.approx(max(said["memory_bytes"].values()) / 2**30)
        assert line["tokens_per_s/measured"] == pytest.approx(8e3 / line["step_ms/measured"])
        assert line["tokens_per_s/predicted"] == pytest.approx(8e3 / line["step_ms/predicted"])


def test_nothing_is_predicted_of_other_batches(model: Any, tmp_path: Path) -> None:
    with Metrics(model, tmp_path, form="json") as metrics:
        found = metrics.after_step(rows=ROWS + 1, tokens=8)
    assert {name for name in found if "predicted" in name} == set()
    assert "tokens_per_s/measured" in found


def test_without_tensorboard_there_are_lines(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with Metrics(model, tmp_path) as metrics:
        metrics.after_step(1.0)
    assert lines(tmp_path)[0]["loss"] == 1.0
    with pytest.raises(UsageError, match="TensorBoard"):
        Metrics(model, tmp_path, form="tensorboard")


def test_tensorboard_reads_them(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(model, tmp_path) as metrics:
        for _ in range(3):
            metrics.after_step(2.5, rows=ROWS)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 2.5), (3, 2.5)]
    assert {"step_ms/measured", "step_ms/predicted"} <= set(events.Tags()["scalars"])


def test_what_cannot_be_written_is_said(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file"):
        Metrics(model, tmp_path / "file", form="json")
    with pytest.raises(UsageError, match="every"):
        Metrics(model, tmp_path, every=0)
    with pytest.raises(UsageError, match="not what an emitted package builds"):
        Metrics(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"predicted": 3, "source": 4}'])
def test_a_plan_that_says_nothing_predicts_nothing(text: str, package: Path, model: Any) -> None:
    path = package / "plan.json"
    before = path.read_text()
    path.write_text(text)
    try:
        assert predictions(model) == {}
    finally:
        path.write_text(before)
