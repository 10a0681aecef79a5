"""What torch's kernels hold beside their operands and their result: statistics kept for backward, and work space.

One entry for each operator of which there is something to say; the emitted program calls what `pdv.emit` writes for it.
Read in torch's derivative formulas (tools/autograd/derivatives.yaml) and checked against runs (benchmarks/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ir.graph import Node
from pdv.memory.layout import Layout, like, row_major

INDEX_BYTES = 8  # torch's indices are int64
STATISTIC_BYTES = 4  # statistics of rows are kept in float32


@dataclass(frozen=True, slots=True)
class Local:
    """A node on one device: how its operands and its result lie there, and bytes of an element of the result.

    ``on_gpu``: some operators that are one kernel there are composed of others on a CPU.
    """

    node: Node
    operands: tuple[Layout, ...]
    result: Layout
    itemsize: int
    on_gpu: bool = False

    @property
    def rows(self) -> int:
        """Of the first operand, without its last dim."""
        first = self.operands[0]
        return first.elements // max(1, first.shape[-1]) if first.shape else 1

    def operand_bytes(self, number: int) -> float:
        """Of an operand as it is read, views written out."""
        return float(self.operands[number].elements * self.node.operands[number].type.dtype.itemsize)

    @property
    def result_bytes(self) -> float:
        """Of the result."""
        return float(self.result.elements * self.itemsize)


Bytes = Callable[[Local], float]


def _none(local: Local) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """Bytes beside operands and result.

    Attributes:
        keeps: its own values kept for backward: statistics, indices, intermediate results.
        forward: work space while it runs.
        backward: the same of its backward.
        handed: operands whose gradient is the result's own, in the same memory.
        saved: operand numbers and/or "out" kept for backward, where the operator's declaration counts one thing for
            another.
    """

    keeps: Bytes = _none
    forward: Bytes = _none
    backward: Bytes = _none
    handed: tuple[int, ...] = ()
    saved: tuple[int | str, ...] | None = None


def _rows(count: int) -> Bytes:
    return lambda local: float(count * local.rows * STATISTIC_BYTES)


def _results(count: float) -> Bytes:
    return lambda local: count * local.result_bytes


def _operands(count: float) -> Bytes:
    return lambda local: count * local.operand_bytes(0)


def _chosen(local: Local) -> float:
    """Indices that ``top_k`` keeps: [rows, k], once of topk and once more of scatter, in the same memory."""
    return float(local.rows * int(local.node.attr("k")) * INDEX_BYTES)


def _broadcast(local: Local) -> float:
    """A product's gradient by an operand that was spread out is made whole before it is summed."""
    spread = any(
        operand.needs_grad and layout.elements < local.result.elements
        for operand, layout in zip(local.node.operands, local.operands, strict=True)
    )
    return local.result_bytes if spread else 0.0


def _on_cpu(count: float) -> Bytes:
    return lambda local: 0.0 if local.on_gpu else count * local.result_bytes


def _rms_kept(local: Local) -> float:
    """One number a row; on a CPU, where it is composed, the rows before they meet the weight too."""
    return _rows(1)(local) + _on_cpu(1)(local)


def folds(local: Local) -> bool:
    """A matrix times a batch of matrices, of which at::matmul makes one product of matrices, transposed."""
    first, second = local.operands
    return len(first.shape) == 2 and len(second.shape) > 2 and local.node.operands[0].needs_grad


def _folded(local: Local) -> float:
    """The batch, transposed into one matrix: a copy where it lies row-major."""
    return local.operand_bytes(1)


def _norm_of_all(local: Local) -> bool:
    """A batch norm by the statistics of all points that this device has: one call of torch's."""
    x, mean, variance, *_ = local.node.operands
    return (mean.op.name, variance.op.name) == ("channel_mean", "channel_variance") and mean.operands[0] is x


_HANDED = Kernel(handed=(0,))

KERNELS: Mapping[str, Kernel] = {
    "add": Kernel(handed=(0, 1)),
    "sub": _HANDED,
    "shift": _HANDED,
    "concat": Kernel(handed=tuple(range(64))),  # narrow views of the gradient
    "reduce_sum": _HANDED,  # spread out without a copy
    "mul": Kernel(backward=_broadcast),
    "div": Kernel(backward=lambda local: _broadcast(local) + local.result_bytes),
    "pow": Kernel(backward=_results(1)),
    "rsqrt": Kernel(backward=_results(1)),
    "layer_norm": Kernel(keeps=_rows(2)),
    "rms_norm": Kernel(keeps=_rms_kept, forward=_on_cpu(1), backward=_on_cpu(2)),
    "attention": Kernel(keeps=_rows(1), backward=_rows(1)),
    "max_pool2d": Kernel(keeps=lambda local: float(local.result.elements * INDEX_BYTES), saved=(0,)),
    "top_k": Kernel(keeps=_chosen, forward=_results(1), saved=()),
}
"""By operator name; one that is not here holds nothing else."""

# Statistics that are sums over devices are taken step by step (operators.py of the package): x - mean is kept, then
# squared.
_FOLDED = Kernel(keeps=_folded, saved=(0,))
_VARIANCE = Kernel(keeps=_operands(1), forward=_operands(1), backward=_operands(2), saved=())
_BATCH_NORM = Kernel(keeps=_operands(1), forward=_operands(1), backward=_operands(2), saved=())
_BATCH_NORM_OF_ALL = Kernel(saved=(0,))
NOTHING = Kernel()
# A statistic that torch's own batch norm takes in the same call.
_WITHIN = Kernel(saved=())


def layout_of(local: Local) -> Layout:
    """How the result of local work lies, where that is not row-major."""
    shape = local.result.shape
    if local.node.op.has_scores and len(shape) == 4:  # [b, h, s, f], laid out as [b, s, h, f]
        _, heads, rows, features = shape
        return Layout(shape, (heads * rows * features, features, heads * features, 1))
    if local.node.op.name == "matmul" and folds(local):
        *batch, rows, columns = shape
        return Layout(shape, (*row_major((*batch, columns, rows))[:-2], 1, rows))
    if local.node.op.kind == "map":
        return like(shape, local.operands)
    return local.result


def kernel_of(local: Local) -> Kernel:
    """What a node holds beside its operands and result."""
    name = local.node.op.name
    if name == "matmul" and folds(local):
        return _FOLDED
    if name == "batch_norm":
        return _BATCH_NORM_OF_ALL if _norm_of_all(local) else _BATCH_NORM
    if name == "channel_variance":
        return _WITHIN if runs_within(local.node) else _VARIANCE
    return KERNELS.get(name, NOTHING)


@lru_cache(maxsize=1 << 12)
def runs_within(node: Node) -> bool:
    """True of a variance around the mean of the same points: no move of a partial sum is in between."""
    return node.op.name == "channel_variance" and node.operands[1].op.name == "channel_mean"
