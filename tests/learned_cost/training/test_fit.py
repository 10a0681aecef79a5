"""The training loop on a small regression: it learns, and a killed training goes on as if it had not been."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ir.errors import DataError, WeightsError, WriteError
from learned_cost.training import fit as fitting
from learned_cost.training.fit import FitConfig, Fitted, fit, shuffle
from learned_cost.weights import load_checkpoint
from tests.learned_cost.clocks import Clocks

ROOT = Path(__file__).parents[3]
torch.optim.AdamW(
    [torch.zeros(1, requires_grad=True)]
)  # loads what torch loads late, so that no test is charged for it
CONFIG = FitConfig(epochs=6, batch_rows=32, learning_rate=1e-2, ema=0.9)


class Regression:
    """Of a sine, by a small network with dropout, so that the random state counts."""

    def __init__(self, rows: int = 256, seed: int = 0, pause_s: float = 0.0) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.05), nn.Linear(16, 1))
        self.x = torch.linspace(-2.0, 2.0, rows)[:, None]
        self.y = torch.sin(self.x)
        self.pause_s = pause_s

    @property
    def rows(self) -> int:
        return len(self.x)

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        return shuffle(self.rows, epoch, seed)

    def loss(self, rows: NDArray[np.int64]) -> Tensor:
        time.sleep(self.pause_s)
        return nn.functional.mse_loss(self.module(self.x[rows]), self.y[rows])

    def identity(self) -> Mapping[str, Any]:
        return {"rows": self.rows}


def numbers(task: Regression) -> list[bytes]:
    return [value.numpy().tobytes() for value in task.module.state_dict().values()]


def whole() -> tuple[list[bytes], Fitted]:
    """The training in a piece."""
    task = Regression()
    fitted = fit(task, CONFIG)
    return numbers(task), fitted


def test_it_learns() -> None:
    _, fitted = whole()
    assert len(fitted.losses) == 6
    assert fitted.steps == 48
    assert fitted.losses[-1] < 0.3 * fitted.losses[0]


def test_the_same_seed_gives_the_same_weights() -> None:
    assert whole()[0] == whole()[0]
    other = Regression()
    fit(other, replace(CONFIG, seed=1))
    assert numbers(other) != whole()[0]


class StopError(Exception):
    pass


@pytest.mark.parametrize("steps", [1, 8, 13, 47])
def test_a_training_cut_off_goes_on_as_if_it_had_not_been(steps: int, tmp_path: Path) -> None:
    taken = 0

    def stop(_: str, __: float | None) -> None:
        nonlocal taken
        taken += 1
        if taken > steps:  # after the checkpoint of the step before was written
            raise StopError

    path = tmp_path / "c"
    with pytest.raises(StopError):
        fit(Regression(), CONFIG, checkpoint=path, every_s=0.0, progress=stop)
    assert load_checkpoint(path).description["steps"] == steps
    task = Regression(seed=99)  # nothing of the new start may matter
    fitted = fit(task, CONFIG, checkpoint=path, resume=True)
    expected, in_a_piece = whole()
    assert numbers(task) == expected
    assert fitted.losses == in_a_piece.losses


CHILD = """
import sys
from pathlib import Path
from dataclasses import replace
from learned_cost.training import fit as fitting
from learned_cost.training.fit import fit
from tests.learned_cost.training.test_fit import CONFIG, Regression
fit(Regression(pause_s=0.02), CONFIG, checkpoint=Path(sys.argv[1]), every_s=0.0)
"""


@pytest.mark.slow  # starts a process that imports torch
def test_a_training_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    path = tmp_path / "c"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    steps = load_checkpoint(path).description["steps"]
    assert 0 < steps < 48
    task = Regression(seed=99)
    fit(task, CONFIG, checkpoint=path, resume=True)
    assert numbers(task) == whole()[0]


def test_an_interrupt_keeps_what_was_done(tmp_path: Path) -> None:
    def interrupt(_: str, share: float | None) -> None:
        if share is not None and share > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Regression(), CONFIG, checkpoint=tmp_path / "c", every_s=1e9, progress=interrupt)
    task = Regression(seed=99)
    fit(task, CONFIG, checkpoint=tmp_path / "c", resume=True)
    assert numbers(task) == whole()[0]


def test_a_full_disk_is_one_error_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "c", 3

    def fills(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ir.files.writing.os.fsync", fills)
    with pytest.raises(WriteError, match=r"No space left.*unchanged"):
        fit(Regression(), CONFIG, checkpoint=path, every_s=0.0)
    monkeypatch.undo()
    assert load_checkpoint(path).description["steps"] == 3
    task = Regression(seed=99)
    fit(task, CONFIG, checkpoint=path, resume=True)
    assert numbers(task) == whole()[0]


def test_only_its_own_checkpoint_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(WeightsError, match="no checkpoint"):
        fit(Regression(), CONFIG, checkpoint=path, resume=True)
    fit(Regression(), CONFIG, checkpoint=path)
    with pytest.raises(WeightsError, match=r"learning_rate was 0\.01, and is 0\.02"):
        fit(Regression(), replace(CONFIG, learning_rate=0.02), checkpoint=path, resume=True)
    with pytest.raises(WeightsError, match="rows was 256, and is 300"):
        fit(Regression(rows=300), CONFIG, checkpoint=path, resume=True)
    wider = Regression()
    wider.module = nn.Linear(1, 1)
    with pytest.raises(WeightsError, match="does not fit"):
        fit(wider, CONFIG, checkpoint=path, resume=True)


def test_a_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(fitting, "time", clocks)

    class Slow(Regression):
        def loss(self, rows: NDArray[np.int64]) -> Tensor:
            clocks.work(0.25)
            return super().loss(rows)

    fitted = fit(Slow(), replace(CONFIG, epochs=10_000, budget_s=3.1))
    assert (fitted.steps, fitted.seconds) == (13, 3.25)
    assert len(fitted.losses) == 2  # an epoch of 8 steps, and what there was of the next


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    task = Regression()
    frozen = next(task.module.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    fit(task, CONFIG)
    assert torch.equal(frozen, before)
    assert numbers(task) != whole()[0]


def test_a_loss_that_is_no_number_is_an_error() -> None:
    task = Regression()
    task.y[3] = float("nan")
    with pytest.raises(DataError, match="the loss is nan at step"):
        fit(task, CONFIG)


def test_no_rows_are_an_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        fit(Regression(rows=0), CONFIG)
