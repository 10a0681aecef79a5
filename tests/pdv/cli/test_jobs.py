"""`pdv plan`: files of jobs, processes beside one another, what is kept of them, and what an interrupt does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ir.errors import UsageError
from pdv.cli import app as cli
from pdv.cli.jobs import processes
from pdv.cli.jobs.processes import Outcome, Runs, own_environment
from pdv.cli.jobs.spec import OWN, Job, _entry, read_jobs
from tests.test_docs import ROOT, blocks

SMALL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"


def jobs(text: str, folder: Path) -> tuple[Job, ...]:
    path = folder / "jobs.yaml"
    path.write_text(text)
    return read_jobs(path)


def test_the_page_is_read(tmp_path: Path) -> None:
    (text,) = [block for block in blocks(ROOT / "docs" / "jobs.md") if block.startswith("# jobs")]
    found = jobs(text, tmp_path)
    assert [job.name for job in found] == [
        "llama-3-8b on 8x8-h100", "llama-3-70b on 8x8-h100", "small: gpt2 on laptop-4", "small: gpt2 on 2x8-a100",
    ]  # fmt: skip
    assert found[0].words == (
        "--cluster", "8x8-h100.yaml", "--arch", "llama-3-8b", "--budget", "30s", "--batch", "512",
    )  # fmt: skip
    assert found[3].words == (
        "--cluster", "2x8-a100.yaml", "gpt2.onnx", "--budget", "30s", "--batch", "32", "--dim", "sequence=512",
    )  # fmt: skip
    assert found[3].package == "small_gpt2_on_2x8_a100_pdv"


def test_every_option_is_one_of_the_command() -> None:
    """Options are derived from the signature: the words are those that typer makes of it."""
    command: Any = typer.main.get_command(cli.app)
    known = {param.name: (*param.opts, *param.secondary_opts) for param in command.commands["optimize"].params}
    for name in _entry().model_fields:
        if name not in {"model", "arch", "cluster", "name"}:
            assert f"--{name.replace('_', '-')}" in known[name]
    assert set(OWN) < set(known)
    assert "--no-check" in known["check"]


def test_options_as_words(tmp_path: Path) -> None:
    text = """
defaults: {arch: tiny, cluster: [a.yaml], check: false, strict: true, link_weights: false}
jobs:
  - model: two.onnx
    mesh: {dp: 2, tp: 4}
    dim: {sequence: 128, axes: [0, 1]}
    rules: [shipped, mine.laws]
    memory_limit: 70 GiB
    budget: 5
"""
    (job,) = jobs(text, tmp_path)
    assert job.words == (
        "--cluster", "a.yaml", "two.onnx", "--no-check", "--strict", "--dim", "sequence=128", "--dim", "axes=0,1",
        "--memory-limit", "70 GiB", "--mesh", "dp=2,tp=4", "--budget", "5", "--rules", "shipped",
        "--rules", "mine.laws",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "jobs.yaml is empty. Write `jobs:`"),
        ("- a", "jobs.yaml line 1: a file of jobs is a mapping. Start with `jobs:`"),
        ("jobs: []", "jobs.yaml line 1, jobs: a list is not allowed here"),
        ("defaults: {}", "jobs.yaml line 1, jobs: missing"),
        ("jobs:\n  - {arch: a}", "jobs.yaml line 2, jobs[0]: the job has no cluster. Write `cluster: FILE.yaml`"),
        ("jobs:\n  - {cluster: a}", "line 2, jobs[0]: the job has no model"),
        ("jobs:\n  - {cluster: a, arch: b, model: c}", "line 2, jobs[0]: the job has both a model and an arch"),
        ("jobs:\n  - cluster: a\n    arch: b\n    bach: 3", "line 4, jobs[0].bach: unknown key. Known keys:"),
        ("jobs:\n  - cluster: a\n    arch: b\n    bach: 3", "Did you mean 'batch'?"),
        ("jobs:\n  - cluster: a\n    arch: b\n    batch: many", "line 4, jobs[0].batch: 'many' is not allowed here."),
        ("jobs:\n  - cluster: a\n    arch: b\n    batch:", "line 4, jobs[0].batch"),
        ("jobs:\n  - cluster: a\n    arch: b\n    strict: 1", "line 4, jobs[0].strict: 1 is not allowed here."),
        ("jobs:\n  - cluster: [a, []]\n    arch: b", "line 2, jobs[0].cluster"),
        ("jobs:\n  - cluster: a\n    arch: b\n    output: x", "line 4, jobs[0].output: unknown key"),
        ("jobs:\n  - cluster: a\n    arch: b\n    mesh: 4", "line 4, jobs[0].mesh: 4 is not allowed here."),
        ("jobs:\n  - cluster: a\n    model: --help", "line 3, jobs[0].model"),
        ("jobs:\n  - cluster: a\n    arch: b\n    name: ../x", "line 4, jobs[0].name: '../x' is no name"),
        (
            "jobs:\n  - {cluster: a, arch: b}\n  - {cluster: a, arch: b, batch: 2}",
            "line 2, jobs[0]: the folder of 'b on a', b_on_a_pdv, is another job's, too",
        ),
        ("jobs:\n  - cluster: a\n    arch: " + "b" * 200, "is too long. Give the entry a `name:`"),
        ("jobs: &x [1]", "anchors"),
        ("jobs: [", "not valid YAML"),
        ("defaults: {jobs: 2}\njobs:\n  - {cluster: a, arch: b}", "line 1, defaults.jobs: unknown key"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_jobs(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        jobs(text, tmp_path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_jobs_end_apart(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fails, the others are written; run from another folder than the file's."""
    folder = here / "there"
    folder.mkdir()
    for name in ("two.onnx", "cluster.yaml"):
        (here / name).rename(folder / name)
    entry = "{model: two.onnx, cluster: [cluster.yaml, absent.yaml], no_cache: true, pipelines: never, check: false}"
    (folder / "jobs.yaml").write_text(f"jobs:\n  - {entry}\n")
    assert cli.run(["plan", "there/jobs.yaml", "--jobs", "2"]) == 11
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.search(r"^ ?two on cluster +[\d.]+ ms +[\d.]+ MiB on slow +0.00% .* 0", lines[3]), lines
    assert re.search(r"two on absent +bad-cluster +5", lines[4])
    assert printed.err == (
        "error: two on absent: bad-cluster: absent.yaml does not exist. Give the path of a YAML file "
        "(examples/clusters has some).\n"
    )
    plans = folder / "jobs_plans"
    assert sorted(path.name for path in plans.iterdir()) == ["jobs.json", "two_on_cluster_pdv"]
    first, second = json.loads((plans / "jobs.json").read_text())["jobs"]
    assert cli.run(["verify", first["output"]]) == 0
    saved = json.loads((plans / "two_on_cluster_pdv" / "plan.json").read_text())
    assert (first["step_s"], first["gap"]) == (saved["predicted"]["step_time_s"], saved["search"]["gap"])
    assert (second["exit_code"], second["error"]["slug"], second["output"]) == (5, "bad-cluster", None)
    capsys.readouterr()
    assert cli.run(["plan", "there/jobs.yaml"]) == 2
    assert "has jobs.json, two_on_cluster_pdv already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "said"), [("jobs.yaml", "is a file"), ("no/where", "does not exist"), (".", "has two_on_cluster_pdv")]
)
def test_where_plans_cannot_go(output: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("jobs.yaml").write_text("jobs:\n  - {model: two.onnx, cluster: cluster.yaml}\n")
    Path("two_on_cluster_pdv").mkdir()
    before = sorted(here.iterdir())
    assert cli.run(["plan", "jobs.yaml", "-o", output]) == 2
    assert said in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


STUB = """#!/bin/sh
# in the place of python: `quick` ends at once, `dead` dies, all others wait for an interrupt; $5 is the job's name
case "$*" in
*quick*) echo '{"plan": {"of": "quick"}}' ;;
*dead*) echo half >&2; kill -9 $$ ;;
*deaf*) trap '' INT; echo x > "$PDV_STARTED.deaf"; while true; do sleep 0.05; done ;;
*) trap 'echo "{\\"plan\\": {\\"of\\": \\"best so far\\"}}"; exit 10' INT
   echo x > "$PDV_STARTED.$5"; while true; do sleep 0.05; done ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(tmp_path / "stub"))
    monkeypatch.setenv("PDV_STARTED", str(tmp_path / "started"))
    return tmp_path


def listed(*names: str) -> list[Job]:
    return [Job(name, name, name, "c", {}, (name,)) for name in names]


def test_a_process_that_dies_is_told(stub: Path) -> None:
    dead, quick = Runs(stub, stub).outcomes(listed("dead", "quick"), 1, lambda _: None)
    assert quick.plan == {"of": "quick"}
    assert dead.exit_code == -9
    assert dead.error is not None
    assert dead.error["message"] == "its process ended by signal 9 and printed no plan: half"


def test_an_interrupt_goes_to_all_and_begins_none(stub: Path) -> None:
    runs, handler = Runs(stub, stub), signal.getsignal(signal.SIGINT)

    def told(outcome: Outcome) -> None:
        if outcome.job.name == "quick":
            while not (stub / "started.long").exists():  # not `late`, which begins where `quick` ended
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    quick, long, *late = runs.outcomes(listed("quick", "long", "late", "later"), 2, told)
    assert (quick.exit_code, long.exit_code, runs.interrupts) == (0, 10, 1)
    assert late[1].exit_code is None  # the third may have begun by then, and ended likewise
    assert long.plan == {"of": "best so far"}
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_third_interrupt_kills(stub: Path) -> None:
    def told(outcome: Outcome) -> None:
        while not (stub / "started.deaf").exists():
            time.sleep(0.01)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    deaf, _ = Runs(stub, stub).outcomes(listed("deaf", "quick"), 2, told)
    assert deaf.exit_code == -9


def test_nothing_outlives_an_error(stub: Path) -> None:
    def told(outcome: Outcome) -> None:
        while not (stub / "started.deaf").exists():
            time.sleep(0.01)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        Runs(stub, stub).outcomes(listed("deaf", "quick"), 2, told)
    (stub / "started.deaf").unlink()
    with pytest.raises(OSError, match="no room"):
        Runs(stub, stub).outcomes(listed("quick", "deaf", "further"), 1, told)
    assert not (stub / "started.further").exists()


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "here:")
    assert own_environment(3)["OMP_NUM_THREADS"] == "2"
    assert own_environment(20)["OMP_NUM_THREADS"] == "1"
    assert own_environment(1)["PYTHONPATH"] == f"{Path('here').absolute()}:{ROOT}"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert own_environment(3)["OMP_NUM_THREADS"] == "5"


@pytest.mark.slow
def test_real_processes_are_interrupted(tmp_path: Path) -> None:
    cluster = ROOT / "examples/clusters/8x8-h100.yaml"
    (tmp_path / "jobs.yaml").write_text(
        f"defaults: {{cluster: {cluster}, batch: 512, no_cache: true, cost: analytic}}\n"
        f"jobs:\n  - {{name: small, arch: '{SMALL}', pipelines: never}}\n  - {{name: large, arch: llama-3-8b}}\n"
        "  - {name: late, arch: llama-3-70b}\n"
    )
    command = [sys.executable, "-m", "pdv", "plan", "jobs.yaml", "--jobs", "1"]
    told = tmp_path / "jobs_plans" / "jobs.json"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(2)  # the second has begun, and searches or not yet
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 10, printed
    small, large, late = json.loads(told.read_text())["jobs"]
    assert (small["exit_code"], late["exit_code"]) == (0, None)
    assert large["exit_code"] != 0
    assert not [path for path in told.parent.iterdir() if path.name.startswith(".")]
