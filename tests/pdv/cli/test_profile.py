"""`pdv profile` and `pdv cluster detect`: what they refuse, and that one measures and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdv.cli.app import run

WRONG = {
    ("profile", "--device", "tpu"): "Allowed: cpu, cuda",
    ("profile", "--device", "cpu", "--budget", "soon"): "is no time",
    ("profile", "--device", "cpu", "--ops", "liner"): "Did you mean 'linear'",
    ("profile", "--device", "cpu", "--model", "x.onnx"): "--model and --cluster go together",
    ("profile", "--device", "cpu", "--record", "cpu-kernel"): "Did you mean 'cpu-core'",
    ("profile", "--device", "cpu", "--ops", "collectives"): "torchrun --nproc-per-node 4",
    ("cluster", "detect", "--device", "tpu"): "Allowed: cpu, cuda",
    ("cluster", "detect", "-o", "there.yaml"): "add --overwrite",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_mistakes_are_one_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "there.yaml").write_text("nodes: []")
    assert run(words) in (2, 5)
    told = capsys.readouterr()
    assert WRONG[words] in told.err
    assert told.out == ""
    assert not (tmp_path / "profiles").exists()


def test_measured_rows_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["profile", "--device", "cpu", "--record", "cpu-core", "--ops", "relu,neg", "--budget", "300ms", "--json"]
    assert run([*words, "-o", str(tmp_path / "rows")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == sum(told["measured"].values()) > 0
    assert set(told["measured"]) <= {"relu", "neg"}
    assert (tmp_path / "rows" / "kernels-0001.parquet").is_file()


@pytest.mark.slow  # measures for some seconds
def test_detected_is_what_planning_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from learned_cost.devices.device import read_record
    from pdv.cluster import load_cluster

    words = ["cluster", "detect", "--device", "cpu", "--name", "mine", "--count", "2", "--json"]
    assert run([*words, "-o", str(tmp_path / "cluster.yaml")]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 2
    assert load_cluster(tmp_path / "cluster.yaml").num_devices == 2
    assert read_record(tmp_path / "devices" / "mine.yaml").name == "mine"
