"""What a host issues of an emitted program: calls, not kernels, and none for what another call computes."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.models import build
from ir.builder import Builder
from ir.cost_model import backward_work
from ir.graph import Graph
from ir.types import DType, TensorType
from pdv.cluster.presets import DEVICES
from pdv.frontend import load_program
from pdv.pcg.calls import issued
from pdv.pcg.norms import FIXED_MOST, is_within_norm
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


@pytest.mark.parametrize("length", [30, 3000])
def test_long_chains_of_vectors_are_looked_at_once(length: int) -> None:
    """Each value is read twice: of 30 there are 2**30 ways down, of 3,000 more than a stack has frames."""
    k = Builder()
    value = k.param("w", TensorType((8,), DType.F32), trainable=False)
    for _ in range(length):
        value = k.add(value, value)
    assert is_within_norm(value) == (length < FIXED_MOST)


def test_rows_of_no_multiple_of_16_bytes_are_slower() -> None:
    inside = InStepDevice(DEVICES["h100-80gb-sxm"], CALIBRATION)
    assert [inside.misaligned(size) for size in (50304, 50258, 50257)] == [
        1.0, CALIBRATION.half_aligned, CALIBRATION.unaligned,
    ]  # fmt: skip
