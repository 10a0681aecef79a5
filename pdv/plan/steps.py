"""What all steps of a derivation share: their form, and the operators that their sites number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ir.graph import Graph, Node

Step = Mapping[str, Any]  # Any: JSON; docs/plan-format.md


def operators(graph: Graph) -> tuple[Node, ...]:
    """The nodes that sites number: everything but leaves, in program order."""
    return tuple(node for node in graph.nodes if not node.is_leaf)


def require(holds: bool, what: str) -> None:
    """That a step applies.

    Raises:
        ValueError: if it does not, saying what it says.
    """
    if not holds:
        raise ValueError(what)
