"""The loss of cut rows against that of the whole batch; ranks are played one after the other by one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.kernels import buckets
from pdv.emit.templates.losses import batch_loss, begin_weight, reduction_of
from pdv.emit.templates.parallel import Axis

Data = tuple[Tensor, Tensor]
CLASSES = 5
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)


# ---- Batches ----


def labels(rows: int, seed: int, ignored: int = -100) -> Data:
    """Logits, and labels, of which padding is: seed 0: the first half; 1: a third; 2: most; 3: all."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64)
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < (0.0, 0.3, 0.9, 1.0)[seed % 4]] = ignored
    if seed % 4 == 0:
        target[: rows // 2] = ignored
    return logits, target


def tokens(rows: int, seed: int) -> Data:
    logits, target = labels(rows * 3, seed)
    return logits.view(rows, 3, CLASSES), target.view(rows, 3)


def images(rows: int, seed: int) -> Data:
    logits, target = tokens(rows, seed)
    return logits.transpose(1, 2), target


def numbers(rows: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    output, target = (torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64) for _ in range(2))
    return output, target


def chances(rows: int, seed: int) -> Data:
    return tuple(x.sigmoid() for x in numbers(rows, seed))  # type: ignore[return-value]


def distributions(rows: int, seed: int) -> Data:
    output, target = numbers(rows, seed)
    return output.log_softmax(1), target.softmax(1)


def log_distributions(rows: int, seed: int) -> Data:
    return distributions(rows, seed)[0], distributions(rows, seed + 100)[0]


def classes(rows: int, seed: int) -> Data:
    return numbers(rows, seed)[0], labels(rows, seed, ignored=1)[1]


def some_of_classes(rows: int, seed: int) -> Data:
    """Of each row the classes that it is of, up to a number that is none."""
    output, target = numbers(rows, seed)
    return output, target.argsort(1).where(torch.arange(CLASSES) < 1 + seed, -1)


def signs(rows: int, seed: int) -> Data:
    output, target = numbers(rows, seed)
    return output, target.sign()


# ---- Losses: all of these equal the whole batch's, for any padding ----


def token_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


def token_mean(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def odd_scalars(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total, weight = token_loss(logits, target)
    return total.reshape(1), weight.to(torch.float32)


def two_means(logits: Tensor, target: Tensor) -> list[tuple[Tensor, Any]]:
    return [token_loss(logits, target), (0.1 * logits.square().sum(), logits.numel())]


def only_where_needed(logits: Tensor, target: Tensor) -> tuple[Any, Any]:
    """Of a rank of padding, a constant: no graph at all."""
    return token_loss(logits, target) if (target != -100).any() else (0.0, 0)


def rows_of_equal_weight(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).abs().sum(1).sqrt().sum(), len(output)


def in_place(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    output.mul_(2)
    return (output - target).square().sum(), output.numel()


@dataclass(frozen=True)
class Case:
    loss_fn: Callable[[Any, Any], Any]
    data: Callable[[int, int], Data]
    whole: Callable[[Any, Any], Tensor] | None = None


CASES = {
    "module": Case(nn.CrossEntropyLoss(), labels),
    "function": Case(F.cross_entropy, labels),
    "other padding": Case(partial(F.cross_entropy, ignore_index=2), partial(labels, ignored=2)),
    "class weights": Case(nn.CrossEntropyLoss(weight=WEIGHTS), labels),
    "weights and smoothing": Case(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), labels),
    "smoothing": Case(partial(F.cross_entropy, label_smoothing=0.1), labels),
    "classes in the middle": Case(nn.CrossEntropyLoss(weight=WEIGHTS), images),
    "shares of classes": Case(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), distributions),
    "nll": Case(nn.NLLLoss(weight=WEIGHTS), lambda n, seed: (distributions(n, seed)[0], labels(n, seed)[1])),
    "mse": Case(F.mse_loss, numbers),
    "l1": Case(nn.L1Loss(), numbers),
    "smooth l1": Case(nn.SmoothL1Loss(beta=0.3), numbers),
    "huber": Case(partial(F.huber_loss, delta=0.4, reduction="mean"), numbers),
    "bce": Case(nn.BCELoss(weight=WEIGHTS), chances),
    "bce of logits": Case(nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS + 1), chances),
    "kl, mean": Case(nn.KLDivLoss(), distributions),
    "kl, batchmean": Case(partial(F.kl_div, reduction="batchmean"), distributions),
    "kl, log": Case(nn.KLDivLoss(reduction="batchmean", log_target=True), log_distributions),
    "poisson": Case(nn.PoissonNLLLoss(full=True), chances),
    "soft margin": Case(nn.SoftMarginLoss(), signs),
    "hinge": Case(nn.HingeEmbeddingLoss(margin=0.7), signs),
    "margins of classes": Case(nn.MultiMarginLoss(p=2, margin=0.8, weight=WEIGHTS), classes),
    "margins of several": Case(F.multilabel_margin_loss, some_of_classes),
    "soft margins of several": Case(nn.MultiLabelSoftMarginLoss(weight=WEIGHTS), chances),
    "tokens": Case(token_loss, tokens, token_mean),
    "odd scalars": Case(odd_scalars, tokens, token_mean),
    "a rank without a graph": Case(only_where_needed, tokens, token_mean),
    "two means": Case(two_means, tokens, lambda y, t: token_mean(y, t) + 0.1 * y.square().mean()),
    "rows alike": Case(rows_of_equal_weight, numbers, lambda y, t: (y - t).abs().sum(1).sqrt().mean()),
    "in place": Case(in_place, numbers, lambda y, t: F.mse_loss(2 * y, t)),
}


def cut_loss(
    monkeypatch: pytest.MonkeyPatch,
    loss_fn: Any,
    data: Data,
    ranks: int,
    reduction: str = "mean",
    *,
    is_early: bool = True,
) -> tuple[list[float], Tensor]:
    """Each rank's loss, and the gradient of the outputs: of all rows."""
    output, target = data
    axes = [Axis("dp", ranks, 0)]
    sums: dict[int, Tensor] = {}  # over all ranks, of what each sums first, second, …

    def run(rank: int, step: Callable[[int, Tensor], None]) -> tuple[Tensor, Tensor]:
        numbers = count()

        def steps(x: Tensor, axes: Sequence[Axis]) -> Iterator[bool]:
            number = next(numbers)
            yield False
            step(number, x)

        monkeypatch.setattr(buckets, "all_reduce_steps", steps)
        rows, own = (x.chunk(ranks)[rank].detach().clone() for x in (output, target))
        weigh = begin_weight(loss_fn, own, axes, reduction) if is_early else None
        share, whole = batch_loss(loss_fn, rows.requires_grad_() * 1, own, axes, reduction, weigh)
        torch.autograd.backward(share)
        assert rows.grad is not None
        return whole(), rows.grad

    for rank in range(ranks):
        run(rank, lambda number, x: sums.__setitem__(number, sums.get(number, 0) + x))
    found = [run(rank, lambda number, x: x.copy_(sums[number])) for rank in range(ranks)]
    return [loss.item() for loss, _ in found], torch.cat([grad for _, grad in found])


@pytest.mark.parametrize("name", CASES)
def test_any_padding_on_any_number_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    warnings.simplefilter("ignore", UserWarning)  # of torch, about the mean that kl_div takes
    for seed in range(4):
        data = case.data(8, seed)
        output = data[0].detach().clone().requires_grad_()
        expected = (case.whole or case.loss_fn)(output, data[1])
        torch.autograd.backward(expected)
        for ranks, is_early in ((2, True), (4, True), (4, False)):
            found, grad = cut_loss(monkeypatch, case.loss_fn, data, ranks, is_early=is_early)
            message = f"{name}, seed {seed}, {ranks} ranks, weight {'early' if is_early else 'late'}"
            assert found == pytest.approx([expected.item()] * ranks, rel=1e-12, nan_ok=True), message
            assert output.grad is not None
            torch.testing.assert_close(grad, output.grad, rtol=1e-10, atol=1e-14, equal_nan=True, msg=message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_neither_overflow_nor_stop_counting(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 rows of loss 5: the sum is no float16, the number of rows is no bfloat16."""
    logits = torch.zeros(20_000, 150, dtype=dtype)
    target = torch.zeros(20_000, dtype=torch.int64)
    target[3:19_000] = -100
    found, grad = cut_loss(monkeypatch, F.cross_entropy, (logits, target), 2)
    assert found == pytest.approx([math.log(150)] * 2, rel=4e-3)
    assert grad[-1, 1].item() == pytest.approx(1 / 150 / 1003, rel=2e-2)  # as torch's own mean


def test_a_sum_is_the_sum_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tokens(8, 1)

    def sums(logits: Tensor, target: Tensor) -> Tensor:
        return token_loss(logits, target)[0] / 7

    for loss_fn in (sums, lambda y, t: (sums(y, t), 3), lambda y, t: [(sums(y, t) / 2, 3)] * 2):
        found, grad = cut_loss(monkeypatch, loss_fn, data, 4, "sum")
        output = data[0].clone().requires_grad_()
        expected = sums(output, data[1])
        torch.autograd.backward(expected)
        assert found == pytest.approx([expected.item()] * 4, rel=1e-12)
        torch.testing.assert_close(grad, output.grad)


SUMS = {
    "module": Case(nn.CrossEntropyLoss(reduction="sum"), labels),
    "class weights, smoothing": Case(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, reduction="sum"), labels),
    "function": Case(partial(F.mse_loss, reduction="sum"), numbers),
    "bce of logits": Case(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS + 1, reduction="sum"), chances),
    "kl": Case(nn.KLDivLoss(reduction="sum"), distributions),
    "margins of classes": Case(nn.MultiMarginLoss(reduction="sum"), classes),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("said", ["mean", "sum"])
def test_a_sum_of_torchs_own_is_that_of_the_whole_batch(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever train_step is told: the loss says it itself."""
    case = SUMS[name]
    reduction = reduction_of(case.loss_fn, said)
    for ranks in (1, 2, 4):
        data = case.data(8, ranks)
        output = data[0].detach().clone().requires_grad_()
        expected = case.loss_fn(output, data[1])
        torch.autograd.backward(expected)
        found, grad = cut_loss(monkeypatch, case.loss_fn, data, ranks, reduction)
        assert found == pytest.approx([expected.item()] * ranks, rel=1e-12)
        assert output.grad is not None
        torch.testing.assert_close(grad, output.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), F.mse_loss, Axis, lambda y, t: (y - t).sum()])
def test_other_losses_do_not_say_that_they_are_sums(loss_fn: Any) -> None:
    assert [reduction_of(loss_fn, said) for said in ("mean", "sum")] == ["mean", "sum"]


def test_where_the_batch_is_whole_any_loss_is_taken_as_it_is() -> None:
    output, target = numbers(4, 0)
    output.requires_grad_()
    axes = [Axis("dp"), Axis("tp")]
    odd = (output.mean(0) - target).std()
    share, whole = batch_loss(lambda y, t: (y.mean(0) - t).std(), output, target, axes, "mean")
    assert torch.equal(share, odd)
    assert torch.equal(whole(), odd)
    assert batch_loss(lambda y, t: (y.sum() + scale.sum(), 4), output, target, axes, "mean")[0].requires_grad
    half, _ = batch_loss(lambda y, t: (y.sum(), 4), output.bfloat16(), target, [], "mean")
    assert half.dtype == torch.float32


# ---- Refusals: on every rank, before any collective ----


class Doubled(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input, target) ** 2


def hooked() -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, args, result: result**2)
    return loss


def patched() -> nn.Module:
    loss = nn.MSELoss()
    loss.forward = lambda y, t: (y - t).sum() ** 2  # type: ignore[method-assign,assignment]
    return loss


scale = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
ONE_NUMBER = [
    lambda y, t: (y - t).square().mean(),
    lambda y, t: F.mse_loss(y.mean(0), t.mean(0)),
    nn.MSELoss(reduction="sum"),
    partial(F.mse_loss, size_average=False),
    partial(F.huber_loss, weight=torch.ones(2, CLASSES)),  # type: ignore[call-arg]
    Doubled(),
    hooked(),
    patched(),
]
BAD = {
    "returned None": lambda y, t: None,
    "returned 2.5": lambda y, t: y.sum().item() * 0 + 2.5,
    "returned a dict": lambda y, t: {"loss": y.sum()},
    "returned a list": lambda y, t: [],
    r"returned \(a tensor of shape \[2, 5\], 1\)": lambda y, t: (y, 1),
    r"returned \(a tensor of shape \[\], a tensor of shape \[2\]\)": lambda y, t: (y.sum(), y[:, 0].detach()),
    r"returned \(a tensor of shape \[\], None\)": lambda y, t: (y.sum(), None),
    r"returned \(.*, .*, .*\)": lambda y, t: (y.sum(), 1, 1),
    "returned a tensor": lambda y, t: [(y.sum(), 1), y.sum()],
    "as a second loss would": lambda y, t: (y.sum(), y.square().sum()),
    r"trains a tensor of shape \[5\]": lambda y, t: ((y * scale).sum(), 1),
    "has no gradient": lambda y, t: (y.detach().sum(), 1),
    r"returned a tensor of shape \[2, 5\], as of reduction='none'": partial(F.mse_loss, reduction="none"),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("loss_fn", ONE_NUMBER)
def test_one_number_is_refused_where_the_batch_is_cut(loss_fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown-row-weights: .* cut over dp=4\..*Return the sum"):
        cut_loss(monkeypatch, loss_fn, numbers(8, 0), 4)


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_sum_and_weight_is_refused(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"bad-loss: .*{message}"):
        cut_loss(monkeypatch, BAD[message], numbers(8, 0), 4)


@pytest.mark.parametrize(
    ("loss_fn", "output", "target"),
    [
        (F.mse_loss, torch.randn(4, 1), torch.randn(4)),  # every row with every other
        (F.mse_loss, torch.randn(2, 1), torch.randn(2)),
        (nn.MSELoss(reduction="sum"), torch.randn(4, 1), torch.randn(4)),
        (F.cross_entropy, torch.randn(4), torch.rand(4)),  # rows taken for classes
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_rows_that_meet_others_are_refused(
    loss_fn: Any, output: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="bad-loss: Rows of output and target"):
        cut_loss(monkeypatch, loss_fn, (output, target), 2, reduction_of(loss_fn, "mean"))


def test_means_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown-row-weights"):
        cut_loss(monkeypatch, nn.MSELoss(), numbers(8, 0), 2, "sum")
    with pytest.raises(ValueError, match="bad-reduction: 'average'"):
        cut_loss(monkeypatch, nn.MSELoss(), numbers(8, 0), 2, "average")
