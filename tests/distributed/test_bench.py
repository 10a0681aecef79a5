"""`pdv bench` under torchrun: collectives as a step has them beside their prices, and a plan again by what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pdv
from pdv.cli import app as cli
from tests.pdv import miniatures

pytestmark = pytest.mark.distributed
TWO = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}


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
