"""Kernels that an emitted program's host issues for an operator. Entry point: ``issued``.

Some operators are written within another's call: a bias in its product's, the statistics of a batch norm and what moves
its running ones in the norm's.
"""

from __future__ import annotations

from ir.dims import Loops
from ir.graph import Node
from ir.ops import OPERATORS
from pdv.pcg.plan_cost import is_bias

STATISTICS = frozenset(statistic for op in OPERATORS.values() for statistic in op.statistics)


def issued(node: Node, loops: Loops, behind: int) -> tuple[int, int]:
    """Kernels forward and backward of an operator under local ``loops``; ``behind``: of the device in backward."""
    if node.op.statistics and node.operands[1].op in STATISTICS:  # one call each way, with the statistics
        return 1, min(1, behind)
    if is_within_norm(node) and all(loops.extents[loop] == node.loops.extents[loop] for loop in node.loops.contracted):
        return 0, 0
    return int(node.op.kernel and not is_within_product(node)), behind


def is_within_product(node: Node) -> bool:
    """True of a bias that the product before it adds itself."""
    return is_bias(node) and node.operands[0].op.bias_rank > 0


def is_within_norm(node: Node) -> bool:
    """True of statistics, which a norm takes itself of what is on one device, and of what moves a buffer by them."""
    if node.op in STATISTICS:
        return True
    vector = node.op.kind == "map" and node.type.rank == 1 and not node.needs_grad
    return vector and all(_is_statistic(operand) for operand in node.operands)


def _is_statistic(node: Node) -> bool:
    """A statistic, a buffer, or what follows them."""
    return (node.is_param and not node.needs_grad) or is_within_norm(node)
