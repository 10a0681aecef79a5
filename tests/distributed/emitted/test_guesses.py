"""Steps whose weight is guessed have the gradients and the loss of those that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from pdv.emit.templates.kernels import buckets
from pdv.emit.templates.parallel import partition
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, local, make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
ROWS, WIDTH, OUT = 8, 6, 3
Case = Callable[[Path], None]


class Layer(ParallelModule):
    """x [b, k] -> [b, n], by rows over dp."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",), {"x": ("b", WIDTH)})
        self.dp = mesh["dp"]
        self.weight = mesh.parameter(weights["weight"])
        self.frozen = mesh.parameter(weights["weight"]).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(partition(x, 0, self.dp), local(self.weight, self.dp) + local(self.frozen, self.dp))


def layer(path: Path) -> Layer:
    return Layer(make_mesh({"dp": 2}, "cpu"), Weights(path))


def batch(seed: int, counted: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of which so many rows count."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, size, generator=generator) for size in (WIDTH, OUT))
    return x, y.where(torch.arange(ROWS)[:, None] < counted, torch.nan)


def distance(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    counts = ~y.isnan()
    return (output - y.nan_to_num()).where(counts, 0.0).square().sum(), counts.sum()


def step(model: Layer, seed: int, counted: int) -> int:
    """One, held against the module's; how many sums ranks waited for before backward."""
    x, y = batch(seed, counted)
    weight = (2 * whole(model.weight)).detach().requires_grad_()  # with the frozen one
    total, count = distance(linear(x, weight), y)
    (wanted,) = torch.autograd.grad(total / count, weight)
    with patch.object(buckets, "Sum", wraps=buckets.Sum) as sums:
        loss = model.train_step(x, y, distance)
    torch.testing.assert_close(loss, (total / count).detach())
    torch.testing.assert_close(whole(model.weight.grad), wanted)
    model.zero_grad()
    return int(sums.call_count)


def whole(x: Tensor | None) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def of_any_weights(path: Path) -> None:
    """Two alike are followed by a guess; where that is wrong, nothing is, and the next two have to be alike."""
    model = layer(path)
    weights = (8, 8, 8, 8, 3, 3, 3, 5, 4, 5, 4, 4, 4, 1, 8)
    waited = [step(model, seed, counted) for seed, counted in enumerate(weights)]
    assert waited == [1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1]


def seen(path: Path) -> None:
    """A hook on one rank, an input that has a gradient: ranks wait, as long as any shows gradients."""
    model = layer(path)
    assert [step(model, 0, 8) for _ in range(3)] == [1, 1, 0]
    handle = model.register_full_backward_hook(lambda *_: None) if dist.get_rank() else None
    assert [step(model, 0, 8) for _ in range(3)] == [0, 1, 1]
    if handle is not None:
        handle.remove()
    assert [step(model, 0, 8) for _ in range(2)] == [1, 0]
    x, y = batch(0, 8)
    for _ in range(2):
        x.grad = None
        model.train_step(x.requires_grad_(), y, distance)
    assert x.grad is not None
    model.zero_grad()
    assert step(model, 0, 8) == 1


def seen_too_early(path: Path) -> None:
    """By a hook that is new in the very step whose weight is another: all ranks say so, and take the step again."""
    model = layer(path)
    assert [step(model, 0, 8) for _ in range(3)] == [1, 1, 0]
    if dist.get_rank():
        model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"seen-too-early: this batch weighs 9, where the last two weighed 24"):
        model.train_step(*batch(0, 3), distance)
    assert model.weight.grad is None
    assert [step(model, 0, 3) for _ in range(3)] == [1, 1, 1]


def failed(path: Path) -> None:
    """A loss that fails on one rank in a step that is guessed."""
    model = layer(path)
    assert [step(model, 0, 8) for _ in range(3)] == [1, 1, 0]

    def fails(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if dist.get_rank():
            raise OSError
        return distance(output, y)

    with pytest.raises(OSError if dist.get_rank() else RuntimeError):  # of no text
        model.train_step(*batch(0, 8), fails)
    assert model.weight.grad is None
    assert step(model, 1, 8) == 0


def held(path: Path) -> None:
    """What waits from earlier passes is not scaled."""
    model = layer(path)
    assert [step(model, 0, 8) for _ in range(3)] == [1, 1, 0]
    for counted in (8, 3, 3, 3, 5):
        model.own_loss = "sum"
        with model.no_sync():
            torch.autograd.backward(distance(model(batch(1, 8)[0]), model.shard_batch(batch(1, 8)[1]))[0])
        model.own_loss = None
        model.train_step(*batch(0, counted), distance)
        found = whole(model.weight.grad)
        model.zero_grad()
        weight = (2 * whole(model.weight)).detach().requires_grad_()
        total, count = distance(linear(batch(0, counted)[0], weight), batch(0, counted)[1])
        before, _ = distance(linear(batch(1, 8)[0], weight), batch(1, 8)[1])
        (wanted,) = torch.autograd.grad(total / count + before, weight)
        torch.testing.assert_close(found, wanted)


CASES: tuple[Case, ...] = (of_any_weights, seen, seen_too_early, failed, held)


def run_case(path: Path, number: int) -> None:
    CASES[number](path)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_a_guess(number: int, tmp_path: Path) -> None:
    weight = torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, tmp_path / "weights")
    run_ranks(run_case, 2, tmp_path / "weights", number)
