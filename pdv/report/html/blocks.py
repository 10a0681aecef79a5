"""The parallel graph as the page draws it: equal blocks once, each operator with its cut, each move with its price.

Entry point: ``graph_facts``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ir.graph import Graph, Node
from ir.sharding import Sharding, format_sharding
from ir.verify import infer_shardings
from pdv.cost.breakdown import PlanCost
from pdv.plan.steps import operators
from pdv.problem import Derived
from pdv.problem.workload import Workload
from pdv.report.layers import NUMBER, layer_names
from pdv.search.blocks import repeats, split_blocks

Facts = dict[str, Any]  # Any: JSON
LAYER = re.compile(r".*?\.\d+(?=\.)")  # the name of a layer: until its number


def graph_facts(workload: Workload, derived: Derived, cost: PlanCost) -> list[Facts]:
    """Sections of the program in order: how often each runs in a row, and the nodes of the first of them."""
    drawn = _Graph(workload, derived, cost)
    blocks = drawn.blocks()
    keys = [drawn.key(block) for block in blocks]
    sections: list[Facts] = []
    at = 0
    for found in repeats(keys):
        sections += (drawn.section(blocks[i], 1) for i in range(at, found.start))
        joined = tuple(node for block in blocks[found.start : found.start + found.period] for node in block)
        sections.append(drawn.section(joined, found.count))
        at = found.start + found.count * found.period
    return [*sections, *(drawn.section(block, 1) for block in blocks[at:])]


class _Graph:
    """A PCG, its shardings, prices and names."""

    def __init__(self, workload: Workload, derived: Derived, cost: PlanCost) -> None:
        self._graph: Graph = workload.problem.graph
        self._pcg, self._cost, self._places = workload.pcg, cost, derived.places
        self._shardings: Mapping[Node, Sharding] = infer_shardings(workload.pcg, workload.problem.mesh)
        self._names = layer_names(workload.pcg)
        self._numbers = {derived.places[node]: number for number, node in enumerate(operators(self._graph))}

    def blocks(self) -> list[tuple[Node, ...]]:
        """Nodes of the PCG by block of the serial graph, in order; a move is in the block of its first reader."""
        split = split_blocks(self._graph)
        home = {self._places[node]: number for number, block in enumerate(split) for node in block.nodes}
        found: list[list[Node]] = [[] for _ in split]
        for node in reversed(self._pcg.nodes):
            if node.is_leaf:
                continue
            if node not in home:
                readers = [home[user] for user in self._pcg.users[node] if user in home]
                home[node] = min(readers, default=len(split) - 1)
            found[home[node]].append(node)
        return [tuple(reversed(nodes)) for nodes in found if nodes]

    def key(self, block: Sequence[Node]) -> str:
        """Equal for blocks that do the same to values in the same shardings."""
        place = {node: number for number, node in enumerate(block)}
        return repr(
            [
                (
                    node.op.name,
                    str(node.type),
                    format_sharding(self._shardings[node]),
                    str(node.attrs.get("axis")) if node.op.kind == "parallel" else "",
                    [self._operand(operand, place) for operand in node.operands],
                )
                for node in block
            ]
        )

    def _operand(self, operand: Node, place: Mapping[Node, int]) -> str:
        number = place.get(operand)
        return str(number) if number is not None else format_sharding(self._shardings[operand])

    def section(self, block: Sequence[Node], count: int) -> Facts:
        """A block as data."""
        place = {node: number for number, node in enumerate(block)}
        nodes = [self._node(node, place) for node in block]
        return {"title": self._title(block, count), "count": count, "nodes": nodes}

    def _node(self, node: Node, place: Mapping[Node, int]) -> Facts:
        cost = self._cost.nodes.get(node)
        facts: Facts = {
            "op": node.op.name,
            "type": str(node.type),
            "sharding": format_sharding(self._shardings[node]),
            "in": [place[operand] for operand in node.operands if operand in place],
            "from": [self._outside(x) for x in node.operands if x not in place],
            "forward_s": cost.forward_s if cost else 0.0,
            "backward_s": cost.backward_s if cost else 0.0,
        }
        if node.op.kind == "parallel":
            return facts | {"axis": str(node.attr("axis"))}
        return facts | {"name": self._names.get(node, node.name or ""), "number": self._numbers.get(node)}

    def _outside(self, operand: Node) -> list[str]:
        """What a node reads that is not in its block: kind, name, sharding."""
        kind = "parameter" if operand.is_param else "constant" if operand.is_const else "value"
        name = str(operand.attr("name")) if operand.is_param else operand.name or operand.op.name
        return [kind, name, format_sharding(self._shardings[operand])]

    def _title(self, block: Sequence[Node], count: int) -> str:
        """The layer that its parameters are of, or they themselves, or the operator that comes last."""
        names = [str(x.attr("name")) for node in block for x in node.operands if x.is_param]
        layers = dict.fromkeys(match.group() for name in names if (match := LAYER.match(name)))
        if len(layers) == 1 and count == 1:
            return next(iter(layers))
        of = dict.fromkeys(NUMBER.sub(".*", f"{layer}.").removesuffix(".") for layer in layers)
        if len(of) == 1:
            first = names[0].removeprefix(next(iter(layers))).lstrip(".").removesuffix(".weight")
            return next(iter(of)) + (f", from {first}" if len(layers) > 1 else "")
        if names:
            return ", ".join(dict.fromkeys(name.removesuffix(".weight") for name in names[:3]))
        computing = [node for node in block if node.op.kind != "parallel"] or list(block)
        return computing[-1].op.name
