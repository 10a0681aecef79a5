"""Calls that an emitted program's host issues for an operator. Entry points: ``issued``,
``parameters_read``.

Some operators are written within another's call: a bias in its product's, the statistics of a batch norm and what moves
its running ones in the norm's.
"""

from __future__ import annotations

from ir.dims import Loops
from ir.graph import Node, unmoved
from pdv.pcg.norms import is_taken_by_norm
from pdv.pcg.plan_cost import is_bias


def issued(node: Node, loops: Loops, behind: int) -> tuple[int, int]:
    """Calls forward and backward of an operator under local ``loops``; ``behind``: the device's kernels in backward.

    In backward autograd calls one function for each call forward, however many kernels that starts.
    """
    if is_taken_by_norm(node, loops) or is_within_product(node) or not node.op.kernel:
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
