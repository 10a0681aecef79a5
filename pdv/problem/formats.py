"""Narrow formats of products: what multiplies in 8 or 4 bits, what its factors are cast by, and what moves in it.

A format is of the products inside layers: attention, the head and all else stay in the type of the graph. Each factor
is cast, scaled, before it is multiplied, and the gradient of the result before both products of backward. Entry point:
`FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One way to scale factors.

    Attributes:
        name: as settings say it.
        number: what profiles call products of it.
        peak: the key of a device record's peak rate, which says whether a device has it.
        bytes: of an element, scales included.
        cast_bytes: read and written for each element of a factor that is cast, in bfloat16 before it: the pass over it
            that finds its scale, where that is another one than the cast, then both layouts that forward and backward
            read (Hopper's units take rows alone, and scales of rows or blocks differ by the direction).
        travels: whether what is gathered for a product is cast before it is sent: a scale of the whole tensor holds for
            its parts, others do not.
        rests: whether weights may rest in it, cast once a step, and be gathered so (torchao's float8 all-gather,
            Transformer Engine's fp8 parameters).
    """

    name: str
    number: str
    peak: str
    bytes: float
    cast_bytes: float
    travels: bool
    rests: bool


# torchao, float8/README.md: tensor-wise scaling reads a tensor twice (its largest value, then the cast), rows twice for
# each direction. MX and NVFP4 scale blocks of 32 and 16 elements as they are read, once; NVFP4 has a scale of the
# tensor besides (NVIDIA, Pretraining LLMs with NVFP4, 2025, section 2).
FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("fp8", "fp8", "fp8", 1.0, 2 + 2 + 2 * 1.0, travels=True, rests=True),
        Format("fp8-rowwise", "fp8_block", "fp8", 1.0, 2 * (2 + 2 + 1.0), travels=False, rests=False),
        Format("mxfp8", "fp8", "fp8", 1.03125, 2 + 2 * 1.03125, travels=False, rests=True),
        Format("nvfp4", "nvfp4", "fp4", 0.5625, 2 + 2 + 2 * 0.5625, travels=False, rests=False),
    )
}
