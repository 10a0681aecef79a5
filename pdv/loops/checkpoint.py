"""Checkpoints that every plan of a model can read: weights, optimizer and averages by the tensors of the source.

Each rank writes the boxes that it holds and reads those that it needs; only what is no box (a parameter that is
reshaped or joined) is whole in memory. Entry points: ``save_checkpoint``, ``load_checkpoint``.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ir.errors import UsageError, WeightsError
from pdv.loops import moments
from pdv.loops.computed import Computed, computed_of
from pdv.loops.files import Boxes, Folder, write
from pdv.loops.pieces import Box, Piece, box_of, check_kept, local_of, notes_of, pieces_of, shape_of, share

if TYPE_CHECKING:
    from pdv.loops.averages import Average

NOTE = "pdv"
"""The tensor of a checkpoint whose bytes are JSON: what is no tensor of the model's."""
WEIGHTS, AVERAGE = "model.", "average."
_FLOAT, _TUPLE, _PAIRS, _COUNTER = "pdv.float", "pdv.tuple", "pdv.pairs", "pdv.counter"
_WAYS: dict[str, Callable[[Any], Any]] = {
    _FLOAT: float,
    _TUPLE: tuple,
    _PAIRS: dict,
    _COUNTER: lambda pairs: Counter(dict(pairs)),
}
"""What JSON has no word for, and how it is made of what is said of it."""
_Held = Mapping[int, Tensor]


# ---- Writing ----


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    average: Average | None = None,
    loop: Mapping[str, Any] | None = None,  # Any: JSON
    overwrite: bool = False,
) -> None:
    """Write weights, buffers and the optimizer's state as ``torch.distributed.checkpoint`` does; all ranks call it.

    loop: what else goes on, as JSON: the step, ``scheduler.state_dict()``, where the data is.

    Raises:
        UsageError: if the folder is taken, ``loop`` is not JSON, the optimizer's state cannot be cut another way, or
            the package does not keep the source's weights.
        WriteError: on all ranks, if one could not write.
    """
    pieces = pieces_of(model)
    check_kept(pieces)
    note: dict[str, Any] = {"version": 1, "loop": as_said(loop or {})}
    held: dict[str, _Held] = {WEIGHTS: {id(piece.tensor): piece.tensor for piece in pieces}}
    if optimizer is not None:
        state = moments.take(optimizer, pieces)
        held |= {f"{moments.PREFIX}{key}.": of for key, of in sorted(state.moments.items())}
        note["optimizer"] = {"numbers": state.numbers, "groups": state.groups, "group_of": state.group_of}
    if average is not None:
        held[AVERAGE] = average.by_parameter()
        note["average"] = average.said()
    parts: dict[str, Any] = {NOTE: as_note(note)}
    with torch.no_grad():
        kinds = sorted({kind for kinds in share(sorted(held)) for kind in kinds})  # a stage may lack one
        for kind in kinds:
            parts |= _tensors(model, pieces, kind, held.get(kind, {}))
        parts |= _unread(pieces)
    write(Path(folder), parts, overwrite=overwrite)


def as_said(value: Any, place: str = "loop") -> Any:  # Any: JSON
    """JSON of what a loop keeps, which ``from_said`` takes back as it was: schedules count by number, and begin at inf.

    Raises:
        UsageError: naming what is no number, text, list or dict.
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {_FLOAT: repr(value)}
    if isinstance(value, list):
        return [as_said(x, f"{place}[{at}]") for at, x in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: as_said(list(value), place)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value.keys().isdisjoint(_WAYS):
            return {key: as_said(x, f"{place}[{key!r}]") for key, x in value.items()}
        pairs = [[as_said(key, place), as_said(x, f"{place}[{key!r}]")] for key, x in value.items()]
        return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
    raise UsageError(
        f"{place} cannot be written as JSON: it is of {type(value).__name__}",
        "Numbers, text, lists, tuples and dicts of them",
    )


def from_said(said: Any) -> Any:  # Any: JSON
    """What a loop kept."""
    if isinstance(said, list):
        return [from_said(x) for x in said]
    if not isinstance(said, dict):
        return said
    way = next(iter(said), None) if len(said) == 1 else None
    if way in _WAYS:
        return _WAYS[way](from_said(said[way]))
    return {key: from_said(x) for key, x in said.items()}


def as_note(note: Mapping[str, Any]) -> Tensor:
    """JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(note, sort_keys=True).encode()), dtype=torch.uint8)


def _tensors(model: Any, pieces: Sequence[Piece], kind: str, held: _Held) -> Iterator[tuple[str, Any]]:
    """What this rank has of one kind of tensors, by name: boxes, or whole what is cut in no boxes."""
    own = [piece for piece in pieces if id(piece.tensor) in held]
    whole = _not_in_boxes(own)
    boxes: dict[str, dict[Box, Tensor]] = {}
    for piece in own:
        name = piece.names[0]
        if name not in whole:
            local = piece.as_stored(local_of(held[id(piece.tensor)]))
            boxes.setdefault(name, {})[box_of(piece.own)] = local
    shapes = {piece.names[0]: shape_of(piece, piece.names[0]) for piece in own}
    yield from (
        (f"{kind}{name}", Boxes(shapes[name], next(iter(parts.values())).dtype, parts)) for name, parts in boxes.items()
    )
    if whole:
        taken = {id(piece.tensor) for piece in own if whole & {*piece.names}}
        for part in model.whole_parts(lambda x: held[id(x)] if id(x) in taken else None, rest=kind == WEIGHTS):
            yield from ((f"{kind}{name}", value) for name, value in part.items())


def _not_in_boxes(own: Sequence[Piece]) -> set[str]:
    """Names of tensors that the parameters of all ranks do not lie in as boxes, side by side."""
    mine = [
        (piece.names, (box_of(piece.whole), piece.cuts, shape_of(piece, piece.names[0])) if piece.is_box else None)
        for piece in own
    ]
    boxes: dict[str, set[Any]] = {}
    whole: set[str] = set()
    for names, box in (entry for entries in share(mine) for entry in entries):
        if box is None:
            whole |= {*names}
        else:
            boxes.setdefault(names[0], set()).add(box)
    return whole | {name for name, found in boxes.items() if not _tile(sorted(found))}


def _tile(found: Sequence[tuple[Box, Any, tuple[int, ...]]]) -> bool:
    """Whether boxes fill a tensor, none on another."""
    volume = sum(math.prod(stop - start for start, stop in box) for box, _, _ in found)
    pairs = combinations([box for box, _, _ in found], 2)
    apart = all(any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(x, y, strict=True)) for x, y in pairs)
    return apart and volume == math.prod(found[0][2])


def _unread(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """What the source stores and this plan does not read; another one may."""
    unread = notes_of(pieces).get("unread", ())
    return {f"{WEIGHTS}{name}": pieces[0].whole.file.get_tensor(name) for name in unread}


# ---- Reading ----


@dataclass(frozen=True)
class _Part:
    """A tensor of a checkpoint, read box by box, as an open safetensors file gives it."""

    folder: Folder
    name: str

    def get_shape(self) -> list[int]:
        return list(self.folder.tensors[self.name])

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        return self.folder.read(self.name, tuple((one.start, one.stop) for one in ranges))


@dataclass(frozen=True)
class Kind:
    """The tensors of a checkpoint of one kind, by the source's names, as an open safetensors file gives them."""

    folder: Folder
    prefix: str
    renamed: Mapping[str, str]

    def at(self, name: str) -> str:
        """Its name in the checkpoint."""
        return f"{self.prefix}{self.renamed.get(name, name)}"

    def get_slice(self, name: str) -> _Part:
        """A tensor of which parts are read."""
        return _Part(self.folder, self.at(name))

    def get_tensor(self, name: str) -> Tensor:
        """All of one."""
        return self.folder.read(self.at(name))


@torch.no_grad()
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    average: Average | None = None,
) -> dict[str, Any]:
    """Take what any plan of the model saved, under this one; ``loop`` as it was given. All ranks call it.

    All is read before anything changes: for that time a rank has twice what it holds.

    Raises:
        WeightsError: on all ranks, naming tensors that are missing or of another shape; then all stays as it was.
    """
    error, note = "", {}
    fills: list[tuple[Kind, Piece, Tensor]] = []
    wanted, steps = None, 0
    try:
        file = Folder(Path(folder))
        note = read_note(file)
        pieces = pieces_of(model)
        computed = computed_of(model, pieces)
        names = _renamed(pieces, file)
        fills += [(Kind(file, WEIGHTS, names), piece, piece.tensor) for piece in pieces]
        if optimizer is not None:
            wanted = moments.put(optimizer, pieces, _part_of(note, "optimizer", file), file.tensors)
            of_moments = [(Kind(file, f"{moments.PREFIX}{key}.", names), piece, x) for key, x, piece in wanted.moments]
            _check(of_moments, file, computed)
            for moment, found in _read(of_moments, computed):
                moment.copy_(found)
        if average is not None:
            steps = int(_part_of(note, "average", file)["steps"])
            held = average.by_parameter()
            own = [piece for piece in pieces if id(piece.tensor) in held]
            fills += [(Kind(file, AVERAGE, names), piece, held[id(piece.tensor)]) for piece in own]
        _check(fills, file, computed)
        read = _read(fills, computed)
    except (WeightsError, UsageError) as failure:
        error = failure.what
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as failure:  # a note may say anything
        error = f"{os.fspath(folder)} has a note that does not hold together ({type(failure).__name__}: {failure})"
    _raise_everywhere(error)
    if optimizer is not None and wanted is not None:
        optimizer.load_state_dict(wanted.state)
    for tensor, found in read:
        tensor.copy_(found)
    if average is not None:
        average.steps = steps
    loop: dict[str, Any] = from_said(note["loop"])
    return loop


def _raise_everywhere(error: str) -> None:
    if failed := [text for text in share(error) if text]:
        raise WeightsError(failed[0], "A checkpoint of this model, whatever its plan", "Take that of this model")


def _read(fills: Sequence[tuple[Kind, Piece, Tensor]], computed: Computed) -> list[tuple[Tensor, Tensor]]:
    """What this rank holds of each, and what the checkpoint has of it."""
    return [(local_of(tensor), piece.own.of(computed.of(kind)).view()) for kind, piece, tensor in fills]


def read_note(file: Folder) -> dict[str, Any]:
    """What a checkpoint says beside tensors.

    Raises:
        WeightsError: if it says nothing that could be read.
    """
    if NOTE not in file.tensors:
        raise WeightsError(
            f"{file.path} has the names of one plan, not of the source. `pdv reshard` makes of it what this plan loads"
        )
    try:
        note = json.loads(bytes(file.read(NOTE).tolist()))
        _ = note["loop"], note["version"]
    except (ValueError, KeyError, TypeError) as failure:
        raise WeightsError(f"{file.path} has a note that says nothing ({failure})") from failure
    if note["version"] != 1:
        raise WeightsError(f"{file.path} is of version {note['version']}, and version 1 can be read")
    return dict(note)


def _part_of(note: Mapping[str, Any], what: str, file: Folder) -> Any:  # Any: JSON
    if what not in note:
        raise WeightsError(f"{file.path} was saved without an {what}; load it without one")
    return note[what]


def _renamed(pieces: Sequence[Piece], file: Folder) -> dict[str, str]:
    """Names that the checkpoint has another one of the source for, as tied weights have several."""
    return {
        source: name
        for name, (source, view) in notes_of(pieces).get("names", {}).items()
        if not view and f"{WEIGHTS}{source}" not in file.tensors and f"{WEIGHTS}{name}" in file.tensors
    }


def _check(fills: Sequence[tuple[Kind, Piece, Tensor]], file: Folder, computed: Computed) -> None:
    """Whether all is there, of the right shape.

    Raises:
        WeightsError: naming what is not.
    """
    wanted = {kind.at(name): shape for kind, piece, _ in fills for name, shape in computed.sources(piece).items()}
    if missing := [name for name in wanted if name not in file.tensors]:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise WeightsError(f"{len(missing)} of {len(wanted)} tensors are not in {file.path} ({some})")
    for name, shape in wanted.items():
        if file.tensors[name] != shape:
            raise WeightsError(f"{name} is of shape {list(file.tensors[name])} in {file.path}, of {list(shape)} here")
