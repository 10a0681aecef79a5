"""From operators of a program to nodes of its PCG: which chunk, and which layer, runs each move between them."""

from __future__ import annotations

from collections.abc import Mapping

from ir.graph import Node
from pdv.problem import Derived


def spread_to_pcg(derived: Derived, of: Mapping[Node, int]) -> dict[Node, int]:
    """What ``of`` says of serial operators, said of the PCG's nodes.

    A sum is taken where its terms are made; any other move is part of its first reader, so that what passes from a
    stage to the next is the smaller of the two. Parameters, constants and what is made of them alone are left out:
    each reader has its own.
    """
    placed = {derived.places[node]: number for node, number in of.items() if node in derived.places}
    fixed: set[Node] = set()
    found: dict[Node, int] = {}
    moved: list[Node] = []
    for node in derived.pcg.nodes:
        if not node.is_input and all(operand in fixed for operand in node.operands):
            fixed.add(node)
        elif node in placed:
            found[node] = placed[node]
        elif node.op.transition.sums and node.operands[0] in found:
            found[node] = found[node.operands[0]]
        elif not node.is_leaf:
            moved.append(node)
    for node in reversed(moved):
        readers = [found[reader] for reader in derived.pcg.users[node] if reader in found]
        if readers:
            found[node] = min(readers)
        elif node.operands[0] in found:  # leaves the program
            found[node] = found[node.operands[0]]
    return found
