"""Algebraic variants of one block: rules applied inside it, never across its boundary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Graph, Node
from ir.views import read_twice
from pdv.rewrite.match import Match
from pdv.rewrite.rewriter import CircleError, RewriteBuilder, Serves, Where, found_matches, rewritten, served
from pdv.rewrite.rule import Rule
from pdv.search.blocks import Block, block_of, split_blocks, tied_params


@dataclass(frozen=True)
class Variant:
    """A block after ``rules``, each applied everywhere that it matches without overlap, in order."""

    block: Block
    rules: tuple[str, ...] = ()

    @cached_property
    def users(self) -> Mapping[Node, tuple[Node, ...]]:
        """Readers inside the block of everything that it reads."""
        found: dict[Node, list[Node]] = {}
        for node in self.block.nodes:
            for operand in node.operands:
                found.setdefault(operand, []).append(node)
        return {node: tuple(dict.fromkeys(readers)) for node, readers in found.items()}

    @cached_property
    def inside(self) -> frozenset[Node]:
        """The block's operators."""
        return frozenset(self.block.nodes)

    @cached_property
    def serves(self) -> Serves:
        """What depends on the parameters that it reads, which is told here: what is behind it, by its sink."""
        sink = () if self.block.sink is None else (self.block.sink,)
        return served(self.block.nodes, (*self.block.outputs, *sink))

    @cached_property
    def ops(self) -> Counter[str]:
        """How many operators of each name there are."""
        return Counter(node.op.name for node in self.block.nodes)

    @cached_property
    def roots(self) -> tuple[Node, ...]:
        """What the block is for."""
        sink = () if self.block.sink is None else (self.block.sink,)
        return (*self.block.outputs, *self.block.updates, *sink)


class Rewrites:
    """What rules make of a block, one after the other: looked up where it was made before, on another mesh too.

    Attributes:
        builder: of all variants.
        canonical: nodes, as they are known where variants are compared (``backtrack``); filled there.
    """

    def __init__(self, block: Block, tied: dict[Node, int]) -> None:
        self.builder = builder_of(block)
        self.canonical: dict[Node, str] = {} if block.source is None else {block.source: block.source.digest}
        self._tied = tied
        self._known: dict[tuple[tuple[Node, ...], tuple[str, ...], Rule], Variant | None] = {}

    def following(self, variant: Variant, rule: Rule) -> Variant | None:
        """The variant with ``rule`` applied everywhere inside it, or None where it matches nothing."""
        key = variant.block.nodes, variant.rules, rule
        if key not in self._known:
            self._known[key] = apply_rule(variant, rule, self._tied, self.builder)
        return self._known[key]


class SourceBlocks:
    """A program's blocks, and what rules make of each: the same on every mesh and under every limit."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], blocks: Sequence[Block] | None = None) -> None:
        """``blocks``: of ``graph``, which stand for those of a longer program that is solved in its place."""
        self.graph = graph
        self.rules = tuple(rules)
        self.blocks = split_blocks(graph, rules) if blocks is None else tuple(blocks)
        self.tied = tied_params(graph)
        self._variants: dict[tuple[tuple[Node, ...], tuple[str, ...]], Variant] = {}
        self._rewrites: dict[tuple[Node, ...], Rewrites] = {}

    def rewrites(self, block: Block) -> Rewrites:
        """What the rules make of one of the blocks."""
        if block.nodes not in self._rewrites:
            self._rewrites[block.nodes] = Rewrites(block, self.tied)
        return self._rewrites[block.nodes]

    def variant(self, number: int, names: tuple[str, ...]) -> Variant:
        """A block (by number) after some rules, which may have been found for an equal one."""
        block = self.blocks[number]
        key = block.nodes, names  # a block may be there over and over
        if key not in self._variants:
            rules = {rule.name: rule for rule in self.rules}
            self._variants[key] = apply_rules(block, [rules[name] for name in names], self.tied)
        return self._variants[key]


@dataclass(frozen=True)
class KnownSources:
    """The programs that were searched so far."""

    found: list[SourceBlocks] = field(default_factory=list)

    def of(self, graph: Graph, rules: Sequence[Rule]) -> SourceBlocks:
        """A program's blocks."""
        known = next((one for one in self.found if one.graph is graph and one.rules == rules), None)
        if known is None:
            known = SourceBlocks(graph, rules)
            self.found.append(known)
        return known


def apply_rules(block: Block, rules: Iterable[Rule], tied: dict[Node, int]) -> Variant:
    """The block after each rule in turn.

    Raises:
        ValueError: if one matches nothing.
    """
    return trail(block, rules, tied)[0][-1]


def trail(block: Block, rules: Iterable[Rule], tied: dict[Node, int]) -> tuple[list[Variant], list[tuple[Match, ...]]]:
    """The block, then after each rule in turn; and what each rule matched.

    Raises:
        ValueError: if a rule matches nothing.
    """
    variants, found = [Variant(block)], []
    k = builder_of(block)
    for rule in rules:
        following = applied_rule(variants[-1], rule, tied, k)
        if following is None:
            raise ValueError(f"{rule.name} matches nothing after {variants[-1].rules}")
        variants.append(following[0])
        found.append(following[1])
    return variants, found


def builder_of(block: Block) -> RewriteBuilder:
    """A builder that knows a block's nodes, so that what does not change stays the same object."""
    leaves = [operand for node in block.nodes for operand in node.operands if operand.is_leaf]
    return RewriteBuilder((*leaves, *block.nodes))


def apply_rule(variant: Variant, rule: Rule, tied: dict[Node, int], k: RewriteBuilder | None = None) -> Variant | None:
    """The variant with ``rule`` applied everywhere inside it, or None where it matches nothing."""
    found = applied_rule(variant, rule, tied, k or builder_of(variant.block))
    return None if found is None else found[0]


def applied_rule(
    variant: Variant, rule: Rule, tied: dict[Node, int], k: RewriteBuilder
) -> tuple[Variant, tuple[Match, ...]] | None:
    """The variant with ``rule`` applied, and where; ``k`` built the variant."""
    if not rule.needs.keys() <= variant.ops.keys() or any(variant.ops[op] < count for op, count in rule.needs.items()):
        return None
    block = variant.block
    where = Where(block.nodes, variant.users, variant.inside.__contains__, tied, variant.serves)
    found = found_matches(rule, where)
    k.moved.clear()
    k.serves = variant.serves
    new: dict[Node, Node] = {}
    while found and not new:
        try:
            new = rewritten(k, block.nodes, found, lambda node: node)
        except CircleError as circle:
            found = tuple(match for match in found if match is not circle.match)
    if not new or not k.moved.isdisjoint(tied):
        return None
    following = _following(variant, rule, new, tied)
    return None if following is None else (following, found)


def _following(variant: Variant, rule: Rule, new: Mapping[Node, Node], tied: dict[Node, int]) -> Variant | None:
    """The rewritten block; None if it makes nothing, or reads a parameter twice that others expect to be read once.

    Or elements of a stored tensor in two parameters, each of which would be trained apart: in a joined one, and in one
    of its parts, where what reads that part by itself has other readers.
    """
    block = variant.block
    outputs = tuple(new.get(node, node) for node in block.outputs)
    updates = tuple(new.get(node, node) for node in block.updates)
    sink = None if block.sink is None else new[block.sink]
    outside = {block.source, *(operand for node in block.nodes for operand in node.operands)}.difference(block.nodes)
    nodes = _order([*outputs, *updates, *([] if sink is None else [sink])], outside)
    if sink is not None and (sink.is_leaf or sink in outside):
        return None
    reads = Counter(operand for node in nodes for operand in node.operands if operand.is_leaf and operand.needs_grad)
    if any(count > 1 and param not in tied for param, count in reads.items()) or any(read_twice(reads)):
        return None
    return Variant(block_of(block.source, nodes, sink, outputs, updates, tied), (*variant.rules, rule.name))


def _order(roots: list[Node], outside: Collection[Node | None]) -> tuple[Node, ...]:
    """Operators that ``roots`` need, operands first, down to leaves and what is ``outside`` of the block."""
    order: dict[Node, None] = {}
    for root in roots:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in order or node.is_leaf or node in outside:
                stack.pop()
                continue
            waiting = [x for x in node.operands if x not in order and not x.is_leaf and x not in outside]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                order[node] = None
                stack.pop()
    return tuple(order)
