"""Which rules match a program, how often, and which of them a plan uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ir.graph import Graph
from pdv.rewrite.rewriter import Where, found_matches
from pdv.rewrite.rule import Rule


@dataclass(frozen=True, slots=True)
class Fired:
    """``matches``: places in the source where the rule applies at once; ``uses``: places where the plan applied it."""

    rule: str
    equation: str
    matches: int
    uses: int


def find_fired(rules: Sequence[Rule], graph: Graph, derivation: Sequence[Mapping[str, Any]]) -> list[Fired]:
    """The rules that match the source or are used, most used first; ``derivation`` is a plan document's."""
    nodes = [node for node in graph.nodes if not node.is_leaf]
    where = Where(nodes, graph.users, lambda node: not node.is_leaf)
    uses: Counter[str] = Counter()
    for step in derivation:
        uses[step["rule"]] += len(step["sites"])
    rows = [Fired(rule.name, rule.equation, len(found_matches(rule, where)), uses[rule.name]) for rule in rules]
    return sorted((row for row in rows if row.matches or row.uses), key=lambda row: (-row.uses, -row.matches, row.rule))
