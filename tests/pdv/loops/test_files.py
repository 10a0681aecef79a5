"""Checkpoints that somebody else made: read as shapes, places and numbers, or refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ir.errors import UsageError, WeightsError
from pdv.loops.files import Boxes, Folder, write
from pdv.loops.moments import decode, encode
from pdv.loops.pieces import pieces_of


def boxes(x: Tensor) -> Boxes:
    """Of two rows, the second made when it is written."""
    halves: dict[Any, Any] = {((0, 1), (0, 3)): x[:1], ((1, 2), (0, 3)): lambda: x[1:]}
    return Boxes((2, 3), x.dtype, halves)


def test_boxes_are_read_where_they_cross(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    write(tmp_path / "ckpt", {"x": boxes(x), "y": x.sum(), "z": ("b", 1)})
    file = Folder(tmp_path / "ckpt")
    assert file.tensors == {"x": (2, 3), "y": ()}
    assert torch.equal(file.read("x", ((0, 2), (1, 3))), x[:, 1:])
    assert torch.equal(file.read("y"), x.sum())
    assert file.value("z") == ("b", 1)


def test_a_checkpoint_is_replaced_on_demand_alone(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", {"x": torch.ones(2)})
    with pytest.raises(UsageError, match="overwrite=True"):
        write(tmp_path / "ckpt", {"x": torch.zeros(2)})
    write(tmp_path / "ckpt", {"x": torch.zeros(2)}, overwrite=True)
    assert not Folder(tmp_path / "ckpt").read("x").any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(UsageError, match="there already"):
        write(tmp_path / "mine", {"x": torch.zeros(2)}, overwrite=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made_by_a_checkpoint",)


def test_nothing_in_a_table_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(WeightsError, match=r"posix\.mkdir|nt\.mkdir"):
        Folder(tmp_path)
    assert not (tmp_path / "made_by_a_checkpoint").exists()


def test_nothing_beside_tensors_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ckpt", {"x": torch.ones(1), "evil": Evil()})
    with pytest.raises(WeightsError, match="evil"):
        Folder(tmp_path / "ckpt").value("evil")
    assert not (tmp_path / "made_by_a_checkpoint").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps({"a": 1})])
def test_what_is_no_table_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no"):
        Folder(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(WeightsError, match="no table"):
        Folder(tmp_path)


def test_files_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", {"x": torch.ones(1000)})
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:500])
    with pytest.raises(WeightsError, match="x of"):
        Folder(tmp_path / "ckpt").read("x")


def test_hyperparameters_come_back() -> None:
    for value in (1, 0.1, True, None, "a", (0.9, 0.999)):
        assert decode(encode(value)) == value
    assert torch.equal(decode(encode(torch.tensor(3.0))), torch.tensor(3.0))
    with pytest.raises(UsageError, match="a function"):
        encode(lambda: 0)


def test_other_models_are_refused() -> None:
    with pytest.raises(UsageError, match="a Linear is not what an emitted package builds"):
        pieces_of(nn.Linear(2, 2))
