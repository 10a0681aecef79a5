"""`pdv cost`: trained, scored, shown and published; wrong input is one error, and a kill loses nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from learned_cost.weights import Weights, load_checkpoint, load_weights, save_weights
from pdv.cli import app as cli
from tests.learned_cost.measurements import kernel_columns, write

pytest.importorskip("torch_geometric")  # loaded here, so that no test is charged for it
ROOT = Path(__file__).parents[3]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", columns=kernel_columns(400))
    return tmp_path


def ran(*words: str) -> int:
    return cli.run(["cost", *words])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one object printed."""
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    assert found["format_version"] == 1
    return found


def damage(here: Path, what: str) -> None:
    path = here / "data" / "kernels.parquet"
    if what == "renamed":
        path.write_text("gpu,op,dtype,latency_us\nT4,linear,fp32,12.5\n")
    elif what == "corrupt":
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
    elif what in {"nan", "negative"}:
        columns = kernel_columns(400)
        columns["latency_us"][17] = float("nan") if what == "nan" else -4.0
        write(here / "data", columns=columns)
    elif what == "column":
        write(here / "data", columns=kernel_columns(400) | {"speed": [1.0] * 400})
    elif what == "device":
        write(here / "data", columns=kernel_columns(400) | {"gpu": ["T44"] * 400})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("renamed", "kernels.parquet is no Parquet file"), ("corrupt", "kernels.parquet is no Parquet file"),
        ("nan", "latency_us is no such number in 1 row (counted from 0: 17)"),
        ("negative", "latency_us is no such number in 1 row (counted from 0: 17)"),
        ("column", "unknown columns speed"), ("device", "device 'T44' is described nowhere in 400 rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_wrong_measurements_are_one_error(
    command: str, what: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(here, what)
    more = ["-o", "w"] if command == "train" else []
    assert ran(command, "--data", "data", *more) == 8
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: bad-data: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(path.name for path in here.iterdir()) == ["data"]


def foreign(path: Path, what: str) -> None:
    """A weight file that is none of this version's."""
    save_weights(path, Weights("kernels", {}, {"features": "of long ago"}))
    if what == "pickle":
        path.with_suffix(".safetensors").write_bytes(pickle.dumps({"w": [1.0]}))
    elif what == "version":
        text = path.with_suffix(".json").read_text()
        path.with_suffix(".json").write_text(text.replace('"format_version": 1', '"format_version": 99'))
    elif what == "collectives":
        save_weights(path, Weights("collectives", {}, {}))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pickle", "is a pickle"), ("version", "format version 99"), ("collectives", "of kind 'collectives'"),
        ("features", "was fitted to features of long ago"),
    ],
)  # fmt: skip
def test_foreign_weights_are_one_error(what: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign(here / "theirs", what)
    commands = [["evaluate", "--data", "data", "--weights", "theirs"],
                ["train", "--data", "data", "--from", "theirs", "-o", "w"]]  # fmt: skip
    if what in {"pickle", "version"}:
        commands += [["show", "theirs"], ["publish", "theirs", "-o", "card"]]
    for command in commands:
        assert ran(*command) == 8
        printed = capsys.readouterr().err
        assert printed.startswith("error: bad-weights: ")
        assert words in printed
    assert not (here / "w.safetensors").exists()
    assert not (here / "card").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data", "data", "-o", "absent/w"], "the folder 'absent' does not exist"),
        (["train", "--data", "data", "-o", "w", "--budget", "2x"], "--budget: '2x' is no time"),
        (["train", "-o", "w"], "Missing option '--data'"),
        (["publish", "w", "-o", "data"], "exists and is not empty"),
        (["evalute", "--data", "data"], "Did you mean 'evaluate'?"),
    ],
)
def test_usage(words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(*words) == 2
    assert message in capsys.readouterr().err


TRAIN = ("train", "--data", "data", "--epochs", "2", "--json")


@pytest.mark.slow  # trains
def test_trained_scored_shown_and_published(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(*TRAIN, "-o", "mine", "--holdout-device", "T4") == 0
    made = told(capsys)
    assert made["training"]["held_out"]["devices"] == ["T4"]
    assert ran("evaluate", "--data", "data", "--weights", "mine", "--plots", "plots", "--json") == 0
    found = told(capsys)
    assert found["kernels"]["rows"] == 400
    assert found["kernels"]["unseen_devices"]["rows"] == found["kernels"]["by_device"]["T4"]["rows"]
    assert found["weights"]["kernels"] == {"name": "mine", "sha256": made["sha256"]}
    assert [(here / "plots" / name).is_file() for name in found["plots"]] == [True, True]
    # what the training said of the device it held out is what the scoring of the file says
    for key in ("mape", "coverage_90"):
        assert found["kernels"]["by_device"]["T4"][key] == pytest.approx(made["metrics"]["all"][key], rel=1e-3)
    assert ran("show", "mine", "--json") == 0
    assert told(capsys)["weights"][0]["sha256"] == made["sha256"]
    assert ran("publish", "mine", "--data", "data", "-o", "card", "--json") == 0
    assert {"README.md", "mine.safetensors", "mine.json", "evaluation.json"} <= set(told(capsys)["files"])
    assert ran("evaluate", "--data", "data", "--weights", "card/mine") == 0
    assert "roofline's error" in capsys.readouterr().out


@pytest.mark.slow  # trains
def test_fine_tuned_on_a_device_that_only_its_folder_describes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(*TRAIN, "-o", "mine") == 0
    write(here / "new", columns=kernel_columns(80) | {"gpu": ["X1"] * 80})
    (here / "new" / "gpus.csv").write_text(
        "gpu,vendor,arch,sm,fp32_tflops,mem_gb,mem_bw_gbs,spec_source\nX1,acme,alpha,20,5.5,8,192.5,sheet\n"
    )
    told(capsys)
    assert ran("evaluate", "--data", "new", "--weights", "mine", "--json") == 0
    before = told(capsys)["kernels"]["unseen_devices"]
    assert ran("train", "--data", "new", "--from", "mine", "-o", "tuned", "--epochs", "40", "--json") == 0
    made = told(capsys)
    assert made["training"]["started_from"]["name"] == "mine"
    assert ran("evaluate", "--data", "new", "--weights", "tuned", "--json") == 0
    after = told(capsys)["kernels"]
    assert after["all"]["mape"] < before["mape"]
    assert "unseen_devices" not in after


@pytest.mark.slow  # trains in processes of its own
def test_a_training_killed_goes_on_to_the_same_weights(here: Path) -> None:
    words = [sys.executable, "-m", "pdv", "cost", "train", "--data", "data", "--epochs", "30"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*words, "-o", "whole"], check=True, env=env, capture_output=True)
    child = subprocess.Popen([*words, "-o", "cut"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (here / "cut.checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    done = load_checkpoint(here / "cut.checkpoint").description["steps"]
    assert not (here / "cut.safetensors").exists()
    resumed = subprocess.run([*words, "-o", "cut", "--resume"], check=False, env=env, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    whole, cut = (load_weights(here / name, "kernels") for name in ("whole", "cut"))
    assert 0 < done < whole.description["training"]["steps"]
    assert cut.digest == whole.digest


@pytest.mark.slow  # trains
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = here / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        assert ran(*TRAIN[:-1], "-o", "small/w") == 9
        assert capsys.readouterr().err.startswith(
            "error: cannot-write: small/w.checkpoint cannot be written (No space left"
        )
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_model_of_collectives_is_trained_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gloo's shipped measurements: the weights know their systems, and price them as they were measured."""
    monkeypatch.chdir(tmp_path)
    profile = str(ROOT / "learned_cost" / "profiles" / "cpu-core")
    assert ran("train", "--collectives", "-d", profile, "-o", "mine", "--json") == 0
    found = told(capsys)
    assert found["training"]["by_system"] == {"cpu-2-a-node": 380, "cpu-4-a-node": 665, "cpu-4-a-node-by-2": 570}
    assert found["metrics"]["all"]["median"] < 0.3
    assert ran("evaluate", "-d", profile, "--collective-weights", "mine", "--json") == 0
    assert ran("train", "--collectives", "-d", profile, "-o", "other", "--epochs", "3") == 2
    assert "Leave out the other options" in capsys.readouterr().err
