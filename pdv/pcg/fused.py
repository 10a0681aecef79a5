"""Element-wise operators that run as one kernel, as a compiler or a framework's own fusions would run them.

A group reads what comes from outside of it and writes what is read outside, once. Its time is that of its operators as
the cost model has them, times the part of their traffic that is left. Entry points: ``groups_of`` a run of operators;
``remaining``, the part of a group; ``fused_of``, the shares of a program's operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from ir.cost_model import CostModel, Group, Query
from ir.graph import Graph, Node
from ir.ops import OPERATORS
from pdv.pcg.norms import STATISTICS
from pdv.problem.fused import Fused, kind_of

FUSED_KINDS = ("map", "row", "move")

APART = frozenset(
    op for op in OPERATORS.values() if op.has_scores or op.draws or op.is_foreign or op.statistics or op in STATISTICS
)

Users = Callable[[Node], Sequence[Node]]


def groups_of(run: Sequence[Node], sources: Callable[[Node], Sequence[Node]]) -> list[list[Node]]:
    """The groups of a run: an operator joins the one whose result it reads last, if that is element-wise too.

    As nothing else that it reads comes later, no other kernel stands between the two. Apart stay attention, norms of a
    batch, which are a kernel already, random numbers and what other libraries compute. ``sources``: of a value, the
    kernels of the run that make it.
    """
    inside = {node: place for place, node in enumerate(run)}
    groups: list[list[Node]] = []
    group: dict[Node, list[Node]] = {}
    for node in run:
        if node.op.kernel and node.op.kind in FUSED_KINDS and node.op not in APART:
            read = [kernel for operand in node.operands for kernel in sources(operand)]
            latest = max(read, key=inside.__getitem__, default=None)
            if latest is None or latest not in group:
                groups.append(group.setdefault(node, []))
            else:
                group[node] = group[latest]
            group[node].append(node)
    return groups


def remaining(group: Sequence[Node], bytes_of: Callable[[Node], float], users: Users) -> float:
    """The part of the operators' own traffic that one kernel has."""
    members = set(group)
    own = sum(bytes_of(value) for node in group for value in (node, *node.operands))
    left = sum(bytes_of(value) for value in {value for node in group for value in node.operands} - members)
    left += sum(bytes_of(node) for node in group if not users(node) or not members.issuperset(users(node)))
    return min(1.0, left / own) if own else 1.0


def fused_of(graph: Graph, compute: CostModel) -> Fused:
    """What a program's operators take where it is compiled; of those that are alike, on average."""
    run = [node for node in graph.nodes if not node.is_leaf]
    listed = [group for group in groups_of(run, kernels_of) if len(group) > 1]
    found: defaultdict[Hashable, list[float]] = defaultdict(list)
    shares = compute.fused([_described(group, graph.users) for group in listed])
    for group, share in zip(listed, shares, strict=True):
        for node in group:
            types = tuple(operand.type for operand in node.operands)
            found[kind_of(node.op, types, node.type, node.attrs)].append(share)
    return Fused({kind: sum(each) / len(each) for kind, each in found.items()})


def _described(group: Sequence[Node], users: Mapping[Node, Sequence[Node]]) -> Group:
    place = {node: number for number, node in enumerate(group)}
    made = [
        (place[kernel], place[node])
        for node in group
        for x in node.operands
        for kernel in kernels_of(x)
        if kernel in place
    ]
    traffic = remaining(group, lambda node: float(node.type.num_bytes), users.__getitem__)
    return Group(tuple(Query.of(node, node.loops, train=False) for node in group), tuple(dict.fromkeys(made)), traffic)


def kernels_of(value: Node, ends: Callable[[Node], bool] = lambda value: value.is_leaf) -> list[Node]:
    """The kernels that make a value, seen through views; behind values at which it ``ends`` there are none."""
    if ends(value):
        return []
    if value.op.kernel:
        return [value]
    return [kernel for operand in value.operands for kernel in kernels_of(operand, ends)]
