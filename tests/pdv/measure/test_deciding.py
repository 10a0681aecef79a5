"""Kernels that decide a plan: those of near rivals whose seconds nobody knows well; and they are measured first."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import pdv
from learned_cost.describe import kernels_of
from learned_cost.devices.device import record
from learned_cost.profile.programs.planned import example_kernels
from pdv.cli import app as cli
from pdv.measure.deciding import deciding, expected_gain, of_package
from pdv.plan.package import Plan
from pdv.prices import priced_by
from pdv.report.loaded import load_plan
from tests.learned_cost.measurements import kernel_columns, write
from tests.pdv.test_compile import two_layers

CPUS = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}


GPUS = {"nodes": [{"devices": 2, "device": "a100-80gb-sxm", "link": "nvlink3"}]}


@cache
def planned(where: str = "cpus") -> Plan:
    model, inputs = two_layers()
    return pdv.optimize(model, inputs, cluster=CPUS if where == "cpus" else GPUS, cost="learned")


def test_what_is_gained_by_knowing() -> None:
    assert expected_gain(1.0, 0.0) == 0.0
    assert expected_gain(0.0, 1.0) == pytest.approx(0.39894, abs=1e-4)
    near, far = expected_gain(0.5, 1.0), expected_gain(5.0, 1.0)
    assert near > 1e5 * far > 0.0
    assert expected_gain(0.5, 2.0) > near, "the less is known, the more there is to learn"
    assert expected_gain(-3.0, 1.0) > 3.0, "a rival that is thought to be faster"


def test_every_kernel_of_a_plan_is_asked_for_once_and_rivals_too(tmp_path: Path) -> None:
    folder = planned("gpus").save(tmp_path / "plan")
    plan = load_plan(folder, priced_by(json.loads((folder / "plan.json").read_text()), None))
    decisions = deciding(plan)
    assert [d.gain_s for d in decisions] == sorted((d.gain_s for d in decisions), reverse=True)
    assert any(d.gain_s > 0.0 and d.rival is not None for d in decisions)
    own = {node.op.name for node in plan.operators if node.op.kernel}
    assert own <= {d.own.op.name for d in decisions}
    asked = of_package(folder)
    assert len({repr(query) for query in asked}) == len(asked) >= len(own)
    kernels = kernels_of(asked)
    assert len({kernel.key for kernel in kernels}) == len(kernels)


def test_examples_are_in_the_device_s_types() -> None:
    assert {kernel.dtype for kernel in example_kernels(record("h100-80gb-sxm"))} >= {"bf16"}
    assert "bf16" not in {kernel.dtype for kernel in example_kernels(record("cpu-core"))}


def test_profile_for_plan_measures_them_and_adapt_names_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned().save(tmp_path / "plan")
    monkeypatch.chdir(tmp_path)
    few = ["profile", "--device", "cpu", "--record", "cpu-core", "--for-plan", "plan", "--budget", "20s", "-o", "few"]
    assert cli.run([*few, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["rows"] >= 5, "few kernels, and it ends when they are measured"
    assert cli.run(["cost", "adapt", "-d", "few", "-o", "mine", "--for-plan", "plan", "--next", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["output"]) == ("cpu-core", "mine")
    assert told["rows"] <= measured["rows"]
    assert len(told["next"]) == 2
    assert cli.run(["cost", "adapt", "-d", "few", "-o", "mine"]) == 2, "it is there"
    assert "mine.safetensors exists" in capsys.readouterr().err
    assert cli.run(["profile", "--device", "cpu", "--for-plan", "plan", "--ops", "linear"]) == 2
    assert "--for-plan says what to measure" in capsys.readouterr().err


def test_adapt_tells_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = kernel_columns(40) | {"gpu": ["A40"] * 40}
    write(tmp_path / "few", columns=columns)
    command = ["cost", "adapt", "-d", str(tmp_path / "few"), "-o", str(tmp_path / "mine"), "--next", "0"]
    assert cli.run(command) == 0
    told = capsys.readouterr().out
    assert "40 kernels of A40" in told
    assert "of each kernel by the others" in told
    found = pdv.optimize(*two_layers(), cluster=CPUS, cost=tmp_path / "mine")
    assert found.document["cost_model"]["name"] == "mine"
