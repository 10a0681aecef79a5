"""Narrow formats of products: what multiplies in 8 or 4 bits, what its factors are cast by, and what moves in it.

A format is of the products inside layers: attention, the head and all else stay in the type of the graph. Each factor
is cast, scaled, before it is multiplied, and the gradient of the result before both products of backward. Entry
points: `FORMATS`, and of a program that is planned, `Products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ir.graph import Graph, unmoved
from ir.operator import Operator
from ir.types import DType, TensorType


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
        by_rows: whether each row that is summed over has a scale of its own: a scale of the whole tensor is one of
            ranks together.
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
    by_rows: bool = False


# torchao, float8/README.md: tensor-wise scaling reads a tensor twice (its largest value, then the cast), rows twice for
# each direction. MX and NVFP4 scale blocks of 32 and 16 elements as they are read, once; NVFP4 has a scale of the
# tensor besides (NVIDIA, Pretraining LLMs with NVFP4, 2025, section 2).
FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("fp8", "fp8", "fp8", 1.0, 2 + 2 + 2 * 1.0, travels=True, rests=True),
        Format("fp8-rowwise", "fp8_block", "fp8", 1.0, 2 * (2 + 2 + 1.0), travels=False, rests=False, by_rows=True),
        Format("mxfp8", "fp8", "fp8", 1.03125, 2 + 2 * 1.03125, travels=False, rests=True),
        Format("nvfp4", "nvfp4", "fp4", 0.5625, 2 + 2 + 2 * 0.5625, travels=False, rests=False),
    )
}


# What the emitted float8.py does, operator by operator: of each factor forward and backward the largest magnitude
# (2 bytes read), the scaled copy (2 and 2), the cast (2 and 1), and a layout of which rows are the sum's (1 and 1).
# Moves stay in bfloat16. Calls: one by tensors starts 18 kernels forward and 29 backward, one by rows 20 and 41,
# each of 13 us on the host of an H100 (benchmarks/results/gpu_steps_h100.json: blocks of GPT-2, then of 27 and 44
# kernels, and of Llama), here in calls as `Calibration` has them.
_EMITTED_CAST_BYTES = 2 * (2 + 4 + 3) + 2
EMITTED_FORMATS: Mapping[str, Format] = {
    name: replace(FORMATS[name], cast_bytes=_EMITTED_CAST_BYTES, travels=False, rests=False)
    for name in ("fp8", "fp8-rowwise")
}
"""Formats in which programs are emitted."""
EMITTED_CALLS: Mapping[str, tuple[int, int]] = {"fp8": (7, 27), "fp8-rowwise": (8, 34)}
"""What the host issues for such a product, forward and backward, in calls of an emitted program."""


@dataclass(frozen=True, slots=True)
class Products:
    """Which products of a program are in a narrow format: those of its layers with a matrix of weights.

    A layer is a numbered module. Products alike in all that is priced are alike in this: what has the type of a matrix
    outside of layers (the head) stays as it is.

    Attributes:
        format: theirs.
        kept: types of matrices whose products stay.
    """

    format: Format
    kept: frozenset[TensorType]

    def takes(self, op: Operator, operands: Sequence[TensorType]) -> bool:
        """Whether a product of such operands is in the format."""
        return op.weight_waits and operands[1].dtype is DType.BF16 and operands[1] not in self.kept

    def weights(self, graph: Graph) -> list[str]:
        """Names of the matrices of a graph, or PCG, whose products are in the format."""
        found: dict[str, None] = {}
        for node in graph.nodes:
            if node.needs_grad and self.takes(node.op, [operand.type for operand in node.operands]):
                matrix = unmoved(node.operands[1])
                found |= {str(matrix.attr("name")): None} if matrix.is_param and matrix.needs_grad else {}
        return list(found)
