"""Ranks that each hold another part of parameters step alike, and are given the same in passes of every kind."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.stored import local_piece
from tests.distributed.emitted.test_loop import CLASSES, MESH, Classifier, batch, classifier, pair, write_weights
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
DATA, INSIDE = {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}


def _refuse(said: str, act: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=said):
        act()


def _steps(model: Classifier, optimizer: optim.Optimizer, count: int, *, skips: bool = False) -> None:
    """Passes and steps; where it ``skips``, rank 1 leaves the last step out."""
    for step in range(count):
        model.train_step(*batch(step), pair)
        if not (skips and step == count - 1 and dist.get_rank() == 1):
            optimizer.step()
        optimizer.zero_grad()


def skipped(path: Path) -> None:
    """A rank alone leaves a step out, which no weight that both hold would tell: they are frozen."""
    model = classifier(path, DATA)
    for parameter in (model.up, model.down, model.bias):
        parameter.requires_grad_(requires_grad=False)
    _steps(model, optim.AdamW(model.parameters()), 3, skips=True)
    _refuse("steps-apart: .* along dp", lambda: _steps(model, optim.AdamW(model.parameters()), 1))
    _refuse("steps-apart", model.check_in_sync)


def scheduled(path: Path) -> None:
    """Each rank's learning rate follows the loss of its own rows, in a number or a tensor of one."""
    for rate in (0.1, torch.tensor(0.1)):
        model = classifier(path, DATA)
        optimizer = optim.AdamW(model.parameters(), rate, foreach=False)
        schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        model.own_loss = "mean"
        for loss in (1.0, 2.0):  # of rank 0; that of rank 1 falls
            F.mse_loss(model(batch()[0]), torch.zeros(4, CLASSES, dtype=torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss if dist.get_rank() == 0 else -loss)
        _steps(model, optimizer, 1)
        _refuse("steps-apart", lambda model=model, optimizer=optimizer: _steps(model, optimizer, 1))


def alike(path: Path) -> None:
    """Groups, warm-up, steps left out and two optimizers, on all ranks the same, are compared and found so."""
    model = classifier(path, DATA)
    parts = [[model.cut, model.bias], [model.up]]
    both = optim.AdamW([{"params": part, "lr": lr} for part, lr in zip(parts, (0.1, 0.2), strict=True)])
    other = optim.SGD([model.down], 0.1, momentum=0.9)
    schedule = optim.lr_scheduler.LambdaLR(both, lambda step: 0.9**step)
    for step in range(5):
        model.train_step(*batch(step), pair)
        both.step()
        if step % 2:
            other.step()
        model.zero_grad()
        schedule.step()
    model.check_in_sync()


def searched(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Weights behind steps of LBFGS with a line search, by the loss of the whole batch."""
    model = classifier(path, sizes)
    optimizer = optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        return model.train_step(*batch(), pair)

    def own() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch()[0]), model.shard_batch(batch()[1]))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(2):
        optimizer.step(closure)
    weights = model.full_state_dict()
    if model.dp.size > 1:
        model.own_loss = "mean"
        _refuse("other-losses: LBFGS decides by .* along dp", lambda: optimizer.step(own))
        _refuse("other-losses", lambda: optimizer.step(closure=own))
    return weights


def late(path: Path) -> None:
    """Rows of one rank in each third pass, and behind many passes in the first that has gradients of its input."""
    model, rank = classifier(path, DATA), dist.get_rank()
    for step in range(2):
        model.train_step(*batch(step), pair)
    _refuse("other-rows", lambda: model.train_step(*batch(2 + rank), pair))
    model.zero_grad()
    model = classifier(path, DATA)
    for step in range(10):
        model.train_step(*batch(step), pair)
    made = batch(10 + rank)[0].requires_grad_()
    _refuse("other-rows", lambda: model(made))


def failed(path: Path) -> None:
    """A loss that ends in an error on one rank: all leave the batch out, and have the gradients of none.

    Ranks that have the same rows (INSIDE) would wait in backward for that one, or take its next step for this one.
    """
    rank = dist.get_rank()

    def own(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if rank == 1:
            raise ArithmeticError("no labels")
        return pair(output, y)

    def number(output: Tensor, y: Tensor) -> Tensor:
        total, weight = own(output, y)
        return total / weight

    x, y = batch(1)
    wrong = y.masked_fill(y == y[-1], CLASSES + 7)
    for loss_fn, target, count, reduction, cuts in (
        (own, y, 1, "mean", DATA), (own, y, 2, "mean", DATA), (own, y, 1, "sum", DATA),
        (torch.nn.CrossEntropyLoss(), wrong, 1, "mean", DATA),
        (torch.nn.CrossEntropyLoss(torch.ones(CLASSES, dtype=torch.float64)), wrong, 1, "mean", DATA),
        (own, y, 1, "mean", INSIDE), (own, y, 2, "mean", INSIDE), (own, y, 1, "sum", INSIDE),
        (number, y, 1, "mean", INSIDE), (own, y, 1, "mean", MESH), (own, y, 2, "mean", MESH),
    ):  # fmt: skip
        if dist.get_world_size() != math.prod(cuts.values()):
            continue
        model = classifier(path, cuts)
        model.train_step(*batch(), pair)
        model.zero_grad()
        with pytest.raises((ArithmeticError, IndexError, RuntimeError), match=r"no labels|loss-failed|out of bounds"):
            model.train_step(x, target, loss_fn, micro_batches=count, reduction=reduction)
        assert all(parameter.grad is None for parameter in model.parameters())
        _steps(model, optim.AdamW(model.parameters()), 2)
        model.check_in_sync()


def handed_out(path: Path) -> None:
    """Whole weights, behind the last comparison of a training: those of the first rank, or none if steps differ."""
    model = classifier(path, DATA)
    optimizer = optim.AdamW(model.parameters())
    _steps(model, optimizer, 5)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.bias.add_(1)
    bias = local_piece(dict(model.named_parameters())["bias"].detach()).clone()
    dist.broadcast(bias, 0)
    with pytest.warns(UserWarning, match="ranks-differ: bias"):
        assert torch.equal(model.full_state_dict()["bias"], bias)
    _steps(model, optimizer, 1, skips=True)
    _refuse("steps-apart", model.full_state_dict)
    _refuse("steps-apart", lambda: model.save_safetensors(path.parent / "out"))


def _told_of_parts(model: Any) -> int:  # Any: an emitted module
    """How often it is told that ranks' parts are of different steps."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.check_in_sync()
    return sum("parts-apart" in str(each.message) for each in told)


def restored(path: Path) -> None:
    """Weights of an earlier step, which a rank alone takes back, of which no weight that both hold tells; then all."""
    model = classifier(path, DATA)
    for parameter in (model.up, model.down, model.bias):
        parameter.requires_grad_(requires_grad=False)
    optimizer = optim.AdamW(model.parameters())
    _steps(model, optimizer, 3)
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    for takes_back, warned in ((dist.get_rank() == 1, 1), (False, 0), (True, 0)):
        if takes_back:
            model.load_state_dict(kept)
        assert _told_of_parts(model) == warned
        _steps(model, optimizer, 1)
    state = optimizer.state_dict()
    for loads, warned in ((dist.get_rank() == 1, 1), (True, 0)):
        if loads:
            optimizer.load_state_dict(state)
        assert _told_of_parts(model) == warned


def frozen(path: Path) -> None:
    """Parameters that ranks freeze alike, and one alone, whose gradients the others would wait for."""
    for cuts in (DATA, INSIDE):
        model = classifier(path, cuts)
        optimizer = optim.AdamW(model.parameters())
        model.up.requires_grad_(requires_grad=False)
        _steps(model, optimizer, 3)
        model.up.requires_grad_()
        model.bias.requires_grad_(dist.get_rank() == 1)
        _refuse(r"frozen-apart: .* along [dt]p alone", lambda model=model, made=optimizer: _steps(model, made, 1))


def _own_norm(model: Classifier) -> None:
    """Clip by the norm of what this rank holds."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([local_piece(grad).norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(min(1.0, 1e-2 / float(norm)))


def _own_norms(model: Classifier) -> None:
    """Make each part of a gradient one of norm 1."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        local_piece(parameter.grad).div_(local_piece(parameter.grad).norm())


def _each_norm(model: Classifier) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, 1e-2 / parameter.grad.norm().item()))


def _each_row(model: Classifier) -> None:
    for parameter in (model.up, model.down, model.cut):
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm(dim=1, keepdim=True))


def _summed_norm(model: Classifier) -> None:
    """A norm taken by hand, its squares summed over ranks."""
    square = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        part = local_piece(parameter.grad).square().sum()
        if parameter is model.up or parameter is model.down:
            dist.all_reduce(part)
        square += part
    for parameter in model.parameters():
        local_piece(parameter.grad).mul_(min(1.0, 1e-2 / float(square.sqrt())))


def _noise(model: Classifier) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).add_(0.1 * torch.randn_like(parameter.grad))


ALIKE: dict[str, Callable[[Classifier], object]] = {
    "model": lambda model: model.clip_grad_norm_(1e-2),
    "torch": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2),
    "values": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2),
    "each": _each_norm, "rows": _each_row, "summed": _summed_norm, "noise": _noise,
    "accumulated": lambda model: (model.train_step(*batch(9), pair), model.clip_grad_norm_(1e-2)),
}  # fmt: skip


def clipped(path: Path) -> None:
    """Parts of gradients that ranks scale by factors of their own; what is one function of the whole is let be."""
    for scale in (_own_norm, _own_norms):
        for is_handed_out in (True, False):
            model = classifier(path, INSIDE)
            optimizer = optim.AdamW(model.parameters())
            _steps(model, optimizer, 3)
            model.train_step(*batch(3), pair)
            scale(model)
            optimizer.step()
            optimizer.zero_grad()
            go_on = partial(_steps, model, optimizer, 5)
            _refuse("scales-apart: the ranks along tp, .* by .[0-9]", model.full_state_dict if is_handed_out else go_on)


def stepped_by_hand(path: Path) -> None:
    """As ``clipped``, without an optimizer."""
    model = classifier(path, INSIDE)
    model.train_step(*batch(), pair)
    _own_norm(model)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()
    _refuse("scales-apart", lambda: model.train_step(*batch(1), pair))


def scaled_alike(path: Path, cuts: dict[str, int]) -> dict[str, Tensor]:
    """Weights behind steps whose gradients were scaled in each way of ``ALIKE``."""
    found = {}
    for name, scale in ALIKE.items():
        model = classifier(path, cuts)
        optimizer = optim.SGD(model.parameters(), 0.1)
        for step in range(9):
            model.train_step(*batch(step), pair)
            if model.tp.size > 1 or name != "summed":
                scale(model)
            else:
                model.clip_grad_norm_(1e-2)
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"{name}.{key}": weight for key, weight in model.full_state_dict().items() if key != "rows"}
    return found


def run_all(path: Path) -> dict[str, Tensor]:
    for each in (skipped, scheduled, alike, late, failed, handed_out, restored, frozen, clipped, stepped_by_hand):
        each(path)
    return {**searched(path, DATA), **scaled_alike(path, INSIDE)}


def test_a_loss_that_fails_on_one_of_those_with_the_same_rows_fails_on_all(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    run_ranks(failed, 4, tmp_path / "weights")


def test_ranks_step_alike_or_learn_that_they_did_not(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    alone = {"dp": 1, "tp": 1}
    wanted = {**searched(tmp_path / "weights", alone), **scaled_alike(tmp_path / "weights", alone)}
    for weights in run_ranks(run_all, 2, tmp_path / "weights"):
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6, msg=name)
