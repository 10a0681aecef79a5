"""The state of an optimizer by the source's tensors: what it keeps for each element, numbers, and hyperparameters.

What is kept element by element (moments, averages) is cut and joined as its parameter is. Numbers, such as how often a
parameter was stepped, are those of all parameters that a stored tensor is made of. Entry points: ``take``, ``put``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ir.errors import UsageError, WeightsError
from pdv.loops.pieces import Piece, share

PREFIX = "optimizer."
STEP = "step"  # of one element as a parameter may be; torch knows it by its name, too


@dataclass
class State:
    """Of an optimizer, JSON but for ``moments``.

    moments: what is kept -> the ``id`` of a parameter -> a tensor placed as this is.
    numbers: what is kept -> name of a stored tensor -> its number. groups: hyperparameters; group_of: which of them.
    """

    moments: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: JSON
    groups: list[dict[str, Any]] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)


def take(optimizer: Optimizer, pieces: Sequence[Piece]) -> State:
    """The state of an optimizer, numbers and groups as all ranks have them; all must call it.

    Raises:
        UsageError: on all ranks, naming what is no tensor of the model, or cannot be cut another way.
    """
    known = {id(piece.tensor): piece for piece in pieces}
    state, problems = State(), []
    for number, group in enumerate(optimizer.param_groups):
        try:
            state.groups.append({key: encode(value) for key, value in group.items() if key != "params"})
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError("the optimizer has a parameter that is not the model's", "Those of the model")
                _take_one(state, parameter, optimizer.state.get(parameter, {}), known[id(parameter)], number)
        except UsageError as error:
            problems.append(error.what)
    if found := [text for texts in share(problems) for text in texts]:
        raise UsageError(
            found[0], "State of the shape of its parameter, and numbers (Adam, SGD, …)", "See docs/loops.md"
        )
    return _agree(state, pieces)


def _take_one(state: State, parameter: Tensor, kept: Mapping[str, Any], piece: Piece, group: int) -> None:
    for name in piece.names:
        state.group_of[name] = group
    for key, value in kept.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or key != STEP):
            state.moments.setdefault(key, {})[id(parameter)] = value
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise UsageError(
                f"the optimizer keeps {key} of shape {list(value.shape)} of {piece.names[0]}, whose part here is of "
                f"shape {list(parameter.shape)}: it is no state of elements, which another plan could cut another way"
            )
        else:
            for name in piece.names:
                if name in state.numbers.setdefault(key, {}) and state.numbers[key][name] != encode(value):
                    raise UsageError(f"parts of {name} have other values of {key}, which one parameter cannot have")
                state.numbers[key][name] = encode(value)


def _agree(state: State, pieces: Sequence[Piece]) -> State:
    """The same with the numbers and groups of all ranks.

    Raises:
        UsageError: if ranks say different things.
    """
    for _, groups, numbers, group_of in (every := share((None, state.groups, state.numbers, state.group_of))):
        if groups != every[0][1]:
            raise UsageError("ranks have other hyperparameters", "The same on all ranks", "Make the groups alike")
        for mine, other in (
            (state.group_of, group_of),
            *((state.numbers.setdefault(k, {}), numbers[k]) for k in numbers),
        ):
            if clash := [name for name in other if mine.setdefault(name, other[name]) != other[name]]:
                raise UsageError(f"parts of {clash[0]} are in several groups, or were stepped unequally often")
    return state


def encode(value: Any) -> Any:  # Any: JSON
    """A hyperparameter or a number as JSON; a tensor of one element as its type and value.

    Raises:
        UsageError: of what is none of these.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, tuple | list):
        return [encode(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"the optimizer has a {type(value).__name__} among its hyperparameters or state")


def decode(value: Any) -> Any:  # Any: JSON
    """What ``encode`` was given."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["tensor"]))
    return tuple(decode(one) for one in value) if isinstance(value, list) else value


# ---- Back into an optimizer ----


def kept_in(names: Iterable[str]) -> list[str]:
    """What is kept of elements, by the names of a checkpoint's tensors."""
    return sorted({name.removeprefix(PREFIX).split(".", 1)[0] for name in names if name.startswith(PREFIX)})


@dataclass(frozen=True)
class Wanted:
    """What ``put`` makes of an optimizer: a state_dict, and its moments, still zero: what is kept, where, of which."""

    state: dict[str, Any]  # Any: as Optimizer.state_dict
    moments: list[tuple[str, Tensor, Piece]]


def put(optimizer: Optimizer, pieces: Sequence[Piece], said: Mapping[str, Any], there: Iterable[str]) -> Wanted:
    """What a checkpoint has of an optimizer; nothing is changed yet.

    said: ``numbers``, ``groups`` and ``group_of`` of a `State`. there: names of the checkpoint's tensors.

    Raises:
        WeightsError: if the checkpoint has only a part of a parameter's state, or groups do not go together.
    """
    known, names = {id(piece.tensor): piece for piece in pieces}, set(there)
    keys = kept_in(names)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    moments: list[tuple[str, Tensor, Piece]] = []
    for group in optimizer.param_groups:
        own = [known[id(parameter)] for parameter in group["params"]]
        made = {key: value for key, value in group.items() if key != "params"} | _hyperparameters(own, said)
        ids = list(range(len(state), len(state) + len(own)))
        groups.append(made | {"params": ids})
        for number, piece in zip(ids, own, strict=True):
            state[number] = {key: decode(value) for key, value in _numbers(piece, said["numbers"]).items()}
            for key in keys:
                if _has(piece, [name for name in piece.names if f"{PREFIX}{key}.{name}" in names], key):
                    state[number][key] = torch.zeros_like(piece.tensor)
                    moments.append((key, state[number][key], piece))
    return Wanted({"state": {n: of for n, of in state.items() if of}, "param_groups": groups}, moments)


def _has(piece: Piece, found: Sequence[str], what: str) -> bool:
    """Whether all or none of what a parameter is made of was found.

    Raises:
        WeightsError: if only some was.
    """
    if found and len(found) < len(piece.names):
        missing = next(name for name in piece.names if name not in found)
        raise WeightsError(
            f"the checkpoint has {what} of {found[0]} and not of {missing}, which are one parameter here",
            "State of all of a parameter, or of none",
            "Train both or neither, or load the weights alone",
        )
    return bool(found)


def _numbers(piece: Piece, said: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    made = {}
    for key, of in said.items():
        if _has(piece, [name for name in piece.names if name in of], key):
            made[key] = of[piece.names[0]]
            if other := [name for name in piece.names if of[name] != made[key]]:
                raise WeightsError(
                    f"{piece.names[0]} and {other[0]} are one parameter here, and have {key} {made[key]} and "
                    f"{of[other[0]]} in the checkpoint",
                    "The same for both",
                    "Load the weights alone",
                )
    return made


def _hyperparameters(own: Sequence[Piece], said: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the group that the parameters were in when they were saved."""
    numbers = sorted({said["group_of"][name] for piece in own for name in piece.names if name in said["group_of"]})
    if len(numbers) > 1:
        raise WeightsError(
            f"one group of the optimizer has parameters of {len(numbers)} groups of the checkpoint",
            "Groups of the same parameters as when it was saved",
            "Make the optimizer with the groups that it had",
        )
    return {key: decode(value) for key, value in said["groups"][numbers[0]].items()} if numbers else {}
