"""A step in time: against the sum of its prices, and what must be so of breakdowns, stragglers and overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.techniques import Technique
from ir.mesh import Mesh
from pdv.pcg.plan_cost import plan_cost
from pdv.problem import Problem
from pdv.problem.workload import Workload
from pdv.report.loaded import load_plan, workload_of_plan
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import PICO
from pdv.simulate.stage import Lowered
from pdv.simulate.step import simulate
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.simulate.workloads import CPU, ONE, PLAIN, TWO, best, gpt
from tests.pdv.worlds import attention_block, cluster, mlp, problem, random_graph


def loss_s(of: Problem, workload: Workload) -> float:
    """The loss alone: what is outside the graph."""
    lowered = Lowered(workload, PLAIN)
    outputs = [(node.type, lowered.nodes.of[node].sharding) for _, node in workload.pcg.outputs]
    price = lowered.stages[0].kind.prices[0].loss(outputs)
    return (price.forward + price.backward) / PICO if of.train else 0.0


@pytest.mark.parametrize("mesh", [ONE, TWO, Mesh.of(a=4, b=2)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_without_overlap_a_step_is_the_sum_of_its_prices(mesh: Mesh, seed: int) -> None:
    """The emitted program on a CPU, where nothing runs beside anything."""
    graph = (mlp(layers=2), attention_block(), random_graph(3, 9), random_graph(5, 7))[seed]
    of = problem(graph, mesh, device=CPU)
    found = best(of)
    simulation = simulate(found, calibration=PLAIN, draws=0)
    expected = plan_cost(of, found.pcg)
    assert simulation.step_s == pytest.approx(expected.step_s + loss_s(of, found), rel=1e-6, abs=1e-9)
    assert simulation.std_s == pytest.approx(0.6 * simulation.step_s, rel=1e-3)


def test_inference_runs_forward_alone() -> None:
    of = problem(mlp(), ONE, mode="infer", device=CPU)
    found = best(of)
    assert simulate(found, calibration=PLAIN, draws=0).step_s == pytest.approx(plan_cost(of, found.pcg).seconds)


CONFIGURATIONS = (
    "tp=4,dp=2,micro_batch=2,batch=8",
    "tp=2,pp=2,dp=2,micro_batch=1,batch=8,zero=1",
    "tp=2,pp=2,dp=2,micro_batch=1,batch=8,vp=2,schedule=interleaved,sp=1,recompute=full",
    "dp=8,zero=3,micro_batch=1,batch=8",
    "tp=2,pp=4,micro_batch=1,batch=8,schedule=gpipe,recompute=selective,flash=0,fused=1",
    "dp=8,zero=2,micro_batch=1,batch=16",
    "tp=2,pp=2,dp=2,micro_batch=1,batch=8,zero=1,synchronous=1,slices=1",
)


@pytest.mark.parametrize("spec", CONFIGURATIONS)
def test_parts_add_up_to_the_step_exactly(spec: str) -> None:
    simulation = simulate(gpt(spec), draws=4)
    for share in simulation.breakdown:
        assert sum(share.parts.values()) == simulation.step_ps
        assert all(time >= 0 for time in share.parts.values())
    assert sum(simulation.totals.values()) == pytest.approx(simulation.step_s, rel=1e-12)
    assert simulation.std_s > simulation.straggler_std_s > 0


@pytest.mark.parametrize("spec", CONFIGURATIONS)
def test_stragglers_cost_time_and_the_same_seed_the_same(spec: str) -> None:
    workload = gpt(spec)
    calm, drawn = simulate(workload, draws=0), simulate(workload, draws=8)
    assert calm.straggler_std_s == 0.0
    assert calm.step_s < drawn.step_s < 1.1 * calm.step_s
    assert simulate(workload, draws=8).step_ps == drawn.step_ps
    assert simulate(workload, draws=8, seed=1).step_ps != drawn.step_ps


def test_recomputation_is_a_forward_pass_again_but_for_embedding_and_head() -> None:
    model = "gpt:layers=4,hidden=256,heads=8,seq=128,vocab=128"
    spec = "tp=2,dp=4,micro_batch=4,batch=16"
    plain = simulate(gpt(spec, model=model), calibration=PLAIN, draws=0).totals
    again = simulate(gpt(f"{spec},recompute=full", model=model), calibration=PLAIN, draws=0).totals
    assert again["compute"] == plain["compute"]
    assert 0.2 * plain["compute"] < again["recomputation"] < 0.4 * plain["compute"]
    assert again["tp"] == pytest.approx(1.5 * plain["tp"], rel=0.15)  # each pass communicates alike


def test_a_small_model_on_a_gpu_takes_what_its_host_takes() -> None:
    workload = gpt("tp=1,dp=8,micro_batch=1,batch=8")
    slow = replace(CALIBRATION, host_forward_s=1e-3, host_backward_s=1e-3, host_pass_s=0.0, straggler_std=0.0)
    simulation = simulate(workload, calibration=slow, draws=0)
    kernels = 4 * 12  # at least so many a layer, forward and backward
    assert simulation.step_s > kernels * 1e-3
    assert simulation.totals["host"] > 0.9 * simulation.step_s
    names = ("host_forward_s", "host_backward_s", "host_add_s", "host_update_s")
    none = replace(slow, **dict.fromkeys(names, 0.0))
    assert simulate(workload, calibration=none, draws=0).totals["host"] == pytest.approx(slow.host_step_s)


def test_a_host_that_waits_for_each_kernel_adds_its_own_time_to_each() -> None:
    """However long kernels are; where it runs ahead, long ones hide it."""

    def totals(settings: str, issue_s: float) -> dict[str, float]:
        zero = replace(PLAIN, host_forward_s=issue_s, host_backward_s=issue_s)
        model = "gpt:layers=2,hidden=2048,heads=16,seq=1024,vocab=128"
        return dict(simulate(gpt(f"dp=8,batch=64,{settings}", model=model), calibration=zero, draws=0).totals)

    eight, four = (totals(f"micro_batch={size},synchronous=1", 1e-6) for size in (1, 2))
    tail = 2 * four["host"] - eight["host"]  # of the step, not of a micro-batch
    assert 0.0 <= tail < 0.1 * four["host"]
    assert totals("micro_batch=1", 1e-6).get("host", 0.0) < 0.05 * eight["host"]
    assert totals("micro_batch=1,synchronous=1", 3e-6)["host"] == pytest.approx(3 * eight["host"])
    assert totals("micro_batch=1,synchronous=1", 0.0)["compute"] == pytest.approx(eight["compute"])


def test_what_all_ranks_hold_crosses_stages_in_slices() -> None:
    def sent(settings: str) -> tuple[float, float, int]:
        lowered = Lowered(gpt(f"tp=4,pp=2,micro_batch=2,batch=8,{settings}"), PLAIN)
        (crossing,) = lowered.chunks.crossings
        return crossing.forward, crossing.backward, lowered.sends.forward[0]

    whole, cut, already = sent("slices=0"), sent("slices=1"), sent("sp=1,slices=1")
    assert cut[:2] == (whole[0] / 4, whole[1] / 4) == already[:2]
    assert already[2] < cut[2]  # the slices are gathered behind the send
    assert sent("sp=1,slices=0") == already


def test_passes_of_a_pipeline_take_a_core_for_their_schedule() -> None:
    """Two of each micro-batch on every stage, by as much of a whole core as the constant says; of one stage none."""

    def computed_s(count: int, share: float, pass_s: float, stages: int = 2) -> float:
        device, spec = {"preset": "cpu-core", "share": share}, f"pp={stages},batch=8,mbs={8 // count // (2 // stages)}"
        work = gpt(spec, nodes=1, devices=2, device=device, link="loopback-gloo", network=None)
        work = replace(work, execution=replace(work.execution, eager=True))
        shares = simulate(work, calibration=replace(CALIBRATION, pass_cpu_s=pass_s), draws=0).breakdown
        return sum(sum(one.parts.values()) for one in shares) / len(shares) / PICO

    for count in (4, 8):
        alone, shared = (computed_s(count, share, 1e-3) - computed_s(count, share, 0.0) for share in (1.0, 0.5))
        assert 2 * count * 1e-3 <= alone <= (2 * count + 4) * 1e-3  # and as the pipeline fills
        assert shared == pytest.approx(2 * alone, rel=0.3)  # of a core that two have
    assert computed_s(2, 0.5, 1e-3, 1) == computed_s(2, 0.5, 0.0, 1)


def test_gradient_sums_hide_behind_backward() -> None:
    def exposed(gradients: bool) -> float:
        found = gpt("dp=8,micro_batch=8,batch=64")
        overlap = replace(found.execution.overlap, gradients=gradients, bucket_bytes=2**18)
        workload = replace(found, execution=replace(found.execution, overlap=overlap))
        return simulate(workload, calibration=PLAIN, draws=0).totals.get("dp", 0.0)

    assert 0.0 < exposed(gradients=True) < 0.5 * exposed(gradients=False)


def test_gathers_ahead_hide_behind_compute() -> None:
    def step(gathers: int) -> float:
        found = gpt("dp=8,zero=3,micro_batch=8,batch=64")
        overlap = replace(found.execution.overlap, gathers=gathers, gradients=False)
        workload = replace(found, execution=replace(found.execution, overlap=overlap))
        return simulate(workload, calibration=PLAIN, draws=0).step_s

    assert step(1) < step(0)
    assert step(2) < step(0)


@pytest.mark.parametrize(("bandwidth", "hidden"), [("10 GB/s", True), ("1 MB/s", False)])
def test_weights_gathered_once_a_step_hide_behind_the_first_micro_batch(
    bandwidth: str, hidden: bool, tmp_path: Path
) -> None:
    """But for those of the first block, which are waited for."""
    shape: dict[str, Any] = {"stages": 2, "micro_batches": 4, "mesh": {"dp": 2}}
    where = cluster(4)
    where["nodes"][0]["link"]["bandwidth"] = bandwidth
    pins = Technique("zero-1", (("dp", 2),), zero=True, once=True).pins
    plan = plan_pipeline(Blocks(), (torch.randn(64, 64, 16),), where, pins=pins, **shape)
    work = workload_of_plan(load_plan(plan.save(tmp_path / "blocks_pdv")))
    stage = Lowered(work, PLAIN).stages[0]
    gathers = [task for task in stage.tail.tasks if task.name == "weights"]
    whole = [stage.kind.links.gather_weights((0,), dict(task.detail)["bytes"]) for task in gathers]
    assert gathers[0].duration == whole[0]
    if hidden:
        assert len(gathers) == 1
        return
    entries, price = stage.sums.nodes.of, stage.kind.prices[0].entries
    first = next(iter(stage.sums._behind.values()))
    computed = sum(price[entries[node].number].forward for node in first if entries[node].role == "local")
    assert whole[1] - gathers[1].duration == computed > 0


def test_zero_divides_the_optimizer() -> None:
    whole = simulate(gpt("dp=8,micro_batch=1,batch=8"), calibration=PLAIN, draws=0).totals
    cut = simulate(gpt("dp=8,micro_batch=1,batch=8,zero=1"), calibration=PLAIN, draws=0).totals
    assert cut["optimizer"] == pytest.approx(whole["optimizer"] / 8, rel=0.01)


def test_a_measured_source_is_told() -> None:
    of = problem(mlp(), ONE, device=CPU)
    found = simulate(best(of), calibration=PLAIN, draws=0)
    assert set(found.seconds_by_source) == {"analytic"}
    assert sum(found.seconds_by_source.values()) == pytest.approx(found.step_s, rel=1e-6)


def test_uneven_devices_wait_for_the_slowest() -> None:
    slow = replace(CPU, name="slow", peak_flops={"float32": 0.5e9}, memory_bandwidth_bytes_per_s=0.5e9)
    of = problem(mlp(layers=2), Mesh.of(a=4), device=CPU)
    even, uneven = best(of), best(of, devices=[CPU, CPU, slow, slow])
    all_slow = best(of, devices=[slow] * 4)
    times = [simulate(workload, calibration=PLAIN, draws=0) for workload in (even, uneven, all_slow)]
    assert times[0].step_s < times[1].step_s <= times[2].step_s
    fast_share = times[1].breakdown[0]
    assert fast_share.parts["waiting"] > 0


@pytest.mark.parametrize("gradients", [0, 1])
def test_zero_2_sums_gradients_of_each_micro_batch(gradients: int) -> None:
    def summed(zero: int) -> float:
        found = gpt(f"dp=8,micro_batch=1,batch=32,zero={zero},gradients={gradients},bucket_bytes=10000")
        return simulate(found, calibration=PLAIN, draws=0).totals["dp"]

    assert summed(2) > summed(1) * (1.0 if gradients else 2.5)  # four times as often; weights are gathered once


@pytest.mark.parametrize("fused", [0, 1])
def test_dropout_takes_time_at_residual_sums_and_in_written_scores(fused: int) -> None:
    def compute(dropout: int, flash: int) -> float:
        spec = f"dp=8,micro_batch=4,batch=32,fused={fused},flash={flash},dropout={dropout}"
        return simulate(gpt(spec), calibration=PLAIN, draws=0).totals["compute"]

    residual = compute(1, 1) - compute(0, 1)
    assert 0.0 < residual < 0.2 * compute(0, 1)
    assert compute(1, 0) - compute(0, 0) > residual


def test_deviations_level_off_where_runs_were_published_and_nowhere_else() -> None:
    """By learned prices, whose device is known; the roofline's stay as wide as they are."""
    from dataclasses import replace as changed

    from pdv.prices import cost_model
    from pdv.simulate.calibration import OF_FRAMEWORKS
    from pdv.simulate.stage import Lowered
    from pdv.simulate.uncertainty import of_step

    workload = gpt("dp=8,zero=2,micro_batch=1,batch=16")
    device = workload.cluster.classes[0].device
    learned = changed(workload, compute_of=lambda _: cost_model("learned", [device]))
    lowered, by_roofline = Lowered(learned, OF_FRAMEWORKS), Lowered(workload, OF_FRAMEWORKS)
    widths = [of_step(lowered, std_s, 1.0) for std_s in (0.0, 0.01, 0.1, 0.3, 0.6, 10.0)]
    assert widths == sorted(widths)
    assert widths[0] == 0.0
    assert widths[1] == pytest.approx(OF_FRAMEWORKS.std_gain * 0.01, rel=0.01)
    assert widths[-1] == pytest.approx(OF_FRAMEWORKS.std_most, rel=0.01)
    assert of_step(by_roofline, 0.6, 1.0) == 0.6
    assert of_step(Lowered(learned, CALIBRATION), 0.6, 1.0) == 0.6
    on_cpu = changed(best(problem(mlp(), ONE, device=CPU)), compute_of=lambda _: cost_model("learned", [CPU]))
    assert of_step(Lowered(on_cpu, CALIBRATION), 0.1, 1.0) == pytest.approx(CALIBRATION.std_gain_cpu * 0.1)
