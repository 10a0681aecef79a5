"""`pdv bench` alone and under torchrun: parts beside predictions, and a plan again by what was kept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pdv
from pdv.cli import app as cli
from pdv.measure.told import told
from pdv.plan.package import Plan
from tests.pdv import miniatures

pytestmark = pytest.mark.distributed
ONE = {"nodes": [{"devices": 1, "device": "cpu-core"}]}
TWO = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}


@pytest.mark.slow
def test_collectives_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = (miniatures.ids(8, 8),)
    pins = {"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}}
    plan = pdv.optimize(miniatures.settled(miniatures.Gpt()), inputs, cluster=TWO, pins=pins)
    folder, kept = plan.save(tmp_path / "gpt"), tmp_path / "kept"
    assert cli.run(["bench", str(folder), "--budget", "3s", "-o", str(kept), "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    rows = [row for row in found["collectives"] if row["devices"] == 2]
    assert {row["collective"] for row in rows} & {"all_reduce", "all_gather"}
    assert all(row["predicted_s"] > 0.0 < row["measured_s"] and row["count"] >= 1.0 for row in rows)
    assert {row["part"] for row in found["parts"]} == {"computing", "communication and waiting", "optimizer"}
    assert list(kept.glob("collectives*.parquet"))
    again = pdv.optimize(miniatures.settled(miniatures.Gpt()), inputs, cluster=TWO, pins=pins, cost=kept)
    curves = again.document["mesh"][0]["link"]["curves"]
    assert curves["source"] == "measured"
    assert curves["points"] != plan.document["mesh"][0]["link"]["curves"]["points"]


@cache
def planned(mode: str = "train") -> Plan:
    model = miniatures.settled(miniatures.Gpt()).train(mode == "train")
    return pdv.optimize(model, (miniatures.ids(8, 8),), cluster=ONE, mode=mode, pipelines="never")


def benched(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.run(["bench", str(folder), "--budget", "1s", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_each_part_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = benched(planned().save(tmp_path / "gpt"), capsys, "-o", str(tmp_path / "kept"))
    assert found["device"] == "cpu"
    step, parts = found["step"], {row["part"]: row for row in found["parts"]}
    assert list(parts) == ["computing", "communication and waiting", "optimizer"]
    assert all(row["measured_s"] >= 0.0 for row in parts.values())
    assert sum(row["measured_s"] for row in parts.values()) == pytest.approx(step["measured_s"], rel=0.5)
    assert sum(row["predicted_s"] for row in parts.values()) == pytest.approx(step["predicted_s"], rel=1e-6)
    assert found["worst"]["part"] in parts
    assert {(row["pass"], row["blocks"]) for row in found["blocks"]} == {("forward", 2), ("backward", 2)}
    assert sum(2 * row["predicted_s"] for row in found["blocks"]) < parts["computing"]["predicted_s"]
    assert found["collectives"] == []
    memory = found["memory"]
    assert memory["predicted_bytes"] == pytest.approx(memory["measured_bytes"], rel=0.1)
    assert found["kept"]["kernels"] > 10
    again = pdv.optimize(
        miniatures.settled(miniatures.Gpt()), (miniatures.ids(8, 8),), cluster=ONE, pipelines="never",
        cost=tmp_path / "kept",
    )  # fmt: skip
    assert again.document["predicted"]["sources"]["measured"] > 0.0
    text = told(found)
    number, unit, word = text["step"].split()[:3]
    assert float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(step["measured_s"], rel=5e-3)
    assert word == "measured,"
    assert "kept" in text


def test_inference_has_no_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = benched(planned("infer").save(tmp_path / "gpt"), capsys, "--no-keep")
    parts = {row["part"]: row for row in found["parts"]}
    assert parts["optimizer"] == {"part": "optimizer", "predicted_s": 0.0, "measured_s": 0.0, "error": None}
    assert {row["pass"] for row in found["blocks"]} == {"forward"}
    assert "kept" not in found
