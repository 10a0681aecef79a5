"""Element-wise operators of a PCG that run as one kernel, each with its share of the group's time; one launch.

Entry point: ``fusion``; which operators those are, ``pdv.pcg.fused`` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ir.graph import Node
from pdv.pcg.fused import groups_of, remaining
from pdv.simulate.lowering.entries import Nodes

Fusion = tuple[tuple[float, bool], ...]
"""For each node of a run: its share of time, and whether it is launched."""

ALONE = (1.0, True)


def fusion(run: Sequence[Node], nodes: Nodes) -> Fusion:
    """The groups of a run."""
    inside = frozenset(run)
    found = dict.fromkeys(run, ALONE)
    for group in groups_of(run, lambda value: _kernels(value, inside, nodes)):
        if len(group) > 1:
            share = remaining(group, lambda node: nodes.of[node].bytes, nodes.pcg.users.__getitem__)
            found |= {node: (share, node is group[0]) for node in group}
    return tuple(found.values())


def _kernels(value: Node, inside: Collection[Node], nodes: Nodes) -> list[Node]:
    """The kernels in the run that make a value, seen through views; a move of one ends the search.

    Nothing in a run makes a parameter: however it comes, by data parallelism or gathered, it is at hand.
    """
    if value not in inside or nodes.base[value].is_leaf:
        return []
    if value.op.kernel:
        return [value]
    return [kernel for operand in value.operands for kernel in _kernels(operand, inside, nodes)]
