"""`pdv bench` without steps: what is refused, what parts are, what collectives cost; steps run in tests/distributed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import pdv
from learned_cost.profile.steps import known_as
from pdv.cli import app as cli
from pdv.measure.bench import _collective, _parts
from pdv.plan.package import Plan
from pdv.prices import priced_by
from pdv.report.loaded import load_plan
from tests.pdv import miniatures
from tests.pdv.packages import change_plan

ONE = {"nodes": [{"devices": 1, "device": "cpu-core"}]}


@cache
def planned(mode: str = "train") -> Plan:
    model = miniatures.settled(miniatures.Gpt()).train(mode == "train")
    return pdv.optimize(model, (miniatures.ids(8, 8),), cluster=ONE, mode=mode, pipelines="never")


def test_what_cannot_be_benched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", str(tmp_path)]) == 2
    assert "plan.json" in capsys.readouterr().err
    folder = planned().save(tmp_path / "gpt")
    (folder / "model.py").write_text("raise RuntimeError('spilled')\n")
    assert cli.run(["bench", str(folder), "--no-keep"]) == 2
    assert "RuntimeError: spilled" in capsys.readouterr().err
    (folder / "model.py").unlink()
    assert cli.run(["bench", str(folder)]) == 2
    assert "has no model.py" in capsys.readouterr().err
    two = {"nodes": [{"count": 2, "devices": 1, "device": "cpu-core"}], "network": "ib-hdr"}
    plan = pdv.optimize(miniatures.settled(miniatures.Gpt()), (miniatures.ids(8, 8),), cluster=two, pipelines="never")
    assert cli.run(["bench", str(plan.save(tmp_path / "two"))]) == 2
    assert "the plan is for 2 hosts" in capsys.readouterr().err


def test_a_plan_that_says_other_things_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = change_plan(planned().save(tmp_path / "gpt"), lambda document: document["cost_model"].update(name="none"))
    assert cli.run(["bench", str(folder)]) == 2
    assert "none" in capsys.readouterr().err


def test_parts_of_a_pipeline_and_prices_of_collectives(tmp_path: Path) -> None:
    answer = {"passes_s": 3.0, "compute_s": 2.0, "optimizer_s": 0.5}
    parts = {"compute": 1.0, "dp": 0.5, "waiting": 0.25, "optimizer": 0.125, "host": 0.0625}
    assert _parts(parts, answer, 1) == {
        "computing": (1.0625, 2.0), "communication and waiting": (0.75, 1.0), "optimizer": (0.125, 0.5)
    }  # fmt: skip
    assert _parts(parts, answer, 2) == {"passes of all stages": (1.8125, 3.0), "optimizer": (0.125, 0.5)}
    cluster = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}
    inputs = (miniatures.ids(8, 8),)
    folder = pdv.optimize(miniatures.settled(miniatures.Gpt()), inputs, cluster=cluster, pipelines="never").save(
        tmp_path / "two"
    )
    problem = load_plan(folder, priced_by(json.loads((folder / "plan.json").read_text()), None)).problem
    row = {"collective": "all_reduce", "bytes": 1 << 20, "devices": 2, "count": 1.0, "seconds": 1.0}
    assert 1e-4 < _collective(problem, row)["predicted_s"] < 1.0
    assert _collective(problem, {**row, "devices": 3})["predicted_s"] is None


def test_measurements_are_kept_under_the_name_of_what_measured_them() -> None:
    cpu = torch.device("cpu")
    assert known_as("cpu-core", cpu) == "cpu-core"
    assert known_as("H100-SXM-80GB", cpu) is None
    assert known_as("no such", cpu) is None
    assert known_as(None, cpu) is None
