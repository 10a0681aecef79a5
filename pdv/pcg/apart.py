"""Axes along which an emitted program sums gradients beside other collectives, read off a PCG. Entry: ``summed_apart``.

Sums run behind the backward pass; what else runs along their axis is waited for. In one process group it would wait for
the sums that were issued before, so these have a group of their own (``make_mesh(..., own_sums=("dp",))``).
"""

from __future__ import annotations

from ir.graph import Graph, Node
from pdv.pcg.units import joins_unit


def summed_apart(graph: Graph, *, forward: bool, several: bool) -> tuple[str, ...]:
    """The names of such axes, joint ones included, in the order in which the graph meets them.

    forward: whether what belongs to the forward pass may run beside sums, too. several: as in ``joins_unit``.
    """
    sums: dict[str, None] = {}
    others: set[str] = set()
    of_param: set[Node] = set()
    for node in graph.nodes:
        if node.op.kind != "parallel":
            continue
        axis, below = str(node.attr("axis")), node.operands[0]
        in_unit = joins_unit(node, several=several)
        if below.is_param or below in of_param:
            of_param.add(node)
            if node.needs_grad and (node.op.transition.only_names or in_unit):
                sums[axis] = None
            if node.op.transition.only_names:
                continue
        ahead, behind = (way.collective for way in node.op.transition.communications)
        if (ahead and (forward or in_unit)) or (behind and node.needs_grad):
            others.add(axis)
    return tuple(axis for axis in sums if axis in others)
