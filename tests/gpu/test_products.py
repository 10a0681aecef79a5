"""Products in float8 by the device's own kernels: what the same casts give in float32; whole programs too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from benchmarks.measured.devices import one_device
from benchmarks.models import build
from pdv.emit.templates.kernels import float8

LINEARS: dict[str, Callable[..., Tensor]] = {
    "fp8-rowwise": float8.float8_linear_by_rows,
    "fp8": float8.float8_linear,
}
SUMS = 3e-3  # of a product, relative: tensor cores keep fewer bits of a sum in float8 than of one in float32
NOISE = 0.1  # of losses of a small model, relative: five steps of it, in 8 bits and in 16


def run(linear: Callable[..., Tensor], operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Result, and gradients of x [m, k] and the weight [n, k]."""
    x, weight = (operand.clone().requires_grad_() for operand in operands)
    y = linear(x, weight)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]


def distance(one: Tensor, other: Tensor) -> float:
    """Relative."""
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("sizes", [(64, 128, 96), (7, 32, 16), (5, 24, 40)])
@pytest.mark.parametrize("recipe", LINEARS)
def test_kernels_multiply_the_casts(
    recipe: str, sizes: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k, n = sizes
    torch.manual_seed(0)
    shapes: list[tuple[int, int]] = [(m, k), (n, k), (m, n)]
    x, weight, grad = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    found = run(LINEARS[recipe], [x, weight], grad)
    monkeypatch.setattr(float8, "has_kernel", lambda *_: False)
    for one, other in zip(found, run(LINEARS[recipe], [x, weight], grad), strict=True):
        assert one.device.type == device.type
        assert distance(one, other) <= 2**-8 + SUMS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/pdv/emit has CPUs")
@pytest.mark.parametrize(("recipe", "name"), [("fp8-rowwise", "rowwise"), ("fp8", "tensorwise")])
def test_it_multiplies_as_torchao_trains(recipe: str, name: str) -> None:
    training = pytest.importorskip("torchao.float8")
    chosen = dataclasses.replace(training.Float8LinearConfig.from_recipe_name(name), round_scales_to_power_of_2=True)
    torch.manual_seed(0)
    shapes: list[tuple[int, int]] = [(64, 128), (96, 128), (64, 96)]
    x, weight, grad = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    layer = nn.Linear(128, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.load_state_dict({"weight": weight})
    module = training.convert_to_float8_training(nn.Sequential(layer), config=chosen)[0]
    theirs_x = x.clone().requires_grad_()
    y = module(theirs_x)
    theirs = [y, *torch.autograd.grad(y, [theirs_x, module.weight], grad)]
    for own, other in zip(run(LINEARS[recipe], [x, weight], grad), theirs, strict=True):
        assert distance(own, other) <= 2**-8, "the same casts, multiplied by other kernels at most"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_has_float8_has_its_kernels() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("needs a device with float8")
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert float8.has_kernel(device, e4m3, e4m3, rows=True)
    assert float8.has_kernel(device, e4m3, e4m3, rows=False)
    assert float8.has_kernel(device, e5m2, e4m3, rows=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/distributed has CPUs")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("products", LINEARS)
def test_programs_train_as_in_bfloat16(products: str, compiled: bool) -> None:
    module, (ids,) = build("gpt2", "small")
    device, losses = torch.device("cuda", torch.cuda.current_device()), {}
    for way in ("own", products):
        options = {"precision": "mixed", "products": way, "check": False}
        plan = pdv.optimize(module, (ids,), cluster=one_device(device), **options)  # type: ignore[arg-type]
        model: Any = plan.build(device=str(device))
        if compiled:
            model.compile()
        losses[way] = _losses(model, ids.to(device))
    assert losses["own"][-1] < 0.9 * losses["own"][0]
    assert losses[products] == pytest.approx(losses["own"], rel=NOISE)
    assert losses[products] != losses["own"], "nothing was cast"


def _losses(model: Any, ids: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for _ in range(5):
        found.append(float(model.train_step(ids, ids.roll(-1, 1), _loss)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    total = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()
