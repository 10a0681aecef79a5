"""Optimizers of torch on emitted parameters: steps as on one process, at plain speed, and DTensors before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from pdv.emit.templates import optimizers
from pdv.emit.templates.parallel import partition, reduce
from pdv.emit.templates.runtime import ParallelModule, Weights, local, make_mesh
from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
MESH = {"dp": 1, "tp": 2}
Make = Callable[[Iterable[Any]], optim.Optimizer]  # Any: parameters or groups

OPTIMIZERS: dict[str, Make] = {
    **{each.__name__: partial(each, lr=0.01) for each in optimizers.ELEMENT_BY_ELEMENT},
    "momentum": partial(optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(optim.AdamW, lr=0.01, fused=True),
    "centered": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
}


class Small(ParallelModule):
    """A weight that is cut, one that is whole, and one number."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        mesh = make_mesh(sizes, "cpu")
        super().__init__(mesh, ("dp",))
        self.own_loss = "sum"
        self.dp, self.tp, weights = mesh["dp"], mesh["tp"], Weights(path)
        self.cut = mesh.parameter(weights["w"], {"tp": 0})
        self.bias = mesh.parameter(weights["b"], {"tp": 0})
        self.number = mesh.parameter(weights["n"])

    def forward(self, x: Tensor) -> Tensor:
        x = partition(x, 0, self.dp) * local(self.number, self.dp, self.tp)
        return torch.nn.functional.linear(x, local(self.cut, self.dp), local(self.bias, self.dp))


def loss_of(model: Small, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return reduce(reduce((model(x) + 1).square().sum(), model.dp), model.tp)


def states(model: Small, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and what the optimizer keeps of them, whole; all that has the shape of a parameter is a DTensor."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            if isinstance(value, Tensor):
                placed = model.mesh.device_mesh is not None and key not in optimizers.ONE_NUMBER
                assert isinstance(value, DTensor) == placed, (name, key)
                found[f"{name}.{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def steps(path: Path, sizes: dict[str, int], name: str) -> dict[str, Tensor]:
    model = Small(path, sizes)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[name]([{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:2]}])
    groups = [group["params"] for group in optimizer.param_groups]
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(7):
        if step == 1:  # parameters that join later
            optimizer.add_param_group({"params": parameters[2:]})
        if step == 2:  # a state that was saved
            optimizer.load_state_dict(optimizer.state_dict())
        if step in (3, 5):  # one without a gradient for a while
            model.number.requires_grad_(step != 3)
        if step == 4:  # a state that was changed by hand
            for state in optimizer.state.values():
                state.update({key: x.clone() for key, x in state.items() if isinstance(x, Tensor)})
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
        schedule.step()
    assert all(group["params"] is params for group, params in zip(optimizer.param_groups, groups, strict=False))
    assert [p for group in optimizer.param_groups for p in group["params"]] == parameters
    return states(model, optimizer)


def thawed(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A parameter that has no gradient, and so no state, in the first steps."""
    model = Small(path, sizes)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        model.bias.requires_grad_(step > 2)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    return states(model, optimizer)


def closure(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    model = Small(path, sizes)
    optimizer = optim.Adam(model.parameters(), lr=0.01)

    def evaluate() -> float:
        assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        torch.autograd.backward(loss)
        return loss.item()

    before = optimizer.step(evaluate)
    assert before is not None
    assert optimizer.step(closure=evaluate) < before
    return states(model, optimizer)


def hooked(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A norm over all parameters, and averages, taken in hooks of steps: these see parameters, not what a rank has."""
    model = Small(path, sizes)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averages = [parameter.detach().clone() for parameter in model.parameters()]

    def clip(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    @torch.no_grad()
    def average(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for x, parameter in zip(averages, optimizer.param_groups[0]["params"], strict=True):
            x.lerp_(parameter, 0.5)

    optimizer.register_step_pre_hook(clip)
    for step in range(4):
        if step == 1:
            optimizer.register_step_post_hook(average)
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    found = states(model, optimizer)
    for parameter, x in zip(model.parameters(), averages, strict=True):
        parameter.data = x
    return {**found, **{f"{name} averaged": x for name, x in states(model, optimizer).items()}}


def swapped(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Averages in the place of weights, and weights back: ``x.data`` that was taken before keeps what it was."""
    model = Small(path, sizes)
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    averages, losses = [parameter.data.clone() for parameter in model.parameters()], []
    for step in range(3):
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
        averages = [0.5 * x + 0.5 * p.data for x, p in zip(averages, model.parameters(), strict=True)]
        kept = [parameter.data for parameter in model.parameters()]
        for given in (averages, kept):
            for parameter, x in zip(model.parameters(), given, strict=True):
                parameter.data = x
            losses.append(loss_of(model, 9).detach())
    return {**states(model, optimizer), "losses": torch.stack(losses)}


def run_all(path: Path, sizes: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    found = {name: steps(path, sizes, name) for name in OPTIMIZERS}
    others = (closure, thawed, hooked, swapped)
    return {**found, **{each.__name__: each(path, sizes) for each in others}}


def failures(path: Path) -> None:
    """A step that fails leaves parameters, to whatever is called next; gradients that wait are no step's."""
    model = Small(path, MESH)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.autograd.backward(loss_of(model, 0))
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for name, given in (("zero_grad", ()), ("load_state_dict", (state,)), ("state_dict", ())):
        torch.autograd.backward(loss_of(model, 0))
        optimizer.param_groups[0]["lr"] = "no number"
        with pytest.raises(TypeError):
            optimizer.step()
        getattr(optimizer, name)(*given)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert (name == "zero_grad") == all(parameter.grad is None for parameter in model.parameters())
        model.zero_grad()
    assert all(isinstance(state["momentum_buffer"], DTensor) for state in optimizer.state_dict()["state"].values())
    with model.no_sync():
        torch.autograd.backward(loss_of(model, 1))
    with pytest.raises(RuntimeError, match="unsummed-gradients"):
        optimizer.step()
    for act in (lambda: dist.all_reduce(model.cut.detach()), lambda: nn.parallel.DistributedDataParallel(model)):
        with pytest.raises(RuntimeError, match=r"own-collective: c10d.* Leave that out"):
            act()


def exchanged(path: Path) -> dict[str, list[bool]]:
    """Of an optimizer of torch, and of a class of one's own: whether its step sees DTensors; hooks always do."""
    seen: dict[str, list[bool]] = {}

    class Own(optim.SGD):
        pass

    for each in (optim.SGD, Own):
        model = Small(path, MESH)
        optimizer = each(model.parameters(), lr=0.1)
        for name, register in (
            ("before", optimizer.register_step_pre_hook),
            ("behind", optimizer.register_step_post_hook),
        ):
            register(partial(_record, seen.setdefault(f"{each.__name__}, {name}", [])))
        torch.autograd.backward(loss_of(model, 0))
        record = partial(_record, seen.setdefault(each.__name__, []))
        with patch.object(each, "_init_group", _recorded(each._init_group, record)):
            optimizer.step()
    return seen


def _record(seen: list[bool], optimizer: optim.Optimizer, *_: object) -> None:
    seen += [isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]]


def _recorded(init: Callable[..., Any], record: Callable[[optim.Optimizer], None]) -> Callable[..., Any]:
    """What a step begins with, recorded."""

    def both(optimizer: optim.Optimizer, *args: Any) -> Any:
        record(optimizer)
        return init(optimizer, *args)

    return both


def run_on_ranks(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[bool]]]:
    failures(path)
    return run_all(path, MESH), exchanged(path)


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {"w": torch.randn(8, 6, generator=generator, dtype=torch.float64), "b": torch.arange(8.0).double()}
    save_file({**values, "n": torch.tensor(1.5, dtype=torch.float64)}, tmp_path / "weights")
    wanted = run_all(tmp_path / "weights", {"dp": 1, "tp": 1})
    for found, seen in run_ranks(run_on_ranks, 2, tmp_path / "weights"):
        in_steps = {name: set(each) for name, each in seen.items() if ", " not in name}
        assert in_steps == {"SGD": {False}, "Own": {True}}
        assert all(all(each) and len(each) == 3 for name, each in seen.items() if ", " in name)
        for name, tensors in wanted.items():
            assert found[name].keys() == tensors.keys()
            for key, tensor in tensors.items():
                torch.testing.assert_close(found[name][key], tensor, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")


class Signs(optim.Optimizer):
    """An optimizer of nobody's, with a state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.sub_(torch.tanh(100 * mean), alpha=group["lr"])


def train_parts(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Of one layer, of which a stage has nothing; then in turns with the others, by an optimizer that loads a state."""
    model = import_package(folder).build("cpu", torch.float64)
    x, losses = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64), list[float]()
    one = model.parameters_of("layers.3.1.*")
    others = [p for p in model.parameters() if all(p is not each for each in one)]
    made = [Signs(parameters, 0.01) for parameters in (one, others) if parameters]

    def step(*steps: optim.Optimizer) -> None:
        losses.append(float(model.train_step(x, x.roll(1, 0), F.mse_loss)))
        model.clip_grad_norm_(0.1)
        for optimizer in steps:
            optimizer.step()
        model.zero_grad()

    for parameter in others:
        parameter.requires_grad_(requires_grad=False)
    for _ in range(3):
        step(*(made[:1] if one else ()))
    for parameter in others:
        parameter.requires_grad_(requires_grad=True)
    for number in range(4):
        step(*(made if number % 2 else made[: bool(one)]))
    again = [Signs(optimizer.param_groups[0]["params"], 0.01) for optimizer in made]
    for optimizer, before in zip(again, made, strict=True):
        optimizer.load_state_dict(before.state_dict())
    step(*again)
    weights: dict[str, Tensor] = model.full_state_dict()
    if model.mesh.stage.size > 1:
        step(*(again if model.mesh.stage.rank else ()))
        with pytest.raises(RuntimeError, match=r"stages-apart: .* and \[False, True\] stepped"):
            step(*again)
    return losses[:8], weights


def test_stages_need_not_have_what_steps(tmp_path: Path) -> None:
    plan = plan_pipeline(Blocks(), (torch.ones(4, 16),), cluster(4), stages=2, micro_batches=2, mesh={"dp": 2})
    folder = plan.save(tmp_path / "plan")
    (alone,) = run_ranks(train_parts, 1, folder)
    assert len(set(alone[0])) == len(alone[0]) == 8
    for losses, weights in run_ranks(train_parts, 4, folder):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        for name, value in alone[1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-9, msg=name)
