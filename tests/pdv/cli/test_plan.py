"""The commands on a whole model: optimize with pins, cache and rules; verify; explain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdv.cli import app as cli
from pdv.cli.values import seconds, strategy_names
from pdv.search.strategies import STRATEGIES

from .conftest import CLUSTER

pytest.importorskip("torch")


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.run(words)
    printed = capsys.readouterr()
    assert code == 0, printed
    return printed.out


def optimized(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    text = ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "--json", "--overwrite", *words)
    plan: dict[str, Any] = json.loads(text)["plan"]
    return plan


def test_pins_reach_the_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = optimized(capsys, "--pins", "pins.yaml", "--budget", "30s")
    assert [axis["name"] for axis in plan["mesh"]] == ["tp"]
    assert plan["techniques"]["tp"] == ["tensor parallel (column)", "tensor parallel (row)"]
    assert json.loads(plan["search"]["certificate"]["space"]["pins"])["tensors"] == {"up": {"tp": "shard 0"}}
    assert "--pins pins.yaml" in plan["command"]
    assert "keep the pins" in plan["search"]["certificate"]["statement"]


def test_a_second_run_is_a_replay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = optimized(capsys)
    kept = list((here / "cache" / "pdv").rglob("*.json"))
    assert kept
    times = [path.stat().st_mtime_ns for path in kept]
    second = optimized(capsys)
    assert [path.stat().st_mtime_ns for path in kept] == times
    for plan in (first, second):
        plan["search"]["seconds"] = None
    assert first == second
    fresh = optimized(capsys, "--cache", "elsewhere")
    assert list(Path("elsewhere").rglob("*.json"))
    assert fresh["derivation"] == first["derivation"]


def test_no_cache_keeps_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimized(capsys, "--no-cache", "--rules", "none")
    assert not (here / "cache").exists()
    assert cli.run(["optimize", "two.onnx", "-c", "cluster.yaml", "--no-cache", "--cache", "x", "--overwrite"]) == 2
    assert "opposite" in capsys.readouterr().err


def test_verify_and_explain(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "--pins", "pins.yaml", "--search", "ilp")
    assert "certificate" in table
    assert ran(capsys, "verify", "two_pdv").startswith("two_pdv: verified, equal to its source over the integers mod")
    text = ran(capsys, "explain", "two_pdv")
    assert "tp:n (tensor)" in text
    assert "certificate: gap 0.00%: no plan costs less than" in text
    detail = ran(capsys, "explain", "two_pdv", "--operator", "relu")
    assert detail.startswith("relu -> f32[8,16], once (r; number 1)\n  loops _1=8 (data), _0=16 (tensor)\n")
    told = json.loads(ran(capsys, "explain", "two_pdv", "--json"))
    assert {entry["op"] for entry in told["operators"]} == {"linear", "relu"}
    assert told["search"]["certificate"]["space"]["variants"] == 1
    assert cli.run(["explain", "two_pdv", "--operator", "linaer"]) == 2
    assert "Did you mean 'linear'" in capsys.readouterr().err


def test_report_and_rivals(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml")
    written = Path("two_pdv/report.html").read_bytes()
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    told = json.loads(ran(capsys, "report", "two_pdv/plan.json", "--quick", "-o", "page.html", "--json"))
    assert (told["asked"], told["output"]) == ([], "page.html")
    assert len(Path("page.html").read_bytes()) == told["bytes"] == len(written)
    assert not shown
    assert ran(capsys, "report", "two_pdv", "--open").startswith("two_pdv/report.html: ")
    assert shown == [Path("two_pdv/report.html").resolve().as_uri()]
    assert Path("two_pdv/report.html").stat().st_size > len(written)
    ran(capsys, "verify", "two_pdv")
    text = ran(capsys, "explain", "two_pdv", "--rivals")
    assert "Beside the experts, simulated alike" in text
    assert "links twice as fast" in text
    beside = json.loads(ran(capsys, "explain", "two_pdv", "--rivals", "--json"))
    assert {row["name"] for row in beside["experts"]} >= {"DDP", "FSDP", "TP"}
    assert cli.run(["report", "absent"]) == 2


def test_the_command_names_all_that_made_the_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimized(capsys)["command"] == "pdv optimize two.onnx --cluster cluster.yaml"
    words = ["--search", "mcmc", "--seed", "3", "--budget", "9s", "--memory-limit", "900 MiB"]
    words += ["--rules", "none", "--rules", "shipped"]
    plan = optimized(capsys, *words)
    options = "--memory-limit '900 MiB' --search mcmc --budget 9s --seed 3 --rules none --rules shipped"
    assert plan["command"] == f"pdv optimize two.onnx --cluster cluster.yaml {options}"


def test_the_summary_says_what_the_axes_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "--pins", "pins.yaml").splitlines()
    assert "axis tp           tensor parallel (column), tensor parallel (row)" in cut
    assert any(line.startswith("predicted memory") and "MiB on slow" in line for line in cut)
    Path("idle.yaml").write_text("operators: [{op: '*', axis: gpu, loop: none}]\ntensors: {'*': {gpu: whole}}")
    idle = ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "--pins", "idle.yaml", "--overwrite")
    assert "axis gpu          idle, every device along it does the same work" in idle


def test_a_search_cut_short_says_what_was_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = CLUSTER.replace("devices: 2", "devices: 4")
    Path("four.yaml").write_text(cluster)
    words = ["optimize", "two.onnx", "-c", "four.yaml", "--budget", "1ms", "--no-cache"]
    assert "meshes left out: " in ran(capsys, *words)


def test_a_mesh_that_does_not_fit_is_its_owners_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", "two.onnx", "-c", "cluster.yaml", "--mesh", "x=3"]) == 2
    assert "usage: the mesh x=3 has 3 devices. cluster has 2 devices" in capsys.readouterr().err
    Path("pins.yaml").write_text("# mine\nmesh: {tp: 3}\n")
    assert cli.run(["optimize", "two.onnx", "-c", "cluster.yaml", "--pins", "pins.yaml"]) == 2
    assert "bad-pins: pins.yaml line 2, mesh: the mesh tp=3 has 3 devices" in capsys.readouterr().err
    assert cli.run(["optimize", "two.onnx", "-c", "cluster.yaml", "--pins", "pins.yaml", "--mesh", "tp=2"]) == 2
    assert "the pins say mesh tp=3, the caller says tp=2" in capsys.readouterr().err


def test_a_limit_above_the_devices_memory_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", "two.onnx", "-c", "cluster.yaml", "--memory-limit", "2 GiB"]) == 2
    assert "2 GiB is more than the smallest device has. At most 1 GiB" in capsys.readouterr().err


def test_a_cache_that_cannot_be_kept_is_one_warning(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("four.yaml").write_text(CLUSTER.replace("devices: 2", "devices: 4"))
    assert cli.run(["optimize", "two.onnx", "-c", "four.yaml", "--cache", "two.onnx"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == ["warning: the cache two.onnx cannot be written (Not a directory); nothing is kept there"]


def test_values() -> None:
    assert [seconds(text, "--budget") for text in ("5s", "500ms", "2m", "0.5", "1h")] == [5.0, 0.5, 120.0, 0.5, 3600.0]
    assert strategy_names("back") == ["backtrack"]
    assert set(strategy_names("")) == set(STRATEGIES)
