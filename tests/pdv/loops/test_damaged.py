"""A checkpoint that is damaged changes nothing, and is told of as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ir.errors import WeightsError
from pdv.cli import app as cli
from pdv.loops import checkpoint
from pdv.loops.averages import Average
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed.loops.plans import adam, build, package, steps


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package("ddp", tmp_path_factory.mktemp("plans"), 2)


def saved(built: Path, folder: Path) -> Path:
    model = build(built)
    optimizer, average = adam(model), Average(model, 0.9)
    steps(model, optimizer, range(1))
    average.update()
    save_checkpoint(folder, model, optimizer, average=average)
    return folder


def load(built: Path, folder: Path) -> None:
    """Refused, and nothing has changed."""
    model = build(built)
    optimizer, average = adam(model), Average(model, 0.9)
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    with pytest.raises(WeightsError):
        load_checkpoint(folder, model, optimizer, average=average)
    assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
    assert not optimizer.state
    assert average.steps == 0


def test_files_cut_short(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(built, tmp_path / "saved")
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    load(built, folder)
    assert cli.run(["reshard", str(folder), "--to", str(built), "-o", str(tmp_path / "out")]) == WeightsError.exit_code
    assert "cannot be read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("lost", ["numbers", "group_of", "groups", "optimizer", "average"])
def test_notes_that_do_not_hold_together(
    lost: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint.as_note

    def without(note: dict[str, Any]) -> torch.Tensor:
        copied = json.loads(json.dumps(note))
        (copied if lost in copied else copied["optimizer"]).pop(lost)
        return plain(copied)

    monkeypatch.setattr(checkpoint, "as_note", without)
    load(built, saved(built, tmp_path / "saved"))
