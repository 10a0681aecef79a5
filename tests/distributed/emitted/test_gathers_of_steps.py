"""Weights gathered once a step give each graph's gradients, whatever changed, froze or let go of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.models.techniques import Technique
from pdv.emit.templates.pipeline import PipelinedModule
from pdv.plan.package import import_package
from pdv.problem.workload import Order
from tests.distributed.harness import run_ranks
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
ZERO_1 = Technique("zero-1", (("dp", 2),), zero=True, once=True)
MICRO_BATCHES, ROWS, WIDTH = 4, 16, 16
FROZEN = "layers.0.1.weight", "layers.3.3.weight"
Pair = tuple[PipelinedModule, Blocks]


def package(folder: Path, order: Order = "1f1b") -> Path:
    """Two stages of two devices."""
    torch.manual_seed(0)
    plan = plan_pipeline(
        Blocks(), (torch.ones(ROWS, WIDTH),), cluster(4),
        stages=2, micro_batches=MICRO_BATCHES, mesh={"dp": 2}, pins=ZERO_1.pins, order=order,
    )  # fmt: skip
    saved = plan.save(folder / "blocks_pdv")
    assert "once=True" in (saved / "model.py").read_text()
    return saved


def both(folder: Path) -> Pair:
    """The program, and the module with its weights."""
    model = import_package(folder).build(device="cpu")
    assert isinstance(model, nn.Module)
    source = Blocks()
    source.load_state_dict(model.full_state_dict())  # type: ignore[operator]
    return model, source  # type: ignore[return-value]


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [b, w]."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    return x, x.roll(1, 1)


def compare(model: PipelinedModule, gradients: Mapping[str, Tensor | None]) -> None:
    """And drop both."""
    found = model.full_gradients()
    wanted = {name: grad for name, grad in gradients.items() if grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def check(model: PipelinedModule, source: nn.Module) -> None:
    """Gradients, which are dropped then."""
    compare(model, {name: p.grad for name, p in source.named_parameters()})
    model.zero_grad()
    source.zero_grad()


@contextmanager
def before_passes(pair: Pair, edit: Callable[[list[nn.Parameter], int], Any]) -> Iterator[None]:
    """Context in which some parameters are changed before each micro-batch, of which it gets the number."""
    model, source = pair
    named = dict(source.named_parameters())
    held = [p for name in FROZEN for p in model.parameters_of(name)]

    def hook(parameters: list[nn.Parameter]) -> Callable[..., None]:
        numbers = iter(range(MICRO_BATCHES))

        def change(*_: Any) -> None:
            if torch.is_grad_enabled():
                edit(parameters, next(numbers))

        return change

    handles = [stage.register_forward_pre_hook(hook(held)) for stage in model.stages.values()]
    handles.append(source.register_forward_pre_hook(hook([named[name] for name in FROZEN])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def grow(parameters: list[nn.Parameter], number: int) -> None:
    """In place, while earlier micro-batches are under way."""
    for parameter in parameters:
        parameter.mul_(1 + 0.1 * number)


def freeze(parameters: list[nn.Parameter], number: int) -> None:
    """For some micro-batches of a step."""
    for parameter in parameters:
        parameter.requires_grad_(number % 3 == 1)


def change_within_steps(folder: Path) -> None:
    """Between forward passes of micro-batches."""
    pair = model, source = both(folder)
    for edit in (grow, freeze):
        with before_passes(pair, edit):
            x, y = batch(0)
            model.train_step(x, y, nn.MSELoss())
            for rows, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                torch.autograd.backward(mse_loss(source(rows), target) / MICRO_BATCHES)
        check(model, source)


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "zero-bubble"])
def test_micro_batches_under_way_give_gradients_of_what_they_read(tmp_path: Path, order: Order) -> None:
    run_ranks(change_within_steps, 4, package(tmp_path, order))


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Of this rank's rows."""
    x, y = batch(number)
    return mse_loss(model(x), y if isinstance(model, Blocks) else model.shard_batch(y))  # type: ignore[operator]


def two_graphs(model: nn.Module) -> None:
    """Of which one is through when the other one is not."""
    first, second = loss_of(model, 0), loss_of(model, 1)
    torch.autograd.backward(first)
    torch.autograd.backward(second)


def one_graph_twice(model: nn.Module) -> None:
    """And once more."""
    loss = loss_of(model, 0)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def dropped_between(model: nn.Module) -> None:
    """Gradients, behind the forward pass."""
    loss = loss_of(model, 0)
    model.zero_grad()
    torch.autograd.backward(loss)


def never_backward(model: nn.Module) -> None:
    """Weights change by ``data``, which nothing counts, behind a forward pass that has no backward one."""
    loss_of(model, 0)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    torch.autograd.backward(loss_of(model, 0))


LOOPS: tuple[Callable[[nn.Module], None], ...] = (two_graphs, one_graph_twice, dropped_between, never_backward)


def own_loops(folder: Path) -> int:
    """All stages on each process; how many units an evaluation of several batches noted."""
    model, source = both(folder)
    model.own_loss = "mean"
    for loop in LOOPS:
        loop(model)
        loop(source)
        check(model, source)
    x, y = batch(3)
    model.train_step(x, y, nn.MSELoss())  # in micro-batches, with no pass that the stages know as the last
    torch.autograd.backward(mse_loss(source(x), y))
    check(model, source)
    return evaluate(model, source)


@torch.no_grad()
def evaluate(model: PipelinedModule, source: nn.Module) -> int:
    """Weights that change uncounted between evaluations."""
    x, _ = batch(4)
    gathers = import_module(f"{type(model).__module__.rpartition('.')[0]}.gathers")
    for _ in range(3):
        for each in (model, source):
            for parameter in each.parameters():
                parameter.data.mul_(0.9)
        torch.testing.assert_close(model(x), model.shard_batch(source(x)))
    (order,) = [order for sums, order in gathers._orders.items() if sums is model.mesh.sums]
    return max(len(units) for units in order.passes.values())


def test_own_loops_and_evaluations_have_gradients_of_all_graphs(tmp_path: Path) -> None:
    noted = run_ranks(own_loops, 2, package(tmp_path))
    assert max(noted) <= 4  # of one pass: no evaluation adds to what those before it noted
