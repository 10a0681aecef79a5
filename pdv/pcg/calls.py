"""Calls that an emitted program's host issues for an operator. Entry points: ``issued``,
``parameters_read``.

Some operators are written within another's call: a bias in its product's, the statistics of a batch norm and what moves
its running ones in the norm's.
"""

from __future__ import annotations

from functools import lru_cache

from ir.dims import Loops
from ir.graph import Node, unmoved
from ir.ops import OPERATORS
from pdv.pcg.plan_cost import FIXED_MOST, is_bias

STATISTICS = frozenset(statistic for op in OPERATORS.values() for statistic in op.statistics)


def issued(node: Node, loops: Loops, behind: int) -> tuple[int, int]:
    """Calls forward and backward of an operator under local ``loops``; ``behind``: the device's kernels in backward.

    In backward autograd calls one function for each call forward, however many kernels that starts.
    """
    is_whole = all(loops.extents[loop] == node.loops.extents[loop] for loop in node.loops.contracted)
    if (is_within_norm(node) and is_whole) or is_within_product(node) or not node.op.kernel:
        return 0, 0
    return 1, min(1, behind)


def parameters_read(node: Node) -> int:
    """How many trained parameters an operator reads, each of which the host takes a leaf of, and gives its gradient.

    Of a view, which starts nothing, none are counted.
    """
    return node.op.kernel * sum(base.is_param and base.needs_grad for base in map(unmoved, node.operands))


def is_within_product(node: Node) -> bool:
    """True of a bias that the product before it adds itself."""
    return is_bias(node) and node.operands[0].op.bias_rank > 0


@lru_cache(maxsize=1 << 14)  # asked of a node more than once
def is_within_norm(node: Node) -> bool:
    """True of statistics, which a norm takes itself of what is on one device, and of what moves a buffer by them: maps
    of vectors over nothing but statistics and buffers (as is found within a few operators).
    """
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        if value.op in STATISTICS or (value is not node and value.is_param and not value.needs_grad):
            continue
        if value.op.kind != "map" or value.type.rank != 1 or len(seen) > FIXED_MOST:
            return False
        stack.extend(operand for operand in value.operands if operand not in seen)
        seen.update(value.operands)
    return True
