"""Long work: what it shows, where it shows nothing, its log, and what Ctrl-C keeps."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ir.errors import NoPlanFitsError
from pdv.cli import app as cli
from pdv.cli.long.progress import progress_bar, standing_text
from pdv.problem import Problem, Solution
from pdv.search.strategies import STRATEGIES, Budget
from pdv.watch import Standing

from .conftest import CLUSTER

pytest.importorskip("torch")
WORDS = ["optimize", "two.onnx", "-c", "four.yaml", "-o", "out", "--no-cache", "--pipelines", "never", "--no-check"]


@pytest.fixture
def four(here: Path) -> Path:
    """Four devices: meshes of one axis, and of two."""
    (here / "four.yaml").write_text(CLUSTER.replace("  - devices: 2", "  - count: 2\n    devices: 2") + NETWORK)
    return here


NETWORK = "network: {name: net, bandwidth: 8 Gbit/s, latency: 5 us}\n"


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # python runs the handler between two instructions


def interrupting(before: int) -> Callable[[Problem, Budget], Solution]:
    """The default search, interrupted when it is asked for the plan number ``before``."""
    asked = 0

    def search(problem: Problem, budget: Budget) -> Solution:
        nonlocal asked
        if asked == before:
            interrupt()
        asked += 1
        return STRATEGIES["dp"](problem, budget)

    return search


def told(printed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed.out)
    return found


@pytest.mark.parametrize("before", [0, 1])
def test_an_interrupted_search_keeps_its_best_plan(
    before: int, four: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cli.run([*WORDS, "--json", "--search", "dp", "-o", "whole"])
    meshes = told(capsys.readouterr())["plan"]["search"]["meshes"]
    assert (whole, meshes > 1) == (0, True)
    monkeypatch.setattr("pdv.planning.search.STRATEGIES", {**STRATEGIES, "dp": interrupting(before)})
    handler = signal.getsignal(signal.SIGINT)
    assert cli.run([*WORDS, "--json", "--search", "dp"]) == 10
    assert signal.getsignal(signal.SIGINT) is handler
    printed = capsys.readouterr()
    assert printed.err == "interrupted: taking the best plan so far (Ctrl-C again ends without one)\n"
    content = told(printed)
    certificate = content["plan"]["search"]["certificate"]
    assert content["interrupted"] is True
    assert content["plan"]["search"]["meshes"] == 1 + before < meshes + before
    assert not certificate["complete"]
    assert "the search was stopped before its end" in certificate["statement"]
    assert cli.run(["verify", "out"]) == 0
    assert {path.name for path in four.iterdir()} >= {"out", "whole"}


@pytest.mark.parametrize("times", [1, 2])
def test_without_a_plan_nothing_is_written(
    times: int, four: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(four.iterdir())

    def search(problem: Problem, budget: Budget) -> Solution:
        interrupt(times)
        raise NoPlanFitsError("nothing fits", needed_bytes=1e12)

    monkeypatch.setattr("pdv.planning.search.STRATEGIES", {**STRATEGIES, "dp": search})
    assert cli.run([*WORDS, "--search", "dp"]) == 130
    assert capsys.readouterr().err.endswith("error: interrupted; nothing was written\n")
    assert sorted(four.iterdir()) == before


@pytest.mark.parametrize("where", ["pdv.plan.proofs.verify_equal", "pdv.emit.package.write_weights"])
def test_an_interrupt_outside_of_the_search_ends_the_command(
    where: str, four: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(four.iterdir())
    monkeypatch.setattr(where, lambda *_, **__: interrupt())
    assert cli.run(WORDS) == 130
    assert sorted(four.iterdir()) == before


@pytest.mark.parametrize("there", [False, True], ids=["new", "overwritten"])
def test_an_interrupt_while_files_change_places_is_too_late(
    there: bool, four: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdv.plan import package

    assert not there or cli.run(WORDS) == 0
    before, move = sorted(four.iterdir()), package._move

    def moved(*args: Any, **named: Any) -> None:
        interrupt()
        move(*args, **named)
        interrupt()

    monkeypatch.setattr(package, "_move", moved)
    assert cli.run([*WORDS, "--overwrite"]) == 0
    assert sorted(four.iterdir()) == (before if there else sorted([*before, four / "out"]))
    assert cli.run(["verify", "out"]) == 0


def test_a_log_has_a_line_for_each_step(four: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second run adds to it
        assert cli.run([*WORDS, "--log-file", "log.txt", "--overwrite"]) == 0
    assert capsys.readouterr().err == ""
    lines = Path("log.txt").read_text().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z +\d+\.\d{3} s  \w", line) for line in lines)
    said = [line.split(" s  ")[1] for line in lines]
    assert sum(line.startswith("pdv ") for line in said) == said.count("done") == 2
    assert any(
        re.fullmatch(r"searching \d+%: mesh 2 of \d, best [\d.]+ ms, bound [\d.]+ ms, gap \d.*%", s) for s in said
    )
    assert cli.run([*WORDS, "--log-file", "log.txt"]) == 2
    assert cli.run(["verify", "out"]) == 0


def test_a_log_that_cannot_be_is_an_error_and_one_that_ends_a_warning(
    four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*WORDS, "--log-file", "absent/log.txt"]) == 9
    assert cli.run([*WORDS, "--log-file", "."]) == 9
    assert not Path("out").exists()
    capsys.readouterr()
    assert cli.run([*WORDS, "--log-file", "/dev/full"]) == 0
    assert (
        capsys.readouterr().err == "warning: /dev/full cannot be written (No space left on device); the log ends here\n"
    )


def test_a_log_that_is_found_to_be_lost_when_it_is_closed_ends_in_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(io.StringIO):
        def close(self) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "open", lambda *_, **__: Late())
    with progress_bar(quiet=True, log=tmp_path / "log") as progress:
        progress("searching", None)
    said = f"warning: {tmp_path / 'log'} cannot be written (Disk quota exceeded); the log ends here\n"
    assert capsys.readouterr().err == said


def seen(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal got on stderr."""
    ours, theirs = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                found.append(piece)
        except OSError:  # the other end was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        assert cli.run(words) == 0
    reader.join()
    os.close(ours)
    return b"".join(found).decode()


def test_a_terminal_shows_the_search(
    four: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    def search(problem: Problem, budget: Budget) -> Solution:
        time.sleep(0.2)
        return STRATEGIES["dp"](problem, budget)

    monkeypatch.setattr("pdv.planning.search.STRATEGIES", {**STRATEGIES, "dp": search})
    drawn = seen([*WORDS, "--search", "dp"], monkeypatch)
    assert "proving" in drawn
    assert re.search(r"searching: mesh 2 of \d, best [\d.]+ ms, bound [\d.]+ ms, gap", drawn)
    for words, name, value in (["--quiet"], "CI", ""), ([], "CI", "true"), ([], "TERM", "dumb"):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert seen([*WORDS, "--overwrite", *words], patch) == ""


def test_what_is_known_of_a_search() -> None:
    assert standing_text(None) == ""
    assert standing_text(Standing("mesh 1 of 3")) == "mesh 1 of 3"
    assert standing_text(Standing("mesh 1 of 3", 0.1, 0.099)) == "mesh 1 of 3, best 100 ms, bound 99 ms, gap 1.00%"
    assert Standing("", 0.1, 0.2).gap == 0.0
    assert Standing("", 0.0, 0.0).gap is None


@pytest.mark.slow
def test_a_real_process_is_interrupted_in_the_middle_of_a_long_search(tmp_path: Path) -> None:
    cluster = Path(__file__).parents[3] / "examples/clusters/8x8-h100.yaml"
    words = ["optimize", "--arch", "llama-3-8b", "--batch", "512", "-c", str(cluster), "-o", "out", "--no-cache"]
    command = [sys.executable, "-m", "pdv", *words, "--cost", "analytic", "--log-file", "log.txt"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        log = tmp_path / "log.txt"
        while "best" not in (log.read_text() if log.exists() else ""):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 10, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "out"]
    assert not json.loads((tmp_path / "out" / "plan.json").read_text())["search"]["certificate"]["complete"]
    assert said.startswith("interrupted: taking the best plan so far")
