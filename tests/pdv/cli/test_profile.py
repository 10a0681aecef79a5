"""`pdv profile` and `pdv cluster detect`: what they refuse, and that one measures and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import parquet

import pdv
from pdv.cli.app import run
from pdv.frontend.program import Program
from tests.pdv.emit.graphs import random_weights
from tests.pdv.worlds import mlp

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


def test_what_is_measured_for_a_plan_is_of_its_device(tmp_path: Path) -> None:
    from pdv.measure.deciding import processors_of

    graph = mlp()
    for device, link, record in (("cpu-core", "loopback-gloo", "cpu-core"), ("a100-80gb-sxm", "nvlink3", None)):
        nodes = {"nodes": [{"devices": 2, "device": device, "link": link}]}
        plan = pdv.optimize(Program(graph, random_weights(graph)), cluster=nodes, mesh={"dp": 2}, rules="none")
        assert processors_of(plan.save(tmp_path / f"{link[:4]}_pdv")) == record
    words = ["profile", "--device", "cpu", "--for-plan", str(tmp_path / "loop_pdv"), "--budget", "300ms"]
    assert run([*words, "-o", str(tmp_path / "rows")]) == 0
    rows = parquet.read_table(tmp_path / "rows" / "kernels-0001.parquet")
    assert set(rows["gpu"].to_pylist()) == {"cpu-core"}


@pytest.mark.slow  # measures for some seconds
def test_detected_is_what_planning_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from learned_cost.devices.device import read_record
    from pdv.cluster import load_cluster

    words = ["cluster", "detect", "--device", "cpu", "--name", "mine", "--count", "2", "--json"]
    assert run([*words, "-o", str(tmp_path / "cluster.yaml")]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 2
    assert load_cluster(tmp_path / "cluster.yaml").num_devices == 2
    assert read_record(tmp_path / "devices" / "mine.yaml").name == "mine"
