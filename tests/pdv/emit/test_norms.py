"""Batch norms in model.py: torch's own call where that does the same, with what follows their statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from tests.pdv.emit.graphs import build, emitted, floats

ALONE = Mesh.of(dp=1)


def normed(batch: int) -> Graph:
    """relu(x) normalised by the batch's statistics, of which a buffer keeps the mean."""
    k = Builder()
    x = k.relu(k.input("x", floats(batch, 4, 3, 3)))
    mean = k.channel_mean(x)
    variance = k.channel_variance(x, mean)
    y = k.batch_norm(x, mean, variance, k.param("norm.weight", floats(4)), k.param("norm.bias", floats(4)), eps=1e-5)
    running = k.param("norm.running_mean", floats(4), trainable=False)
    return k.graph({"y": y}, {"norm.running_mean": k.add(k.scale(running, factor=0.9), k.scale(mean, factor=0.1))})


def test_a_norm_by_all_points_is_one_call(tmp_path: Path) -> None:
    text = emitted(normed(4), ALONE, tmp_path / "normed_pdv")
    assert "batch_norm_of_all(h, local(self.norm_weight), local(self.norm_bias), 1e-05)" in text
    assert "channel_mean" not in text
    model, x = build(tmp_path / "normed_pdv"), torch.randn(4, 4, 3, 3)
    before = model.norm_running_mean.clone()
    weight, bias = model.norm_weight, model.norm_bias
    expected = torch.nn.functional.batch_norm(x.relu(), None, None, weight, bias, training=True)
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert torch.allclose(model.norm_running_mean, 0.9 * before + 0.1 * x.relu().mean((0, 2, 3)), atol=1e-6)


def tracked(*, unbiased: bool = True, momentum: float = 0.25, returned: bool = False, kept: float = 0.75) -> Graph:
    """A norm by the batch's statistics whose buffers follow both, as torch's own does if ``unbiased``."""
    k = Builder()
    x = k.relu(k.input("x", floats(4, 4, 3, 3)))
    mean = k.channel_mean(x)
    variance = k.channel_variance(x, mean)
    y = k.batch_norm(x, mean, variance, k.param("norm.weight", floats(4)), k.param("norm.bias", floats(4)), eps=1e-3)
    told = k.unbiased(variance, points=36) if unbiased else variance
    updates = {
        name: k.add(k.scale(k.param(name, floats(4), trainable=False), factor=kept), k.scale(value, factor=momentum))
        for name, value in (("norm.mean", mean), ("norm.variance", told))
    }
    return k.graph({"y": y} | ({"moved": updates["norm.mean"]} if returned else {}), updates)


def test_a_norm_with_running_statistics_is_torchs_own_call(tmp_path: Path) -> None:
    text = emitted(tracked(), ALONE, tmp_path / "tracked_pdv")
    weights = "local(self.norm_weight), local(self.norm_bias)"
    assert f"self.norm_variance, {weights}, training=True, momentum=0.25, eps=0.001" in " ".join(text.split())
    assert "overwrite" not in text
    assert "channel_mean" not in text
    model, inputs = build(tmp_path / "tracked_pdv"), [torch.randn(4, 4, 3, 3) for _ in range(2)]
    expected = {name: model.full_state_dict()[f"norm.{name}"].double() for name in ("mean", "variance")}
    outputs = [model(x) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        points = x.relu().double().transpose(0, 1).flatten(1)
        expected["mean"] = 0.75 * expected["mean"] + 0.25 * points.mean(1)
        expected["variance"] = 0.75 * expected["variance"] + 0.25 * points.var(1)
        z = torch.nn.functional.batch_norm(
            x.relu(), None, None, model.norm_weight, model.norm_bias, training=True, eps=1e-3
        )
        assert torch.allclose(y, z, atol=1e-6)
    for name, value in expected.items():
        assert torch.allclose(model.full_state_dict()[f"norm.{name}"].double(), value, atol=1e-6)
    torch.autograd.backward(torch.stack(outputs).square().sum())  # through calls whose buffers moved again since
    assert model.norm_weight.grad is not None


@pytest.mark.parametrize(
    "graph", [tracked(unbiased=False), tracked(returned=True), tracked(kept=0.5)], ids=["biased", "returned", "kept"]
)
def test_running_statistics_that_move_otherwise_are_written_out(graph: Graph, tmp_path: Path) -> None:
    text = emitted(graph, ALONE, tmp_path / "written_pdv")
    assert "batch_norm_of_all" in text
    assert text.count("overwrite(") == 2


def test_a_norm_by_stored_statistics_is_one_call(tmp_path: Path) -> None:
    k = Builder()
    x = k.relu(k.input("x", floats(4, 4, 3, 3)))
    mean, variance = (k.param(f"norm.{name}", floats(4), trainable=False) for name in ("mean", "variance"))
    y = k.batch_norm(
        x, mean, k.exp(variance), k.param("norm.weight", floats(4)), k.param("norm.bias", floats(4)), eps=1e-3
    )
    text = emitted(k.graph({"y": y}), ALONE, tmp_path / "stored_pdv")
    assert ".operators import fused_batch_norm\n" in text
    model, inputs = build(tmp_path / "stored_pdv"), torch.randn(4, 4, 3, 3, requires_grad=True)
    z = (inputs.relu() - model.norm_mean.view(-1, 1, 1)) / (model.norm_variance.exp() + 1e-3).sqrt().view(-1, 1, 1)
    expected = z * model.norm_weight.view(-1, 1, 1) + model.norm_bias.view(-1, 1, 1)
    found = model(inputs)
    assert torch.allclose(found, expected, atol=1e-5)
    leaves = (inputs, model.norm_weight, model.norm_bias)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (found, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
