"""Peaks of steps: published formulas, schedules, and what each way of saving memory saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.builder import Builder
from ir.mesh import Mesh
from ir.types import DType
from pdv.cluster import load_cluster
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.manual.configuration import configuration, workload
from pdv.memory import StageMemory, step_memory
from pdv.memory.log import Heap
from pdv.memory.passes import passes
from pdv.memory.setting import Setting
from pdv.problem.workload import Execution, Workload
from pdv.schedule.order import Pipeline, in_flight
from tests.pdv import worlds
from tests.pdv.simulate.workloads import best

S, B, H, A = 128, 2, 256, 8
SBH, SCORES = S * B * H, 5 * A * S * S * B
MEGATRON = "flash=0,fused=1,dropout=1"


def run_by(settings: str, devices: int = 8, layers: int = 2, batch: int = 16, micro_batch: int = B) -> Workload:
    node = {"devices": min(devices, 8), "device": "a100-80gb-sxm", "link": "nvlink3", "count": max(1, devices // 8)}
    cluster = load_cluster({"nodes": [node], **({"network": "ib-hdr"} if devices > 8 else {})})
    given = configuration(f"{settings},micro_batch={micro_batch}", batch)
    model = arch(f"gpt:layers={layers},hidden={H},heads={A},seq={S},vocab=1024")
    return workload(
        lambda rows: graph(model, rows, DType.BF16, tp=given.tp),
        given,
        cluster,
        lambda d: ComputeModel((d,)),
        stage_links,
    )


def kept(work: Workload) -> float:
    """Bytes of one micro-batch between forward and backward; after backward all are freed."""
    made = passes(Setting(work), 0, Heap(), twice=True)
    assert made.forward.end + made.later.end == 0
    return made.forward.end


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        (MEGATRON, 1, 34 * SBH + SCORES),
        (f"{MEGATRON},tp=8", 8, SBH * (10 + 24 / 8) + SCORES / 8),
        (f"{MEGATRON},tp=8,sp=1", 8, (34 * SBH + SCORES) / 8),
        (f"{MEGATRON},tp=8,sp=1,recompute=selective", 8, 34 * SBH / 8),
        (f"{MEGATRON},tp=8,recompute=full", 8, 2 * SBH),
    ],
)
def test_activations_of_a_layer_are_those_of_korthikanti(settings: str, devices: int, expected: float) -> None:
    """Table 2 of "Reducing activation recomputation in large transformer models", MLSys'23, but for statistics."""
    more, fewer = (kept(run_by(settings, devices, layers)) for layers in (3, 2))
    assert more - fewer == pytest.approx(expected, rel=0.006)


@pytest.mark.parametrize(
    ("settings", "weights", "gradients", "optimizer"),
    [("zero=0", 2, 4, 12), ("zero=1", 2, 4, 12 / 8), ("zero=2", 2, 4 / 8, 12 / 8)],
)
def test_mixed_precision_keeps_18_bytes_and_zero_cuts_them(
    settings: str, weights: float, gradients: float, optimizer: float
) -> None:
    work = run_by(settings)
    count = sum(node.type.num_elements for node in work.problem.graph.params if node.needs_grad)
    held = step_memory(work).worst.by_kind
    assert held["weights"] == pytest.approx(weights * count, rel=0.02)  # positions and masks are constants
    assert held["gradients"] == pytest.approx(gradients * count)
    assert held["optimizer"] == pytest.approx(optimizer * count)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_as_many_micro_batches_are_in_flight_as_the_schedule_has(order: str) -> None:
    virtual = 2 if order == "interleaved" else 1
    work = run_by(f"pp=4,dp=1,schedule={order},vp={virtual},recompute=full", 4, 8, batch=16, micro_batch=2)
    pipeline = Pipeline(4, virtual, 8, work.execution.order)
    layers = 8 // 4 // virtual
    for one in step_memory(work).stages[:-1]:  # the last one has the loss, too
        held = max(point.after_bytes for point in one.curve) - one.curve[-1].after_bytes
        # of a chunk: the inputs of its layers and its output
        assert held == in_flight(pipeline, one.stage) * (layers + 1) * 2 * SBH


def test_each_way_of_saving_memory_saves() -> None:
    plain, selective, full = (
        step_memory(run_by(f"flash=0,recompute={kind}", layers=6)).worst.peak_bytes
        for kind in ("none", "selective", "full")
    )
    assert full < selective < plain
    flash, cut = (step_memory(run_by(settings, layers=6)).worst.peak_bytes for settings in ("flash=1", "flash=0,tp=2"))
    assert flash < plain
    assert cut < plain
    zero = [step_memory(run_by(f"zero={level}", layers=6)).worst.peak_bytes for level in (0, 1, 2, 3)]
    assert zero == sorted(zero, reverse=True)


def test_the_peak_is_the_sum_of_its_holders_and_the_curve_reaches_it() -> None:
    for settings, devices in (("zero=3", 8), ("tp=2,pp=2,schedule=interleaved,vp=2", 8), ("recompute=full", 8)):
        for one in step_memory(run_by(settings, devices, 8)).stages:
            assert sum(one.holders.values()) == pytest.approx(one.peak_bytes, rel=1e-9)
            assert all(size >= 0 for size in one.holders.values())
            assert max(point.most_bytes for point in one.curve) == one.peak_bytes
            assert one.when


def test_a_device_holds_more_than_tensors() -> None:
    one = step_memory(run_by("dp=8")).worst
    assert one.peak_bytes < one.least_bytes <= one.total_bytes
    assert one.margin_bytes == one.device.memory_bytes - one.least_bytes
    assert one.fits()
    small = replace(one.device, memory_bytes=int(one.least_bytes) - 1)
    assert not one.fits(small)


def test_a_cpu_holds_tensors_alone() -> None:
    one = worst_of_mlp()
    assert one.peak_bytes == one.total_bytes == one.least_bytes


def worst_of_mlp() -> StageMemory:
    return step_memory(best(worlds.problem(worlds.mlp(), Mesh.of(a=2)), Execution())).worst


def test_a_step_by_hand() -> None:
    """y = W x alone: after backward weight, gradient and moments are there, and AdamW's work space comes on top."""
    k = Builder()
    y = k.linear(k.input("x", worlds.f32(4, 8)), k.param("w", worlds.f32(16, 8)))
    one = step_memory(best(worlds.problem(k.graph({"y": y}), Mesh.of(a=1)), Execution())).worst
    weight, x = 16 * 8 * 4, 4 * 8 * 4
    assert one.when == "optimizer step"
    assert one.peak_bytes == 4 * weight + x + 2 * weight  # the root and the quotient; no parameter came before


def test_inference_keeps_nothing() -> None:
    work = best(worlds.problem(worlds.mlp(layers=3), Mesh.of(a=1), mode="infer"))
    one = step_memory(work).worst
    assert set(one.by_kind) <= {"weights", "inputs", "activations", "temporaries"}
    assert one.curve[-1].after_bytes == pytest.approx(one.by_kind["weights"] + one.by_kind["inputs"])


def trained(work: Workload) -> int:
    """Elements of its parameters."""
    return sum(node.type.num_elements for node in work.problem.graph.params if node.needs_grad)


def test_fsdp_rests_as_the_optimizers_copy_and_makes_gradients_in_backward() -> None:
    for precision, weights in (("mixed", 0.0), ("mixed-half-gradients", 2 / 8)):  # of DeepSpeed, beside its copy
        work = run_by(f"zero=3,precision={precision}", layers=8)
        held, ended = step_memory(work).worst, trained(work)
        sizes = {holder: size for holder, size in held.holders.items() if holder.kind == "weights"}
        assert sum(sizes.values()) == pytest.approx(weights * ended, abs=0.02 * ended)
        assert held.by_kind["optimizer"] == pytest.approx(12 / 8 * ended)
    (one,) = step_memory(run_by("zero=3", layers=8)).stages
    before, after = one.curve[0].after_bytes, one.curve[-2].after_bytes
    made = after - (before - kept(run_by("zero=3", layers=8)))
    assert made == pytest.approx(4 / 8 * trained(run_by("zero=3", layers=8)), rel=0.02)


def test_stages_of_fsdp_keep_whole_weights_and_gradients() -> None:
    work = run_by("pp=2,dp=4,zero=3", layers=8)
    stages = step_memory(work).stages
    found = sum(size for one in stages for holder, size in one.holders.items() if holder.op in ("", "all_gather"))
    others = sum(size for one in stages for holder, size in one.holders.items() if holder.kind == "inputs")
    assert found - others >= (2 + 4 + 12 / 4) * trained(work)


@pytest.mark.parametrize(("settings", "most"), [("zero=3", 3), ("tp=8,sp=1", 4)])
def test_an_eager_loss_of_logits_makes_three_of_them_in_float32_and_four_of_cut_ones(settings: str, most: int) -> None:
    work = run_by(f"{settings},loss=float32")
    made = passes(Setting(work), 0, Heap(), twice=False)
    held, peak = 0.0, 0.0
    for log in (made.forward, made.backward):
        for delta, holder in zip(log.deltas, log.holders, strict=True):
            held += delta if holder.kind == "loss" else 0.0
            peak = max(peak, held)
    assert held == 0
    assert peak == pytest.approx(most * S * B * 1024 * 4 / (8 if "tp" in settings else 1))
