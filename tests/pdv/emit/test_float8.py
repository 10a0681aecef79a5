"""Products in float8, in one process: as torchao's, and what is emitted, listed and refused."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import VerificationError
from pdv.emit.templates.kernels import float8
from pdv.plan.package import Plan, import_package
from pdv.verification.package import verify
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.packages import Document, change_plan, document_of
from tests.pdv.worlds import cluster

LINEARS: dict[str, Callable[..., Tensor]] = {
    "rowwise": float8.float8_linear_by_rows,
    "tensorwise": float8.float8_linear,
}
E4M3_ROUND, E5M2_ROUND = 2.0**-4, 2.0**-3  # relative, of one number


def run(linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Result, and gradients of both operands."""
    operands = [operand.clone().requires_grad_() for operand in (x, weight)]
    y = linear(*operands, bias)
    return [y.detach(), *torch.autograd.grad(y, operands, grad)]


def drawn(rows: int, inner: int, outer: int) -> list[Tensor]:
    """x, a matrix, a bias and a gradient, of uneven magnitudes, in bfloat16."""
    of = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, inner, generator=of) * torch.logspace(-2, 2, inner)
    found = x, torch.randn(outer, inner, generator=of), torch.randn(outer, generator=of)
    return [one.bfloat16() for one in (*found, 1e-4 * torch.randn(2, rows, outer, generator=of))]


def distance(one: Tensor, other: Tensor) -> float:
    """Relative."""
    return ((one.detach().float() - other.detach().float()).norm() / other.detach().float().norm()).item()


@pytest.mark.parametrize("sizes", [(7, 32, 16), (16, 64, 48)])
@pytest.mark.parametrize("recipe", LINEARS)
def test_it_multiplies_as_torchao_trains(recipe: str, sizes: tuple[int, int, int]) -> None:
    training = pytest.importorskip("torchao.float8")
    named = training.Float8LinearConfig.from_recipe_name(recipe)
    chosen = dataclasses.replace(named, round_scales_to_power_of_2=True)
    x, weight, bias, grad = drawn(*sizes)
    layer = nn.Linear(sizes[1], sizes[2]).bfloat16()
    layer.load_state_dict({"weight": weight, "bias": bias})
    module = training.convert_to_float8_training(nn.Sequential(layer), config=chosen)[0]
    theirs_x = x.clone().requires_grad_()
    y = module(theirs_x)
    theirs = [y, *torch.autograd.grad(y, [theirs_x, module.weight], grad)]
    for own, other in zip(run(LINEARS[recipe], x, weight, bias, grad), theirs, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("recipe", LINEARS)
def test_the_same_casts_are_multiplied_where_there_is_no_kernel(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(5, 24, 40)
    with_kernel = run(LINEARS[recipe], *given)
    monkeypatch.setattr(float8, "has_kernel", lambda *_: False)
    for own, other in zip(run(LINEARS[recipe], *given), with_kernel, strict=True):
        assert distance(own, other) < 2**-8  # of bfloat16, in which results are
    exact = run(F.linear, *[one.float() for one in given])
    apart = [distance(own, other) for own, other in zip(with_kernel, exact, strict=True)]
    rounds = [E4M3_ROUND, *[E4M3_ROUND if recipe == "rowwise" else E5M2_ROUND] * 2]
    assert all(2**-8 < one < most for one, most in zip(apart, rounds, strict=True)), apart


@pytest.mark.parametrize("recipe", LINEARS)
def test_zeros_large_and_single_rows(recipe: str) -> None:
    x, weight, bias, grad = drawn(3, 16, 16)
    assert torch.equal(run(LINEARS[recipe], 0 * x, weight, None, grad)[0], torch.zeros(2, 3, 16).bfloat16())
    for factor in (1e30, 1e-30):
        found = run(LINEARS[recipe], (factor * x.float()).bfloat16(), weight, None, grad)
        assert all(bool(one.isfinite().all()) for one in found)
    row = LINEARS[recipe](x[0, 0], weight, bias)
    assert row.shape == (16,)
    assert LINEARS[recipe](x.float(), weight.float(), bias.float()).equal(
        F.linear(x.float(), weight.float(), bias.float())
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_scale_is_the_largest_power_of_two_that_leaves_nothing_out(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    edges = [most * 2.0**n * (1 + step * 2.0**-7) for n in (-40, -3, 0, 5, 90) for step in (-1, 0, 1)]
    for magnitude in (*edges, *torch.logspace(-11, 38, 400).tolist()):
        x = torch.tensor([[-magnitude, magnitude / 3]]).bfloat16()
        found = float8.cast(x, dtype)
        expected = 2.0 ** math.floor(math.log2(most / x.abs().max().item()))
        assert found.inverse.item() == 1 / expected
        assert torch.equal(found.values.float(), (x.float() * expected).to(dtype).float())


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.parametrize("recipe", LINEARS)
def test_it_is_compiled_whole_and_without_a_warning(recipe: str) -> None:
    given = drawn(16, 32, 48)
    compiled = run(torch.compile(LINEARS[recipe], fullgraph=True), *given)
    for own, other in zip(compiled, run(LINEARS[recipe], *given), strict=True):
        assert torch.equal(own, other)


def planned(**options: Any) -> Plan:
    """Gpt, its embedding tied, in bfloat16 over float32, for two devices."""
    given = {"cluster": cluster(2), "precision": "mixed", "pipelines": "never", "mesh": {"tp": 2}, "rules": "none"}
    return pdv.optimize(settled(Gpt(2)), (ids(8, 8),), **{**given, **options})


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}])
def test_a_text_of_one_scale_a_tensor_is_run_in_float64(mesh: dict[str, int]) -> None:
    """As all texts are before they are written: nothing is rounded there."""
    plan = planned(products="fp8", mesh=mesh, cluster=cluster(mesh["tp"]))
    assert any(step["rule"] == "scale" for step in plan.document["derivation"])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of products scaled by rows."""
    return planned(products="fp8-rowwise").save(tmp_path_factory.mktemp("float8") / "gpt_pdv")


def test_layers_are_scaled_and_the_head_is_not(package: Path) -> None:
    text = (package / "model.py").read_text()
    block, model = text.split("class Model")
    assert block.count(" float8_linear_by_rows(") + block.count("(float8_linear_by_rows(") == 3
    assert block.count("F.linear(") == 1, "queries, keys and values have the head's size"
    assert "float8_linear" not in model
    assert "F.linear(" in model
    plain = planned().save(package.parent / "plain_pdv")
    assert not (plain / "float8.py").exists()
    assert "float8" not in (plain / "model.py").read_text()


def test_the_plan_lists_what_is_scaled(package: Path) -> None:
    verify(package)
    steps = [step for step in document_of(package)["derivation"] if step["rule"] == "scale"]
    names = [f"h.{layer}.{name}.weight" for layer in range(2) for name in ("proj", "up", "down")]
    assert [(step["bindings"], sorted(step["sites"])) for step in steps] == [({"format": "fp8-rowwise"}, sorted(names))]


CHANGES = {
    "format": r"products are in \['mxfp8'\]",
    "site": "scale of all matrices of layers",
    "none": "the plan gives",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_says_otherwise_does_not_replay(package: Path, change: str, tmp_path: Path) -> None:
    def edit(document: Document) -> None:
        (step,) = [step for step in document["derivation"] if step["rule"] == "scale"]
        if change == "format":
            step["bindings"]["format"] = "mxfp8"
        elif change == "site":
            step["sites"].pop()
        else:
            document["derivation"].remove(step)

    shutil.copytree(package, tmp_path / "gpt_pdv")
    with pytest.raises(VerificationError, match=CHANGES[change]):
        verify(change_plan(tmp_path / "gpt_pdv", edit))


def test_in_float32_nothing_is_cast(package: Path) -> None:
    exact, rounded = (import_package(package).build(device="cpu", dtype=dtype) for dtype in (torch.float32, None))
    x = ids(8, 8)
    source = settled(Gpt(2))(x)
    assert distance(exact(x), source) < 1e-6
    assert 1e-3 < distance(rounded(x), source) < 0.1
