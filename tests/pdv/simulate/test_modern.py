"""Narrow formats, moves in pieces, gathers beside forward, what is recomputed: each against what it says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ir.errors import UsageError
from ir.ops import OPERATORS
from ir.types import DType
from pdv.cluster import Device, load_cluster
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.manual.configuration import configuration, workload
from pdv.memory import StepMemory, step_memory
from pdv.prices import cost_model
from pdv.problem.formats import FORMATS
from pdv.problem.recomputation import kept_operators, run_again
from pdv.problem.workload import Workload
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.result import Simulation
from pdv.simulate.step import simulate

MODEL = "llama:layers=3,hidden=4096,heads=32,kv_heads=8,ffn=14336,seq=8192,vocab=32000"


@cache
def learned(device: Device) -> Any:  # Any: a cost model
    return cost_model("learned", [device])


def made(text: str, device: str = "h100-80gb-sxm", devices: int = 8) -> Workload:
    given = configuration(text)
    cluster = load_cluster({"nodes": [{"devices": devices, "device": device, "link": "nvlink4"}]})
    described = arch(MODEL)
    return workload(
        lambda batch: graph(described, batch, DType.BF16, tp=given.tp), given, cluster, learned, stage_links
    )


def step(text: str, device: str = "h100-80gb-sxm") -> Simulation:
    return simulate(made(text, device), draws=0)


def memory(text: str) -> StepMemory:
    return step_memory(made(text))


@pytest.mark.parametrize("name", FORMATS)
def test_products_in_narrow_formats_are_faster_and_cost_casts(name: str) -> None:
    plain, narrow = step("dp=8", "b200-sxm-180gb"), step(f"dp=8,products={name}", "b200-sxm-180gb")
    assert 0.4 * plain.totals["compute"] < narrow.totals["compute"] < plain.totals["compute"]
    assert narrow.totals["dp"] == pytest.approx(plain.totals["dp"], rel=0.2)


def test_finer_scales_cost_more() -> None:
    assert step("dp=8,products=fp8-rowwise").step_s > step("dp=8,products=fp8").step_s


def test_a_precision_of_eight_bits_is_a_format_of_products() -> None:
    assert configuration("dp=8,precision=fp8") == configuration("dp=8,products=fp8")
    assert configuration("products=mxfp8,precision=mixed-half-gradients").precision == "mixed-half-gradients"


def test_a_device_without_units_for_a_format_is_refused() -> None:
    with pytest.raises(UsageError, match=r"h100-80gb-sxm has no units for fp4.*own, fp8"):
        made("dp=8,products=nvfp4")
    with pytest.raises(UsageError, match=r"Allowed: own\."):
        made("dp=8,products=fp8", "a100-80gb-sxm")


def test_pieces_hide_part_of_what_tensor_parallelism_moves() -> None:
    whole, pieces = step("tp=8,sp=1"), step("tp=8,sp=1,pieces=1")
    assert 0.125 * whole.totals["tp"] <= pieces.totals["tp"] < 0.8 * whole.totals["tp"]
    assert pieces.totals["compute"] == pytest.approx(whole.totals["compute"])
    assert CALIBRATION.pieces_hidden < 1.0


def test_factors_are_sent_as_they_are_cast_where_one_scale_holds_for_all_pieces() -> None:
    plain = step("tp=8,sp=1").totals["tp"]
    assert step("tp=8,sp=1,products=fp8").totals["tp"] < 0.95 * plain
    assert step("tp=8,sp=1,products=fp8-rowwise").totals["tp"] == pytest.approx(plain)


def test_gathers_of_cut_optimizers_hide_beside_the_next_forward() -> None:
    waited, beside = step("dp=8,zero=1,batch=64"), step("dp=8,zero=1,weights=1,batch=64")
    assert beside.totals["dp"] < waited.totals["dp"]
    assert beside.totals["compute"] == pytest.approx(waited.totals["compute"])


def test_light_collectives_slow_compute_less() -> None:
    assert step("dp=8,zero=3,light=1").step_s < step("dp=8,zero=3").step_s


def test_weights_that_rest_narrow_take_half() -> None:
    wide, narrow = memory("dp=8,zero=1,products=fp8"), memory("dp=8,zero=1,products=fp8,cast_weights=1")
    outside = 2 * 2 * 32000 * 4096  # embedding and head stay in bfloat16; so do norms, and tables of angles
    whole = wide.worst.by_kind["weights"]
    assert narrow.worst.by_kind["weights"] == pytest.approx(outside + (whole - outside) / 2, rel=3e-3)


def test_a_loss_in_float32_holds_most_and_a_fused_one_least() -> None:
    eager, in_place, fused = (memory(f"dp=8,loss={kind}").worst.peak_bytes for kind in ("float32", "in-place", "fused"))
    assert eager > in_place > fused


def test_a_loss_over_a_cut_vocabulary_is_not_fused() -> None:
    assert memory("tp=8,loss=fused").worst.peak_bytes == memory("tp=8,loss=in-place").worst.peak_bytes


OPS = [OPERATORS[name] for name in ("rms_norm", "linear", "linear", "linear", "linear", "add", "silu", "mul", "linear")]


def test_what_selective_recomputation_keeps_and_runs_again() -> None:
    assert kept_operators(OPS, "operators") == {1, 3, 8}
    assert run_again(OPS, "operators") == {0, 2, 4, 5, 6, 7}
    assert kept_operators(OPS, "elementwise") == {1, 2, 3, 8}  # the fourth product is only added
    assert run_again(OPS, "elementwise") == run_again(OPS, "offload") == {0, 5, 6, 7}
    assert run_again(OPS, "none") == frozenset()
    assert run_again(OPS, "full") == set(range(len(OPS)))


def test_every_second_layer_runs_again() -> None:
    """One of three; their inputs alone are kept of it."""
    whole, each = (step(f"dp=8,recompute={kind}").totals["recomputation"] for kind in ("full", "alternate"))
    assert each == pytest.approx(whole / 3, rel=1e-6)
    none, some, least = (memory(f"dp=8,recompute={kind}").worst.peak_bytes for kind in ("none", "alternate", "full"))
    assert least < some < none


def test_more_recomputation_is_slower_and_holds_less() -> None:
    kinds = ("none", "elementwise", "operators", "full")
    times = [step(f"dp=8,zero=3,fused=1,recompute={kind}").step_s for kind in kinds]
    sizes = [memory(f"dp=8,zero=3,fused=1,recompute={kind}").worst.peak_bytes for kind in kinds]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert memory("dp=8,zero=3,fused=1,recompute=offload").worst.peak_bytes == pytest.approx(sizes[-1], rel=0.02)


def test_analytic_prices_know_formats_by_their_rate() -> None:
    work = made("dp=8,products=fp8", "b200-sxm-180gb")
    of = lambda kind: simulate(  # noqa: E731
        Workload(
            work.problem, work.pcg, work.cluster, work.stages, work.execution, work.axes,
            lambda device: cost_model(kind, [device]),
        ),
        draws=0,
    ).totals["compute"]  # fmt: skip
    assert of("analytic") == pytest.approx(of("learned"), rel=0.5)
