"""What is fixed of how a step runs is kept, or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pdv
from ir.errors import NoPlanFitsError, PinsError, UsageError, VerificationError
from ir.types import DType
from pdv.cli import app as cli
from pdv.cluster import Cluster, load_cluster
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph, program
from pdv.memory import step_memory
from pdv.pipelines.pinned import Pinned
from pdv.pipelines.search import search_pipelines
from pdv.plan.running import as_run
from pdv.planning.problems import load_target, plan_problems
from pdv.planning.search import Effort, search_problems
from pdv.problem import Problem
from pdv.problem.workload import RUN_ORDERS, Order
from pdv.report.loaded import workload_of_found
from pdv.search.strategies.backtrack import backtrack
from pdv.verification import verify
from tests.pdv.packages import change_plan

CLUSTER_OF_FOUR = {"name": "host", "nodes": [{"devices": 4, "device": "cpu-core", "link": "loopback-gloo"}]}
SPEC = "gpt:layers=3,hidden=64,heads=4,seq=32,vocab=64"
CLUSTER = "nodes: [{devices: 4, device: cpu-core, link: loopback-gloo}]\n"


@cache
def devices() -> Cluster:
    """One host of four cores."""
    return load_cluster(CLUSTER_OF_FOUR)


@cache
def problem() -> Problem:
    """A small GPT on the host."""
    return plan_problems(graph(arch(SPEC), 8, DType.F32), devices(), mode="train", rules=())[0]


def test_each_is_kept() -> None:
    pinned = Pinned(2, 4, "gpipe", "full", {"dp": 2})
    found = search_pipelines(problem(), devices(), float("inf"), backtrack, pinned)
    assert found is not None
    execution, mesh = found.execution, found.solution.problem.mesh
    assert (found.stages.count, execution.micro_batches, execution.order) == (2, 4, "gpipe")
    assert (execution.recompute, [(axis.name, axis.size) for axis in mesh.axes]) == ("full", [("dp", 2)])


@pytest.mark.parametrize(("order", "virtual"), [("zero-bubble", 1), ("zbv", 2), ("dualpipev", 2)])
def test_halves_of_backward_are_kept(order: Order, virtual: int) -> None:
    found = search_pipelines(problem(), devices(), float("inf"), backtrack, Pinned(2, schedule=order))
    assert found is not None
    assert (found.stages.count, found.stages.virtual, found.execution.order) == (2, virtual, order)
    assert found.stages.folded == (virtual == 2)
    assert as_run(found, devices()).stages == found.stages


def test_interleaved_stages_are_kept() -> None:
    """Two or more on each rank, in turn; micro-batches go in groups of as many as there are ranks."""
    for pinned in (Pinned(2, schedule="interleaved"), Pinned(2, virtual_stages=2)):
        found = search_pipelines(problem(), devices(), float("inf"), backtrack, pinned)
        assert found is not None
        assert (found.stages.count, found.stages.virtual, found.execution.order) == (2, 2, "interleaved")
        assert found.execution.micro_batches % 2 == 0
        assert set(found.stages.chunk_of.values()) == {0, 1, 2, 3}
    one_each = search_pipelines(problem(), devices(), float("inf"), backtrack, Pinned(2, virtual_stages=1))
    assert one_each is not None
    assert one_each.stages.virtual == 1


@pytest.mark.parametrize("pinned", [Pinned(stages=4), Pinned(micro_batches=8), Pinned(recompute="full")])
def test_what_is_not_fixed_is_searched(pinned: Pinned) -> None:
    found = search_pipelines(problem(), devices(), float("inf"), backtrack, pinned)
    assert found is not None
    have = {"stages": found.stages.count, "micro_batches": found.execution.micro_batches}
    have |= {"recompute": found.execution.recompute}
    assert {name: have[name] for name in pinned.as_dict()} == pinned.as_dict()


def test_a_plan_with_pinned_stages_verifies(tmp_path: Path) -> None:
    model = program(arch(SPEC), 8, DType.F32)
    saved = pdv.optimize(model, cluster=devices(), stages=2, micro_batches=4, rules="none").save_plan(tmp_path / "plan")
    assert verify(saved)["proof"]
    change_plan(saved, lambda plan: plan["search"]["certificate"]["space"]["running"].update(stages=4))
    with pytest.raises(VerificationError, match=r"running\.stages is 4, the plan gives 2"):
        verify(saved)


def test_a_batch_is_taken_row_by_row() -> None:
    """The program of a single row says nothing of others, and is replayed all the same."""
    found = search_pipelines(problem(), devices(), float("inf"), backtrack, Pinned(stages=2, micro_batches=8))
    assert found is not None
    assert as_run(found, devices()).execution.micro_batches == 8


@pytest.mark.parametrize(
    ("pinned", "told"),
    [
        (Pinned(stages=3), "3 stages of 4 devices"),
        (Pinned(stages=2, mesh={"a": 4}), "the mesh a=4 has 4 devices"),
        (Pinned(micro_batches=3), "3 micro-batches of 8 rows"),
        (Pinned(micro_batches=0), "0 micro-batches"),
        (Pinned(schedule="chimera"), "schedule: 'chimera' is not known"),  # type: ignore[arg-type]
        (Pinned(stages=4, virtual_stages=2), r"8 stages: .* has 5 pieces"),
        (Pinned(schedule="1f1b", virtual_stages=2), "2 stages on each of 2 ranks in the order 1f1b"),
        (
            Pinned(schedule="interleaved", virtual_stages=1),
            "leaves nothing to interleave",
        ),
        (Pinned(stages=4, schedule="interleaved", micro_batches=2), "take turns on stages of 4 ranks"),
        (Pinned(virtual_stages=0), "0 virtual stages"),
        (Pinned(stages=2, schedule="zbv", virtual_stages=4), "4 stages on each of 2 ranks in the order zbv"),
        (Pinned(stages=2, schedule="dualpipev", micro_batches=2), "2 micro-batches in the order dualpipev on 4 stages"),
        (Pinned(schedule="zero-bubble", recompute="full"), "the order zero-bubble with recomputation"),
        (Pinned(recompute="selective"), "recompute: 'selective' is not known"),
    ],
)
def test_what_cannot_be_is_refused(pinned: Pinned, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        search_pipelines(problem(), devices(), float("inf"), backtrack, pinned)


def test_stages_are_of_training() -> None:
    with pytest.raises(UsageError, match="of training"):
        search_pipelines(replace(problem(), mode="infer"), devices(), float("inf"), backtrack, Pinned(stages=2))


def test_nothing_else_is_taken_where_nothing_fits() -> None:
    with pytest.raises(NoPlanFitsError, match="as pinned"):
        search_pipelines(replace(problem(), memory_limit=1e5), devices(), float("inf"), backtrack, Pinned(stages=2))


@pytest.mark.parametrize(
    ("pinned", "more"), [(Pinned(2, 2, recompute="none"), 1.3), (Pinned(1, 2, recompute="none"), 1.02)]
)
def test_what_would_fit_on_the_host_is_said(pinned: Pinned, more: float) -> None:
    """And does."""
    node = {"devices": 2, "device": "a100-80gb-sxm", "link": "nvlink3"}
    gpus, wide = load_cluster({"name": "gpus", "nodes": [node]}), "gpt:layers=4,hidden=1024,heads=8,seq=2048,vocab=64"
    given = plan_problems(graph(arch(wide), 16, DType.BF16), gpus, mode="train", rules=())[0]
    held = [
        step_memory(workload_of_found(found, gpus)).worst.least_bytes
        for found in (search_pipelines(given, gpus, math.inf, backtrack, one) for one in (pinned, hosted(pinned)))
        if found is not None
    ]
    assert len(held) == 2
    assert held[1] < 0.9 * held[0]
    tight = replace(given, memory_limit=more * held[1])
    with pytest.raises(NoPlanFitsError, match="With --offload activations it would fit"):
        search_pipelines(tight, gpus, math.inf, backtrack, pinned)
    assert search_pipelines(tight, gpus, math.inf, backtrack, hosted(pinned)) is not None


def hosted(pinned: Pinned) -> Pinned:
    return replace(pinned, activations="host")


def test_no_pipelines_and_one_are_opposites() -> None:
    effort = Effort("backtrack", 60.0)
    with pytest.raises(UsageError, match="never"):
        search_problems(
            (problem(),), devices(), effort, None, lambda *_: None, lambda *_: (), pinned=Pinned(stages=2)
        )  # fmt: skip


def test_the_mesh_is_that_of_a_stage() -> None:
    """It is the whole cluster's where stages are not fixed."""
    cluster, _, pinned = load_target(devices(), {"dp": 2}, None, Pinned(stages=2))
    assert (cluster.mesh, pinned.mesh) == (None, {"dp": 2})
    cluster, _, pinned = load_target(devices(), {"dp": 4}, None, Pinned(micro_batches=2))
    assert dict(cluster.mesh or ()) == pinned.mesh == {"dp": 4}
    with pytest.raises(UsageError, match="dp=2 has 2 devices"):
        load_target(devices(), {"dp": 2}, None, Pinned(micro_batches=2))


def test_options_reach_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("cluster.yaml").write_text(CLUSTER)
    options = "--stages 2 --micro-batches 4 --schedule gpipe --recompute full --mesh dp=2"
    words = f"optimize --arch {SPEC} --batch 8 --dtype float32 -c cluster.yaml --json {options}".split()
    assert cli.run(words) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
    steps = {step["rule"]: step["bindings"] for step in plan["derivation"]}
    assert steps["accumulate"] == {"micro_batches": 4}
    assert steps["stage"] == {"stage": 1, "of": 2, "order": "gpipe"}
    assert "recompute" in steps
    assert options.partition(" --mesh")[0] in plan["command"]
    certificate = plan["search"]["certificate"]
    assert certificate["space"]["running"]["mesh"] == {"dp": 2}
    assert "keep the pins" in certificate["statement"]
    assert cli.run([*words[:-6], "--schedule", "zb"]) == 2
    assert f"Allowed: {', '.join(RUN_ORDERS)}" in capsys.readouterr().out


def pinned_inside(pins: dict[str, Any], **how: Any) -> pdv.Plan:
    """Two stages of two devices."""
    return pdv.optimize(program(arch(SPEC), 8, DType.F32), cluster=CLUSTER_OF_FOUR, pins=pins, stages=2, **how)


def cut_in(plan: pdv.Plan) -> dict[str, str]:
    """How parameters rest that do not rest whole."""
    stored = [step for step in plan.document["derivation"] if step["rule"] == "store-parameter"]
    return {name: step["bindings"]["sharding"] for step in stored for name in step["sites"]}


def test_a_plan_with_pins_inside_its_stages_verifies(tmp_path: Path) -> None:
    """The meshes that it names are those of the cluster, of which pins of a stage's mesh say nothing."""
    pins = {"mesh": {"dp": 2}, "techniques": {"dp": "zero-2"}}
    saved = pinned_inside(pins, micro_batches=4, rules="none").save_plan(tmp_path / "plan")
    assert verify(saved)["proof"]
    change_plan(saved, lambda plan: plan["search"]["certificate"]["space"]["meshes"].reverse())
    with pytest.raises(VerificationError, match=r"space\.meshes\[0\] is "):
        verify(saved)


def test_pins_speak_of_the_inside_of_each_stage() -> None:
    """A technique, whatever the schedule would allow beside it; and what is named in one layer alone."""
    zero = pinned_inside({"mesh": {"dp": 2}, "techniques": {"dp": "zero-2"}}, micro_batches=4)
    assert cut_in(zero)
    assert {axis["name"] for axis in zero.document["mesh"]} == {"dp"}
    assert "keep the pins" in zero.document["search"]["certificate"]["statement"]
    stale = pinned_inside({"mesh": {"dp": 2}, "techniques": {"dp": "ddp"}}, schedule="2bw", rules="none")
    assert not cut_in(stale)
    one = {"transformer.h.1.mlp.c_fc.weight": {"tp": "whole"}}
    named = pinned_inside({"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}, "tensors": one}, rules="none")
    plain = pinned_inside({"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}}, rules="none")
    assert cut_in(plain).keys() - cut_in(named).keys() == one.keys()


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ({"techniques": {"dp": "ddp"}}, "no mesh of a stage has the axes dp"),
        ({"mesh": {"dp": 2}, "tensors": {"nothing": {"dp": "cut"}}}, "no parameter or value is called 'nothing'"),
    ],
)
def test_pins_that_no_stage_has_are_named(pins: dict[str, Any], told: str) -> None:
    with pytest.raises(PinsError, match=told):
        pinned_inside(pins, micro_batches=4)


def test_pins_are_named_where_no_plan_keeps_them_and_the_schedule() -> None:
    """Versions of what is gathered for its use alone are no versions of what rests."""
    with pytest.raises(NoPlanFitsError, match=r"or the pins of dp \(pins, techniques\.dp\)"):
        pinned_inside({"mesh": {"dp": 2}, "techniques": {"dp": "zero-2"}}, schedule="2bw", rules="none")


def test_ranks_with_equal_layers_have_equal_stages() -> None:
    """96 layers on 8 ranks: 12 each, in 2, 4, 6 or 12 stages; 126 do not divide into 64."""
    assert Pinned().virtual("interleaved", 96, 8) == (2, 4, 6, 12)
    assert Pinned().virtual("interleaved", 80, 8) == (2, 5, 10)
    assert Pinned().virtual("interleaved", 126, 64) == Pinned().virtual("interleaved") == (2, 4, 8)
    assert Pinned(virtual_stages=3).virtual("interleaved", 96, 8) == (3,)
