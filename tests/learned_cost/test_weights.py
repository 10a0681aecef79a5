"""Weight files: whole pairs of one version load, all else is refused and never run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ir.errors import WeightsError, WriteError
from learned_cost.weights import Arrays, Weights, load_checkpoint, load_weights, save_checkpoint, save_weights

ARRAYS: Arrays = {
    "layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array([3, 4], dtype=np.int64),
}
DESCRIPTION = {"features": "abc", "model": {"width": 4}, "metrics": {"mape": 0.08}}


def saved(folder: Path) -> Path:
    save_weights(folder / "w", Weights("kernels", ARRAYS, DESCRIPTION))
    return folder / "w"


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for given in (path, tmp_path / "w.json", tmp_path / "w.safetensors"):
        loaded = load_weights(given, "kernels", features="abc")
        assert loaded.name == "w"
        assert {name: array.tolist() for name, array in loaded.arrays.items()} == {
            name: array.tolist() for name, array in ARRAYS.items()
        }
        assert {key: loaded.description[key] for key in DESCRIPTION} == DESCRIPTION
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["w.json", "w.safetensors"]


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = [path.with_suffix(suffix).read_bytes() for suffix in (".json", ".safetensors")]
    saved(tmp_path)
    assert before == [path.with_suffix(suffix).read_bytes() for suffix in (".json", ".safetensors")]


class Trap:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    path, sprung = saved(tmp_path), tmp_path / "sprung"
    for protocol in (0, 2, 5):
        (tmp_path / "w.safetensors").write_bytes(pickle.dumps(Trap(sprung), protocol=protocol))
        with pytest.raises(WeightsError, match="pickle" if protocol else "no safetensors"):
            load_weights(path, "kernels")
        with pytest.raises(WeightsError):
            load_checkpoint(tmp_path / "w.safetensors")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()  # the trap would have worked


def test_what_torch_saves_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with zipfile.ZipFile(tmp_path / "w.safetensors", "w") as file:  # what torch.save makes
        file.writestr("archive/data.pkl", pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(WeightsError, match="pickle"):
        load_weights(path, "kernels")
    assert not (tmp_path / "sprung").exists()


def edited(path: Path, **changes: object) -> None:
    text = path.with_suffix(".json")
    text.write_text(json.dumps(json.loads(text.read_text()) | changes))


def damage(path: Path, what: str) -> None:
    numbers, text = path.with_suffix(".safetensors"), path.with_suffix(".json")
    raw = numbers.read_bytes()
    if what == "no numbers":
        numbers.unlink()
    elif what == "no description":
        text.unlink()
    elif what == "truncated":
        numbers.write_bytes(raw[:-7])
    elif what == "empty":
        numbers.write_bytes(b"")
    elif what == "another training":
        save_weights(path.parent / "other", Weights("kernels", {"layer.weight": np.ones(3)}, DESCRIPTION))
        numbers.write_bytes((path.parent / "other.safetensors").read_bytes())
    elif what == "huge header":
        numbers.write_bytes(b"\xff" * 7 + b"\x00" + raw)
    elif what == "not finite":
        save_weights(path, Weights("kernels", {"layer.weight": np.array([np.nan])}, DESCRIPTION))
    elif what == "no json":
        text.write_text("weights: 3")
    elif what == "json list":
        text.write_text("[1]")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("no numbers", "there is no"), ("no description", "there is no"), ("truncated", "damaged"),
        ("empty", "damaged"),
        ("another training", "do not belong together"), ("huge header", "damaged"), ("not finite", "not finite"),
        ("no json", "describes no weights"), ("json list", "describes no weights"),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused(what: str, told: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    damage(path, what)
    with pytest.raises(WeightsError, match=told):
        load_weights(path, "kernels")


def test_other_versions_kinds_and_features_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(WeightsError, match=r"fitted to features abc.*features xyz.*Train again"):
        load_weights(path, "kernels", features="xyz")
    with pytest.raises(WeightsError, match=r"of kind 'kernels'.*'collectives'"):
        load_weights(path, "collectives")
    edited(path, format_version=99)
    with pytest.raises(WeightsError, match=r"format version 99.*reads 1"):
        load_weights(path, "kernels")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    checkpoint = tmp_path / "c.checkpoint"
    save_checkpoint(checkpoint, ARRAYS, {"step": 1})

    left = 0

    def full(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ir.files.writing.os.fsync", full)
    with pytest.raises(WriteError, match=r"No space left.*unchanged.*Free some room"):
        save_weights(path, Weights("kernels", {"layer.weight": np.zeros(5)}, DESCRIPTION))
    with pytest.raises(WriteError, match="No space left"):
        save_checkpoint(checkpoint, ARRAYS, {"step": 2})
    left = 1  # full between the two files
    with pytest.raises(WriteError, match="No space left"):
        save_weights(path, Weights("kernels", {"layer.weight": np.zeros(5)}, DESCRIPTION))
    monkeypatch.undo()
    assert load_weights(path, "kernels").arrays["layer.weight"].shape == (3, 4)
    assert load_checkpoint(checkpoint).description["step"] == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c.checkpoint", "w.json", "w.safetensors"]


def test_checkpoints_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.checkpoint"
    save_checkpoint(path, ARRAYS, {"step": 7})
    assert load_checkpoint(path).description["step"] == 7
    path.write_bytes(path.read_bytes().replace(b'format_version\\":1', b'format_version\\":2').replace(
        b'format_version\\": 1', b'format_version\\": 2'))  # fmt: skip
    with pytest.raises(WeightsError, match="format version 2"):
        load_checkpoint(path)
    with pytest.raises(WeightsError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "absent")
