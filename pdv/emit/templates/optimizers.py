"""Parameters in the hands of an optimizer. Entry point: ``step_on_local_tensors``.

Parameters are DTensors, on which every operation costs more than on a plain tensor. An optimizer that treats elements
one by one needs nothing of that: for the time of ``step`` its parameters, their gradients and its state are exchanged
for the local tensors that they hold. Before and after, inside a closure, and in hooks of steps, all are DTensors, as
checkpoints need, and norms that a hook takes.

Others (Adafactor, Muon, LBFGS, your own classes), and what is placed otherwise than its parameter, step on DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .gradients import GradientSums, Leaves
from .kernels.dtensors import own_part
from .kernels.steps import note_step
from .stored import local_piece, placed_as

ELEMENT_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad, optim.Adadelta,
    optim.Adamax, optim.ASGD, optim.Rprop,
)  # fmt: skip
_NEAREST = -1  # among hooks of an optimizer, which torch counts from 0
ONE_NUMBER = ("step", "eta", "mu", "mu_product")  # of a parameter's state; the rest has the parameter's shape

Step = tuple[tuple[Any, ...], dict[str, Any]]  # Any: the arguments of an optimizer's step
State = dict[str, Any]  # Any: what an optimizer keeps of a parameter
States = dict[Tensor, State]
_exchanges: WeakKeyDictionary[Optimizer, Exchange] = WeakKeyDictionary()
_looks: list[Callable[[Optimizer], object]] = []


@cache
def step_on_local_tensors() -> None:
    """From now on, let optimizers of parameters that have leaves step on local tensors."""
    register_optimizer_step_pre_hook(_stand_nearest)


def look_at_steps(look: Callable[[Optimizer], object]) -> None:
    """Call it before steps, behind hooks of the caller's own, with gradients as the step takes them."""
    _looks.append(look)


def _stand_nearest(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have parameters exchanged right around a step: the caller's hooks, before and behind it, see DTensors."""
    del args, kwargs
    _take_back(optimizer)  # of a step that failed
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    before[_NEAREST], behind[_NEAREST] = _before_step, _after_step
    before.move_to_end(_NEAREST)  # type: ignore[attr-defined]  # an OrderedDict
    behind.move_to_end(_NEAREST, last=False)  # type: ignore[attr-defined]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Exchange, and take it back around calls of the closure; RuntimeError if gradients wait to be summed."""
    for look in _looks:
        look(optimizer)
    known = _exchanges.get(optimizer)
    if type(optimizer) is optim.Adafactor and any(map(_is_cut, _given(optimizer))):
        raise RuntimeError(
            "whole-parameters-wanted: Adafactor takes norms of rows and columns of parameters, of which ranks hold "
            "parts. Take another optimizer, such as AdamW, or a plan whose parameters rest whole."
        )
    again = known is not None and known.is_ready(optimizer)
    all_sums = known.sums if known is not None and again else _sums_of(optimizer)
    if any(sums.is_waiting for sums in all_sums):
        raise RuntimeError(
            "unsummed-gradients: gradients of no_sync were not summed over ranks. Run the last backward pass outside "
            "of no_sync, call flush of the model, or drop them with its zero_grad."
        )
    note_step(optimizer, all_sums)
    if not all_sums or type(optimizer) not in ELEMENT_BY_ELEMENT or optimizer.defaults.get("differentiable"):
        _place_gradients(optimizer)
        return None
    if known is None:
        _exchanges[optimizer] = known = Exchange()
        optimizer.register_state_dict_pre_hook(_take_back)  # of a step that failed
        optimizer.register_load_state_dict_pre_hook(_take_back)
    known.make(optimizer, again=again)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _with_parameters(optimizer, args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _with_parameters(optimizer, kwargs["closure"])}
    return None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take back, and count a change of each parameter, which torch's fused optimizers do not."""
    del args, kwargs
    _take_back(optimizer)
    known = _exchanges.get(optimizer)
    if known is not None and known.again is not None:
        increment_version(known.again.shards)
        return
    increment_version([leaves.shard(p) for p in _given(optimizer) if (leaves := _leaves(p)) and isinstance(p, DTensor)])


def _take_back(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _exchanges:
        _exchanges[optimizer].take_back(optimizer)


def _zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """What an optimizer has while parameters are exchanged, as a step that fails leaves them."""
    _take_back(optimizer)
    optimizer.zero_grad(*args, **kwargs)


def _with_parameters(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure that sees parameters."""

    def exchanged_back() -> Any:
        _take_back(optimizer)
        loss = closure()
        _exchanges[optimizer].make(optimizer)
        return loss

    return exchanged_back


def _sums_of(optimizer: Optimizer) -> set[GradientSums]:
    """Those in which gradients of its parameters may wait."""
    return {leaves.sums for p in _given(optimizer) if (leaves := _leaves(p))}


def _given(optimizer: Optimizer) -> Iterator[Tensor]:
    """Its parameters."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _place_gradients(optimizer: Optimizer) -> None:
    """Of gradients that were set to plain tensors, which are whole as torch asks, what the rank holds, as DTensors."""
    for parameter in _given(optimizer):
        grad = parameter.grad
        if grad is not None and not isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = own_part(grad, parameter)


def _is_cut(x: Tensor) -> bool:
    return isinstance(x, DTensor) and any(isinstance(placed, Shard) for placed in x.placements)


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
        self.again: Again | None = None
        self.sums: set[GradientSums] = set()

    def is_ready(self, optimizer: Optimizer) -> bool:
        """Whether parameters and states are what the last step left."""
        return self.again is not None and self.again.holds(optimizer)

    @torch.no_grad()
    def make(self, optimizer: Optimizer, *, again: bool = False) -> None:
        """Local tensors in place of parameters; ``again``: of those of the last step (``is_ready``)."""
        vars(optimizer).setdefault("zero_grad", partial(_zero_grad, optimizer))
        if again and self.again is not None and self.again.give_gradients():
            for parameters, before, shards in self.again.groups:
                self._groups.append((parameters, before))
                parameters[:] = shards
            optimizer.state = self._pieces
            return
        _place_gradients(optimizer)
        self.again = None
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
        if getattr(vars(optimizer).get("zero_grad"), "func", None) is _zero_grad:
            del vars(optimizer)["zero_grad"]
        for parameters, before in self._groups:
            parameters[:] = before
        self._groups = []
        optimizer.state = self._whole
        if self.again is not None:
            self.again.drop_gradients()
            if self.again.left_states():
                return
            self.again = None
        for parameter in self._others:
            if parameter in self._pieces:
                self._whole[parameter] = self._pieces.pop(parameter)
        for entry in self._exchanged:
            entry.shard.grad = None
            if entry.has_changed(self._pieces):
                self._whole[entry.parameter] = entry.place(self._pieces[entry.shard])
        if not self._others:
            self.again = Again(optimizer, self._exchanged, self._pieces)
            self.sums = _sums_of(optimizer)

    def _local(self, parameter: Tensor) -> Tensor:
        entry = self._entries.get(id(parameter))
        shard = leaves.shard(parameter) if (leaves := _leaves(parameter)) else None
        if entry is None or entry.shard is not shard or not entry.knows(self._whole):
            if shard is None or not isinstance(parameter, DTensor):
                self._others.append(parameter)
                return parameter
            entry = self._entries[id(parameter)] = Entry(parameter, shard, self._whole, self._pieces)
        grad = parameter.grad
        if entry.is_foreign or (grad is not None and not _is_placed_as(grad, entry.parameter)):
            self._others.append(parameter)
            return parameter
        entry.shard.grad = grad.to_local() if isinstance(grad, DTensor) else None
        self._exchanged.append(entry)
        return entry.shard


class Again:
    """What a step exchanged, in lists that a next one of the same parameters and states takes as they are."""

    def __init__(self, optimizer: Optimizer, entries: Sequence[Entry], pieces: States) -> None:
        self.whole, self._pieces = optimizer.state, pieces
        self._parameters = [entry.parameter for entry in entries]
        self.shards = [entry.shard for entry in entries]
        self._placements = [parameter.placements for parameter in self._parameters]
        self._leaves = [_leaves(parameter) for parameter in self._parameters]
        shards = {id(entry.parameter): entry.shard for entry in entries}
        lists = [group["params"] for group in optimizer.param_groups]
        self.groups = [(given, list(given), [shards[id(p)] for p in given]) for given in lists]
        self._states, self._local_states = _all_of(self.whole), _all_of(pieces)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether parameters and states are these."""
        lists = [group["params"] for group in optimizer.param_groups]
        return (
            optimizer.state is self.whole
            and _are_these([_leaves(parameter) for parameter in self._parameters], self._leaves)
            and all(own is not None and own.has(shard) for own, shard in zip(self._leaves, self.shards, strict=True))
            and _are_these(lists, [given for given, _, _ in self.groups])
            and all(_are_these(given, before) for given, before, _ in self.groups)
            and _are_these(_all_of(self.whole), self._states)
        )

    def give_gradients(self) -> bool:
        """Each local tensor gets the piece of its parameter's gradient; False if one is placed otherwise."""
        for parameter, shard, placements in zip(self._parameters, self.shards, self._placements, strict=True):
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements == placements:
                shard.grad = grad._local_tensor  # noqa: SLF001  # what to_local() gives where nothing is recorded
            elif grad is not None:
                self.drop_gradients()
                return False
        return True

    def drop_gradients(self) -> None:
        """Local tensors have none."""
        for shard in self.shards:
            shard.grad = None

    def left_states(self) -> bool:
        """Whether a step left the tensors of the states in their places, and made none."""
        return _are_these(_all_of(self._pieces), self._local_states)


def _all_of(states: States) -> list[object]:
    """Parameters, their states, and what these have: to look each up would take its hash, which Python makes."""
    return [*states, *states.values(), *chain.from_iterable(map(_values, states.values()))]


def _values(state: Any) -> Iterable[object]:  # Any: a State, or what a loop keeps beside states
    return state.values() if isinstance(state, dict) else ()


def _are_these(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both lists have the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


class Entry:
    """A parameter with the local tensor in its place, and its state with local tensors in place of DTensors."""

    def __init__(self, parameter: DTensor, shard: Tensor, whole: States, pieces: States) -> None:
        self.parameter, self.shard = parameter, shard
        self.held: State | None = whole.get(parameter)
        self.live: State | None = None
        pieces.pop(shard, None)
        if self.held is not None:
            self._note(self.held, {name: local_piece(x) for name, x in self.held.items()})
            pieces[shard] = self.live = dict(self._pieces)
        self.is_foreign = not all(_is_placed_as(x, parameter) for x in (self.held or {}).values())

    def knows(self, whole: States) -> bool:
        """Whether the parameter's state is the one that it was made for, or left."""
        held = whole.get(self.parameter)
        return held is self.held and (held is None or _are_these([*held.values()], [*self._values.values()]))

    def has_changed(self, pieces: States) -> bool:
        """Whether a step put other tensors into the state than those that it had, or made one."""
        if self.live is None:
            self.live = pieces.get(self.shard)
            return self.live is not None
        return not _are_these([*self.live.values()], [*self._pieces.values()])

    def place(self, state: State) -> State:
        """The state after a step, with DTensors in place of local tensors."""
        held = {} if self.held is None else self.held
        placed = {name: self._placed(x, name) for name, x in state.items()}
        held.clear()
        held.update(placed)
        self._note(held, dict(state))
        return held

    def _note(self, held: State, pieces: State) -> None:
        self.held, self._values, self._pieces = held, dict(held), pieces

    def _placed(self, x: Any, name: str) -> Any:
        if self.held is not None and self._pieces.get(name) is x:
            return self._values[name]
        if not isinstance(x, Tensor) or name in ONE_NUMBER or x.shape != self.shard.shape:
            return x
        return placed_as(self.parameter, x, self.parameter.device_mesh)


def _is_placed_as(x: object, parameter: DTensor) -> bool:
    return not isinstance(x, DTensor) or x.placements == parameter.placements
