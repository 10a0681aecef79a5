"""Buffers that a step overwrites: moved once where forward runs twice, and read by backward as forward read them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import pytest
import torch
from torch import Tensor, nn

from pdv.emit.emission import shapes_in
from pdv.problem.workload import Recompute
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

WIDTH, LAYERS = 4, 3


@runtime_checkable
class Emitted(Protocol):
    """What is asked of an emitted module."""

    def full_gradients(self) -> dict[str, Tensor]: ...

    def full_state_dict(self) -> dict[str, Tensor]: ...


class Layer(nn.Module):
    """A norm whose statistics move, and a scale that follows what it scales: [n, c, l] -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(self.up(x)).relu()
        return y


class Net(nn.Module):
    """``LAYERS`` layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Follows(nn.Module):
    """A product with a buffer that is overwritten thereafter: [n, c] -> same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y: Tensor = self.b(h * self.size)
        self.size: Tensor = 0.9 * self.size + 0.1 * h.detach().abs().mean(0)
        return y


def train(model: nn.Module, x: Tensor) -> None:
    """Two passes forward, then both backward: the second has moved the buffers by then."""
    (model(x).square() + model(x)).sum().backward()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["net", "follows"])
def test_buffers_move_once_and_backward_reads_old_ones(kind: str, recompute: Recompute) -> None:
    module, x = (Net(), torch.randn(4, WIDTH, 3)) if kind == "net" else (Follows(), torch.randn(4, WIDTH))
    how = {"stages": 1, "micro_batches": 1, "mesh": {"dp": 1}}
    model = plan_pipeline(module, (x,), cluster(1), recompute=recompute, **how).build(device="cpu")
    assert isinstance(model, Emitted)
    train(model, x)
    train(module, x)
    gradients, state = model.full_gradients(), model.full_state_dict()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(state[name], buffer, msg=name)


def test_what_runs_again_and_moves_no_buffer_is_as_it_was() -> None:
    def text(module: nn.Module) -> str:
        how = {"stages": 1, "micro_batches": 1, "mesh": {"dp": 1}}
        plan = plan_pipeline(module, (torch.randn(4, WIDTH, 3),), cluster(1), recompute="full", **how)
        return plan.emission.body(shapes_in(plan.weights))

    assert "checkpoint(block, h, use_reentrant=False, context_fn=restoring(block))" in text(Net())
    assert "use_reentrant=False)" in (still := text(Net().eval()))
    assert "restoring" not in still
