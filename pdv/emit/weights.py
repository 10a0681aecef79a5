"""weights.safetensors, written one tensor at a time: the model is never in memory as a whole.

The format: 8 bytes of header length, a JSON header padded with spaces, the tensors. Room for the header is kept first
and filled last, for shapes are known only once a tensor has been read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ir.types import DType

Array = np.ndarray[Any, Any]  # Any: the element type is known only when the tensor is read
Loader = Callable[[], Array]

_CODES = {
    DType.F64: "F64", DType.F32: "F32", DType.BF16: "BF16", DType.F16: "F16", DType.I64: "I64", DType.I32: "I32",
    DType.I8: "I8", DType.U8: "U8", DType.BOOL: "BOOL",
}  # fmt: skip
_ROOM_PER_TENSOR = 240  # dtype, up to eight dims, two offsets of 20 digits


def write_weights(path: Path, tensors: Mapping[str, tuple[DType, Loader]]) -> dict[str, tuple[int, ...]]:
    """Write every tensor once, as the given type; the shapes, by name.

    The widest types come first, so that every tensor is aligned; then by name, so that equal models give equal files.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    room = -(-sum(len(json.dumps(name)) + _ROOM_PER_TENSOR for name in names) // 8) * 8 + 8
    header: dict[str, dict[str, object]] = {}
    with path.open("wb") as file:
        file.seek(8 + room)
        offset = 0
        for name in names:
            dtype, load = tensors[name]
            array = as_type(load(), dtype)
            file.write(array.data if array.ndim and array.size else array.tobytes())
            shape = tuple(array.shape)
            end = offset + array.size * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (offset, end)}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= room, f"header of {len(text)} bytes in {room}"
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
    return {name: tuple(entry["shape"]) for name, entry in header.items()}  # type: ignore[arg-type]


def as_type(array: Array, dtype: DType) -> Array:
    """The array, row-major, as bytes of ``dtype`` (bfloat16 as its 16 bits)."""
    if dtype is DType.BF16:
        import ml_dtypes

        return np.asarray(array.astype(ml_dtypes.bfloat16), order="C").view(np.uint16)
    return np.asarray(array, np.dtype(dtype.torch_name), order="C")
