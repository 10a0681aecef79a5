"""The normal form of a graph: rules and steps that are taken wherever they apply, operands first.

Entry point: ``normalized``. Choosing where a rule is worth taking is the search's (``rewriter``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ir.builder import Builder
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.operator import Operator
from pdv.rewrite.instantiate import build
from pdv.rewrite.match import matches
from pdv.rewrite.rule import Rule

Step = Callable[[Builder, Node], Node | None]
"""step(k, node) is an equal node, made by ``k``, or None where it does not apply: what no law can say."""


def normalized(graph: Graph, rules: Sequence[Rule | Step]) -> Graph:
    """g == g under rules that hold, to which none applies any more; inputs keep their order, also unused ones."""
    k = _NormalBuilder(rules)
    return k.rebuild(graph, k.copy)[0]


def apply_rule(rule: Rule, k: Builder, node: Node) -> Node | None:
    """What a rule of one result makes of a node; None where it does not match, or makes a value of another type."""
    for match in matches(rule, node, {}) if rule.may_match(node) else ():
        try:
            made = build(k, rule.after[0], match.operands, match.values, node.name, short=True)
        except ShapeError:
            continue
        if made.type == node.type and made.needs_grad == node.needs_grad:
            return made
    return None


class _NormalBuilder(Builder):
    """A builder of nodes to which no rule applies: of those that apply, the first is taken."""

    def __init__(self, rules: Sequence[Rule | Step]) -> None:
        super().__init__()
        self._rules = rules
        self._steps: dict[Operator, list[Step]] = {}
        self._normal: dict[Node, Node] = {}

    def apply(self, op: Operator, operands: tuple[Node, ...], attrs: Mapping[str, Any], name: str = "") -> Node:
        """As ``Builder.apply``; equal to what was asked for."""
        node = super().apply(op, operands, attrs, name)
        if op not in self._steps:
            self._steps[op] = [_step(rule) for rule in self._rules if not isinstance(rule, Rule) or rule.root is op]
        if node not in self._normal:
            found = (step(self, node) for step in self._steps[op])
            self._normal[node] = next((other for other in found if other is not None), node)
        return self._normal[node]


def _step(rule: Rule | Step) -> Step:
    return partial(apply_rule, rule) if isinstance(rule, Rule) else rule
