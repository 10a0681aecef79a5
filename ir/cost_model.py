"""What the search asks of a cost model: seconds of an operator's work on one device, how sure they are, and from where.

Decides the form of question and answer. Analytic answers are in ``pdv.cost.compute``, measured and learned ones in
``learned_cost.estimator``. A model is asked in batches, and answers equal questions equally as long as it lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ir.dims import Loops
from ir.graph import Node
from ir.operator import Attrs, Operator
from ir.types import TensorType

Source = Literal["measured", "learned", "analytic"]
SOURCES: tuple[Source, ...] = ("measured", "learned", "analytic")  # in order of trust (docs/architecture.md, Costs)


class Query(NamedTuple):
    """One operator under local loops; ``wanted[i]`` says whether operand ``i`` needs a gradient, None: no backward."""

    op: Operator
    loops: Loops
    operands: tuple[TensorType, ...]
    result: TensorType
    attrs: Attrs
    wanted: tuple[bool, ...] | None

    @classmethod
    def of(cls, node: Node, loops: Loops, *, train: bool) -> Query:
        """What a node is under ``loops``; in training, whatever takes a gradient gets one."""
        types = tuple(operand.type for operand in node.operands)
        return cls(node.op, loops, types, node.type, node.attrs, node.wanted if train and node.needs_grad else None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds with their deviation; of several kernels the least trusted ``source``, and ``why`` it is no better."""

    mean_s: float
    std_s: float = 0.0
    source: Source = "analytic"
    why: str = ""


NOTHING = Estimate(0.0)


class NodeEstimate(NamedTuple):
    """An operator's work forward and backward."""

    forward: Estimate
    backward: Estimate = NOTHING


class CostModel(Protocol):
    """Prices local work on the slowest of a cluster's devices."""

    @property
    def identity(self) -> str:
        """Equal only for models that answer alike: what cached searches are keyed by."""

    @property
    def correlation(self) -> float:
        """Of the errors of two kernels of one device, in [0, 1]: what does not average out over a plan."""

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """Estimates, one for each query."""

    def optimizer(self, num_bytes: float) -> Estimate:
        """AdamW's step for one parameter, of which a device holds ``num_bytes``."""

    def outside(self, outputs: Sequence[TensorType]) -> Estimate:
        """What a training step takes beside the graph: the loss over its outputs, given as one device holds them."""

    def provenance(self) -> Mapping[str, Any]:  # Any: JSON
        """Name, hash and device records of what answers, for plan.json."""
