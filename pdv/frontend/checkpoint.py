"""Weights from safetensors files, as Hugging Face writes them: one file, or several and an index that names them.

Nothing is read but the headers; a tensor is mapped when it is asked for, and let go with the array, so that a
checkpoint larger than memory can be planned and written. Entry points: ``read_checkpoint``, ``with_checkpoint``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ir.dims import Shape
from ir.errors import ShapeError, WeightsError, first_line
from ir.views import Reading, apply_view, readings, shape_after
from pdv.frontend.program import Array, Program, Weights

INDEX = ".index.json"
_MOST_HEADER = 100 << 20  # bytes, as the library has it
_TYPES: Mapping[str, Any] = {  # Any: NumPy's types, and one that it lacks
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_ALLOWED = "A .safetensors file, or the .index.json beside several of them"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: where its bytes begin, of which type and shape it is."""

    file: Path
    start: int
    dtype: Any  # Any: as NumPy has it
    shape: Shape

    @property
    def is_floating(self) -> bool:
        """Whether it holds floats, of whatever width."""
        return bool(self.dtype.kind == "f" or self.dtype == ml_dtypes.bfloat16)

    def load(self) -> Array:
        """Its values, mapped."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.start, self.shape)


def read_checkpoint(path: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint, by name.

    Raises:
        WeightsError: if there is none, or it is not well formed.
    """
    if not path.is_file():
        raise WeightsError(f"{path} does not exist" if not path.exists() else f"{path} is no file", _ALLOWED)
    if not path.name.endswith(INDEX):
        return _read_header(path)
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is no index of a checkpoint: {first_line(error)}", _ALLOWED) from error
    folder = path.resolve().parent
    odd = sorted({file for file in files.values() if Path(file).name != file or file in ("", ".", "..")})
    if odd:
        raise WeightsError(f"{path} names {odd[0]!r}", "Files beside the index")
    entries = {file: _read_header(folder / file) for file in sorted(set(files.values()))}
    missing = [name for name, file in files.items() if name not in entries[file]]
    if missing:
        raise WeightsError(f"{path} names {missing[0]!r}, which {files[missing[0]]} has not", _ALLOWED)
    return {name: entries[file][name] for name, file in files.items()}


def with_checkpoint(program: Program, path: Path) -> Program:
    """The program with its stored tensors from a checkpoint; those that it does not read may be there, too.

    Raises:
        WeightsError: naming tensors that the checkpoint lacks, or has in another shape; or if it cannot be read.
    """
    found = read_checkpoint(path)
    parts = {name: source for name, (source, _) in program.names.items() if source in program.joint}
    own = (name for name in program.weights.names if name not in program.joint)
    named = {name: _name_in(found, name, program) for name in (*own, *parts)}
    missing = [name for name, there in named.items() if not there]
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise WeightsError(f"{path} lacks {len(missing)} of {len(named)} tensors ({some})", "All that the model stores")
    entries = {name: found[there] for name, there in named.items()}
    wanted = [reading for param in program.graph.params for reading in readings(param) if reading.source in entries]
    for name in parts:
        source, view = program.names[name]
        wanted.append(Reading(name, (), shape_after(program.weights.load(source).shape, view)))
    for reading in wanted:
        entry = entries[reading.source]
        if not (entry.is_floating and _is_view(entry.shape, reading)):
            held = f"{entry.dtype.name} of shape {list(entry.shape)}"
            raise WeightsError(
                f"{path}: {named[reading.source]} is {held}", f"Floats, of which the model reads {list(reading.shape)}"
            )
    loaders = {name: entry.load for name, entry in entries.items() if name not in parts}
    joined = {name: partial(_join, program, name, entries) for name in program.weights.names if name in program.joint}
    unread = {name: found[name].load if name in found else load for name, load in program.weights.unread.items()}
    files = {name: entries[name].file for name in loaders if named[name] == name}
    return replace(program, weights=Weights({**loaders, **joined}, unread, files))


def _name_in(found: Mapping[str, Entry], name: str, program: Program) -> str:
    """What a checkpoint calls a tensor, by any of its names; nothing if it has none."""
    others = (other for other, (source, view) in program.names.items() if source == name and not view)
    return next((each for each in (name, *others) if each in found), "")


def _join(program: Program, name: str, entries: Mapping[str, Entry]) -> Array:
    """Memory that several tensors of a checkpoint lie in.

    Raises:
        WeightsError: if two of them differ where they overlap.
    """
    before = program.weights.load(name)
    whole, numbers = before.copy(), np.arange(before.size).reshape(before.shape)
    parts = {other: apply_view(numbers, view) for other, (source, view) in program.names.items() if source == name}
    for other, places in parts.items():
        whole.reshape(-1)[places] = entries[other].load()
    for other, places in parts.items():
        if not np.array_equal(whole.reshape(-1)[places], entries[other].load().astype(whole.dtype)):
            raise WeightsError(f"{other} differs from tensors whose memory it shares in the model", "Equal parts of it")
    return whole


def _is_view(shape: Shape, reading: Reading) -> bool:
    try:
        return shape_after(shape, reading.view) == reading.shape
    except (ShapeError, ValueError, IndexError, AssertionError):
        return False


def _read_header(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            listed = json.loads(file.read(length))
        return {
            str(name): _entry(path, 8 + length, size, entry) for name, entry in listed.items() if name != "__metadata__"
        }
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", _ALLOWED) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is no safetensors file: {first_line(error)}", _ALLOWED) from error


def _entry(path: Path, data: int, size: int, entry: Mapping[str, Any]) -> Entry:
    begin, end = entry["data_offsets"]
    dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
    whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    if not whole or end - begin != math.prod(shape) * dtype.itemsize or data + end > size:
        raise ValueError(f"a tensor of shape {list(shape)} takes bytes {begin} to {end}")
    return Entry(path, data + begin, dtype, shape)
