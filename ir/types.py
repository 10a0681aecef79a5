"""What a tensor is before anyone decides where it lives: an element type and a global shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ir.errors import ShapeError

MOST_DIMS, MOST_EXTENT = 32, 1 << 40


class DType(Enum):
    """Element types a graph may hold; the value is the short name used in printed graphs."""

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    F8E4M3Z = "f8e4m3z"
    F8E5M2Z = "f8e5m2z"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """True for the types that carry a gradient."""
        return self in _FLOATING

    @property
    def is_half(self) -> bool:
        """True for floating types of two bytes or one."""
        return self.is_floating and self.itemsize <= 2

    @property
    def is_stored(self) -> bool:
        """True for the types in which torch keeps and moves elements, and does not compute with them."""
        return self in _STORED

    @property
    def torch_name(self) -> str:
        """The name of this type in torch, e.g. ``"float32"``."""
        return _TORCH_NAME[self]

    @classmethod
    def from_name(cls, name: str) -> DType:
        """The type called ``name`` in torch or NumPy (``"float32"``) or here (``"f32"``).

        Raises:
            KeyError: if no supported type has that name.
        """
        return _BY_NAME[name]


_EIGHTHS = frozenset({DType.F8E4M3, DType.F8E5M2, DType.F8E4M3Z, DType.F8E5M2Z})
_FLOATING = frozenset({DType.F64, DType.F32, DType.BF16, DType.F16}) | _EIGHTHS
_STORED = _EIGHTHS | {DType.U32, DType.U16}
_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.BF16: 2,
    DType.F16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U32: 4,
    DType.U16: 2,
    DType.U8: 1,
    DType.F8E4M3: 1,
    DType.F8E5M2: 1,
    DType.F8E4M3Z: 1,
    DType.F8E5M2Z: 1,
    DType.BOOL: 1,
}
_TORCH_NAME = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.BF16: "bfloat16",
    DType.F16: "float16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U32: "uint32",
    DType.U16: "uint16",
    DType.U8: "uint8",
    DType.F8E4M3: "float8_e4m3fn",
    DType.F8E5M2: "float8_e5m2",
    DType.F8E4M3Z: "float8_e4m3fnuz",
    DType.F8E5M2Z: "float8_e5m2fnuz",
    DType.BOOL: "bool",
}
_BY_NAME = {name: dtype for dtype, name in _TORCH_NAME.items()} | {dtype.value: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor over all devices: its global shape and element type."""

    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        """Raises ShapeError if there are more dims, or longer ones, than any tensor has."""
        if len(self.shape) > MOST_DIMS or max(self.shape, default=0) > MOST_EXTENT:
            what = f"a tensor of {len(self.shape)} dims, the longest of {max(self.shape)}"
            raise ShapeError(what, f"Up to {MOST_DIMS} dims of up to {MOST_EXTENT}")

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.value}[{','.join(map(str, self.shape))}]"
