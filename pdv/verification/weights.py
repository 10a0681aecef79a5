"""weights.safetensors held to plan.json: names, types, shapes, the digest of every tensor, and no byte besides.

Constants (masks, tables) are held to the plan itself, which knows their values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ir.dims import Shape
from ir.errors import VerificationError, WeightsError
from ir.files.reading import parse_json, read_text
from ir.graph import View
from ir.views import readings
from pdv.emit.emission import Emission
from pdv.emit.package import INDEX, WEIGHTS
from pdv.emit.weights import (
    CODES,
    TYPES,
    Stored,
    describe,
    digest_of,
    head,
    in_order,
    index_text,
    state_text,
    type_of,
)
from pdv.frontend.checkpoint import read_checkpoint
from pdv.frontend.program import Weights
from pdv.plan.seal import PLAN, damage_error

PIECE = 1 << 20  # bytes read at a time
_MEND = "Restore it, or write the package again with pdv optimize"


def read_stored(said: object) -> dict[str, Stored]:
    """The field ``weights`` of plan.json.

    Raises:
        VerificationError: if it is none.
    """
    if not isinstance(said, Mapping):
        raise damage_error("weights is no object")
    found = {}
    for name, entry in said.items():
        shape = entry["shape"] if isinstance(entry, Mapping) and set(entry) == set(Stored._fields) else None
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise damage_error(f"weights.{name} is {entry!r}")
        found[name] = Stored(entry["dtype"], tuple(shape), entry["sha256"])
    return found


def check_weights(
    folder: Path,
    program: Emission,
    stored: Mapping[str, Stored],
    state: Mapping[str, Any],  # Any: JSON
    *,
    edited: bool = False,
) -> None:
    """Whether plan.json names the tensors that the program reads, and the file holds these.

    state: what else of the source's state there is (``state`` of plan.json).
    ``edited``: the file may be another one, of the same names, types and shapes; constants keep their values.

    Raises:
        VerificationError: naming the tensor.
    """
    _check_names(program, stored, state.get("unread", ()))
    _check_shapes(program, stored)
    path = folder / WEIGHTS
    try:
        said = state_text(state, program.computed)
        linked = _read_links(folder, stored, said)
        for name, other in linked.items():
            _check_linked(other, name, stored[name], edited=edited)
        own = {name: entry for name, entry in stored.items() if name not in linked}
        with path.open("rb") as file:
            if edited:
                _check_others(file, path, program, own)
            else:
                _check_same(file, path, own, said)
    except FileNotFoundError:
        raise VerificationError(f"{path} is missing", "", _MEND) from None
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error.strerror}", "", _MEND) from error


def _read_links(folder: Path, stored: Mapping[str, Stored], said: str) -> dict[str, Path]:
    """Which tensors lie in files of others, by the index of the package, if it has one.

    Raises:
        VerificationError: if the index is not as it was written.
    """
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = dict(parse_json(read_text(path, PLAN))["weight_map"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise VerificationError(f"{path} is no index of weights: {error!r}", "", _MEND) from error
    whole = set(weight_map) == set(stored) and all(isinstance(file, str) for file in weight_map.values())
    if not whole or path.read_text(encoding="utf-8") != index_text(weight_map, said):
        raise VerificationError(f"{path} is not the index of the tensors that plan.json names", "", _MEND)
    return {name: Path(file) for name, file in weight_map.items() if file != WEIGHTS}


def _check_linked(path: Path, name: str, entry: Stored, *, edited: bool) -> None:
    """A tensor of another file is the one that the plan names.

    Raises:
        VerificationError: if it is not; or, of one that may be ``edited``, has another type or shape.
    """
    try:
        found = read_checkpoint(path).get(name)
    except WeightsError as error:
        raise VerificationError(f"{name}: {error.what}", "", _MEND) from error
    array = None if found is None else found.load()
    if array is None or (CODES[type_of(array)], array.shape) != entry[:2]:
        raise VerificationError(f"{path} has no {name} as the program reads it", "", _MEND)
    if not edited and describe(array, TYPES[entry.dtype]).sha256 != entry.sha256:
        raise VerificationError(f"{path}: {name} is another tensor than was linked", "", _MEND)


def _check_same(file: BinaryIO, path: Path, stored: Mapping[str, Stored], said: str) -> None:
    """The file holds the tensors that were written, byte for byte."""
    expected = head(stored, said)
    if file.read(len(expected)) != expected:
        raise VerificationError(f"{path} does not hold the tensors that plan.json names", "", _MEND)
    for name, entry in stored.items():
        if _digest(file, entry.num_bytes) != entry.sha256:
            raise VerificationError(f"{path}: {name} is another tensor than was written", "", _MEND)
    if file.read(1):
        raise VerificationError(f"{path} is longer than its tensors", "", _MEND)


def _check_others(file: BinaryIO, path: Path, program: Emission, stored: Mapping[str, Stored]) -> None:
    """The file holds tensors of the same names, types and shapes, whoever wrote them."""
    size = path.stat().st_size
    start = 8 + int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(start - 8)) if start <= size else {}
        header.pop("__metadata__", None)
        found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        parts = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise VerificationError(f"{path} has no header of safetensors: {error!r}", "", _MEND) from error
    for name in [*stored, *found]:
        if name not in found or name not in stored or found[name] != (stored[name].dtype, stored[name].shape):
            what = (
                f"{path}: {name} is {found.get(name)}, the program reads {stored[name][:2] if name in stored else None}"
            )
            raise VerificationError(what, "Tensors of the same names, types and shapes", _MEND)
    ends = [0, *(end for _, end, _ in parts)]
    if [begin for begin, _, _ in parts] != ends[:-1] or size != start + ends[-1]:
        raise VerificationError(f"{path}: its tensors do not lie one behind the other", "", _MEND)
    constants = program.constants()
    for begin, end, name in parts:
        file.seek(start + begin)
        wrong = end - begin != stored[name].num_bytes
        if wrong or (name in constants and _digest(file, end - begin) != stored[name].sha256):
            raise VerificationError(f"{path}: {name} is no tensor of the program's, or another constant", "", _MEND)


def _check_names(program: Emission, stored: Mapping[str, Stored], unread: Sequence[str]) -> None:
    """The names and types are those that the program reads; constants have the plan's values."""
    types = {name: dtype for name, (dtype, _) in program.tensors(Weights()).items()}
    for name in unread:
        if name in types or name not in stored or stored[name].dtype not in TYPES:
            raise VerificationError(f"plan.json: state.unread names {name!r}, which is no such tensor", "", _MEND)
        types[name] = TYPES[stored[name].dtype]
    expected = in_order(types)
    if list(stored) != expected:
        odd = sorted(set(stored) ^ set(expected)) or "in another order"
        raise VerificationError(f"plan.json: weights are not those of the program: {odd}", "", _MEND)
    for name, entry in stored.items():
        code = CODES[types[name]]
        if entry.dtype != code:
            raise VerificationError(f"plan.json: weights.{name} is {entry.dtype}, the plan gives {code}", "", _MEND)
    for name, (dtype, array) in program.constants().items():
        if (stored[name].shape, stored[name].sha256) != (array.shape, digest_of(array, dtype)):
            raise VerificationError(f"plan.json: weights.{name} is not the constant of the plan", "", _MEND)


def _check_shapes(program: Emission, stored: Mapping[str, Stored]) -> None:
    """Every parameter is a view of what is stored."""
    for param in program.graph.params:
        for source, view, shape in readings(param):
            if view_shape(stored[source].shape, view) != shape:
                what = f"plan.json: weights.{source} has the shape {list(stored[source].shape)}"
                raise VerificationError(f"{what}, of which the plan's {param.attr('name')} is no view", "", _MEND)


def view_shape(shape: Shape, view: View) -> Shape | None:
    """The shape of a view; None if there is no such view of this shape."""
    for step in view:
        match step:
            case ("permute", perm) if sorted(perm) == list(range(len(shape))):
                shape = tuple(shape[dim] for dim in perm)
            case ("chunk", int(dim), int(parts), _) if dim < len(shape) and shape[dim] % parts == 0:
                shape = (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
            case ("slice", int(dim), int(start), int(stop), extent) if dim < len(shape) and shape[dim] == extent:
                shape = (*shape[:dim], stop - start, *shape[dim + 1 :])
            case ("reshape", new) if math.prod(new) == math.prod(shape):
                shape = tuple(new)
            case _:
                return None
    return shape


def _digest(file: BinaryIO, num_bytes: int) -> str:
    """Of the next bytes of a file, or of as many as there are."""
    total: Any = hashlib.sha256()  # Any: hashlib names no type for it
    while num_bytes > 0 and (piece := file.read(min(PIECE, num_bytes))):
        total.update(piece)
        num_bytes -= len(piece)
    return str(total.hexdigest())
