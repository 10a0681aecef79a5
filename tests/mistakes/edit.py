"""Put one mistake into a plan: change the node of a given name, or what a collective does when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ir.builder import Builder
from ir.collectives import MOVES, Group, Move
from ir.graph import Graph, Node

Change = Callable[[Builder, Node, tuple[Node, ...]], Node]
"""(builder, the right node, its new operands) -> what stands in its place."""


@dataclass(frozen=True)
class Mistake:
    """A seeded mistake.

    Attributes:
        what: in words.
        caught_by: "states" (the verifier of shardings), "signature" (what plan and source store, take and give),
            "values" (outputs over Z_p) or "gradients" (gradients over Z_p).
        at: the nodes of the plan that ``change`` replaces, by name.
        plan: which program's plan.
        moves: parallel operators that run wrongly.
    """

    what: str
    caught_by: str
    at: tuple[str, ...] = ()
    change: Change = lambda k, node, x: x[0]
    plan: str = "transformer"
    moves: Mapping[str, tuple[Move, Move]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what

    @property
    def all_moves(self) -> Mapping[str, tuple[Move, Move]]:
        """Every parallel operator, the wrong ones among them."""
        return {**MOVES, **self.moves}


def edited(graph: Graph, mistake: Mistake) -> Graph:
    """``graph`` with the mistake in it; every name in ``at`` has to be there."""
    k = Builder()
    made: dict[Node, Node] = {}
    found = set()
    for node in graph.nodes:
        operands = tuple(made[operand] for operand in node.operands)
        if node.name in mistake.at:
            found.add(node.name)
            made[node] = mistake.change(k, node, operands)
        else:
            made[node] = k.copy(node, operands)
    assert found == set(mistake.at), f"no node is called {set(mistake.at) - found}"
    outputs, updates = ({name: made[node] for name, node in named} for named in (graph.outputs, graph.updates))
    return k.graph(outputs, updates, graph.name)


def drop(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Leave the node out."""
    del k, node
    return x[0]


def twice(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Do it again to its result."""
    return k.apply(node.op, (k.copy(node, x), *x[1:]), dict(node.attrs), node.name)


def attrs(**changed: Any) -> Change:
    """Other attributes."""
    return lambda k, node, x: k.apply(node.op, x, {**node.attrs, **changed}, node.name)


def operator(**declared: Any) -> Change:
    """An operator declared otherwise."""
    return lambda k, node, x: k.apply(replace(node.op, **declared), x, dict(node.attrs), node.name)


def other(op: str, **attributes: Any) -> Change:
    """Another operator over the same operands."""
    return lambda k, node, x: getattr(k, op)(*x, name=node.name, **attributes)


def parameter(**changed: Any) -> Change:
    """A parameter stored or read otherwise."""

    def change(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
        del x
        given = {key: node.attr(key) for key in ("source", "view", "trainable", "stored")}
        return k.param(node.name, node.type, **{**given, **changed})

    return change


def scaled(move: Move, divide: bool = True) -> Move:
    """``move``, and then the mean where the sum is meant (or the sum again where it was taken already)."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        moved = move(group, x, given)
        size = group.mesh.shape[group.axis]
        return moved * (pow(size, -1, 2**31 - 1) if divide else size) % (2**31 - 1)

    return run


def reversed_blocks(move: Move) -> Move:
    """``move`` between ranks that are numbered from the other end of the axis."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        grid = x.reshape(group.trials, *group.mesh.shape, *x.shape[1:])
        return move(group, grid[(slice(None),) * (1 + group.axis) + (slice(None, None, -1),)].reshape(x.shape), given)

    return run
