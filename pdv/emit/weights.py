"""weights.safetensors, written one tensor at a time: the model is never in memory as a whole.

The format: 8 bytes of header length, a JSON header padded with spaces, the tensors. Room for the header is kept first
and filled last, for shapes are known only once a tensor has been read. ``head`` says what the header is, so that a
file is held against what was written byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ir.types import DType

Array = np.ndarray[Any, Any]  # Any: the element type is known only when the tensor is read
Loader = Callable[[], Array]

CODES = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.BF16: "BF16",
    DType.F16: "F16",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I16: "I16",
    DType.I8: "I8",
    DType.U32: "U32",
    DType.U16: "U16",
    DType.U8: "U8",
    DType.F8E4M3: "F8_E4M3",
    DType.F8E5M2: "F8_E5M2",
    DType.F8E4M3Z: "F8_E4M3FNUZ",
    DType.F8E5M2Z: "F8_E5M2FNUZ",
    DType.BOOL: "BOOL",
}
TYPES = {code: dtype for dtype, code in CODES.items()}
SAID = "pdv"  # what it is called in the file's metadata; ``templates/stored.py`` reads it
COMPUTED = "computed"  # in what is said: names of what is no tensor of the source; read there, too
_ROOM_PER_TENSOR = 240  # dtype, up to eight dims, two offsets of 20 digits


class Stored(NamedTuple):
    """A tensor as it lies in the file: type (as safetensors calls it), shape, and a digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


def write_weights(path: Path, tensors: Mapping[str, tuple[DType, Loader]], said: str = "") -> dict[str, Stored]:
    """Write every tensor once, as the given type; what was stored, by name, in the file's order.

    said: of the tensors, for the program (``state_text``).
    """
    names = in_order({name: dtype for name, (dtype, _) in tensors.items()})
    written: dict[str, Stored] = {}
    with path.open("wb") as file:
        file.seek(8 + _room(names, said))
        for name in names:
            dtype, load = tensors[name]
            array = as_type(load(), dtype)
            file.write(_bytes(array))
            written[name] = _describe(array, dtype)
        file.seek(0)
        file.write(head(written, said))
    return written


def describe(array: Array, dtype: DType) -> Stored:
    """What would be stored of it."""
    return _describe(as_type(array, dtype), dtype)


def _describe(array: Array, dtype: DType) -> Stored:
    return Stored(CODES[dtype], tuple(array.shape), hashlib.sha256(_bytes(array)).hexdigest())


def _bytes(array: Array) -> memoryview | bytes:
    return array.data.cast("B") if array.ndim and array.size else array.tobytes()


def index_text(weight_map: Mapping[str, str], said: str) -> str:
    """The index of a package whose tensors lie in several files; said: of the tensors (``state_text``)."""
    metadata = {SAID: said} if said else {}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1) + "\n"


def in_order(types: Mapping[str, DType]) -> list[str]:
    """The widest types first, so that every tensor is aligned; then by name, so that equal models give equal files."""
    return sorted(types, key=lambda name: (-types[name].itemsize, name))


def head(stored: Mapping[str, Stored], said: str = "") -> bytes:
    """What stands before the data of the tensors, which lie in the order of ``stored``."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": {SAID: said}} if said else {}
    offset = 0
    for name, entry in stored.items():
        end = offset + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    room, text = _room(stored, said), json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= room, f"header of {len(text)} bytes in {room}"
    return room.to_bytes(8, "little") + text.ljust(room)


def _room(names: Sequence[str] | Mapping[str, object], said: str) -> int:
    own = sum(len(json.dumps(name)) + _ROOM_PER_TENSOR for name in names)
    return -(-(own + (len(json.dumps(said)) + _ROOM_PER_TENSOR if said else 0)) // 8) * 8 + 8


def state_text(state: Mapping[str, object], computed: Collection[str] = ()) -> str:
    """What a file of weights says of its tensors; nothing where they are the source's, which has no others.

    state: of the source (``state`` of plan.json); computed: names of tensors that are none of the source's, and were
    computed of those. A name alone tells nothing: a source may have any.
    """
    said = {**state, **({COMPUTED: sorted(computed)} if computed else {})}
    return json.dumps(said, sort_keys=True, separators=(",", ":")) if said else ""


def type_of(array: Array) -> DType:
    """The type of an array, as the IR calls it."""
    return DType.from_name(array.dtype.name)


def as_type(array: Array, dtype: DType) -> Array:
    """The array, row-major, as bytes of ``dtype`` (bfloat16 as its 16 bits)."""
    if dtype is DType.BF16:
        import ml_dtypes

        return np.asarray(array.astype(ml_dtypes.bfloat16, copy=False), order="C").view(np.uint16)
    with np.errstate(over="ignore"):  # what the type does not hold is infinite in it
        return np.asarray(array, np.dtype(dtype.torch_name), order="C")


def digest_of(array: Array, dtype: DType) -> str:
    """The digest that ``write_weights`` would give it."""
    return describe(array, dtype).sha256
