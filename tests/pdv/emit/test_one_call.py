"""Functions that model.py says by torch's own call, with the values and gradients of what the module says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from pdv.plan.package import import_package
from tests.pdv.emit.graphs import of_module
from tests.pdv.worlds import cluster

Function = Callable[[Tensor], Tensor]
IN_ONE: dict[str, tuple[Function, str]] = {
    "leaky": (lambda x: F.leaky_relu(x, 0.2), "F.leaky_relu(x, 0.2)"),
    "by hand": (lambda x: torch.where(x > 0, x, 0.3 * x), "F.leaky_relu(x, 0.3)"),
    "steeper below": (lambda x: F.leaky_relu(x, -1.5), "F.leaky_relu(x, -1.5)"),
    "elu": (lambda x: F.elu(x, 0.7), "F.elu(x, 0.7)"),
    "selu": (F.selu, "F.elu(x, 1.6732632) * 1.050701"),
    "celu": (lambda x: F.celu(x, 0.5), "F.celu(x, 0.5)"),
    "celu, another": (lambda x: F.celu(x, 3.0), "F.celu(x, 3.0)"),
}
APART: dict[str, Function] = {
    "zero above": lambda x: torch.where(x >= 0, x, 0.2 * x),
    "another's sign": lambda x: torch.where(x.flip(1) > 0, x, 0.2 * x),
    "another below": lambda x: torch.where(x > 0, x, 0.2 * x.flip(1)),
    "from one on": lambda x: torch.where(x > 1, x, 0.2 * x),
    "turned": lambda x: F.relu(x) - torch.expm1(x.clamp(max=0.0)),
    "of others": lambda x: F.relu(x) + torch.expm1(x.flip(1).clamp(max=0.0)),
    "within twice": lambda x: F.relu(x) + 0.7 * torch.expm1(2.0 * x.clamp(max=0.0)),
}


class Made(nn.Module):
    """[b, 6] -> [b, 6], through zeros of both signs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def check_equal(model: nn.Module, module: nn.Module) -> None:
    """Values and gradients, at zero too."""
    values = torch.cat([torch.linspace(-3, 3, 17), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 40.0, -40.0, 1.0])])
    x, y = (values.view(4, 6).clone().requires_grad_() for _ in range(2))
    expected = module(y)
    torch.testing.assert_close(model(x), expected)
    weights = torch.arange(1.0, 1.0 + expected.numel()).view_as(expected)
    (model(x) * weights).sum().backward()
    (module(y) * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("name", IN_ONE)
def test_it_is_one_call(name: str, tmp_path: Path) -> None:
    function, said = IN_ONE[name]
    module = Made(function)
    model, text = of_module(module, torch.randn(4, 6), tmp_path / "written")
    assert said in text.replace("x * local(self.weight)", "x")
    check_equal(model, module)


class Groups(nn.Module):
    """[b, 8, 4, 4] -> the same: convolutions and norms of groups, as of denoisers, with some that are another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm, self.each = nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)
        self.plain, self.factors = nn.GroupNorm(4, 16, affine=False), nn.Linear(16, 32)
        for vector in (self.norm.weight, self.norm.bias, self.each.weight, self.each.bias):
            nn.init.normal_(vector)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        scale, shift = self.factors(x.mean((2, 3))).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        x = self.plain(x) * scale + shift
        out: Tensor = self.last(F.leaky_relu(self.each(x), 0.1))
        return out


@pytest.mark.parametrize(("technique", "whole"), [("ddp", 2), ("zero-3", 2), ("megatron", 0)])
def test_groups_that_are_not_put_together_first_are_normed_in_one_call(
    technique: str, whole: int, tmp_path: Path
) -> None:
    module, x = Groups(), torch.randn(8, 8, 4, 4)
    pins = {"mesh": {"a": 2}, "techniques": {"a": technique}}
    plan = pdv.optimize(module, (x,), cluster=cluster(2), pins=pins)
    assert "outputs, gradients and buffers within" in plan.document["run"]["statement"]
    package = plan.save(tmp_path / "groups")
    text = (package / "model.py").read_text()
    assert text.count("F.group_norm(") == whole
    assert text.count("F.layer_norm(") == 3 - whole
    assert text.count("F.leaky_relu(") == 1
    model = import_package(package).build(device="cpu")
    torch.testing.assert_close(model(x), module(x))
    torch.testing.assert_close(dict(model.full_state_dict()), dict(module.state_dict()))


def padded(x: Tensor) -> Tensor:
    """Two dims at once, a third by another number, and one that is joined of constants by hand."""
    x = F.pad(F.pad(x.unflatten(1, (2, 3)), (1, 2, 0, 3)), (1, 0), value=-2.0)
    before, behind = (torch.full((len(x), x.size(1), count), 0.5) for count in (2, 1))
    return torch.cat([before, x, behind], 2).flatten(1)


def joined(x: Tensor) -> Tensor:
    """What is no padding: two values with zeros between, numbers that differ, and nothing but constants."""
    x = torch.cat([x, torch.zeros(len(x), 1), 2 * x], 1)
    x = torch.cat([torch.zeros(len(x), 1), x, torch.ones(len(x), 1)], 1)
    return torch.cat([torch.tensor([[1.0, 2.0]]).expand(len(x), -1), x], 1)


@pytest.mark.parametrize(("function", "pads"), [(padded, 3), (joined, 0)])
def test_constants_around_a_value_are_its_padding(
    function: Function, pads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Made(function)
    model, text = of_module(module, torch.randn(4, 6), tmp_path / "written")
    assert text.count("F.pad(") == pads
    assert text.count("torch.cat(") == 3 * (not pads)
    if pads:
        assert all(said in text for said in ("(1, 2, 0, 3))", "(1, 0), value=-2.0)", "(2, 1), value=0.5)"))
    check_equal(model, module)


class Sloped(nn.Module):
    """[b, 6] -> [b, 6]: one slope of all, then one for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.each = nn.PReLU(), nn.PReLU(3, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.each(self.one(x - 0.25).view(-1, 3, 2)).flatten(1)
        return out


@pytest.mark.parametrize("technique", ["ddp", "zero-3"])
def test_slopes_that_are_trained(technique: str, tmp_path: Path) -> None:
    module, x = Sloped(), torch.randn(8, 6)
    plan = pdv.optimize(module, (x,), cluster=cluster(2), pins={"mesh": {"a": 2}, "techniques": {"a": technique}})
    package = plan.save(tmp_path / "sloped")
    assert (package / "model.py").read_text().count("F.prelu(") == 2
    model = import_package(package).build(device="cpu")
    check_equal(model, module)
    for name, grad in model.full_gradients().items():
        torch.testing.assert_close(grad, dict(module.named_parameters())[name].grad)


@pytest.mark.parametrize("name", APART)
def test_what_is_another_function_is_left(name: str, tmp_path: Path) -> None:
    module = Made(APART[name])
    model, text = of_module(module, torch.randn(4, 6), tmp_path / "written")
    assert not any(call in text for call in ("leaky_relu", "F.elu", "F.celu"))
    check_equal(model, module)
