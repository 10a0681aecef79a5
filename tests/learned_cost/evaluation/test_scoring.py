"""A folder scored as a whole: kernels, collectives, graphs; and published."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from ir.errors import DataError, UsageError, WriteError
from learned_cost.collectives.rows import Cases
from learned_cost.data.dataset import Dataset, read_folder
from learned_cost.data.kernel import Subgraph
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Answer, Floats, Mask
from learned_cost.evaluation.scoring import Evaluation, evaluate, select
from learned_cost.training.card import publish
from learned_cost.weights import Weights, load_weights, save_weights
from tests.learned_cost.measurements import write

pytest.importorskip("scipy.stats")  # loaded here, so that no test is charged for it


class Roofline:
    """Predicts the roofline, a tenth above it."""

    def predict_table(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:  # noqa: ARG002
        rows = len(table)
        return Answer(np.log(table["roofline_us"] * 1.1e-6), np.full(rows, 0.5), np.ones(rows, dtype=bool))

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        seconds = np.array([graph.flops / device.peak_flops["fp32"] for graph in subgraphs])
        return Answer(np.log(seconds + 1e-6), np.full(len(seconds), 0.1), np.ones(len(seconds), dtype=bool))


class Line:
    """A latency and a bandwidth."""

    def predict(self, rows: Table) -> tuple[Floats, Floats]:
        return np.log(12e-6 + rows["bytes"] / 2e11), np.full(len(rows), 0.1)

    def known(self, cases: Cases) -> Mask:
        return np.asarray(cases.bytes > 2**20)


def data_bytes(data: Dataset) -> Floats:
    assert data.collectives is not None
    return data.collectives["bytes"]


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    write(tmp_path / "data")
    write(tmp_path / "data", "collectives")
    node = {
        "graph": ["g"] * 2, "node": [0, 1], "op": ["call_module"] * 2, "target": ["fc", "fc"], "dtype": [None] * 2,
        "input_shapes": ["[[8, 16]]"] * 2, "output_shape": ["(8, 32)"] * 2,
    }  # fmt: skip
    return read_folder(write(tmp_path / "data", "opgraphs", node))


def test_all_parts_are_scored(data: Dataset) -> None:
    found = evaluate(data, Roofline(), Line(), seen={"T4"}, known_ops={"linear"})
    assert found.report["kernels"]["rows"] == 60
    assert found.report["kernels"]["unknown_ops"]["layernorm"] > 0
    assert found.report["kernels"]["by_device"]["L40S"]["seen"] is False
    assert found.report["collectives"]["all"]["mape"] < 0.01
    assert found.report["collectives"]["unseen_systems"]["rows"] == int((data_bytes(data) <= 2**20).sum()) > 0
    graph = found.report["graphs"]["g"]
    seconds = 2 * (2 * 8 * 16 * 32 / data.devices["T4"].peak_flops["fp32"] + 1e-6)
    assert graph["kernels"] == 2
    assert graph["by_device"]["T4"]["seconds"] == pytest.approx(seconds)
    assert graph["by_device"]["T4"]["std_s"] == pytest.approx(seconds * 0.1 / np.sqrt(2.0))
    assert json.loads(json.dumps(found.report, allow_nan=False))
    assert set(evaluate(data, None, Line()).report) == {"collectives"}


def test_pieces_are_predicted_as_the_whole(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(data, Roofline(), None)
    monkeypatch.setattr("learned_cost.evaluation.scoring.PIECE", 7)
    pieces = evaluate(data, Roofline(), None)
    np.testing.assert_array_equal(pieces.predicted_s["kernels"], whole.predicted_s["kernels"])
    assert pieces.report["kernels"]["all"] == whole.report["kernels"]["all"]


def test_rows_are_selected(data: Dataset) -> None:
    chosen = select(data, devices=("T4",))
    assert chosen.kernels is not None
    assert set(chosen.kernels.text("gpu")) == {"T4"}
    assert chosen.collectives is None  # all of them are of another device
    folded = select(data, fold=2)
    assert folded.kernels is not None
    assert set(folded.kernels["fold"]) == {2}
    with pytest.raises(DataError, match=r"no device 'T5'.*A100-SXM4-80GB, L40S, T4"):
        select(data, devices=("T5",))


def scored(data: Dataset, folder: Path) -> tuple[Weights, Evaluation]:
    save_weights(folder / "mine", Weights("kernels", {"w": np.ones(3)}, {"features": "x", "training": {"rows": 3}}))
    return load_weights(folder / "mine", "kernels"), evaluate(data, Roofline(), None)


@pytest.mark.slow  # matplotlib
def test_a_published_folder_is_whole(data: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weights, found = scored(data, tmp_path)
    names = publish(weights, found, tmp_path / "card", evaluated_on="some rows")
    assert names == [
        "README.md", "evaluation.json", "kernels-error-by-size.png", "kernels-predicted-against-measured.png",
        "mine.json", "mine.safetensors",
    ]  # fmt: skip
    assert load_weights(tmp_path / "card" / "mine", "kernels").digest == weights.digest
    assert "Kernels of some rows" in (tmp_path / "card" / "README.md").read_text()
    with pytest.raises(UsageError, match="--overwrite"):
        publish(weights, found, tmp_path / "card", evaluated_on="some rows")
    publish(weights, found, tmp_path / "card", evaluated_on="others", overwrite=True)
    assert "Kernels of others" in (tmp_path / "card" / "README.md").read_text()


@pytest.mark.slow  # matplotlib
def test_publishing_on_a_full_disk_leaves_nothing(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    weights, found = scored(data, tmp_path)
    left = 3

    def fills(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("ir.files.writing.os.fsync", fills)
    with pytest.raises(WriteError, match="No space left"):
        publish(weights, found, tmp_path / "card", evaluated_on="some rows")
    assert sorted(tmp_path.iterdir()) == before
