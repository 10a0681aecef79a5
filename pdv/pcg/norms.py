"""What a batch norm's own call does beside the norm: its statistics, and what moves the running ones.

Entry points, of an operator as it is cut: ``is_own_statistic``; ``is_taken_by_norm``, which says it of both.
"""

from __future__ import annotations

from functools import lru_cache

from ir.dims import Loops
from ir.graph import Node
from ir.ops import OPERATORS

FIXED_MOST = 128  # operators and leaves of a value that is followed to what it is computed from
STATISTICS = frozenset(statistic for op in OPERATORS.values() for statistic in op.statistics)


def is_own_statistic(node: Node, loops: Loops) -> bool:
    """True of a statistic under local ``loops`` that have all points of a channel: the norm's call takes it."""
    return node.op in STATISTICS and _is_whole(node, loops)


def is_taken_by_norm(node: Node, loops: Loops) -> bool:
    """The same, and of what moves running statistics by such: whether these are cut is known in a finished graph."""
    return _is_whole(node, loops) and is_within_norm(node)


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


def _is_whole(node: Node, loops: Loops) -> bool:
    return all(loops.extents[loop] == node.loops.extents[loop] for loop in node.loops.contracted)
