"""What the search asks of a cost model: seconds of an operator's work on one device, how sure they are, and from where.

Decides the form of question and answer, and how much arithmetic and traffic a loop nest means. Analytic answers are in
``pdv.cost.compute``, measured and learned ones in ``learned_cost.estimator``. A model is asked in batches, and answers
equal questions equally as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ir.dims import Loops
from ir.graph import Graph, Node
from ir.operator import Attrs, Operator
from ir.types import DType, TensorType

Source = Literal["measured", "learned", "analytic"]
Key = tuple[object, ...]
PASSES = {"train": 3, "infer": 1}  # backward is twice forward; what is computed again is no model FLOP
SOURCES: tuple[Source, ...] = ("measured", "learned", "analytic")  # in order of trust (docs/architecture.md, Costs)


class Query(NamedTuple):
    """One operator under local loops; ``wanted[i]`` says whether operand ``i`` needs a gradient, None: no backward.

    ``number``: of a product, the format in which its factors are multiplied where it is narrower than their type, as
    profiles call it ("fp8", "fp8_block", "nvfp4").
    """

    op: Operator
    loops: Loops
    operands: tuple[TensorType, ...]
    result: TensorType
    attrs: Attrs
    wanted: tuple[bool, ...] | None
    number: str = ""

    @classmethod
    def of(cls, node: Node, loops: Loops, *, train: bool) -> Query:
        """What a node is under ``loops``; in training, whatever takes a gradient gets one."""
        types = tuple(operand.type for operand in node.operands)
        return cls(node.op, loops, types, node.type, node.attrs, node.wanted if train and node.needs_grad else None)

    @property
    def key(self) -> Key:
        """All that an answer depends on: dims follow from the operator, the operands and the attributes."""
        op, loops, operands, result, attrs, wanted, number = self
        return op.name, tuple(loops.extents.values()), operands, result, tuple(attrs.items()), wanted, number


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds with their deviation; of several kernels the least trusted ``source``, and ``why`` it is no better."""

    mean_s: float
    std_s: float = 0.0
    source: Source = "analytic"
    why: str = ""

    def times(self, factor: float) -> Estimate:
        """The same, so many times as long."""
        return Estimate(self.mean_s * factor, self.std_s * factor, self.source, self.why)


NOTHING = Estimate(0.0)


def together(parts: Sequence[Estimate]) -> Estimate:
    """One after the other, errors of one sign."""
    source = next((p.source for p in parts if p.source == "analytic"), parts[0].source)
    return Estimate(sum(p.mean_s for p in parts), sum(p.std_s for p in parts), source)


class NodeEstimate(NamedTuple):
    """An operator's work forward and backward."""

    forward: Estimate
    backward: Estimate = NOTHING


# Products of 8192 x 768 x 50257 and such in two-byte types, PyTorch 2.11 on an H100 SXM (CUDA 13.0), 2026-11-23: 4.6 to
# 8.3 times as long as with a multiple of 8 where a dim is odd, 2.5 to 2.9 times where it is even; within steps of GPT-2
# about 5 times (benchmarks/results/gpu_steps_h100.json).
ALIGNED = 8  # two-byte elements that are 16 bytes
UNALIGNED, HALF_ALIGNED = 5.0, 2.8


def misaligned(row: int, odd: float = UNALIGNED, even: float = HALF_ALIGNED) -> float:
    """1 of rows of so many elements that are a multiple of 16 bytes, else ``odd`` or ``even``; default: of a GPU."""
    if row % ALIGNED == 0:
        return 1.0
    return odd if row % 2 else even


def slower_by_rows(
    op: Operator, loops: Loops, dtype: DType, odd: float = UNALIGNED, even: float = HALF_ALIGNED
) -> float:
    """How much slower an operator is on a GPU for the lengths of its rows; ``odd``, ``even``: as of ``misaligned``.

    Tensor cores read rows of a multiple of 16 bytes (cuBLAS manual, 2.1.11): products in two-byte types.
    """
    if dtype.itemsize != 2 or op.kind != "contraction":
        return 1.0
    return max(misaligned(loops.size(term[-1]), odd, even) for term in (*loops.operands, loops.result) if term)


def with_rows(queries: Sequence[Query], found: Sequence[NodeEstimate]) -> list[NodeEstimate]:
    """What kernels of a GPU take for the lengths of their rows, too, which no model learned; measured ones show it."""
    slower = [slower_by_rows(query.op, query.loops, query.result.dtype) for query in queries]
    return [
        NodeEstimate(*(part if part.source == "measured" else part.times(factor) for part in one))
        if factor != 1.0
        else one
        for one, factor in zip(found, slower, strict=True)
    ]


class Group(NamedTuple):
    """Operators that a compiler runs as one kernel, who reads whose result, and the part of their traffic left then."""

    queries: tuple[Query, ...]
    edges: tuple[tuple[int, int], ...]
    traffic: float


@dataclass(frozen=True)
class Answers:
    """What a cost model ``says`` of queries, each asked once, those that are new together."""

    says: Callable[[Sequence[Query]], Iterable[NodeEstimate]]
    _known: dict[Key, NodeEstimate] = field(default_factory=dict, repr=False)

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """Estimates, one for each query."""
        keys, known = [query.key for query in queries], self._known
        new = {key: query for key, query in zip(keys, queries, strict=True) if key not in known}
        known.update(zip(new, self.says(list(new.values())) if new else (), strict=True))
        return [known[key] for key in keys]


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

    def fused(self, groups: Sequence[Group]) -> list[float]:
        """The part that each takes as one kernel of what its operators take one by one."""

    def optimizer(self, num_bytes: float, moment: int = 4) -> Estimate:
        """AdamW's step for one parameter, of which a device holds ``num_bytes``; ``moment``: bytes of one element's."""

    def outside(self, outputs: Sequence[TensorType]) -> Estimate:
        """What a training step takes beside the graph: the loss over its outputs, given as one device holds them."""

    @property
    def note(self) -> str:
        """What a user should know of the files that were named; empty if nothing."""

    def provenance(self) -> Mapping[str, Any]:  # Any: JSON
        """Name, hash and device records of what answers, for plan.json."""

    def on(self, devices: Collection[Any]) -> CostModel:  # Any: as the cluster describes them
        """The same for some of the cluster's devices alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """What running a node once does on one device, forward or backward."""

    flops: float
    bytes_moved: float
    kernels: int

    def faster(self, gain: float) -> Work:
        """The same on units of ``gain`` times the rate."""
        return self if gain == 1.0 else Work(self.flops / gain, self.bytes_moved, self.kernels)


def forward_work(op: Operator, loops: Loops, operands: Sequence[TensorType], result: TensorType) -> Work:
    """Forward arithmetic and least memory traffic under ``loops`` (give local loops for one device's share)."""
    if not op.kernel:
        return Work(0.0, 0.0, 0)
    flops = op.flops(loops) if op.flops else op.flops_per_point * loops.points
    traffic = float(loops.size_of(loops.result) * result.dtype.itemsize)
    traffic += sum(loops.size_of(dims) * t.dtype.itemsize for dims, t in zip(loops.operands, operands, strict=True))
    if op.kind == "index":  # a gather reads the rows that it returns, not the table
        traffic = 2.0 * loops.size_of(loops.result) * result.dtype.itemsize
    return Work(flops, traffic, 1)


def model_flops(graph: Graph) -> float:
    """Arithmetic of products, convolutions and attention, forward, as the model is written (Chowdhery et al., 2022)."""
    counted = (node for node in graph.nodes if node.op.kind in ("contraction", "stencil") or node.op.flops is not None)
    return sum(forward_work(n.op, n.loops, [x.type for x in n.operands], n.type).flops for n in counted if n.operands)


def backward_work(
    op: Operator, loops: Loops, operands: Sequence[TensorType], result: TensorType, wanted: Sequence[bool]
) -> Work:
    """Backward arithmetic and traffic; ``wanted[i]`` says whether operand ``i`` needs a gradient.

    The gradient of a contraction by one operand is a contraction of the same size over the others.
    """
    count = sum(wanted)
    if not op.kernel or count == 0:
        return Work(0.0, 0.0, 0)
    forward = forward_work(op, loops, operands, result)
    if op.kind in ("contraction", "stencil") and op.backward_factor is None and len(operands) > 1:
        return Work(forward.flops * count, forward.bytes_moved * count, count)
    factor = 2.0 if op.backward_factor is None else op.backward_factor
    grads = sum(
        loops.size_of(dims) * t.dtype.itemsize
        for dims, t, want in zip(loops.operands, operands, wanted, strict=True)
        if want
    )
    if op.kind == "index":
        return Work(forward.flops * factor, forward.bytes_moved, 1)
    return Work(forward.flops * factor, forward.bytes_moved + grads, 1)
