"""The pipeline: options reach the plan, a package's plan is proved again, and damage is one error."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pdv
from benchmarks import models
from ir.errors import PdvError, PinsError, UsageError, VerificationError
from ir.mesh import Mesh
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import program
from pdv.plan.derivation import replay
from pdv.plan.document import read_problem
from pdv.plan.package import Plan
from pdv.plan.seal import write_document
from pdv.plan.source import write_source
from pdv.report.saved import explain
from pdv.verification import verify
from tests.pdv.worlds import cluster

Options = dict[str, Any]  # Any: what optimize takes


def planned(name: str = "two", mesh: dict[str, int] | None = None, **options: Any) -> Plan:
    mesh = mesh or {"dp": 2}
    model, inputs = two_layers() if name == "two" else models.build(name, "small")
    return pdv.optimize(model, inputs, cluster=cluster(math.prod(mesh.values())), mesh=mesh, **options)


def two_layers() -> tuple[Any, Any]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        return layers, (torch.randn(8, 8),)


@cache
def base() -> Plan:
    return planned()


def written(plan: Plan, directory: Path, **changes: Any) -> Path:
    """What of a package its proof reads."""
    document = json.loads(json.dumps(plan.document))
    document["search"]["seconds"] = None
    write_document(directory, {**document, "files": write_source(plan.source, directory), **changes})
    return directory


def test_a_plan_is_shown_as_the_command_line_prints_it() -> None:
    """A notebook shows it so: no document, and no weights."""
    names = [line.split("  ")[0] for line in repr(base()).splitlines()]
    assert names[:2] == ["plan", "mesh"]
    assert {"predicted step", "predicted memory", "certificate", "proof", "run"} <= set(names)
    assert len(repr(base())) < 2500


def test_every_option_reaches_the_plan() -> None:
    assert base().document["mode"] == "train"
    infer = planned(mode="infer")
    assert infer.document["mode"] == "infer"
    assert infer.document["predicted"]["step_time_s"]["mean"] < base().document["predicted"]["step_time_s"]["mean"]
    assert "gradients" not in infer.document["predicted"]["memory_breakdown_bytes"]
    half = planned(dtype="bfloat16")
    assert {output["dtype"] for output in half.document["source"]["outputs"]} == {"bfloat16"}
    kept, half_kept = (sum(p.document["predicted"]["memory_breakdown_bytes"].values()) for p in (base(), half))
    assert half_kept < kept
    large = planned(batch=32)
    assert large.document["source"]["inputs"][0]["shape"] == [32, 8]
    for plan in (base(), infer, half, large):
        assert plan.document["proof"]["error_bound"] < 1e-6


def test_unknown_options_are_usage_errors() -> None:
    unknown: tuple[Options, ...] = (
        {"search": "guess"}, {"dtype": "int64"}, {"dtype": "float12"}, {"budget_s": 0.0}, {"seed": -1},
    )  # fmt: skip
    for options in unknown:
        with pytest.raises(UsageError):
            planned(**options)


WRONG_PINS: dict[str, tuple[Options, str]] = {
    "contradictory": ({"axes": {"dp": "data"}, "techniques": {"dp": "tensor"}}, "contradict each other"),
    "no such axis": ({"techniques": {"tp": "tensor"}}, "no mesh axis is called 'tp'"),
    "no such tensor": ({"tensors": {"3.weight": {"dp": "cut"}}}, "no parameter or value is called"),
    "another mesh": ({"mesh": {"dp": 4}}, "the caller says"),
}


@pytest.mark.parametrize("name", WRONG_PINS)
def test_wrong_pins_are_one_error(name: str) -> None:
    pins, message = WRONG_PINS[name]
    with pytest.raises(PinsError, match=message):
        planned(pins=pins)


def test_pins_bind_and_the_cache_replays_them(tmp_path: Path) -> None:
    pins = {"techniques": {"dp": "zero-3"}}
    first, second = (planned(pins=pins, cache=tmp_path) for _ in range(2))
    assert first.document["techniques"] == {"dp": ["data parallel", "ZeRO-3"]}
    assert first.document["search"]["certificate"] == second.document["search"]["certificate"]
    assert first.pcg.digest == second.pcg.digest
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_pins_of_a_stage_bind_on_unequal_devices() -> None:
    """Fast and slow devices in turns have no stage of two that follow each other: that order is left out."""
    nodes = [
        {"devices": 2, "device": {"preset": "cpu-core", "share": share, "quota": True}, "link": "loopback-gloo"}
        for share in (0.7, 0.3)
    ]
    link = {"name": "port", "bandwidth": "1 Gb/s", "latency": "750 us"}
    model = program(arch("gpt:layers=2,hidden=64,heads=2,seq=32,vocab=256"), 8)
    found = pdv.optimize(
        model, cluster={"name": "unequal", "nodes": nodes, "network": link}, cost="analytic", stages=2,
        micro_batches=4, mesh={"dp": 2}, pins={"techniques": {"dp": "ddp"}},
    )  # fmt: skip
    assert found.mesh == Mesh.of(dp=2)
    assert found.document["techniques"] == {"dp": ["data parallel"]}
    assert found.document["search"]["lower_bound"] > 0.0


def test_planning_twice_gives_the_same_document() -> None:
    again = planned()
    assert again.pcg.digest == base().pcg.digest
    first, second = ({**plan.document["search"], "seconds": 0} for plan in (base(), again))
    assert json.dumps({**base().document, "search": first}) == json.dumps({**again.document, "search": second})


def test_a_package_is_proved_again(tmp_path: Path) -> None:
    assert verify(written(base(), tmp_path))["proof"] == base().document["proof"]
    assert "simulated ranks" in base().document["run"]["statement"]
    assert "Memory: at most" in explain(tmp_path)


DAMAGE: dict[str, Options] = {
    "no source": {"source": None},
    "another source": {"source": {"hash": "0" * 32}},
    "another graph": {"pcg_hash": "0" * 32},
    "no derivation": {"derivation": None},
    "an empty derivation": {"derivation": []},
    "no laws": {"laws": None},
    "laws that are none": {"laws": ["a == b"]},
    "no mesh": {"mesh": None},
    "an uneven mesh": {"mesh": [{"name": "dp", "size": 3, "link": {}}]},
    "another version": {"format_version": 99},
    "no mode": {"mode": None},
    "no classes": {"cluster": {"classes": None}},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_package_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError):
        verify(written(base(), tmp_path, **DAMAGE[name]))


UNREADABLE: dict[str, Options] = {
    "no price": {"predicted": None},
    "a price that is text": {"predicted": {"step_time_s": {"mean": "soon"}}},
    "no operators": {"techniques": {"dp": []}, "operators": None},
    "no techniques": {"techniques": {}},
    "no proof": {"proof": 3},
    "no search": {"search": {}},
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_package_that_cannot_be_explained_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"plan\.json is damaged"):
        explain(written(base(), tmp_path, **UNREADABLE[name]))


def test_another_source_is_not_explained(tmp_path: Path) -> None:
    written(base(), tmp_path)
    text = (tmp_path / "source.graph").read_text(encoding="utf-8")
    (tmp_path / "source.graph").write_text(text.replace("relu", "gelu"), encoding="utf-8")
    for function in (explain, verify):
        with pytest.raises(VerificationError, match=r"source\.graph is not the file that was written with the plan"):
            function(tmp_path)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path)
    (tmp_path / "plan.json").write_text("[]", encoding="utf-8")
    with pytest.raises(VerificationError, match="no JSON object"):
        explain(tmp_path)
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    for function in (explain, verify):
        with pytest.raises(PdvError):
            function(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mode": "infer"}, {"dtype": "bfloat16"}, {"batch": 16}], ids=str)
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_is_planned_proved_and_replayed(name: str, mesh: dict[str, int], options: Options) -> None:
    plan = planned(name, mesh, **options)
    document = json.loads(json.dumps(plan.document, allow_nan=False))
    assert replay(read_problem(document, plan.source), document["derivation"]).digest == plan.pcg.digest
    assert document["search"]["lower_bound"] <= document["search"]["cost"]
    assert document["proof"]["error_bound"] < 1e-6


def test_no_package_is_written_inside_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pdv.cli.app import run

    outer = base().save(tmp_path / "outer")
    before = sorted(outer.rglob("*"))
    for inside in (outer / "sub", outer / "checkpoints" / "sub"):
        with pytest.raises(UsageError, match=r"lies in the package .*outer"):
            base().save(inside)
    (tmp_path / "jobs.yaml").write_text("jobs: [{name: a, model: m.onnx, cluster: c.yaml}]\n")
    model = ["--arch", "gpt2", "--batch", "4", "--cluster", "examples/clusters/laptop-4.yaml"]
    for words in (
        ["optimize", *model, "-o", str(outer / "sub")],
        ["plan", str(tmp_path / "jobs.yaml"), "-o", str(outer)],
    ):
        assert run(words) == 2
        assert "lies in the package" in capsys.readouterr().err
    assert sorted(outer.rglob("*")) == before
    assert base().save(outer, overwrite=True) == outer
