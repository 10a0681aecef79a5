"""What a tensor is before anyone decides where it lives: an element type and a global shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Element types a graph may hold; the value is the short name used in printed graphs."""

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

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
        """True for floating types of two bytes."""
        return self.is_floating and self.itemsize == 2

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


_FLOATING = frozenset({DType.F64, DType.F32, DType.BF16, DType.F16})
_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.BF16: 2,
    DType.F16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
}
_TORCH_NAME = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.BF16: "bfloat16",
    DType.F16: "float16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
_BY_NAME = {name: dtype for dtype, name in _TORCH_NAME.items()} | {dtype.value: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor over all devices: its global shape and element type."""

    shape: tuple[int, ...]
    dtype: DType

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
