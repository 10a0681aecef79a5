"""From folders to weight files: what is trained on, what is held out, what the file says, and trainings cut off."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ir.errors import DataError, WeightsError, WriteError
from learned_cost.data.dataset import Dataset, read_folder, read_folders
from learned_cost.data.table import Table
from learned_cost.training.fit import FitConfig
from learned_cost.training.train import Trained, TrainOptions, shape_hash, split, train
from learned_cost.weights import load_weights
from learned_cost.weights import training_facts as seen_by
from tests.learned_cost.linear_learner import LinearLearner
from tests.learned_cost.measurements import kernel_columns, write

pytest.importorskip("scipy.stats")  # loaded here, as what torch loads late is, so that no test is charged for it
torch.set_num_threads(1)  # small tensors: a second thread only waits
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
OPTIONS = TrainOptions(FitConfig(epochs=12, batch_rows=64, learning_rate=2e-2))


def data(folder: Path, rows: int = 500, seed: int = 0) -> Dataset:
    suspect = [row % 50 == 0 for row in range(rows)]
    caches = ["cold" if row % 50 == 1 else None for row in range(rows)]
    return read_folder(write(folder, columns=kernel_columns(rows, seed) | {"suspect": suspect, "l2": caches}))


def kernels(dataset: Dataset) -> Table:
    assert dataset.kernels is not None
    return dataset.kernels


def trained(folder: Path, options: TrainOptions = OPTIONS, name: str = "w") -> Trained:
    return train(data(folder / "data"), folder / name, options, learner=LinearLearner())


def test_suspect_and_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    table = kernels(data(tmp_path))

    def devices(rows: Sequence[int] | np.ndarray) -> set[str | None]:
        return set(table.text("gpu")[rows])

    for options in (
        OPTIONS, replace(OPTIONS, holdout_devices=("T4",)), replace(OPTIONS, holdout_fold=2),
        replace(OPTIONS, devices=("L40S",)),
    ):  # fmt: skip
        rows, held = split(table, options)
        assert not table["suspect"][rows].any()
        assert not table["suspect"][held].any()
        assert "cold" not in {*table.text("l2")[rows], *table.text("l2")[held]}
        assert not set(rows) & set(held)
    rows, held = split(table, replace(OPTIONS, holdout_devices=("T4",)))
    assert (devices(rows), devices(held)) == ({"A100-SXM4-80GB", "L40S"}, {"T4"})
    rows, held = split(table, replace(OPTIONS, holdout_fold=2))
    assert set(table["fold"][held]) == {2}
    assert set(table["fold"][rows]) == {0, 1, 3, 4}
    rows, held = split(table, replace(OPTIONS, devices=("L40S",)))
    assert devices(rows) | devices(held) == {"L40S"}


def test_shapes_are_held_out_on_all_devices(tmp_path: Path) -> None:
    table = kernels(data(tmp_path))
    rows, held = split(table, OPTIONS)
    shapes = list(zip(table.text("op"), table["m"], table["n"], table["k"], strict=True))
    assert {shapes[row] for row in held}.isdisjoint(shapes[row] for row in rows)
    assert 0 < len(held) < 0.15 * len(table)
    again = kernels(read_folders([tmp_path, write(tmp_path / "more", columns=kernel_columns(20, 5))]))
    np.testing.assert_array_equal(shape_hash(again)[: len(table)], shape_hash(table))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (replace(OPTIONS, holdout_devices=("T5",)), "no device 'T5'.*A100-SXM4-80GB, L40S, T4"),
        (replace(OPTIONS, holdout_fold=7), "fold 7.*folds 0, 1, 2, 3, 4"),
        (replace(OPTIONS, devices=("T4",), holdout_devices=("T4",)), "no rows are left"),
    ],
)
def test_what_cannot_be_split_is_refused(options: TrainOptions, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        split(kernels(data(tmp_path)), options)


def test_a_weight_file_says_what_it_was_trained_on(tmp_path: Path) -> None:
    result = trained(tmp_path, replace(OPTIONS, holdout_devices=("T4",)))
    loaded = load_weights(tmp_path / "w", "kernels", features="linear-1")
    assert loaded.digest == result.weights.digest
    said = loaded.description["training"]
    assert set(said["by_device"]) == {"A100-SXM4-80GB", "L40S"}
    assert sum(said["by_source"].values()) == said["rows"]
    assert said["held_out"]["devices"] == ["T4"]
    assert loaded.description["metrics"]["unseen_devices"]["rows"] == said["held_out"]["rows"]
    assert seen_by(loaded, "by_device") == ["A100-SXM4-80GB", "L40S"]
    text = (tmp_path / "w.json").read_text()
    assert str(tmp_path) not in text  # nothing of the machine
    assert not list(tmp_path.glob("*.checkpoint"))


def test_it_learns_and_its_intervals_hold(tmp_path: Path) -> None:
    report = trained(tmp_path).report
    assert report["all"]["mape"] < 0.5 * report["all"]["roofline_mape"]
    assert report["all"]["coverage_90"] >= 0.8


class StopError(Exception):
    pass


def test_a_training_cut_off_gives_the_same_file(tmp_path: Path) -> None:
    whole = trained(tmp_path, name="whole").weights
    seen: list[float | None] = []

    def stop(_: str, share: float | None) -> None:
        seen.append(share)
        if share is not None and share > 0.5:
            raise StopError

    dataset = data(tmp_path / "data")
    with pytest.raises(StopError):
        train(dataset, tmp_path / "cut", OPTIONS, learner=LinearLearner(), progress=stop)
    assert (tmp_path / "cut.checkpoint").is_file()
    assert not (tmp_path / "cut.safetensors").exists()
    resumed = train(dataset, tmp_path / "cut", OPTIONS, learner=LinearLearner(), resume=True).weights
    assert resumed.digest == whole.digest
    other = data(tmp_path / "other", seed=1)
    (tmp_path / "cut.safetensors").unlink()
    with pytest.raises(StopError):
        train(dataset, tmp_path / "cut", OPTIONS, learner=LinearLearner(), progress=stop)
    with pytest.raises(WeightsError, match="of another training: data was"):
        train(other, tmp_path / "cut", OPTIONS, learner=LinearLearner(), resume=True)


def test_fine_tuning_starts_where_the_weights_are(tmp_path: Path) -> None:
    start = trained(tmp_path, replace(OPTIONS, holdout_devices=("T4",)))
    begun = load_weights(tmp_path / "w", "kernels")
    few = replace(OPTIONS, devices=("T4",), holdout_fold=0, start=begun, fit=replace(OPTIONS.fit, epochs=30))
    tuned = trained(tmp_path, few, name="tuned")
    assert tuned.report["all"]["mape"] < start.report["all"]["mape"]
    same = [name for name, value in begun.arrays.items() if np.array_equal(value, tuned.weights.arrays[name])]
    assert "1.weight" in same
    assert "3.weight" not in same
    assert seen_by(tuned.weights, "by_device") == ["A100-SXM4-80GB", "L40S", "T4"]
    assert tuned.weights.description["training"]["started_from"] == {"name": "w", "sha256": begun.digest}


def test_a_full_disk_keeps_the_checkpoint_and_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = trained(tmp_path).weights
    left = 12 + 1  # a checkpoint an epoch, and the first of the two files

    def fills(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    more = replace(OPTIONS, fit=replace(OPTIONS.fit, seed=3))
    monkeypatch.setattr("ir.files.writing.os.fsync", fills)
    with pytest.raises(WriteError, match="No space left"):
        trained(tmp_path, more)
    monkeypatch.undo()
    assert load_weights(tmp_path / "w", "kernels").digest == old.digest
    resumed = train(data(tmp_path / "data"), tmp_path / "w", more, learner=LinearLearner(), resume=True)
    assert load_weights(tmp_path / "w", "kernels").digest == resumed.weights.digest != old.digest


def test_no_kernels_are_an_error(tmp_path: Path) -> None:
    dataset = read_folder(write(tmp_path, "collectives"))
    with pytest.raises(DataError, match="no kernels"):
        train(dataset, tmp_path / "w", OPTIONS, learner=LinearLearner())
