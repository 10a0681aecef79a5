"""Steps on padded batches: loss and gradients are the whole batch's on every rank, however the padding lies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.parallel import partition
from pdv.emit.templates.runtime import Mesh, Weights, local, make_mesh, train_step
from tests.distributed.harness import run_ranks
from tests.distributed.two_layer import BATCH, SEQ, VOCAB, TwoLayer, batch, write_weights

pytestmark = pytest.mark.distributed
Result = list[tuple[list[float], dict[str, Tensor]]]  # of each case: the loss of each step, and the summed gradients
RUNS = [
    ({"dp": 2, "tp": 1}, "global"),
    ({"dp": 2, "tp": 2}, "global"),
    ({"dp": 2, "tp": 2}, "local"),
    ({"dp": 4, "tp": 1}, "global"),
]
STEPS = 4  # padding: half of the ranks', random, all but one token, all
SMOOTHED = partial(F.cross_entropy, ignore_index=3, label_smoothing=0.1, weight=torch.linspace(0, 2, SEQ).double())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "weights.safetensors"
    write_weights(path)
    return path


def padded(step: int, labels: Tensor, ignored: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    chance = torch.rand(labels.shape, generator=generator)
    padding = [torch.arange(BATCH)[:, None] < BATCH // 2, chance < 0.5, chance < chance.max(), chance >= 0]
    return labels.masked_fill(padding[step % 4], ignored)


def tokens(step: int) -> Tensor:
    return padded(step, batch(step)[1], -100)


def columns(step: int) -> Tensor:
    """Of each column of logits, which position: torch wants the classes second. 3 is padding."""
    labels = torch.randint(SEQ, (BATCH, VOCAB), generator=torch.Generator().manual_seed(step))
    return padded(step, labels, 3)


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_loss_if_any(logits: Tensor, labels: Tensor) -> tuple[Tensor | float, Tensor | int]:
    return token_loss(logits, labels) if (labels != -100).any() else (0.0, 0)


def with_penalty(logits: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor | int]]:
    return [token_loss(logits, labels), (logits.square().sum(), logits.numel())]


def mean_with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return token_mean(logits, labels) + logits.square().mean()


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp_min(0), VOCAB).double()


# what a user passes, the targets, and the same loss for the whole batch
CASES: list[tuple[Any, Callable[[int], Tensor], Callable[..., Tensor]]] = [
    (token_loss, tokens, token_mean),
    (token_loss_if_any, tokens, token_mean),
    (with_penalty, tokens, mean_with_penalty),
    (SMOOTHED, columns, SMOOTHED),
    (nn.CrossEntropyLoss(ignore_index=3), columns, nn.CrossEntropyLoss(ignore_index=3)),
    (nn.MSELoss(), lambda step: one_hot(tokens(step)), nn.MSELoss()),
]


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def steps(path: Path, sizes: dict[str, int], rows: str) -> Result:
    model = TwoLayer(make_mesh(sizes, "cpu"), Weights(path))
    found: Result = []
    for loss_fn, targets, _ in CASES:
        losses = []
        for step in range(STEPS):
            x, y = batch(step)[0], targets(step)
            if rows == "local":
                x, y = x.chunk(model.dp.size)[model.dp.rank], y.chunk(model.dp.size)[model.dp.rank]
            losses.append(train_step(model, x, y, loss_fn, [model.dp], rows=rows).item())  # type: ignore[arg-type]
        found.append((losses, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    return found


def plain_steps(path: Path) -> Result:
    """The same on the whole batch, by autograd alone."""
    model = TwoLayer(make_mesh({"dp": 1, "tp": 1}, "cpu"), Weights(path))
    found: Result = []
    for _, targets, mean in CASES:
        losses = []
        for step in range(STEPS):
            loss = mean(model(batch(step)[0]), targets(step))
            torch.autograd.backward(loss)
            losses.append(loss.item())
        found.append((losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    return found


@pytest.mark.parametrize(("sizes", "rows"), RUNS, ids=str)
def test_losses_and_gradients_are_those_of_the_whole_batch(weights: Path, sizes: dict[str, int], rows: str) -> None:
    expected = plain_steps(weights)
    for found in run_ranks(steps, sizes["dp"] * sizes["tp"], weights, sizes, rows):
        for number, ((losses, tensors), (expected_losses, expected_tensors)) in enumerate(
            zip(found, expected, strict=True)
        ):
            assert losses == pytest.approx(expected_losses, rel=1e-12, nan_ok=True), f"case {number}"
            assert sorted(tensors) == sorted(expected_tensors)
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    tensor, expected_tensors[name], rtol=1e-9, atol=1e-12, msg=f"{number} {name}"
                )


# ---- Rows cut by two axes, two outputs, of which a loss leaves one out on some ranks ----


class TwoHeads(nn.Module):
    """[batch, dim] -> ([batch, 3], [batch, 2]), rows cut by a, then b."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.axes = mesh.axes
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = (
            nn.Parameter(torch.randn(n, 5, generator=generator, dtype=torch.float64)) for n in (3, 2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for axis in self.axes:
            x = partition(x, 0, axis)
        return F.linear(x, local(self.first, *self.axes)), F.linear(x, local(self.second, *self.axes))


def two_heads_loss(outputs: tuple[Tensor, Tensor], targets: list[Tensor]) -> list[tuple[Tensor | float, Tensor | int]]:
    """The mean over what is labelled, of each head; no part of the graph without a label."""
    terms: list[tuple[Tensor | float, Tensor | int]] = []
    for output, target in zip(outputs, targets, strict=True):
        known = target != -100
        if known.any():
            terms.append((F.cross_entropy(output[known], target[known], reduction="sum"), known.sum()))
        else:
            terms.append((0, 0))
    return terms


def two_heads_step() -> tuple[float, list[Tensor]]:
    model = TwoHeads(make_mesh({"a": 2, "b": 2}, "cpu"))
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = [torch.tensor([0, 1, -100, -100, 2, 2, 0, 0]), torch.tensor([-100, -100, -100, -100, 1, 0, -100, -100])]
    loss = train_step(model, x, targets, two_heads_loss, model.axes)
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def test_ranks_whose_losses_leave_out_different_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, gradients = two_heads_step()
    for loss, found in run_ranks(two_heads_step, 4):
        assert loss == pytest.approx(expected, rel=1e-12)
        for mine, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


# ---- One mean over several calls; refusals ----


def accumulated(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    model = TwoLayer(make_mesh(sizes, "cpu"), Weights(path))
    count = sum(int((tokens(step) != -100).sum()) for step in range(STEPS))
    for step in range(STEPS):
        loss_fn = partial(share_of, count=count)
        train_step(model, batch(step)[0], tokens(step), loss_fn, [model.dp], reduction="sum")
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def share_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return token_loss(logits, labels)[0] / count


def test_gradients_of_one_mean_over_several_calls(weights: Path) -> None:
    model = TwoLayer(make_mesh({"dp": 1, "tp": 1}, "cpu"), Weights(weights))
    logits = torch.cat([model(batch(step)[0]) for step in range(STEPS)])
    torch.autograd.backward(token_mean(logits, torch.cat([tokens(step) for step in range(STEPS)])))
    for found in run_ranks(accumulated, 4, weights, {"dp": 2, "tp": 2}):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def refused(path: Path) -> str:
    model = TwoLayer(make_mesh({"dp": 2, "tp": 2}, "cpu"), Weights(path))
    x, y = batch(0)
    with pytest.raises(ValueError, match="uneven-rows") as uneven:
        train_step(model, x[: 3 + model.dp.rank], y[: 3 + model.dp.rank], token_loss, [model.dp], rows="local")
    with pytest.raises(ValueError, match=r"unknown-row-weights: .* over dp=2"):
        train_step(model, x, y, token_mean, [model.dp])
    assert all(parameter.grad is None for parameter in model.parameters())
    train_step(TwoLayer(make_mesh({"dp": 1, "tp": 4}, "cpu"), Weights(path)), x, y, token_mean, [])
    return str(uneven.value)


def test_what_is_not_known_is_refused_on_every_rank_and_allowed_where_rows_are_whole(weights: Path) -> None:
    for message in run_ranks(refused, 4, weights):
        assert "along dp were given [[3], [4]] rows" in message
