"""Loops of one's own around a sharded model: what torch does with its parameters is of the whole, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from pdv.emit.templates.kernels.dtensors import mend_distributed_tensors
from pdv.emit.templates.runtime import make_mesh
from tests.distributed.emitted.test_loop import (
    CLASSES,
    MESH,
    ROWS,
    Classifier,
    batch,
    classifier,
    pair,
    same,
    write_weights,
)
from tests.distributed.harness import run_ranks
from tests.distributed.loops import plans

pytestmark = pytest.mark.distributed


def targets() -> Tensor:
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def losses(model: Classifier) -> None:
    """What ``own_loss`` says of a loss decides whether gradients are added up or averaged; unsaid, it is refused."""
    (x, _), y = batch(), targets()
    own = model.shard_batch(y)
    model.train_step(x, y, nn.MSELoss())
    wanted = model.full_gradients()
    model.zero_grad()
    if model.dp.size > 1:
        with pytest.raises(RuntimeError, match=r"unknown-row-weights: .* cut over dp=2: .* model.own_loss = \"mean\""):
            mse_loss(model(x), own).backward()
        model.zero_grad()
    model.own_loss = "mean"
    mse_loss(model(x), own).backward()
    same(model, wanted)
    model.own_loss = "sum"
    (mse_loss(model(x), own, reduction="sum") / y.numel()).backward()
    same(model, wanted)


def numbers(model: Classifier) -> list[float]:
    """Of gradients, weights, and products of both: whole, with their signs."""
    model.train_step(*batch(), pair)
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        found += [grad.norm().item(), float(grad.sum()), grad.abs().max().item(), (grad * parameter).mean().item()]
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    total = sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters() if parameter.grad is not None)
    model.zero_grad()
    return [*found, total]


def changed(model: Classifier) -> dict[str, Tensor]:
    """Weights drawn, set and averaged by hand."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5 + torch.rand_like(parameter)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.9, model.parameters())
    model.bias.data = torch.full((CLASSES,), 0.25, dtype=torch.float64)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        model.train_step(*batch(step), pair)
        optimizer.step()
        optimizer.zero_grad()
    model.float()  # torch exchanges the parameters for others
    x, y = batch(3)
    model.train_step(x.float(), y, pair)
    optimizer.step()
    optimizer.zero_grad()
    model.double()
    model.to("cpu")  # where it is
    for move in (lambda: None, lambda: model._apply(lambda x: x.clone())):  # as to another device and back
        move()
        assert all(parameter.sources and parameter.kept is not None for parameter in model.parameters_of("*"))
        model.train_step(*batch(4), pair)
        optimizer.step()
        optimizer.zero_grad()
    assert all(hasattr(p, "leaves") == isinstance(p, DTensor) for p in model.parameters())
    for number, parameter in enumerate(model.parameters()):  # plain tensors, which are of the whole
        whole = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter.detach()) - number
        parameter.grad = whole
    optimizer.step()
    return model.full_state_dict()


def headed(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Weights behind steps of a head of one's own, behind a loss of one's own, in a hook of ``train_step``, alone."""
    model, (x, y) = classifier(path, sizes), batch()
    torch.manual_seed(5)
    head = nn.Linear(CLASSES, CLASSES).double()
    optimizer = optim.AdamW([{"params": list(model.parameters())}, {"params": list(head.parameters())}], 0.01)
    ways: list[Literal["mean", "sum"]] = ["mean", "sum"]
    for summed in (False, True):
        if summed:
            model.sum_over_data(head.parameters())
        elif model.dp.size == 1:
            continue
        for model.own_loss in ways:
            for _ in range(2):
                loss = mse_loss(head(model(x)), model.shard_batch(targets()), reduction=model.own_loss)
                (loss if model.own_loss == "mean" else loss / targets().numel()).backward()
            optimizer.step() if summed else _refuse("own-parameters-apart: the gradient of a param", optimizer.step)
            optimizer.zero_grad()
            if not summed:
                break
    alone = optim.SGD(head.parameters(), 0.1)
    hook = model.register_forward_hook(lambda module, given, output: head(output))
    for model.own_loss in ways:
        model.requires_grad_(model.own_loss == "mean")
        model.train_step(x, y, pair)
        alone.step()
        model.zero_grad()
        alone.zero_grad()
    hook.remove()
    found = {**model.full_state_dict(), **head.state_dict(prefix="head.")}
    return {f"headed.{name}": weight for name, weight in found.items() if name != "rows"}  # those of refused passes


def run_both(path: Path, sizes: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    model = classifier(path, sizes)
    losses(model)
    return numbers(model), {**changed(classifier(path, sizes)), **headed(path, sizes)}


def adapters(path: Path) -> None:
    """Trained in a hook of a frozen model, which no loss of one's own sees; or other ones on each rank."""
    model = classifier(path, MESH).requires_grad_(requires_grad=False)
    torch.manual_seed(5)
    adapter = nn.Linear(CLASSES, CLASSES).double()
    model.register_forward_hook(lambda module, given, output: output + adapter(output))
    optimizer = optim.SGD([*model.parameters(), *adapter.parameters()], 0.1)
    model.train_step(*batch(), pair)
    _refuse("own-parameters-apart: the gradient of a parameter .4, 4.", optimizer.step)
    optimizer = optim.SGD([*model.parameters(), nn.Parameter(torch.full((2,), float(model.dp.rank)))])
    _refuse("own-parameters-apart: a parameter .2. .* along dp", optimizer.step)
    if model.dp.rank == 0:
        alone = nn.Linear(2, 2)
        optim.SGD(alone.parameters()).step()  # nobody waits for the other ranks
        alone.bias.requires_grad_(requires_grad=False)
        optim.SGD(alone.parameters()).step()
    model.sum_over_data(adapter.parameters())
    _refuse("hooks-of-parts: .* or sum_over_data", lambda: model.train_step(*batch(), pair, micro_batches=2))
    _refuse("unknown-row-weights", lambda: mse_loss(model(batch()[0]), model.shard_batch(targets())).backward())


def unmended() -> None:
    """A torch without the table in which DTensors are mended says so, and builds."""
    dispatcher = DTensor._op_dispatcher
    mend_distributed_tensors.cache_clear()
    try:
        DTensor._op_dispatcher = SimpleNamespace()  # type: ignore[assignment]
        with pytest.warns(UserWarning, match=r"unmended-torch: item\(\) of cut parameters"):
            make_mesh(MESH, "cpu")
    finally:
        DTensor._op_dispatcher = dispatcher


def _drifts(path: Path) -> None:
    """One rank alone clips: said at the next pass that is compared, from which all go on with the first one's."""
    model = classifier(path, MESH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train_step(*batch(), pair)
    if dist.get_rank() == 0:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-6)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="ranks-differ"):
        model.check_in_sync()
    with pytest.warns(UserWarning, match="ranks-differ: .*bias.* the same on several ranks.*first one's"):
        model.train_step(*batch(), pair)
    model.check_in_sync()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step()
            model.train_step(*batch(), pair)


def refusals(path: Path) -> None:
    model = classifier(path, MESH)
    rank = dist.get_rank()
    _refuse("other-rows: ranks were given different", lambda: model.train_step(*batch(rank // 2), pair))
    model = classifier(path, MESH)
    with torch.no_grad():
        assert isinstance(model.bias, DTensor)
        model.bias.to_local().add_(rank)
    _refuse("ranks-differ: bias", lambda: model.train_step(*batch(), pair))
    _drifts(path)
    model = classifier(path, MESH)
    torch.manual_seed(rank)
    _refuse("other-random-numbers", lambda: nn.init.normal_(model.bias))
    _refuse("nothing-applied", lambda: model.apply(lambda module: None))
    model.bias.grad = torch.full_like(model.bias, torch.inf)
    _refuse("no-finite-norm: .* is inf", lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True))
    model.zero_grad()
    assert model.apply(lambda module: module.eval()) is model
    _refuse("assigned-state", lambda: model.load_state_dict(model.state_dict(), assign=True))
    _refuse("other-data", lambda: setattr(model.bias, "data", torch.zeros(CLASSES + 1, dtype=torch.float64)))
    model.train_step(*batch(), pair)
    _refuse("whole-parameters-wanted: Adafactor", optim.Adafactor(model.parameters()).step)
    with torch.no_grad():
        _refuse("nothing-to-train: train_step runs where", lambda: model.train_step(*batch(), pair))
    for count in (1, 2):
        model.requires_grad_(requires_grad=False)
        _refuse(
            "nothing-to-train: no output", lambda count=count: model.train_step(*batch(), pair, micro_batches=count)
        )


def pipeline(folder: Path) -> dict[str, Tensor]:
    """Weights of a pipeline whose tied table is frozen for a step, and that is stepped by hooks in another."""
    model = plans.build(folder)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.3)
    for step in range(3):
        for parameter in model.parameters():
            parameter.requires_grad_(step != 1 or parameter.dim() == 1)
        model.train_step(*plans.batch(step), plans.loss_fn)
        optimizer.step()
        model.zero_grad()
    hooks = [p.register_post_accumulate_grad_hook(_descend) for p in model.parameters()]
    model.train_step(*plans.batch(3), plans.loss_fn)
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    weights: dict[str, Tensor] = model.full_state_dict()
    if model.mesh.stage.size == 1:
        return weights
    of_other_stage = optim.AdamW(model.parameters())
    del of_other_stage.param_groups[0]["betas"]  # as what torch.distributed.checkpoint loads, not flat
    _refuse("lost-options: AdamW has no betas", of_other_stage.step)
    model.requires_grad_(requires_grad=False)
    _refuse("nothing-to-train: all parameters of all", lambda: model.train_step(*plans.batch(4), plans.loss_fn))
    model.requires_grad_()
    hook = model.register_forward_hook(lambda *_: None)
    _refuse("hooks-not-called", lambda: model.train_step(*plans.batch(4), plans.loss_fn))
    hook.remove()
    hook = next(model.parameters()).register_hook(torch.zeros_like)
    _refuse("hooks-of-parts", lambda: model.train_step(*plans.batch(4), plans.loss_fn))
    hook.remove()
    model.zero_grad()
    alone = optim.LBFGS(model.parameters())
    _refuse("stages-apart: LBFGS", lambda: alone.step(lambda: model.train_step(*plans.batch(4), plans.loss_fn)))
    model.zero_grad()
    model.train_step(*plans.batch(4), plans.loss_fn)
    model.clip_grad_norm_(0.1)
    optimizer.step()
    model.zero_grad()
    model.train_step(*plans.batch(5), plans.loss_fn)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    model.zero_grad()
    _refuse("stages-apart", lambda: model.train_step(*plans.batch(6), plans.loss_fn))
    return weights


def _descend(parameter: Tensor) -> None:
    with torch.no_grad():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad


@pytest.mark.slow
def test_a_loop_of_ones_own_around_a_pipeline(tmp_path: Path) -> None:
    folder = plans.package("pipeline", tmp_path)
    wanted = pipeline(folder)
    for found in run_ranks(pipeline, 2, folder):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def _refuse(said: str, act: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, ValueError), match=said):
        act()


def run_all(path: Path) -> tuple[list[float], dict[str, Tensor]]:
    refusals(path)
    adapters(path)
    unmended()
    return run_both(path, MESH)


def test_a_loop_of_ones_own_is_that_of_one_process_or_refused(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    numbers_of_one, weights_of_one = run_both(tmp_path / "weights", {"dp": 1, "tp": 1})
    for found, weights in run_ranks(run_all, 4, tmp_path / "weights"):
        assert found == pytest.approx(numbers_of_one, rel=1e-9, abs=1e-12)
        for name, weight in weights_of_one.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6, msg=name)
