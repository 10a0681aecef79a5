"""Losses, gates and layers that torch takes apart by values, or that draw inside: forward and backward as torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.filterwarnings("ignore:no declaration of")


def compare(module: nn.Module, *inputs: Tensor) -> Any:  # Any: an emitted model
    """The program of one process computes what the module does, and its gradients."""
    model = pdv.optimize(module, inputs, cluster=cluster(2)).build("cpu")
    found, wanted = model(*inputs), module(*inputs)
    assert torch.allclose(found, wanted, atol=1e-5)
    weights = torch.randn_like(wanted)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    gradients = model.full_gradients()
    for name, parameter in module.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4), name
    return model


class Gaussian(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.variance = nn.Linear(8, 4), nn.Linear(8, options.pop("wide", 4))
        self.loss = nn.GaussianNLLLoss(eps=0.1, **options)  # some variances are below

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        variance: Tensor = self.variance(x).square().squeeze(-1)
        return self.loss(self.mean(x), y, variance)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"full": True, "reduction": "none"}, {"wide": 1, "reduction": "sum"}], ids=str)
def test_gaussian_loss(options: dict[str, Any]) -> None:
    before = F.gaussian_nll_loss.__code__
    compare(Gaussian(**options), torch.randn(4, 8), torch.randn(4, 4))
    assert F.gaussian_nll_loss.__code__ is before


def test_gaussian_loss_of_a_number() -> None:
    class Fixed(Gaussian):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.gaussian_nll_loss(self.mean(x), y, 0.5) + 0 * self.variance(x).sum()

    compare(Fixed(), torch.randn(4, 8), torch.randn(4, 4))


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y, places = self.pool(self.conv(x))
        return self.unpool(y * 2, places)  # type: ignore[no-any-return]


def test_unpooling() -> None:
    compare(Unpooled(), torch.randn(2, 3, 8, 8))


def test_slopes_drawn_in_training_and_their_mean_in_evaluation() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.3)), torch.randn(64, 8)
    compare(module.eval(), x)
    model = pdv.optimize(module.train(), (x,), cluster=cluster(2)).build("cpu")
    with torch.no_grad():
        y, before = model(x), module[0](x)
    slopes = (y / before)[before < 0]
    assert torch.equal(y[before > 0], before[before > 0])
    assert 0.1 <= slopes.min() < 0.12
    assert 0.28 < slopes.max() <= 0.3
    with pytest.raises(RuntimeError, match="drawn-in-training"):
        model.eval()(x)


class Gate(nn.Module):
    """A mixture of experts, of which each row meets two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.gate = kind, nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        values, places = scores.topk(2, -1)
        match self.kind:
            case "softmax of the largest":
                shares = torch.zeros_like(scores).scatter(-1, places, values.softmax(-1))
            case "others hidden":
                shares = torch.full_like(scores, float("-inf")).scatter(-1, places, values).softmax(-1)
            case _:
                shares = scores.softmax(-1) * torch.zeros_like(scores).scatter(-1, places, 1.0)
        return torch.stack([shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]).sum(0)


@pytest.mark.parametrize("kind", ["softmax of the largest", "others hidden", "a mask of the largest"])
def test_gates_of_files(kind: str, tmp_path: Path) -> None:
    module, x, path = Gate(kind).eval(), torch.randn(4, 8), tmp_path / "gate.onnx"
    torch.onnx.export(module, (x,), path, dynamo=True, verbose=False, optimize=False)
    model = pdv.optimize(path, cluster=cluster(2)).build("cpu")
    found, wanted = model(x), module(x)
    assert torch.allclose(found, wanted, atol=1e-5)
    found.square().sum().backward()
    wanted.square().sum().backward()
    gradients = model.full_gradients()
    for name, parameter in module.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-4), name
