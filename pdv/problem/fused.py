"""What element-wise operators take where a compiler runs several as one kernel: a share of their own time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ir.cost_model import NodeEstimate, Query
from ir.operator import Attrs, Operator
from ir.types import TensorType


@dataclass(frozen=True)
class Fused:
    """Of a program that is compiled, by what is alike on every device (``kind_of``).

    Shares are of kernels on so many rows: a program of other rows, a micro-batch's, has its own (``fused_of``).
    """

    shares: Mapping[Hashable, float]

    def of(self, query: Query, found: NodeEstimate) -> NodeEstimate:
        """What an operator takes of what it takes alone; its gradient the same part."""
        share = self.share(query.op, query.operands, query.result, query.attrs)
        return found if share == 1.0 else NodeEstimate(*(part.times(share) for part in found))

    def share(self, op: Operator, operands: tuple[TensorType, ...], result: TensorType, attrs: Attrs) -> float:
        """The part of an operator's own time that is left."""
        return self.shares.get(kind_of(op, operands, result, attrs), 1.0)

    @property
    def identity(self) -> list[tuple[str, float]]:
        """For caches."""
        return sorted((repr(kind), share) for kind, share in self.shares.items())


def kind_of(op: Operator, operands: tuple[TensorType, ...], result: TensorType, attrs: Attrs) -> Hashable:
    """Equal for operators that differ in their first dim alone, along which rows of a batch lie."""
    sizes = tuple((one.shape[1:], one.dtype) for one in (*operands, result))
    return op.name, sizes, tuple(item for item in attrs.items() if item[0] != "shape")
