"""Rebuild a graph bottom-up under local laws, until nothing changes.

Decides only the order of application: operands first, laws in the order given, to a fixpoint. Entry point: `rewrite`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ir.builder import Builder
from ir.graph import Graph, Node

Law = Callable[[Builder, Node], Node | None]
"""law(k, node) is an equal node, made by `k`, or None where the law does not apply."""

MAX_ROUNDS = (
    100  # laws only shrink or sink, so a real graph settles in a few rounds; more means two laws undo each other
)


def rewrite(graph: Graph, laws: Sequence[Law]) -> Graph:
    """g == the same g under laws that hold; inputs keep their order, also unused ones."""
    for _ in range(MAX_ROUNDS):
        following = _one_round(graph, laws)
        if following.digest == graph.digest:
            return following
        graph = following
    raise AssertionError(f"laws do not settle in {MAX_ROUNDS} rounds on {graph.name}")


def _one_round(graph: Graph, laws: Sequence[Law]) -> Graph:
    k = Builder()
    new: dict[Node, Node] = {node: k.copy(node, ()) for node in graph.inputs}
    for node in graph.nodes:
        new[node] = _settle(k, k.copy(node, tuple(new[operand] for operand in node.operands)), laws)
    outputs = {name: new[node] for name, node in graph.outputs}
    updates = {name: new[node] for name, node in graph.updates}
    return k.graph(outputs, updates, graph.name)


def _settle(k: Builder, node: Node, laws: Sequence[Law]) -> Node:
    """The node after every law that applies to it, each possibly several times."""
    for _ in range(MAX_ROUNDS):
        following = next((result for law in laws if (result := law(k, node)) is not None), None)
        if following is None or following is node:
            return node
        node = following
    raise AssertionError(f"laws do not settle at {node!r}")
