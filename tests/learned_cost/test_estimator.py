"""Costs by kernels: sources in order of trust, fallbacks that say why, one batch for what is new, equal answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from ir.builder import Builder
from ir.cost_model import NOTHING, Query, Work
from ir.graph import Node
from ir.types import DType, TensorType
from learned_cost.data.kernel import DIMS, Kernel, Subgraph
from learned_cost.data.measured import Measurements, Row, sizes_of
from learned_cost.describe import backward_kernels, forward_kernels
from learned_cost.devices.device import DeviceRecord, record
from learned_cost.estimator import NO_WEIGHTS, OUT_OF_RANGE, UNKNOWN_DEVICE_STD, KernelCosts, Place
from learned_cost.evaluation.evaluate import Answer
from learned_cost.kernels.predict import Predictor
from pdv.cluster.presets import DEVICES
from pdv.cost.compute import ComputeModel
from tests.learned_cost.measurements import kernel_columns, write

ANALYTIC = ComputeModel((DEVICES["a100-80gb-sxm"],))
A100, T4 = record("a100-80gb-sxm"), record("t4")


@dataclass
class Halves:
    """A model by formula: a microsecond and half of what the peak rate allows; knows no attention."""

    asked: list[int] = field(default_factory=list)

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        self.asked.append(len(subgraphs))
        seconds = [1e-6 + 2 * subgraph.flops / device.peak_flops["fp32"] for subgraph in subgraphs]
        known = [not subgraph.kernels[0].op.startswith("attn") for subgraph in subgraphs]
        return Answer(np.log(seconds), np.full(len(seconds), 0.1), np.array(known))


def costs(
    *places: Place, predictor: Halves | None = None, measured: Measurements | None = None, blind: bool = False
) -> KernelCosts:
    model = None if blind else predictor or Halves()
    return KernelCosts(places or (Place(A100),), ANALYTIC, "test", model, measured)


def query(node: Node, *, train: bool = True) -> Query:
    types = tuple(operand.type for operand in node.operands)
    return Query(node.op, node.loops, types, node.type, node.attrs, (True,) * len(types) if train else None)


def f32(*shape: int) -> TensorType:
    return TensorType(shape, DType.F32)


def linear(rows: int = 64) -> Node:
    k = Builder()
    return k.linear(k.input("x", f32(rows, 32)), k.param("w", f32(24, 32)))


def attention() -> Node:
    k = Builder()
    q, key, value = (k.input(name, f32(2, 4, 16, 8)) for name in "qkv")
    return k.attention(q, key, value, causal=True, scale=1.0)


def kernels(asked: Query) -> tuple[Kernel, ...]:
    parts = asked.op, asked.loops, asked.operands, asked.result, asked.attrs
    backward = () if asked.wanted is None else backward_kernels(*parts, asked.wanted)
    return (*forward_kernels(*parts), *backward)


def row(kernel: Kernel) -> tuple[object, ...]:
    dims = sizes_of({name: kernel.dims[name] for name in DIMS if name in kernel.dims}, kernel.flops)
    return A100.name, kernel.op, kernel.dtype, kernel.direction, kernel.stack, dims


def test_new_kernels_are_predicted_in_one_batch_and_known_ones_not_again() -> None:
    predictor = Halves()
    model = costs(predictor=predictor)
    first = model.nodes([query(linear(rows)) for rows in (16, 32, 64)])
    assert predictor.asked == [9]  # forward, and the gradients of x and w
    assert model.nodes([query(linear(64)), query(linear(16))]) == [first[2], first[0]]
    assert predictor.asked == [9]


def test_a_price_is_the_sum_of_its_kernels() -> None:
    asked = query(linear())
    (found,) = costs().nodes([asked])
    seconds = [1e-6 + 2 * kernel.flops / A100.peak_flops["fp32"] for kernel in kernels(asked)]
    assert found.forward.mean_s == pytest.approx(seconds[0], rel=1e-3)
    assert found.backward.mean_s == pytest.approx(seconds[1] + seconds[2], rel=1e-3)
    assert found.forward.std_s == pytest.approx(0.1 * seconds[0], rel=1e-3)
    assert (found.forward.source, found.backward.source) == ("learned", "learned")


def test_inference_has_no_backward() -> None:
    assert costs().nodes([query(linear(), train=False)])[0].backward == NOTHING


def test_out_of_range_falls_back_to_the_roofline_and_says_so() -> None:
    (found,) = costs().nodes([query(attention(), train=False)])
    (kernel,) = kernels(query(attention(), train=False))
    assert found.forward.source == "analytic"
    assert found.forward.why == OUT_OF_RANGE
    assert found.forward.mean_s == ANALYTIC.seconds(Work(kernel.flops, kernel.bytes, 1), DType.F32)


def test_without_weights_all_is_analytic() -> None:
    (found,) = costs(blind=True).nodes([query(linear())])
    assert {found.forward.why, found.backward.why} == {NO_WEIGHTS}


def test_a_measurement_of_the_very_kernel_comes_first() -> None:
    asked = query(linear())
    forward, of_x, _ = kernels(asked)
    measured = Measurements({row(forward): as_row(forward, 5e-4), row(of_x): as_row(of_x, 7e-4)}, "mine", "0" * 64)
    (found,) = costs(measured=measured).nodes([asked])
    assert (found.forward.mean_s, found.forward.std_s, found.forward.source) == (5e-4, 1e-5, "measured")
    assert found.backward.source == "learned"  # one of its two kernels was not measured
    assert found.backward.mean_s > 7e-4
    (other,) = costs(Place(T4), measured=measured).nodes([asked])
    assert other.forward.source == "learned"  # it was measured on another device


def as_row(kernel: Kernel, seconds: float, **sizes: int) -> Row:
    dims = kernel.dims | sizes
    return Row(tuple(dims.items()), kernel.flops, kernel.bytes, seconds, 1e-5)


def test_what_is_larger_than_all_measured_ones_runs_at_the_rate_of_the_nearest() -> None:
    """And what is as large, or of too few, is foretold by the weights."""
    small, large = kernels(query(linear(48)))[0], kernels(query(linear(4096)))[0]
    rows = {(*row(small)[:-1], number): as_row(small, 1e-3, m=48 - number) for number in range(5)}
    measured = Measurements(rows, "mine", "0" * 64)
    place = record(A100.name)
    assert measured.beyond(small, place) is None
    found = measured.beyond(large, place)
    assert found is not None
    assert found[0] == pytest.approx(1e-3 * large.flops / small.flops)
    assert Measurements(dict(list(rows.items())[:4]), "mine", "0" * 64).beyond(large, place) is None
    core = record("cpu-core")
    there = Measurements({(core.name, *key[1:]): value for key, value in rows.items()}, "mine", "0" * 64)
    asked = [query(linear(4096), train=False)]
    (estimate,) = costs(Place(core), measured=there).nodes(asked)
    assert (estimate.forward.source, estimate.forward.mean_s) == ("learned", pytest.approx(found[0], rel=1e-3))
    assert costs(measured=measured).nodes(asked) == costs().nodes(asked)  # weights know a GPU's kernels of every size
    idle = Measurements({key: replace(value, seconds=0.0) for key, value in rows.items()}, "mine", "0" * 64)
    assert idle.beyond(large, place) is None  # a rate of no time is none


def test_a_measured_lookup_is_of_a_table_as_large() -> None:
    """A profile's sizes do not say how large the table was whose gradient is written."""
    kernel = Kernel("embedding", "index", "fp32", {"m": 128, "n": 64}, (8192, 1, 1, 1), 0.0, 1e6, "backward")
    measured = Measurements({row(kernel): as_row(kernel, 1e-4)}, "mine", "0" * 64)
    assert measured.seconds(kernel, record(A100.name)) == (1e-4, 1e-5)
    assert measured.seconds(replace(kernel, bytes=1e7), record(A100.name)) is None


def test_the_slowest_device_counts() -> None:
    (both,) = costs(Place(A100), Place(T4)).nodes([query(linear(4096))])
    (slow,) = costs(Place(T4)).nodes([query(linear(4096))])
    assert both == slow


def test_a_share_of_a_device_takes_longer() -> None:
    (whole,) = costs().nodes([query(linear())])
    (half,) = costs(Place(A100, pace=0.5)).nodes([query(linear())])
    assert half.forward.mean_s == pytest.approx(2 * whole.forward.mean_s, rel=1e-3)


def test_an_unknown_device_is_less_sure() -> None:
    (found,) = costs(Place(A100, known=False)).nodes([query(linear())])
    assert found.forward.std_s / found.forward.mean_s == pytest.approx(math.hypot(0.1, UNKNOWN_DEVICE_STD), rel=1e-3)


def test_answers_do_not_depend_on_what_else_is_asked() -> None:
    alone = costs().nodes([query(linear(48))])
    among = costs().nodes([query(linear(rows)) for rows in range(1, 65)])
    assert alone[0] == among[47]


def test_shipped_weights_answer_alone_as_among_others() -> None:
    """To far more digits than are kept of an answer, so that none turns; in single precision 1 % of kernels did."""
    weights = Predictor.load()
    asked = [Subgraph.of(kernel) for n in range(1, 65) for kernel in kernels(query(linear(n)))]
    together = weights.predict(asked, A100)
    alone = [weights.predict([one], A100) for one in asked]
    for name in ("mean_log_s", "std_log"):
        each = np.concatenate([getattr(answer, name) for answer in alone])
        np.testing.assert_allclose(each, getattr(together, name), rtol=1e-12, atol=0)


def test_the_loss_counts_what_a_device_holds_of_the_outputs() -> None:
    model = costs()
    assert model.outside([f32(8, 1024)]).mean_s > model.outside([f32(4, 1024)]).mean_s > 0.0
    assert model.outside([]) == NOTHING


def test_parameters_cost_a_cpu_what_was_measured_and_a_gpu_what_the_roofline_says() -> None:
    assert costs().optimizer(1e6) == ANALYTIC.optimizer(1e6)
    core = Place(record("cpu-core"))
    one, half = costs(core).optimizer(1e6), costs(Place(core.record, pace=0.5)).optimizer(1e6)
    assert one.source == "measured"
    assert one.mean_s > costs(core).optimizer(0.0).mean_s > 0.0
    assert half.mean_s == pytest.approx(2 * one.mean_s)


def test_measured_collectives_are_of_one_kind_of_device_and_as_many() -> None:
    rows = (("all_reduce", 1024.0, 1e-4),)
    measured = Measurements({}, "mine", "0" * 64, {(A100.name, "NVLink3+NVSwitch", 2, 1.0): rows})
    assert costs(measured=measured).move("NVLink3+NVSwitch", 2, 1.0) == rows
    assert costs(measured=measured).move("NVLink3+NVSwitch", 4, 1.0) == ()
    assert costs(measured=measured).move("NVLink3+NVSwitch", 2, 0.5) == ()
    assert costs(Place(A100), Place(T4), measured=measured).move("NVLink3+NVSwitch", 2, 1.0) == ()
    assert costs().move("NVLink3+NVSwitch", 2, 1.0) == ()


def test_a_profile_is_read_as_its_rows_are_asked(tmp_path: Path) -> None:
    columns = kernel_columns(4) | {"direction": ["forward"] * 4, "stack": ["torch"] * 4, "l2": ["warm"] * 3 + ["cold"]}
    read = Measurements.read([write(write(tmp_path, "kernels", columns), "collectives")], "mine")
    assert len(read.rows) == 3  # what was measured on cold caches is left out
    kernel = Kernel(
        str(columns["op"][0]), "contraction", "fp32",
        {name: int(columns[name][0]) for name in ("b", "m", "n", "k") if columns[name][0] is not None}, (1, 1, 1, 1),
        0.0, 0.0,
    )  # fmt: skip
    seconds, _ = read.seconds(kernel, record(str(columns["gpu"][0]))) or (0.0, 0.0)
    assert seconds == pytest.approx(float(columns["latency_us"][0]) * 1e-6)
    assert set(read.collectives) == {("A100-SXM4-80GB", "NVLink3+NVSwitch", 8, 1.0)}


def test_windows_of_groups_are_no_whole_ones() -> None:
    """Of the same sizes, with a part of the arithmetic: measured apart, and asked for apart."""
    k = Builder()
    image = k.input("x", f32(8, 64, 16, 16))
    weights = {groups: k.param(f"w{groups}", f32(64, 64 // groups, 3, 3)) for groups in (1, 64)}
    nodes = [k.conv2d(image, weight, padding=(1, 1), groups=groups) for groups, weight in weights.items()]
    ((whole,), (of_groups,)) = (kernels(Query.of(node, node.loops, train=False)) for node in nodes)
    assert whole.dims == of_groups.dims
    measured = Measurements({row(whole): Row((), whole.flops, 1.0, 1e-3, 0.0)}, "test", "")
    assert measured.seconds(whole, A100) == (1e-3, 0.0)
    assert measured.seconds(of_groups, A100) is None


def test_replayed_calls_answer_for_a_gpu_and_for_no_cpu() -> None:
    (kernel,) = kernels(query(linear(), train=False))
    gpu, cpu = A100, record("cpu-core")
    rows = {}
    for device, stack, seconds in ((gpu, "cudagraph", 1e-6), (gpu, "torch", 9e-6), (cpu, "cudagraph", 1e-6)):
        rows[device.name, *row(replace(kernel, stack=stack))[1:]] = Row((), 1.0, 1.0, seconds, 0.0)
    measured = Measurements(rows, "test", "")
    assert measured.seconds(kernel, gpu) == (1e-6, 0.0)
    assert measured.seconds(kernel, cpu) is None
    alone = Measurements({row(kernel): Row((), 1.0, 1.0, 9e-6, 0.0)}, "test", "")
    assert alone.seconds(kernel, gpu) == (9e-6, 0.0)


def test_devices_are_priced_by_themselves_too() -> None:
    """All together by the slowest, a part of them by its own slowest; what is of none of them is priced as all."""
    fast, slow = DEVICES["a100-80gb-sxm"], replace(DEVICES["a100-80gb-sxm"], share=0.25)
    both = KernelCosts((Place(A100), Place(A100, pace=0.25)), ComputeModel((fast, slow)), "test", Halves())
    whole, quick, late = (
        model.nodes([query(linear())])[0].forward for model in (both, both.on([fast]), both.on([slow]))
    )
    assert whole.mean_s == late.mean_s == pytest.approx(4 * quick.mean_s)
    assert both.on([fast]) is both.on([fast])
    assert len({both.identity, both.on([fast]).identity, both.on([slow]).identity}) == 3
    assert both.on([fast, slow]) is both
    assert both.on([DEVICES["t4"]]) is both
