"""How published runs are read: bandwidths, GPUs, models, units and partitions as people write them."""

from __future__ import annotations

import math

import pytest

from benchmarks.fidelity import recall, row_of
from benchmarks.published.cluster import bandwidth, cluster_of, devices_of, node_size
from benchmarks.published.cross import BY_MODEL, interval, parts_of
from benchmarks.published.runs import (
    Refused,
    Unreadable,
    arch_of,
    default_heads,
    measured_s,
    parameters,
    partition_of,
    run_of,
)
from benchmarks.published.simulate import Simulated, ends

ROW = {
    "model": "GPT-2 345M", "params": "0.355e9", "layers": "24", "hidden": "1024", "heads": "16", "seq": "1024",
    "vocab": "50304", "gpu": "A100-80G", "num_gpus": "16", "gpus_per_node": "8", "global_batch": "64",
    "micro_batch": "2", "tp": "2", "pp": "2", "dp": "4", "zero": "0", "recompute": "full", "schedule": "1F1B",
    "measured(value)": "1.5", "unit": "s/iteration", "source": "somewhere", "set": "made-up",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("8x200Gb/s HDR per node", 25),
        ("4x Omni-Path 100Gb/s links per node", 6.25),
        ("25GB/s per GPU (HDR)", 25),
        ("1600Gb/s per node (RoCE)", 25),
        ("NDR 400 Gb/s", 50),
        ("400Gbps", 6.25),
    ],
)
def test_a_network_is_read_as_bytes_of_one_device(text: str, gb_per_s: float) -> None:
    assert bandwidth(text, 8) == pytest.approx(gb_per_s * 1e9)


def test_both_directions_are_halved_and_no_rate_is_none() -> None:
    assert bandwidth("NVLink3 600GB/s bidir", 1) == pytest.approx(300e9)
    assert bandwidth("NVLink3 (4 inter-GPU connects)", 1) is None


@pytest.mark.parametrize(
    ("text", "devices", "found"),
    [
        ("GH200", 64, [("gh200-96gb", 64)]),
        ("A100-40G x8 + V100-16G x8", 16, [("a100-40gb-sxm", 8), ("v100-16gb-sxm", 8)]),
        ("4xA100, 4xT4", 16, [("a100-80gb-sxm", 8), ("t4", 8)]),
        ("A100+V100+T4", 12, [("a100-80gb-sxm", 4), ("v100-16gb-sxm", 4), ("t4", 4)]),
        ("T4 (4x g4dn.12xlarge)", 16, [("t4", 16)]),
        ("DGX-GB300", 256, [("gb300", 256)]),
        ("DGX-B200", 8, [("b200-sxm-180gb", 8)]),
        ("GH-96", 4, [("gh200-96gb", 4)]),
        ("H100-94G", 8, [("h100-94gb-sxm", 8)]),
        ("H100-96G(HBM2e,500W)", 8, [({"preset": "h100-96gb-sxm", "power": "500 W"}, 8)]),
    ],
)
def test_gpus_are_counted_by_kind(text: str, devices: int, found: list[tuple[object, int]]) -> None:
    assert devices_of(text, devices) == found


def test_a_gpu_without_record_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="abacus"):
        devices_of("abacus", 8)
    with pytest.raises(ValueError, match="rtx-a6000"):
        devices_of("rtx-a600x", 8)


def test_a_refusal_has_a_reason() -> None:
    with pytest.raises(AssertionError, match="without a reason"):
        Refused(7, "made-up", " ")


def test_racks_are_one_fast_level_of_equal_parts() -> None:
    row = {**ROW, "gpu": "DGX-GB200", "gpus_per_node": "4 per tray, NVL72 domain", "num_gpus": "256"}
    assert cluster_of(row, 256)["nodes"] == [{"count": 4, "devices": 64, "device": "gb200", "link": "nvlink5"}]
    assert cluster_of(row, 8)["nodes"][0]["devices"] == 8
    assert node_size("8", 256) == 8


def test_embedding_and_loss_count_as_layers_where_that_evens_the_rest() -> None:
    assert ends(126, 16) == {"partition": (7, *[8] * 14, 7)}
    assert ends(126, 128) == {"partition": (0, *[1] * 126, 0)}
    assert ends(96, 12) == ends(126, 1) == ends(125, 16) == {}


def test_a_row_says_its_cluster_model_and_plan() -> None:
    run = run_of(0, ROW)
    assert run.arch == "gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=50304"
    assert run.cluster["nodes"] == [{"count": 2, "devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}]
    stated = {name: run.manual[name] for name in ("tp", "pp", "dp", "recompute", "schedule", "micro_batch")}
    assert stated == {"tp": 2, "pp": 2, "dp": 4, "recompute": "full", "schedule": "1f1b", "micro_batch": 2}
    assert run.measured_s == 1.5


def test_one_node_needs_no_network() -> None:
    assert "network" not in cluster_of({**ROW, "num_gpus": "8"}, 8)


@pytest.mark.parametrize("name", ["layers", "num_gpus", "measured(value)"])
def test_what_has_no_default_must_be_stated(name: str) -> None:
    with pytest.raises(Unreadable):
        run_of(0, {**ROW, name: ""})


@pytest.mark.parametrize(
    ("unit", "value"),
    [
        ("ms/iteration", 1500),
        ("sec/step", 1.5),
        ("seconds", 1.5),
        ("s/iteration (138 TFLOP/s/GPU)", 1.5),
        ("samples/s", 64 / 1.5),
        ("iterations/s", 1 / 1.5),
        ("sequences/s/GPU", 64 / 1.5 / 16),
    ],
)
def test_a_step_in_any_unit(unit: str, value: float) -> None:
    assert measured_s({**ROW, "unit": unit, "measured(value)": str(value)}, 64, 16) == pytest.approx(1.5)


def test_cells_with_words_and_sums_are_numbers() -> None:
    run = run_of(0, {**ROW, "num_gpus": "8+8", "gpus_per_node": "8 (NVSwitch)", "gpu": "A100-40G + A100-80G"})
    assert [(node["count"], node["devices"]) for node in run.cluster["nodes"]] == [(1, 8), (1, 8)]


def test_float32_is_taken_at_its_word() -> None:
    assert run_of(0, {**ROW, "precision": "fp32"}).single
    assert not run_of(0, {**ROW, "precision": "fp16 with fp32 master weights"}).single
    assert not run_of(0, ROW).single


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(Unreadable, match="furlongs"):
        measured_s({**ROW, "unit": "furlongs"}, 64, 16)


def test_units_agree() -> None:
    tokens = {**ROW, "unit": "tokens/s/GPU", "measured(value)": str(64 * 1024 / (1.5 * 16))}
    flops = 64 * 1024 * 24 * 96 * 1024**2 * (1 + 1024 / (6 * 1024) + 50304 / (16 * 24 * 1024))
    rate = {**ROW, "unit": "TFLOP/s/GPU (96Bslh^2)", "measured(value)": str(flops / (1.5 * 16 * 1e12))}
    assert measured_s(tokens, 64, 16) == pytest.approx(1.5)
    assert measured_s(rate, 64, 16) == pytest.approx(1.5)


def test_heads_that_are_not_stated_have_at_least_128_dims() -> None:
    assert default_heads(12288, 8) == 96
    assert default_heads(14400, 8) == 96  # 150 dims each: 112.5 of 128 do not divide
    assert 14400 % default_heads(14400, 8) == 0


def test_a_gated_mlp_is_as_large_as_the_parameters_say() -> None:
    row = {**ROW, "model": "Llama-2-13B", "params": "13.0e9", "hidden": "5120", "layers": "40", "vocab": "32000"}
    assert "ffn=13824" in arch_of(row, 40)


def test_parameters_are_numbers_or_words() -> None:
    assert parameters("22B") == 22e9
    assert parameters("3.5e8") == 3.5e8
    assert parameters("about a lot") is None


def test_a_partition_counts_layers_between_what_stands_at_both_ends() -> None:
    notes = "pipeline partition [0, 9, 15, 21, 30]; and more"
    assert partition_of(notes, 24, 4) == (6, 6, 6, 6)
    assert partition_of("none stated", 24, 4) is None
    assert math.isclose(sum(partition_of("pipeline partition [0, 2, 30]", 24, 2) or ()), 24)


TITAN = {
    **ROW, "gpu": "H100-80G", "source": "pytorch/torchtitan benchmarks/a_2025-06.md", "zero": "3",
    "recompute": "selective-op", "precision": "fp8-rowwise", "notes": "async TP, compile", "pp": "1", "dp": "8",
}  # fmt: skip


def test_what_modern_frameworks_do_is_told_by_source_and_notes() -> None:
    manual = run_of(0, TITAN).manual
    said = {name: manual[name] for name in ("products", "recompute", "pieces", "sp", "loss", "light")}
    wanted = {"products": "fp8-rowwise", "recompute": "operators", "pieces": True, "sp": True, "loss": "fused"}
    assert said == wanted | {"light": True}
    assert not run_of(0, {**TITAN, "notes": "vanilla TP, compile"}).manual["pieces"]
    assert run_of(0, {**TITAN, "source": "pytorch/torchtitan a_202412.md"}).manual["loss"] == "float32"
    assert run_of(0, TITAN).recompute == ()
    assert run_of(0, {**TITAN, "recompute": "selective-layer"}).manual["recompute"] == "alternate"


def test_hosts_of_the_chronicle_wait_for_each_kernel() -> None:
    chronicle = {**ROW, "source": "bigscience-workshop/bigscience chronicles-prequel.md", "notes": "GBS Variations"}
    early, late = run_of(0, chronicle), run_of(0, {**chronicle, "notes": 'section "Rebalancing layers"'})
    assert early.manual["synchronous"] is late.manual["synchronous"] is True
    assert late.manual["slices"]
    assert (early.manual["precision"], late.manual["precision"]) == ("mixed-half-gradients", "mixed-two-gradients")
    assert not run_of(0, {**ROW, "source": "Megatron-LM README"}).manual["synchronous"]


def test_what_tables_leave_out_is_open() -> None:
    row = {
        **TITAN,
        "source": "NVIDIA-NeMo/Megatron-Bridge",
        "recompute": "",
        "zero": "not stated (distributed optimizer)",
    }
    run = run_of(0, row)
    assert run.manual["zero"] == 1
    assert run.recompute == ("none", "elementwise", "full")
    assert "offload" in run_of(0, {**row, "gpu": "DGX-GB200"}).recompute


def test_parts_are_models_of_large_sets() -> None:
    few, many = run_of(0, ROW), run_of(1, {**ROW, "set": "many"})
    assert set(parts_of([few, *[many] * BY_MODEL])) == {"made-up", "many GPT-2 345M"}


def test_an_interval_holds_the_mean() -> None:
    low, high = interval([0.1, -0.1, 0.2, 0.05])
    assert low <= 0.1125 <= high
    assert interval([0.1, -0.1]) == pytest.approx((0.1, 0.1))


def test_a_row_of_a_record_says_of_its_run_what_was_simulated() -> None:
    run = run_of(3, {**ROW, "mem_gb": "40"})
    entry = Simulated(run, 1.8, 0.1, 5e10, fits=False, breakdown={"compute": 1.5, "dp": 0.3}, chosen="vp=1")
    (again,) = recall([run, run_of(4, ROW)], [row_of(entry)])
    one, other = row_of(again), row_of(entry)
    assert one.pop("shares") == pytest.approx(other.pop("shares"))
    assert one == pytest.approx(other)
    assert (again.step_s, again.memory_bytes) == pytest.approx((1.8, 5e10))
