"""Optimizers of torch at the speed of plain tensors. Entry point: ``step_on_local_tensors``.

Parameters are DTensors, on which every operation costs more than on a plain tensor. An optimizer that treats elements
one by one needs nothing of that: for the time of ``step`` its parameters, their gradients and its state are exchanged
for the local tensors that they hold. Before and after, and inside a closure, all are DTensors, as checkpoints need.

Other optimizers, whose update of an element depends on others (Adafactor, Muon, LBFGS, your own classes), step on the
DTensors. So does a parameter of which a gradient or state is placed otherwise than itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .gradients import Leaves

ELEMENT_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad, optim.Adadelta,
    optim.Adamax, optim.ASGD, optim.Rprop,
)  # fmt: skip
ONE_NUMBER = ("step", "eta", "mu", "mu_product")  # of a parameter's state; the rest has the parameter's shape

Step = tuple[tuple[Any, ...], dict[str, Any]]  # Any: the arguments of an optimizer's step
_exchanges: WeakKeyDictionary[Optimizer, Exchange] = WeakKeyDictionary()


@cache
def step_on_local_tensors() -> None:
    """From now on, let optimizers of parameters that have leaves step on local tensors."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Exchange, and take it back around calls of the closure.

    Raises:
        RuntimeError: if gradients wait to be summed.
    """
    leaves = [leaves for group in optimizer.param_groups for p in group["params"] if (leaves := _leaves(p))]
    if any(sums.is_waiting for sums in {each.sums for each in leaves}):
        raise RuntimeError(
            "unsummed-gradients: gradients of no_sync, or of a backward pass that failed, were not summed over ranks. "
            "Run the last backward pass outside of no_sync, call flush of the model, or drop them with its zero_grad."
        )
    if not leaves or type(optimizer) not in ELEMENT_BY_ELEMENT or optimizer.defaults.get("differentiable"):
        return None
    if optimizer not in _exchanges:
        _exchanges[optimizer] = Exchange()
        optimizer.register_state_dict_pre_hook(_take_back)  # of a step that failed
    _take_back(optimizer)
    _exchanges[optimizer].make(optimizer)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _with_parameters(optimizer, args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _with_parameters(optimizer, kwargs["closure"])}
    return None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    _take_back(optimizer)


def _take_back(optimizer: Optimizer) -> None:
    if optimizer in _exchanges:
        _exchanges[optimizer].take_back(optimizer)


def _with_parameters(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure that sees parameters."""

    def exchanged_back() -> Any:
        _take_back(optimizer)
        loss = closure()
        _exchanges[optimizer].make(optimizer)
        return loss

    return exchanged_back


def _leaves(parameter: Tensor) -> Leaves | None:
    leaves = getattr(parameter, "leaves", None)
    return leaves if isinstance(leaves, Leaves) else None


class Exchange:
    """The parameters of an optimizer that are exchanged at the time, and what belongs to them."""

    def __init__(self) -> None:
        self._shards: dict[Tensor, tuple[DTensor, dict[str, Any]]] = {}
        """Local tensor -> its parameter, and the state that the parameter had."""

    @torch.no_grad()
    def make(self, optimizer: Optimizer) -> None:
        """Local tensors in place of parameters."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._local(parameter, optimizer.state) for parameter in group["params"]]

    @torch.no_grad()
    def take_back(self, optimizer: Optimizer) -> None:
        """Parameters in place of local tensors, if there are any."""
        if not self._shards:
            return
        for group in optimizer.param_groups:
            group["params"][:] = [self._shards[p][0] if p in self._shards else p for p in group["params"]]
        for shard, (parameter, held) in self._shards.items():
            shard.grad = None
            if shard in optimizer.state:
                state = optimizer.state.pop(shard)
                found = {name: _placed(x, name, shard, parameter, held) for name, x in state.items()}
                held.clear()
                held.update(found)
                optimizer.state[parameter] = held
        self._shards = {}

    def _local(self, parameter: Tensor, state: dict[Any, dict[str, Any]]) -> Tensor:
        leaves = _leaves(parameter)
        if leaves is None or not isinstance(parameter, DTensor):
            return parameter
        held = state.get(parameter, {})
        if not all(_is_placed_as(x, parameter) for x in (parameter.grad, *held.values())):
            return parameter
        shard = leaves.shard(parameter)
        shard.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
        if state.pop(parameter, None) is not None:
            state[shard] = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in held.items()}
        self._shards[shard] = parameter, held
        return shard


def _is_placed_as(x: object, parameter: DTensor) -> bool:
    return not isinstance(x, DTensor) or x.placements == parameter.placements


def _placed(x: Any, name: str, shard: Tensor, parameter: DTensor, held: dict[str, Any]) -> Any:
    """Some of a parameter's state, of which ``x`` is what is held here."""
    before = held.get(name)
    if before is x or (isinstance(before, DTensor) and before.to_local() is x):
        return before
    if not isinstance(x, Tensor) or name in ONE_NUMBER or x.shape != shard.shape:
        return x
    return DTensor.from_local(x, parameter.device_mesh, parameter.placements, run_check=False)
