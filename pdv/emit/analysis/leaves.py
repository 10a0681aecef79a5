"""Leaves as the emitted program reads them: a parameter or constant below its chain of parallel operators.

Decides which values are nodes of their own in the program, and which are written where they are read: parameters on
their way from storage to use (``all_gather(local(self.weight), 0, dp)``) and constants, whose cuts are made at build.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ir.graph import Graph, Node
from ir.memory.kept import light_values
from pdv.pcg.over_time import TIME


@dataclass(frozen=True, slots=True)
class Leaf:
    """``base`` (a param, const or input) and the parallel operators above it, innermost first."""

    base: Node
    chain: tuple[Node, ...]

    @property
    def regather(self) -> bool:
        """True if gathered copies must not outlive their use."""
        return self.base.is_param and bool(self.base.attr("regather")) and self.gathers

    @property
    def gathers(self) -> bool:
        """True if it takes communication to read it."""
        return any(node.op.transition.gathers for node in self.chain)


class Reading:
    """What each node of a PCG reads, once operators that do nothing are gone.

    ``replicate`` of a value without gradient only names a state; ``users`` are counted without it. ``several``: whether
    micro-batches in flight share copies of weights; ``light``: whether light values are made again in backward.
    """

    def __init__(self, graph: Graph, *, several: bool = False, light: bool = False) -> None:
        self.graph, self.several = graph, several
        self.light: Collection[Node] = light_values(graph) if light else ()
        self.overwritten = frozenset(name for name, _ in graph.updates)
        self._leaves: dict[Node, Leaf] = {}
        users: dict[Node, dict[Node, None]] = {node: {} for node in graph.nodes}
        for node in graph.nodes:
            if node.is_leaf:
                self._leaves[node] = Leaf(node, ())
                continue
            below = self._leaves.get(self.resolve(node.operands[0])) if _is_at_build(node) else None
            if below is not None and not below.base.is_input:
                self._leaves[node] = below if is_idle(node) else Leaf(below.base, (*below.chain, node))
            if is_idle(node):
                continue
            for operand in node.operands:
                users[self.resolve(operand)][node] = None
        self.users: Mapping[Node, tuple[Node, ...]] = {node: tuple(readers) for node, readers in users.items()}

    def resolve(self, node: Node) -> Node:
        """The node itself, or what it stands for if it does nothing."""
        while is_idle(node):
            node = node.operands[0]
        return node

    def operands(self, node: Node) -> tuple[Node, ...]:
        """What the program reads to compute ``node``."""
        return tuple(self.resolve(operand) for operand in node.operands)

    def leaf(self, node: Node) -> Leaf | None:
        """The leaf that ``node`` reads, if it is written where it is read."""
        return self._leaves.get(node)

    def is_overwritten(self, node: Node) -> bool:
        """True if ``node`` reads a buffer that a step overwrites."""
        leaf = self._leaves.get(node)
        return leaf is not None and leaf.base.is_param and leaf.base.attr("name") in self.overwritten

    def is_own(self, node: Node) -> bool:
        """True if the program computes it by a step of its own."""
        return node not in self._leaves and not is_idle(node)

    def readers(self, base: Node) -> tuple[Node, ...]:
        """The computing nodes that read a leaf, through whatever chain."""
        found: dict[Node, None] = {}
        stack = [base]
        while stack:
            for user in self.users[stack.pop()]:
                if user in self._leaves:
                    stack.append(user)
                else:
                    found[user] = None
        return tuple(found)


def _is_at_build(node: Node) -> bool:
    """Whether a parallel operator on a leaf takes a part of it that is the same all along, as slices in time do not."""
    in_time = node.op.kind == "parallel" and node.attr("axis") == TIME and not node.op.transition.only_names
    return node.op.kind == "parallel" and not in_time


def is_idle(node: Node) -> bool:
    """replicate(x) == x where x has no gradient."""
    return node.op.transition.only_names and not node.operands[0].needs_grad
