"""What a host issues of an emitted program: calls, not kernels, and none for what another call computes."""

from __future__ import annotations

from collections import Counter

from benchmarks.models import build
from ir.cost_model import backward_work
from ir.graph import Graph
from pdv.cluster.presets import DEVICES
from pdv.frontend import load_program
from pdv.pcg.calls import issued
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.price import InStepDevice


def calls(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if not node.is_leaf:
            types = [operand.type for operand in node.operands]
            behind = backward_work(node.op, node.loops, types, node.type, node.wanted).kernels if node.needs_grad else 0
            forward, backward = issued(node, node.loops, behind)
            assert backward in {0, forward}
            found[node.op.name] += forward
    return +found


def test_a_norm_of_a_batch_is_one_call() -> None:
    module, inputs = build("resnet50", "small")
    graph = load_program(module, inputs).graph
    found, norms = calls(graph), sum(node.op.name == "batch_norm" for node in graph.nodes)
    assert norms == found["batch_norm"] > 0
    assert not {"channel_mean", "channel_variance", "scale", "unbiased"} & set(found)
    assert found["add"] < norms  # residuals, and nothing of running statistics


def test_a_bias_is_within_its_product() -> None:
    module, inputs = build("gpt2", "small")
    graph = load_program(module, inputs).graph
    layers = sum(node.op.name == "attention" for node in graph.nodes)
    assert calls(graph)["add"] == 2 * layers + 1  # residuals, and the positions


def test_rows_of_no_multiple_of_16_bytes_are_slower() -> None:
    inside = InStepDevice(DEVICES["h100-80gb-sxm"], CALIBRATION)
    assert [inside.misaligned(size) for size in (50304, 50258, 50257)] == [
        1.0, CALIBRATION.half_aligned, CALIBRATION.unaligned,
    ]  # fmt: skip
