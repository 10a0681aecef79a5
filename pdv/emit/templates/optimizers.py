"""Optimizers of torch at the speed of plain tensors. Entry point: ``step_on_local_tensors``.

Parameters are DTensors, on which every operation costs more than on a plain tensor. An optimizer that treats elements
one by one needs nothing of that: for the time of ``step`` its parameters, their gradients and its state are exchanged
for the local tensors that they hold. Before and after, and inside a closure, all are DTensors, as checkpoints need.

Other optimizers, whose update of an element depends on others (Adafactor, Muon, LBFGS, your own classes), step on the
DTensors. So does a parameter of which a gradient or state is placed otherwise than itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from operator import is_
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
State = dict[str, Any]  # Any: what an optimizer keeps of a parameter
States = dict[Tensor, State]
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
    """The parameters of an optimizer that are exchanged, and its state of them; kept for the next step."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by id of the parameter
        self._exchanged: list[Entry] = []
        self._others: list[Tensor] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # the list of a group, and what it had
        self._whole: defaultdict[Tensor, State] = defaultdict(dict)
        self._pieces: defaultdict[Tensor, State] = defaultdict(dict)

    @torch.no_grad()
    def make(self, optimizer: Optimizer) -> None:
        """Local tensors in place of parameters."""
        self._whole, self._exchanged, self._others = optimizer.state, [], []
        for group in optimizer.param_groups:
            parameters = group["params"]
            self._groups.append((parameters, list(parameters)))
            parameters[:] = [self._local(parameter) for parameter in parameters]
        for parameter in self._others:
            if parameter in self._whole:
                self._pieces[parameter] = self._whole[parameter]
        optimizer.state = self._pieces

    @torch.no_grad()
    def take_back(self, optimizer: Optimizer) -> None:
        """Parameters in place of local tensors, if there are any."""
        if not self._groups:
            return
        for parameters, before in self._groups:
            parameters[:] = before
        self._groups = []
        optimizer.state = self._whole
        for parameter in self._others:
            if parameter in self._pieces:
                self._whole[parameter] = self._pieces.pop(parameter)
        for entry in self._exchanged:
            entry.shard.grad = None
            if entry.has_changed(self._pieces):
                self._whole[entry.parameter] = entry.place(self._pieces[entry.shard])

    def _local(self, parameter: Tensor) -> Tensor:
        entry = self._entries.get(id(parameter))
        if entry is None or not entry.knows(self._whole):
            leaves = _leaves(parameter)
            if leaves is None or not isinstance(parameter, DTensor):
                self._others.append(parameter)
                return parameter
            entry = self._entries[id(parameter)] = Entry(parameter, leaves.shard(parameter), self._whole, self._pieces)
        grad = parameter.grad
        if entry.is_foreign or (grad is not None and not _is_placed_as(grad, entry.parameter)):
            self._others.append(parameter)
            return parameter
        entry.shard.grad = grad.to_local() if isinstance(grad, DTensor) else None
        self._exchanged.append(entry)
        return entry.shard


class Entry:
    """A parameter with the local tensor in its place, and its state with local tensors in place of DTensors."""

    def __init__(self, parameter: DTensor, shard: Tensor, whole: States, pieces: States) -> None:
        self.parameter, self.shard = parameter, shard
        self._held: State | None = whole.get(parameter)
        self._live: State | None = None
        pieces.pop(shard, None)
        if self._held is not None:
            self._note(self._held, {name: _piece(x) for name, x in self._held.items()})
            pieces[shard] = self._live = dict(self._pieces)
        self.is_foreign = not all(_is_placed_as(x, parameter) for x in (self._held or {}).values())

    def knows(self, whole: States) -> bool:
        """Whether the parameter's state is the one that it was made for, or left."""
        held = whole.get(self.parameter)
        return held is self._held and (held is None or _are_same(held, self._values))

    def has_changed(self, pieces: States) -> bool:
        """Whether a step put other tensors into the state than those that it had, or made one."""
        if self._live is None:
            self._live = pieces.get(self.shard)
            return self._live is not None
        return not _are_same(self._live, self._pieces)

    def place(self, state: State) -> State:
        """The state after a step, with DTensors in place of local tensors."""
        held = {} if self._held is None else self._held
        placed = {name: self._placed(x, name) for name, x in state.items()}
        held.clear()
        held.update(placed)
        self._note(held, dict(state))
        return held

    def _note(self, held: State, pieces: State) -> None:
        self._held, self._values, self._pieces = held, dict(held), pieces

    def _placed(self, x: Any, name: str) -> Any:
        if self._held is not None and self._pieces.get(name) is x:
            return self._values[name]
        if not isinstance(x, Tensor) or name in ONE_NUMBER or x.shape != self.shard.shape:
            return x
        return DTensor.from_local(x, self.parameter.device_mesh, self.parameter.placements, run_check=False)


def _piece(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _is_placed_as(x: object, parameter: DTensor) -> bool:
    return not isinstance(x, DTensor) or x.placements == parameter.placements


def _are_same(one: State, other: State) -> bool:
    """Whether both have the same objects."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))
