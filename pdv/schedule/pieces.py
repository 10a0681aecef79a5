"""The pieces that a pipeline may be cut between: layers of every stack, what comes before them, and what behind.

Finer than ``units``: an encoder's layers and a decoder's are pieces of one order, and embedding and head are pieces of
their own. No value is read by an earlier piece than makes it. Entry point: ``pieces``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ir.graph import Graph, Node
from ir.proof.repeats import FEWEST
from pdv.schedule.stages import NUMBERED, REMEMBERED, SHARE, units

Group = tuple[str, int]
"""A numbered module: what its parameters' names begin with, and its number."""


@dataclass(frozen=True)
class Pieces:
    """``of``: the piece of each operator; ``layers``: of each piece, whether it is a layer."""

    of: Mapping[Node, int]
    layers: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.layers)


@lru_cache(maxsize=REMEMBERED)
def pieces(graph: Graph) -> Pieces:
    """By the numbered modules that parameters are named by, or else by blocks."""
    groups = _groups(graph)
    trained = [node for node in graph.params if node.needs_grad]
    named = sum(node in groups for node in trained)
    if len(set(groups.values())) < FEWEST or named < SHARE * len(trained):
        found = units(graph)
        return _with_ends(graph, found.of, [found.layers] * found.count)
    order = _order(graph, groups)
    last = len(order) - 1
    of: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        latest = max((of[operand] for operand in node.operands if operand in of), default=-1)
        own = [order[groups[operand]] for operand in node.operands if operand in groups]
        loose = any(x.is_param and x.needs_grad and x not in groups for x in node.operands)
        of[node] = max(latest, *own) if own else last + 1 if loose and latest >= last else latest
    return _with_ends(graph, of, [True] * len(order))


def _groups(graph: Graph) -> dict[Node, Group]:
    """The numbered module of each trained parameter that is in one."""
    found: dict[Node, Group] = {}
    for node in graph.params:
        match = NUMBERED.match(str(node.attr("name"))) if node.needs_grad else None
        if match:
            found[node] = match[1], int(match[2])
    return found


def _order(graph: Graph, groups: Mapping[Node, Group]) -> dict[Group, int]:
    """Groups numbered by how deep in the program they are read last: an encoder's before those that read it."""
    depth: dict[Node, int] = {}
    deepest: dict[Group, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        depth[node] = 1 + max((depth[operand] for operand in node.operands if operand in depth), default=0)
        for operand in node.operands:
            if operand in groups:
                group = groups[operand]
                deepest[group] = max(deepest.get(group, 0), depth[node])
    ordered = sorted(deepest, key=lambda group: (deepest[group], group))
    return {group: number for number, group in enumerate(ordered)}


def _with_ends(graph: Graph, of: Mapping[Node, int], layers: list[bool]) -> Pieces:
    """With what comes before the first layer, and behind the last; what has nothing to train joins what follows it.

    What is made of parameters and constants alone is with its first reader: each stage makes its own of it.
    """
    trained = sorted({unit for node, unit in of.items() if node.needs_grad and node not in graph.fixed})
    if not trained:
        return Pieces(dict.fromkeys(of, 0), (False,))
    last = len(trained) - 1
    found = {node: min(bisect_left(trained, unit), last) for node, unit in of.items()}
    for node in reversed(graph.nodes):
        if node in graph.fixed and node in found:
            found[node] = min((found[reader] for reader in graph.users[node]), default=last)
    return Pieces(found, tuple(0 <= unit < len(layers) and layers[unit] for unit in trained))
