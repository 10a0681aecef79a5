"""Weights that somebody trained, as Hugging Face keeps them, read straight into an emitted model.

A checkpoint of a model's body goes without the prefix that its names have in a model with a head, or the other way
round, as ``from_pretrained`` allows. Entry point: ``load_pretrained``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ir.dims import Shape
from ir.errors import WeightsError
from pdv.emit.templates.stored import Files
from pdv.loops.computed import computed_of
from pdv.loops.pieces import Piece, local_of, notes_of, pieces_of, share

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types whose values are weights as they are; what is quantized has scales beside it."""
MEND = "Take safetensors of this model (save_pretrained writes them)"


@torch.no_grad()
def load_pretrained(path: str | os.PathLike[str], model: Any, *, new: Sequence[str] = ()) -> None:
    """Take weights of a safetensors file, an index of several, or their folder; each rank reads what it holds.

    new: how names begin that the checkpoint need not have, such as a head; these stay as they are.

    Raises:
        WeightsError: on all ranks, naming what is missing or of another shape; then all stays as it was.
    """
    error = ""
    fills: list[tuple[Tensor, Tensor]] = []
    try:
        pieces = pieces_of(model)
        computed = computed_of(model, pieces)
        file = _open(Path(path))
        wanted = [computed.sources(piece) for piece in pieces]
        named = _names(list(dict.fromkeys(name for names in wanted for name in names)), notes_of(pieces), file.keys())
        for piece, names in zip(pieces, wanted, strict=True):
            if all(name in named for name in names):
                _check(piece, names, named, file)
                fills.append((local_of(piece.tensor), piece.own.of(computed.of(_Renamed(file, named))).view()))
            elif missing := [name for name in names if name not in named and not name.startswith(tuple(new))]:
                error = error or f"{path} has no {missing[0]}, nor a name that differs by a prefix"
    except WeightsError as failure:
        error = failure.what
    except Exception as failure:  # noqa: BLE001  # safetensors raises its own kinds
        _, own, said = str(failure).partition("bad-weights: ")
        said = said.partition(". Allowed:")[0]
        error = said if own else f"{path} cannot be read ({type(failure).__name__}: {failure})"
    if failed := [text for text in share(error) if text]:
        raise WeightsError(failed[0], "All weights of the model by its own names", MEND)
    for tensor, found in fills:
        tensor.copy_(found)


def _open(path: Path) -> Files:
    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else path / SINGLE
    if not path.is_file():
        raise WeightsError(f"there is no {path}")
    return Files(path)


def _names(wanted: Sequence[str], notes: Mapping[str, Any], there: Sequence[str]) -> Mapping[str, str]:
    """The checkpoint's name for each of the source's that it has: of all ways to prefix them, by which it has most."""
    others: dict[str, list[str]] = {name: [name] for name in wanted}
    for name, (source, view) in notes.get("names", {}).items():
        if not view and source in others:  # tied weights go by several
            others[source].append(name)
    own, theirs = _first_part(wanted), _first_part(there)
    ways: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(f"{own}."),
        lambda name: f"{theirs}.{name}",
    )
    held = set(there)
    found = [
        {name: at for name in wanted for at in reversed([way(x) for x in others[name]]) if at in held} for way in ways
    ]
    return max(found, key=len)


def _first_part(names: Sequence[str]) -> str:
    """With what most names begin."""
    counted = Counter(name.partition(".")[0] for name in names)
    return counted.most_common(1)[0][0] if counted else ""


def _check(piece: Piece, wanted: Mapping[str, Shape], named: Mapping[str, str], file: Files) -> None:
    for name, shape in wanted.items():
        stored = file.get_slice(named[name])
        found = tuple(stored.get_shape())
        if piece.tensor.is_floating_point() and stored.get_dtype() not in FLOATS:
            raise WeightsError(f"{named[name]} is {stored.get_dtype()}, and {', '.join(FLOATS)} can be read")
        if found != shape:
            raise WeightsError(f"{named[name]} is of shape {list(found)}, the model has {list(shape)}")


@dataclass(frozen=True)
class _Renamed:
    """Files by the source's names."""

    files: Files
    names: Mapping[str, str]

    def get_tensor(self, name: str) -> Tensor:
        return self.files.get_tensor(self.names[name])

    def get_slice(self, name: str) -> Any:  # Any: what can be sliced, with a get_shape
        return self.files.get_slice(self.names[name])
