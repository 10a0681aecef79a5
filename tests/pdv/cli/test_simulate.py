"""`pdv simulate` and `pdv diff`: plans, configurations, traces, and what is said where arguments do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ir.errors import UsageError
from pdv.cli import app as cli

from .test_plan import ran

GPU = """
nodes: [{count: %d, devices: 4, device: a100-80gb-sxm, link: nvlink3}]
network: ib-hdr
"""
SMALL = "gpt:layers=4,hidden=256,heads=8,seq=128,vocab=1000"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for count in (1, 2):
        (tmp_path / f"gpus{4 * count}.yaml").write_text(GPU % count)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran(capsys, *words, "--json"))
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(words) == 2
    return capsys.readouterr().err


def described(capsys: pytest.CaptureFixture[str], manual: str, cluster: str = "gpus8.yaml") -> dict[str, Any]:
    return told(capsys, "simulate", "--arch", SMALL, "--manual", manual, "-c", cluster, "--batch", "16")


def test_a_configuration(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = described(capsys, "tp=2,pp=2,zero=1,recompute=full")
    assert found["mesh"] == {"dp": 2, "tp": 2}
    assert found["configuration"] == "tp=2,pp=2,dp=2,zero=1,recompute=full,batch=16"
    assert found["pipeline"]["micro_batches"] == 8
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"])
    assert found["tokens_per_s"] == pytest.approx(16 * 128 / found["step_s"])
    assert found["mfu"] * 8 * 312e12 * found["step_s"] == pytest.approx(found["model_flops"])
    assert [entry["stage"] for entry in found["stages"]] == [0, 1]
    assert found["fits"]
    assert {"tp", "bubble", "recomputation", "compute"} <= set(found["breakdown_s"])
    text = ran(capsys, "simulate", "--arch", SMALL, "-c", "gpus8.yaml", "--batch", "16", "--manual", "tp=2,pp=2")
    assert "time goes to" in text
    assert "2 stages of dp=2 x tp=2, 8 micro-batches, 1f1b" in text


def test_a_trace(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--arch", SMALL, "-c", "gpus4.yaml", "--batch", "4", "--manual", "tp=2,pp=2", "--trace", "step.json")
    ran(capsys, "simulate", *words)
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_two_configurations_side_by_side(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, manual in (("a", "tp=2"), ("b", "tp=2,sp=1,zero=1")):
        Path(f"{name}.json").write_text(json.dumps(described(capsys, manual)))
    found = told(capsys, "diff", "a.json", "b.json")
    assert found["settings"]["zero"] == [0, 1]
    norms = {entry["name"]: (entry["first"], entry["second"]) for entry in found["operators"]}
    assert norms["transformer.h.*.ln_1"] == ({"S0,I": 4}, {"S0,S1": 4})
    text = ran(capsys, "diff", "a.json", "b.json")
    assert "x as long" in text


def test_a_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "free", "--no-cache")
    said = json.loads(Path("free/plan.json").read_text())["simulated"]
    for target in ("free", "free/plan.json"):
        found = told(capsys, "simulate", target)
        assert found["step_s"] == said["step_s"]
    Path("slow.yaml").write_text(Path("cluster.yaml").read_text().replace("efficiency: 1.0", "efficiency: 0.001"))
    assert told(capsys, "simulate", "free", "-c", "slow.yaml")["step_s"] > said["step_s"]
    Path("more.yaml").write_text(Path("cluster.yaml").read_text().replace("devices: 2", "devices: 4"))
    assert "more has 4 devices, the plan is for 2" in refused(capsys, "simulate", "free", "-c", "more.yaml")


def test_options_of_a_configuration_are_refused_of_a_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "plan", "--no-cache")
    for words in (("--batch", "7"), ("--dtype", "bfloat16"), ("--dim", "sequence=4")):
        assert f"{words[0]}: a plan is simulated as it is" in refused(capsys, "simulate", "plan", *words)
    assert "--batch and --dtype: " in refused(capsys, "simulate", "plan", "--dtype", "fp16", "--batch", "7")


def test_where_measurements_cannot_be_kept_is_said_before_steps_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "plan", "--no-cache")
    (here / "taken").touch()
    assert "-o: 'taken' is a file" in refused(capsys, "bench", "plan", "-o", "taken")
    assert cli.run(["bench", "plan", "-o", "taken/rows"]) == 9
    assert "cannot-write: taken/rows" in capsys.readouterr().err
    assert refused(capsys, "bench", "absent", "-o", "rows")
    assert not (here / "rows").exists()


def test_a_checkpoint_that_is_there_is_replaced_by_the_option_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there").mkdir()
    (here / "there" / "file").touch()
    assert "add --overwrite" in refused(capsys, "reshard", "absent", "-o", "there")


def test_two_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "tensor", "--pins", "pins.yaml", "--no-cache")
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "data", "--mesh", "dp=2", "--no-cache")
    assert told(capsys, "diff", "tensor", "tensor")["ratio"] == 1.0
    found = told(capsys, "diff", "data", "tensor")
    assert found["settings"]["mesh tp"] == [None, 2]
    assert len(found["operators"]) == 2


def test_a_model_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("two.onnx", "-c", "cluster.yaml", "--dtype", "float32", "--manual")
    found = told(capsys, "simulate", *words, "tp=2,micro_batch=8")
    cuts = {entry["name"]: entry["sharding"] for entry in found["operators"]}
    assert cuts == {"up": "S1", "down": "P"}


def test_a_type_that_a_device_does_not_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(("simulate", "two.onnx", "-c", "cluster.yaml", "--manual", "tp=2,micro_batch=8")) == 0
    assert "slow has no bfloat16 rate: it is priced at its float32 rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to simulate"),
        (("--arch", SMALL), "need a cluster"),
        (("x.onnx",), "is a model, not a plan"),
        (("x", "--arch", SMALL, "-c", "gpus4.yaml"), "are both a model"),
        (("x",), "is no directory"),
        (("--arch", SMALL, "-c", "gpus4.yaml", "--manual", "tp=3"), "do not divide 4"),
        (("--arch", SMALL, "-c", "gpus4.yaml", "--trace", "no/where.json"), "does not exist"),
    ],
)
def test_what_does_not_go_together(
    gpus: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, "simulate", *words)


def test_no_simulation(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text("{}")
    assert "neither a plan nor a simulation" in refused(capsys, "diff", "other.json", "other.json")


def test_a_plan_without_a_file(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=128"
    words = ("optimize", "--arch", tiny, "--batch", "4", "-c", "gpus4.yaml", "--no-cache", "--rules", "none")
    before = sorted(gpus.iterdir())
    assert told(capsys, *words)["output"] is None
    assert sorted(gpus.iterdir()) == before
    ran(capsys, *words, "-o", "plan")
    assert sorted(path.name for path in Path("plan").iterdir()) == ["plan.json", "report.html", "source.graph"]
    assert f"--arch {tiny}" in json.loads(Path("plan/plan.json").read_text())["command"]
    ran(capsys, "verify", "plan")
    assert told(capsys, "simulate", "plan")["model"]["name"] == "gpt"


def test_a_plan_without_weights_is_no_program(gpus: Path) -> None:
    import pdv
    from pdv.frontend.arch.description import arch
    from pdv.frontend.arch.graph import program

    tiny = arch("gpt:layers=1,hidden=64,heads=4,seq=32,vocab=128")
    plan = pdv.optimize(program(tiny, 4), cluster="gpus4.yaml", rules="none")
    with pytest.raises(UsageError, match="was described by --arch and has no weights"):
        plan.save("program")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no model to plan"),
        (("x.onnx", "--arch", SMALL), "are both a model"),
        (("--arch", SMALL), "--arch needs a batch"),
    ],
)
def test_what_a_description_needs(
    gpus: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, "optimize", *words, "-c", "gpus4.yaml")


def test_formats_of_products_are_simulated_and_not_emitted(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (gpus / "b200.yaml").write_text("nodes: [{preset: dgx-b200}]\n")
    words = ("simulate", "--arch", SMALL, "-c", "b200.yaml", "--batch", "16")
    assert told(capsys, *words, "--dtype", "nvfp4")["configuration"] == "dp=8,batch=16,products=nvfp4"
    assert told(capsys, *words, "--manual", "precision=nvfp4")["configuration"] == "dp=8,batch=16,products=nvfp4"
    error = refused(capsys, "optimize", "--arch", SMALL, "-c", "b200.yaml", "--batch", "16", "--dtype", "fp8")
    assert "fp8 is a format of products" in error
    assert "pdv simulate --manual products=fp8" in error


def test_formats_are_named_as_settings_name_them() -> None:
    from pdv.cli import values
    from pdv.problem.formats import FORMATS

    assert set(values.FORMATS) == set(FORMATS)
