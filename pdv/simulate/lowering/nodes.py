"""The entries of a PCG's nodes. Entry point: ``Nodes``."""

from __future__ import annotations

from ir.graph import Graph, Node
from pdv.problem import Problem
from pdv.problem.workload import Execution
from pdv.simulate.lowering.entries import Entries, Entry


class Nodes:
    """What each node of a PCG is; states are inferred on the way.

    Raises:
        ShardingError: if the graph is no PCG of the problem's mesh.
    """

    def __init__(self, problem: Problem, pcg: Graph, execution: Execution) -> None:
        self.problem, self.pcg = problem, pcg
        self.entries = Entries(problem, execution)
        self.of: dict[Node, Entry] = {}
        self.base: dict[Node, Node] = {}  # the value at the root of a chain of parallel operators
        for node in pcg.nodes:
            self.base[node] = self.base[node.operands[0]] if node.op.kind == "parallel" else node
            self.of[node] = self._entry(node)

    def _entry(self, node: Node) -> Entry:
        if node.is_param:
            return self.entries.leaf(node, node.attr("stored"), regather=node.attr("regather"))
        if node.is_leaf:
            return self.entries.leaf(node)
        operands = [self.of[operand] for operand in node.operands]
        if node.op.kind != "parallel":
            return self.entries.local(node, operands)
        base = self.of[self.base[node]]
        return self.entries.move(
            node.op.name, node.attrs, node.operands[0], operands[0], base if base.role == "leaf" else None
        )
