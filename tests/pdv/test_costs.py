"""The choice of a cost model: which one a name stands for, what plans say of it, and explaining by it again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pdv
from ir.cost_model import SOURCES, Query
from ir.errors import DataError, UsageError, WeightsError
from ir.graph import Graph
from learned_cost import choose
from learned_cost.estimator import NO_RECORD
from learned_cost.kernels.predict import Predictor
from learned_cost.training.few_shot import adapt_file
from pdv import config
from pdv.cli import app as cli
from pdv.cluster import load_cluster
from pdv.cluster.presets import DEVICES
from pdv.cost.compute import ComputeModel
from pdv.plan.cache import problem_key
from pdv.plan.package import Plan
from pdv.planning.problems import plan_problems
from pdv.prices import cost_model
from pdv.report.saved import explain
from pdv.report.summary import summarize
from pdv.search.strategies import Budget
from pdv.verification import verify
from tests.learned_cost.measurements import write as write_profile
from tests.learned_cost.training.test_few_shot import measured as few_of_an_a40
from tests.pdv import worlds
from tests.pdv.packages import change_plan
from tests.pdv.test_compile import two_layers

CPUS = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}
MINE = {
    "name": "mine", "memory": "8 GiB", "peak": {"float32": "10 TFLOP/s"}, "memory_bandwidth": "400 GB/s",
    "launch_latency": "5 us", "efficiency": 0.8,
}  # fmt: skip


@cache
def planned(cost: str, device: str = "cpu-core", pipelines: config.Pipelines = "always") -> Plan:
    model, inputs = two_layers()
    nodes = [{"devices": 2, "device": MINE if device == "mine" else device, "link": "loopback-gloo"}]
    return pdv.optimize(model, inputs, cluster={"nodes": nodes}, cost=cost, pipelines=pipelines)


def _queries(graph: Graph) -> list[Query]:
    return [Query.of(node, node.loops, train=True) for node in graph.nodes if not node.is_leaf]


def changed(plan: Plan, directory: Path, **facts: Any) -> Path:
    """A package whose plan says other things of its cost model."""
    return change_plan(plan.save(directory), lambda document: document["cost_model"].update(facts))


@pytest.mark.parametrize("kind", ["corrections", "profiles"])
def test_a_file_that_is_of_other_devices_is_said_to_count_for_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, few = tmp_path / "mine", few_of_an_a40(tmp_path / "few")
    what = "few was" if kind == "profiles" else "what corrects mine was"
    if kind == "corrections":
        adapt_file(Predictor.load(None), few, None, mine)
    cost = str(mine if kind == "corrections" else tmp_path / "few")
    note = f"{what} measured on A40, none of this cluster's devices: it is not used"

    model, inputs = two_layers()
    plan = pdv.optimize(model, inputs, cluster=CPUS, cost=cost)
    assert plan.document["predicted"]["source"].endswith(f"; {note}")
    assert summarize(plan.document)["prices"] == note
    folder = plan.save(tmp_path / "two_pdv")
    assert note in explain(folder, cost=cost)
    verify(folder, cost=cost)
    assert cli.run(["simulate", str(folder), "--cost", cost]) == 0
    assert capsys.readouterr().err == f"warning: {note}\n"

    several = [DEVICES["a40"], DEVICES["t4"]]
    assert cost_model(cost, several).note == cost_model(cost, several).on(several[1:]).note == ""
    assert cost_model(cost, several[1:]).note == note
    assert "prices" not in summarize(planned("learned").document)


def test_the_default_and_the_analytic_model_by_name() -> None:
    devices = [DEVICES["t4"]]
    assert cost_model("analytic", devices) == ComputeModel((DEVICES["t4"],))
    assert cost_model(None, devices).provenance()["name"] == config.COST == "auto"


def test_auto_takes_what_is_known_of_each_device() -> None:
    recorded, measured = cost_model("auto", [DEVICES["t4"]]), cost_model("auto", [DEVICES["cpu-core"]])
    assert (recorded.provenance()["weights"] is None, recorded.provenance()["profiles"]) == (False, None)
    assert measured.provenance()["profiles"] == cost_model("measured", [DEVICES["cpu-core"]]).provenance()["profiles"]
    described = load_cluster({"nodes": [{"devices": 2, "device": MINE, "link": "loopback-gloo"}]}).classes[0].device
    assert cost_model("auto", [described]) == ComputeModel((described,))


def test_auto_prices_a_device_without_a_record_by_the_roofline() -> None:
    described = replace(DEVICES["t4"], name="slow", launch_latency_s=1.0)
    problems = [
        plan_problems(worlds.mlp(), load_cluster(CPUS), mode="train", compute=cost_model("auto", devices))[0]
        for devices in ([DEVICES["t4"]], [DEVICES["t4"], described])
    ]
    known, mixed = (problem.compute.nodes(_queries(problem.graph)) for problem in problems)
    assert {entry.forward.source for entry in known} == {"learned"}
    assert {(entry.forward.source, entry.forward.why) for entry in mixed} == {("analytic", NO_RECORD)}


def test_auto_without_a_reader_of_profiles_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    facts = cost_model("auto", [DEVICES["cpu-core"]]).provenance()
    assert (facts["profiles"], facts["weights"]["name"]) == (None, "kernels")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("lerned", UsageError, "Did you mean 'learned'"),
        ("absent/profiles", UsageError, "no file or folder here"),
        ("absent.safetensors", WeightsError, "there is no"),
    ],
)
def test_what_is_no_cost_model(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        cost_model(name, [DEVICES["t4"]])


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\x80\x04pickle")
    (tmp_path / "w.json").write_text("{}")
    with pytest.raises(WeightsError):
        cost_model(tmp_path / "w.safetensors", [DEVICES["t4"]])
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/kernels.parquet").write_bytes(b"not Parquet")
    with pytest.raises(DataError):
        cost_model(tmp_path / "profile", [DEVICES["t4"]])


def test_an_analytic_plan_says_so() -> None:
    document = planned("analytic").document
    assert document["cost_model"] == {"name": "analytic", "hash": None, "devices": {}}
    assert set(document["predicted"]["sources"]) == {"analytic"}
    assert {entry["source"] for entry in document["operators"]} == {"analytic"}
    assert document["predicted"]["fallbacks"] == []


@pytest.mark.parametrize("cost", ["learned", "measured", "auto"])
def test_a_plan_says_where_its_seconds_come_from(cost: str) -> None:
    document = planned(cost, pipelines="never").document  # so that the search's cost is a price
    predicted, facts = document["predicted"], document["cost_model"]
    assert facts["name"] == cost
    assert len(facts["weights"]["hash"]) == 64
    assert (facts["profiles"] is None) == (cost == "learned")
    assert facts["devices"] == {"cpu-core": "cpu-core"}
    loss_s = sum(predicted["sources"].values()) - document["search"]["cost"]  # the loss is none of the search's
    assert 0.0 <= loss_s < 30e-6
    assert {entry["source"] for entry in document["operators"]} <= set(SOURCES)
    assert predicted["sources"]["learned"] > 0.0
    assert 0.0 < predicted["step_time_s"]["std"] < predicted["step_time_s"]["mean"]


def test_a_device_without_a_record_is_named() -> None:
    document = planned("learned", "mine").document
    assert document["cost_model"]["devices"] == {"mine": "as the cluster file describes it"}


def test_the_same_plan_twice() -> None:
    first = planned("learned").document
    planned.cache_clear()
    again = planned("learned").document
    assert {**first, "search": {**first["search"], "seconds": None}} == {
        **again, "search": {**again["search"], "seconds": None}
    }  # fmt: skip


def test_a_proof_needs_no_cost_model(tmp_path: Path) -> None:
    directory = changed(planned("learned"), tmp_path / "plan", name="weights of elsewhere")
    assert "equal to its source" in verify(directory)["proof"]["statement"]


def test_explaining_prices_by_the_same_model(tmp_path: Path) -> None:
    plan = planned("learned")
    text = explain(plan.save(tmp_path / "plan"))
    assert f"{plan.document['predicted']['step_time_s']['mean'] * 1e3:.4g} ±" in text
    assert "learned" in text


def test_explaining_by_other_weights_is_an_error(tmp_path: Path) -> None:
    directory = changed(planned("learned"), tmp_path / "plan", weights={"name": "other", "hash": "0" * 64})
    with pytest.raises(UsageError, match="priced by weights other"):
        explain(directory)


def test_caches_are_keyed_by_the_cost_model(tmp_path: Path) -> None:
    cluster = load_cluster(CPUS)
    devices = [entry.device for entry in cluster.classes]
    profile = write_profile(tmp_path / "profile")
    models = [cost_model(name, devices) for name in ("analytic", "learned", profile)]
    problems = [plan_problems(worlds.mlp(), cluster, mode="train", compute=model)[0] for model in models]
    assert len({problem_key(problem, "backtrack", Budget(), None) for problem in problems}) == len(models)
