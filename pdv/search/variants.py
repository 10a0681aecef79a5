"""Algebraic variants of one block: rules applied inside it, never across its boundary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ir.graph import Graph, Node
from pdv.rewrite.rule import Binding, RewriteBuilder, Rule
from pdv.search.blocks import Block, block_of


@dataclass(frozen=True)
class Variant:
    """A block after ``rules``, each applied everywhere that it matches, in order."""

    block: Block
    rules: tuple[str, ...] = ()


def apply_rules(block: Block, rules: tuple[Rule, ...], tied: dict[Node, int]) -> Variant:
    """The block after each rule in turn.

    Raises:
        ValueError: if one matches nothing.
    """
    variant = Variant(block)
    for rule in rules:
        following = apply_rule(variant, rule, tied)
        if following is None:
            raise ValueError(f"{rule.name} matches nothing after {variant.rules}")
        variant = following
    return variant


def apply_rule(variant: Variant, rule: Rule, tied: dict[Node, int]) -> Variant | None:
    """The variant with ``rule`` applied everywhere inside it, or None where it matches nothing."""
    block = variant.block
    k = RewriteBuilder()
    new: dict[Node, Node] = {}
    inside: set[Node] = set()
    matched = False
    for node in block.nodes:
        copy = k.copy(node, tuple(new.get(operand, operand) for operand in node.operands))
        inside.add(copy)
        binding = rule.match(copy, inside.__contains__)
        if binding is not None and not _reads(binding, tied):
            before = set(inside)
            copy = rule.apply(k, binding)
            inside |= _new_nodes(copy, before, block.source)
            matched = True
        new[node] = copy
    if not matched:
        return None
    outputs = tuple(new.get(node, node) for node in block.outputs)
    updates = tuple(new.get(node, node) for node in block.updates)
    sink = None if block.sink is None else new[block.sink]
    roots = [*outputs, *updates, *([] if sink is None else [sink])]
    nodes = _reachable(roots, inside)
    return Variant(block_of(block.source, nodes, sink, outputs, updates, tied), (*variant.rules, rule.name))


def _reads(binding: Binding, tied: Collection[Node]) -> bool:
    """True if a rule would move a tied parameter, whose readers must all find it in one place."""
    return any(isinstance(value, Node) and value in tied for value in binding.values())


def _new_nodes(root: Node, known: set[Node], source: Node | None) -> set[Node]:
    found: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node.is_leaf or node is source or node in known or node in found:
            continue
        found.add(node)
        stack.extend(node.operands)
    return found


def _reachable(roots: list[Node], inside: set[Node]) -> tuple[Node, ...]:
    """Nodes of the block that its results need, operands first."""
    order = Graph((), tuple((str(i), root) for i, root in enumerate(roots))).nodes
    return tuple(node for node in order if node in inside)
