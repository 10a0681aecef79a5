"""Wherever `pdv` is started from, it prints what it can, and says how it ended by its exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pdv
from pdv.cli import app as cli
from pdv.cli import doctor
from pdv.folders import text_of
from pdv.frontend.program import Program
from pdv.report.loaded import load_plan
from tests.pdv.emit.graphs import random_weights
from tests.pdv.worlds import cluster, mlp

PDV = f"{sys.executable} -m pdv"
STEP = "simulate --arch gpt:layers=2,hidden=64,heads=4,seq=16,vocab=64 --batch 64 --manual zero=0 -c"
LAPTOP = "nodes: [{devices: 2, device: cpu-core, link: loopback-gloo}]\n"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def started(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    (folder / "cluster.yaml").write_text(LAPTOP)
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment}
    return subprocess.run(["sh", "-c", command], cwd=folder, env=own, capture_output=True, check=False)


def test_letters_that_the_encoding_lacks_are_question_marks(tmp_path: Path) -> None:
    done = started(f"{PDV} {STEP} cluster.yaml", tmp_path, **ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ms ? " in done.stdout


@pytest.mark.parametrize("environment", [{}, ASCII])
def test_names_of_files_are_printed_as_they_are(tmp_path: Path, environment: dict[str, str]) -> None:
    done = started(f"{PDV} launch $(printf 'm\\351') x.py", tmp_path, **environment)
    assert done.returncode == 2
    assert b"m\\udce9" in done.stderr


def test_names_of_files_are_text_in_what_is_written(tmp_path: Path) -> None:
    graph = mlp()
    name = os.fsdecode(b"m\xe9\xc3\xa9.onnx")
    plan = pdv.optimize(Program(graph, random_weights(graph)), cluster=cluster(2), mesh={"dp": 2})
    package = plan.made_by(f"pdv optimize {name}").save(tmp_path / "out_pdv")
    for written in ("plan.json", "model.py", "report.html"):
        assert (package / written).read_text(encoding="utf-8")
    assert load_plan(package).document["command"] == "pdv optimize m\ufffd\xe9.onnx"
    assert text_of(Path(name).stem) == "m\ufffd\xe9"


def test_streams_that_are_closed_are_nowhere(tmp_path: Path) -> None:
    options = "--arch gpt:layers=1,hidden=32,heads=4,seq=16,vocab=64 --batch 8 -c cluster.yaml --no-cache"
    done = started(f"{PDV} optimize {options} -o out_pdv <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_behind_stdout_is_one_error_on_stderr(tmp_path: Path) -> None:
    simulated = f"{STEP} cluster.yaml"
    for command in (
        "--help",
        "--version",
        "cluster devices",
        "cluster devices --json",
        f"{simulated} --json",
        simulated,
    ):
        done = started(f"{PDV} {command} > /dev/full", tmp_path)
        assert done.returncode == 9, command
        assert done.stderr.startswith(b"error: cannot-write: ")
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_went_away_ends_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    """Whether before the first letter or after it: the work is done, and the exit code is its own."""
    trace = f"{PDV} {STEP} cluster.yaml --trace there.json"
    done = started(f"( sleep 0.2; {trace}; echo $? > code ) | true", tmp_path, **environment)
    assert ((tmp_path / "code").read_text(), done.stderr) == ("0\n", b"")
    assert (tmp_path / "there.json").is_file()
    done = started(f"( sleep 0.2; {PDV} cluster show nowhere.yaml 2>&1; echo $? > code ) | true", tmp_path)
    assert (tmp_path / "code").read_text() == "5\n"


def test_a_broken_pipe_of_our_own_is_no_reader_that_went_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_machine", broken)
    assert cli.run(["doctor", "--json"]) == 70
    assert "internal-error" in capsys.readouterr().out


ENDED_AS = """
import os, signal
from pathlib import Path
signal.signal(signal.{name}, signal.SIG_DFL)  # whoever runs the tests may ignore it
os.fsync = lambda _: (Path("reached").touch(), os.kill(os.getpid(), signal.{name}))
from pdv.cli.app import main
main({words})
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_an_order_to_end_leaves_nothing_half_written(tmp_path: Path, name: str, code: int) -> None:
    words = [*STEP.split(), "cluster.yaml", "--trace", "there.json"]
    for given in (words, [*words, "--json"]):
        (tmp_path / "run.py").write_text(ENDED_AS.format(name=name, words=given))
        done = started(f"{sys.executable} run.py", tmp_path)
        assert done.returncode == code
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "reached", "run.py"]
        if "--json" in given:
            assert json.loads(done.stdout)["error"]["exit_code"] == code
            assert done.stderr == b""
        else:
            assert (done.stdout, done.stderr) == (b"", b"error: told to end; nothing was written\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_nohup_is_heeded(tmp_path: Path, name: str) -> None:
    words = [*STEP.split(), "cluster.yaml", "--trace", "there.json"]
    text = ENDED_AS.format(name=name, words=words).replace(
        "os.fsync", f"signal.signal(signal.{name}, signal.SIG_IGN)\nos.fsync"
    )
    (tmp_path / "run.py").write_text(text)
    assert started(f"{sys.executable} run.py", tmp_path).returncode == 0
    assert (tmp_path / "there.json").is_file()
