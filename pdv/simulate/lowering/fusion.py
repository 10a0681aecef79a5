"""Element-wise operators that run as one kernel, as a compiler or a framework's own fusions would run them.

A group reads what comes from outside of it and writes what is read outside, once. Its time is that of its operators as
the cost model has them, times the part of their traffic that is left; the launches are one. Entry point: ``fusion``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ir.graph import Node
from pdv.simulate.lowering.entries import Nodes

Fusion = tuple[tuple[float, bool], ...]
"""For each node of a run: its share of time, and whether it is launched."""

FUSED_KINDS = ("map", "row", "move")
ALONE = (1.0, True)


def fusion(run: Sequence[Node], nodes: Nodes) -> Fusion:
    """The groups of a run: an operator joins the one whose result it reads last, if that is element-wise too.

    As nothing else that it reads comes later, no other kernel stands between the two.
    """
    inside = {node: place for place, node in enumerate(run)}
    group: dict[Node, int] = {}
    members: list[list[Node]] = []
    for node in run:
        if not node.op.kernel or node.op.kind not in FUSED_KINDS or node.op.has_scores:
            continue
        read = [kernel for operand in node.operands for kernel in _kernels(operand, inside, nodes)]
        latest = max(read, key=inside.__getitem__, default=None)
        if latest is None or latest not in group:
            group[node] = len(members)
            members.append([node])
        else:
            group[node] = group[latest]
            members[group[latest]].append(node)
    found = dict.fromkeys(run, ALONE)
    for number, fused in enumerate(members):
        if len(fused) > 1:
            share = _remaining_traffic(fused, number, group, nodes)
            found |= {node: (share, node is fused[0]) for node in fused}
    return tuple(found.values())


def _kernels(value: Node, inside: Mapping[Node, int], nodes: Nodes) -> list[Node]:
    """The kernels in the run that make a value, seen through views; a move of one ends the search.

    Nothing in a run makes a parameter: however it comes, by data parallelism or gathered, it is at hand.
    """
    if value not in inside or nodes.base[value].is_leaf:
        return []
    if value.op.kernel:
        return [value]
    return [kernel for operand in value.operands for kernel in _kernels(operand, inside, nodes)]


def _remaining_traffic(fused: Sequence[Node], number: int, group: Mapping[Node, int], nodes: Nodes) -> float:
    """The part of the operators' own traffic that one kernel has."""
    own = sum(nodes.of[value].bytes for node in fused for value in (node, *node.operands))
    outside = {value for node in fused for value in node.operands if group.get(value) != number}
    left = sum(nodes.of[value].bytes for value in outside)
    left += sum(nodes.of[node].bytes for node in fused if _read_outside(node, number, group, nodes))
    return min(1.0, left / own) if own else 1.0


def _read_outside(node: Node, number: int, group: Mapping[Node, int], nodes: Nodes) -> bool:
    users = nodes.pcg.users[node]
    return not users or any(group.get(user) != number for user in users)
