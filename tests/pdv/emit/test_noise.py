"""Random numbers that a module draws: planned, the same on ranks that hold the same, steady while programs compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.builder import Builder
from ir.errors import ModelError, UnsupportedOperatorsError
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from ir.ops.draws import steady_uniform
from ir.types import DType, TensorType
from pdv.check.steady import SteadyNoise
from pdv.emit.emission import shapes_in
from pdv.emit.templates.kernels import operators
from tests.pdv.worlds import cluster


class Autoencoder(nn.Module):
    """Variational: its code is drawn around a mean."""

    def __init__(self, *, always: bool = True) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)
        self.always = always

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        code = mean
        if self.always or self.training:
            code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(code), mean, spread


class Denoiser(nn.Module):
    """Diffusion: a step and noise are drawn for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.net = nn.Embedding(10, 16), nn.Linear(16, 16)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        step = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise, kept = torch.randn_like(x), self.kept[step].unsqueeze(1)  # type: ignore[index]
        guess = self.net(kept.sqrt() * x + (1 - kept).sqrt() * noise + self.steps(step))
        return (guess - noise).square().mean(-1)  # type: ignore[no-any-return]


class Many(nn.Module):
    """Of every distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        drawn = [
            torch.rand(x.shape[0], 16), torch.rand_like(y), torch.randn(y.shape, dtype=y.dtype),
            torch.normal(0.5, 2.0, (x.shape[0], 16)), torch.normal(y.detach(), 0.1),
            torch.empty_like(y).uniform_(-1, 1),
            y.new_empty(y.shape).normal_(0, 0.02), torch.bernoulli(torch.full_like(y, 0.3)),
            torch.bernoulli(y.sigmoid()).detach(), torch.empty_like(y).exponential_(2.0), torch.randint_like(y, 5),
            torch.distributions.Normal(y, F.softplus(y)).rsample(),
        ]  # fmt: skip
        hidden = y.masked_fill(torch.rand_like(y) < 0.5, 0)
        return F.gumbel_softmax(y, tau=1.0) + hidden + sum(drawn)


@pytest.mark.parametrize("module", [Autoencoder(), Autoencoder(always=False), Denoiser(), Many()])
def test_modules_that_draw_are_planned_and_their_text_is_run(module: nn.Module) -> None:
    plan = pdv.optimize(module, torch.randn(8, 16), cluster=cluster(2), mesh={"dp": 2})
    assert "both with the same noise" in plan.document["reading"]
    assert "was run on 2 simulated ranks" in plan.document["run"]["statement"]
    text = plan.emission.body(shapes_in(plan.weights))
    assert "noise(" in text
    assert ("training=self.training" in text) == (not getattr(module, "always", True))
    assert "[b, 16]" in text  # any number of rows


def test_inference_takes_any_number_of_rows() -> None:
    plan = pdv.optimize(Denoiser().eval(), torch.randn(8, 16), cluster=cluster(2), mode="infer")
    text = plan.emission.body(shapes_in(plan.weights))
    assert "x [b, 16] -> [b]" in text
    assert "training=" not in text


def test_what_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdv.check.steady.normal_of", lambda steady: steady)
    with pytest.raises(ModelError, match="was read"):
        pdv.optimize(Autoencoder(), torch.randn(8, 16), cluster=cluster(2))


def test_rows_chosen_by_drawn_places_are_refused() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[torch.randperm(x.shape[0])])  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedOperatorsError, match=r"randperm.*draws at random"):
        pdv.optimize(Shuffled(), torch.randn(8, 16), cluster=cluster(2))


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_drawn", [0])


@pytest.mark.parametrize(
    ("kind", "ends", "mean", "deviation"),
    [("uniform", {}, 0.5, 12**-0.5), ("normal", {}, 0.0, 1.0), ("integers", {"low": -1, "high": 3}, 0.5, 1.25**0.5)],
)
@pytest.mark.usefixtures("anew")
def test_noise_is_of_its_distribution(
    kind: str, ends: dict[str, Any], mean: float, deviation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = torch.ones(200, 100, dtype=torch.int64 if ends else torch.float32)
    first, second = (operators.noise(like, kind, **ends) for _ in range(2))
    assert (first != second).any()
    assert abs(float(first.double().mean()) - mean) < 0.03
    assert abs(float(first.double().std()) - deviation) < 0.03
    monkeypatch.setattr(operators, "_drawn", [0])
    assert torch.equal(operators.noise(like, kind, **ends), first)
    monkeypatch.setattr(operators, "_drawn", [0])
    assert (operators.noise(like, kind, block=1, **ends) != first).any()


@pytest.mark.parametrize(("kind", "ends"), [("uniform", {}), ("normal", {}), ("integers", {"low": 2, "high": 9})])
def test_steady_noise_is_that_of_the_ir_and_of_torch(
    kind: str, ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "steady", [True])
    k = Builder()
    dtype = DType.I64 if ends else DType.F64
    like = k.input("like", TensorType((3, 4, 6), dtype))
    drawn = k.noise(like, kind=kind, draw=1, **ends)
    ones = np.ones((3, 4, 6), np.int64 if ends else np.float64)
    graph = k.graph({"y": drawn})
    wanted = evaluate(graph, {"like": ones}, field=FloatField()).gather()["y"]
    whole = operators.noise(torch.from_numpy(ones), kind, **ends)
    assert np.array_equal(whole.numpy(), wanted)
    assert (whole[0] == whole[1]).all()
    part = operators.noise(torch.from_numpy(ones[:1, :2, 3:]), kind, cut={1: 1, 2: 1}, **ends)
    assert torch.equal(part, whole[:1, 2:, 3:])
    calls: dict[str, Callable[[], Tensor]] = {
        "uniform": lambda: torch.rand(3, 4, 6, dtype=torch.float64),
        "normal": lambda: torch.randn(3, 4, 6, dtype=torch.float64),
        "integers": lambda: torch.randint(2, 9, (3, 4, 6)),
    }
    with SteadyNoise():
        assert torch.equal(calls[kind](), whole)
    assert steady_uniform((3, 4, 6)).min() > 0


def test_in_evaluation_what_is_drawn_in_training_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="drawn-in-training"):
        operators.noise(torch.ones(2), "normal", training=False)
    monkeypatch.setattr(operators, "steady", [True])
    operators.noise(torch.ones(2), "normal", training=False)  # while programs are compared
