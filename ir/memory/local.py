"""A node on one device: how its operands and its result lie there, and what its kernel holds beside them."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Node
from ir.memory.layout import Layout, Memory, like

INDEX_BYTES = 8  # torch's indices are int64
STATISTIC_BYTES = 4  # statistics of rows are kept in float32


@dataclass(frozen=True, slots=True)
class Local:
    """``itemsize``: bytes of an element of the result; ``on_gpu``: some kernels there are compositions on a CPU."""

    node: Node
    operands: tuple[Layout, ...]
    result: Layout
    itemsize: int
    on_gpu: bool = False

    @property
    def memory(self) -> Memory:
        """What its kernel holds."""
        declared = self.node.op.memory
        return declared(self) if callable(declared) else declared

    @property
    def layout(self) -> Layout:
        """How the result lies."""
        if (declared := self.memory.layout) is not None:
            return declared(self)
        return like(self.result.shape, self.operands) if self.node.op.kind == "map" else self.result

    @property
    def saved(self) -> tuple[int | str, ...]:
        """Operand numbers and/or "out" that backward may need."""
        return self.node.op.saved if self.memory.saved is None else self.memory.saved

    @property
    def rows(self) -> int:
        """Of the first operand, without its last dim."""
        first = self.operands[0]
        return first.elements // max(1, first.shape[-1]) if first.shape else 1

    @property
    def row_bytes(self) -> float:
        """Of a statistic of each row."""
        return float(self.rows * STATISTIC_BYTES)

    def operand_bytes(self, number: int = 0) -> float:
        """Of an operand as it is read, views written out."""
        return float(self.operands[number].elements * self.node.operands[number].type.dtype.itemsize)

    @property
    def result_bytes(self) -> float:
        """Of the result."""
        return float(self.result.elements * self.itemsize)

    @property
    def composed_bytes(self) -> float:
        """Of the result on a CPU, where the operator is composed of others; nothing on a GPU."""
        return 0.0 if self.on_gpu else self.result_bytes
