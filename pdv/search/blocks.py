"""Split a graph at bottleneck values into blocks, and recognise equal blocks by hash.

A bottleneck is a value that everything after it depends on alone (Unity, OSDI'22, section 6.2, splits at
post-dominators); leaves do not count, for they can be read anywhere. Nor does what is made of inputs alone, costs
little and is read all along the program (masks, positions): it is *beside* the way, a block of its own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ir.graph import Graph, Node, bottlenecks
from ir.memory.kept import is_light
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.proof.repeats import Repeat, find_repeats
from ir.sharding import Partial
from pdv.rewrite.match import matches
from pdv.rewrite.rule import Rule

SMALL = 8  # operators: what is smaller may be merged with its neighbours
MOST = 40  # operators in a merged block
WIDEST = 8  # blocks between bottlenecks that a layer may have
# Of the points of the largest operator, what is beside the way may take together. A mask of a GPT is 1/200 of the
# attention that reads it; one of no more than this costs a step under a percent, on which a certificate is open.
BESIDE = 1 / 64


@dataclass(frozen=True)
class Block:
    """A run of nodes between two bottlenecks.

    Attributes:
        source: the value that comes in, or None for the first block.
        nodes: operators (no leaves), operands first.
        sink: the value that goes out, or None for the last block.
        outputs: what the program returns of the source and the nodes but the sink; ``updates``: what overwrites a
            buffer. A sink that leaves the program does so in the block that reads it, with which it may share its way.
        key: equal for blocks that differ only in parameter names.
        beside: True for what others read beside their sources: it has no source and no sink, and is the first block.
    """

    source: Node | None
    nodes: tuple[Node, ...]
    sink: Node | None
    outputs: tuple[Node, ...]
    updates: tuple[Node, ...]
    key: str
    beside: bool = False

    @property
    def read_beside(self) -> tuple[Node, ...]:
        """What it reads that is made elsewhere, beside its source."""
        known = {self.source, *self.nodes}
        read = dict.fromkeys(operand for node in self.nodes for operand in node.operands if not operand.is_leaf)
        return tuple(operand for operand in read if operand not in known)


def repeats(keys: Sequence[str]) -> tuple[Repeat, ...]:
    """All stretches that repeat, in order, the longest found first."""
    found = longest_repeat(keys)
    if found is None:
        return ()
    behind = (replace(one, start=one.start + found.stop) for one in repeats(keys[found.stop :]))
    return (*repeats(keys[: found.start]), found, *behind)


def longest_repeat(keys: Sequence[str]) -> Repeat | None:
    """The longest stretch that repeats; of equally long ones the one of the shortest period, then the first."""
    return max(find_repeats(keys, WIDEST), key=lambda one: one.count * one.period, default=None)


def split_blocks(graph: Graph, rules: Sequence[Rule] = ()) -> tuple[Block, ...]:
    """Blocks in program order; together they hold every operator once.

    Small neighbours that a match of one of ``rules`` spans are one block.
    """
    beside, nodes = _beside(_in_place(graph), graph)
    if not nodes:
        return ()  # a program that returns what comes in
    ends = _merge(nodes, [*bottlenecks(nodes, graph.users), len(nodes) - 1], graph, rules)
    tied = _read_across(tied_params(graph), nodes, ends, graph)
    blocks = [replace(block_of(None, beside, None, (), (), tied), beside=True)] if beside else []
    start = 0
    source: Node | None = None
    for end in ends:
        last = end == len(nodes) - 1
        block_nodes = tuple(nodes[start : end + 1])
        inside = {source, *block_nodes} if last else {source, *block_nodes[:-1]}
        outputs = tuple(value for _, value in graph.outputs if value in inside)
        updates = tuple(value for _, value in graph.updates if value in inside)
        blocks.append(block_of(source, block_nodes, None if last else nodes[end], outputs, updates, tied))
        start, source = end + 1, nodes[end]
    return tuple(blocks)


def _read_across(tied: dict[Node, int], nodes: Sequence[Node], ends: Sequence[int], graph: Graph) -> dict[Node, int]:
    """Those that more than one block reads: blocks that read others of them are not equal."""
    order = {node: index for index, node in enumerate(nodes)}
    homes = {param: {bisect_left(ends, order[user]) for user in graph.users[param]} for param in tied}
    return {param: number for param, number in tied.items() if len(homes[param]) > 1}


def _merge(nodes: Sequence[Node], ends: list[int], graph: Graph, rules: Sequence[Rule]) -> list[int]:
    """The ends that no match spans, as long as blocks stay small.

    Only matches with an operator that computes much count (``Rule.spans``), and only between blocks that were small
    before: a chain of convolutions has a bottleneck behind each, a transformer's layers are large enough already.
    """
    starts = [0, *(end + 1 for end in ends[:-1])]
    small = [end - start < SMALL for start, end in zip(starts, ends, strict=True)]
    beside = [a and b for a, b in pairwise(small)]  # a block and the next may become one
    if not any(beside):
        return ends
    order = {node: index for index, node in enumerate(nodes)}
    block = [
        number for number, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end + 1)
    ]
    spanned = [False] * len(ends)  # between a block and the next
    by_op: dict[Operator, list[Rule]] = {}
    for rule in rules:
        if rule.spans:
            by_op.setdefault(OPERATORS[rule.before[0].op], []).append(rule)
    mergeable = [a or b for a, b in zip([False, *beside], [*beside, False], strict=True)]
    for index, node in enumerate(nodes):
        for rule in by_op.get(node.op, ()) if mergeable[block[index]] else ():
            if (match := next(matches(rule, node, graph.users), None)) is not None:
                touched = sorted({block[order[x]] for x in match.nodes if x in order})
                for number in range(touched[0], touched[-1]):
                    spanned[number] = True
    kept: list[int] = []
    start = 0
    for number, end in enumerate(ends):
        both = number + 1 < len(ends) and beside[number]
        if both and spanned[number] and ends[number + 1] - start < MOST:
            continue
        kept.append(end)
        start = end + 1
    return kept


def _in_place(graph: Graph) -> list[Node]:
    """Operators in program order, those that only serve a buffer's new value right behind what they read.

    At the end of the program, where the graph has them, they would keep statistics alive across all blocks.
    """
    wanted: set[Node] = set()
    waiting = [node for _, node in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting.extend(node.operands)
    operators = [node for node in graph.nodes if not node.is_leaf]
    anchor = {node: index for index, node in enumerate(operators) if node in wanted}
    served = [node for node in operators if node not in wanted]
    for node in served:
        behind = [anchor[operand] for operand in node.operands if operand in anchor]
        if behind:
            anchor[node] = max(behind)
    for node in reversed(served):  # what reads leaves alone goes with its first reader
        if node not in anchor:
            anchor[node] = min((anchor[reader] for reader in graph.users[node]), default=len(operators))
    return sorted(operators, key=lambda node: (anchor[node], node not in wanted))


def _beside(nodes: Sequence[Node], graph: Graph) -> tuple[tuple[Node, ...], list[Node]]:
    """What several blocks read of values made of inputs alone, and what they are made of; and all other operators.

    Such values are never sums of terms, so that who can read them whole can read them however they are made.
    """
    roots = {node for _, node in (*graph.outputs, *graph.updates)}
    made: set[Node] = set()
    for node in nodes:
        given = all(x.is_input or x.is_const or x in made for x in node.operands)
        if given and node not in roots and _is_plain(node):
            made.add(node)
    way = [node for node in nodes if node not in made]
    ends = bottlenecks(way, graph.users)
    homes = {node: {bisect_left(ends, at)} for at, node in enumerate(way)}
    for node in reversed(nodes):
        if node in made:
            homes[node] = {home for user in graph.users[node] for home in homes[user]}
    beside = tuple(node for node in nodes if node in made and len(homes[node]) > 1)
    points = sum(node.loops.points for node in beside)
    if not beside or points > BESIDE * max(node.loops.points for node in nodes):
        return (), list(nodes)
    own: dict[Node, list[Node]] = {}  # of one block: right before its first reader, or what that stands before
    place = {node: at for at, node in enumerate(way)}
    for node in reversed(nodes):
        if node in made and len(homes[node]) == 1:
            place[node] = min(place[user] for user in graph.users[node])
            own.setdefault(way[place[node]], []).insert(0, node)
    return beside, [x for node in way for x in (*own.get(node, ()), node)]


def _is_plain(node: Node) -> bool:
    """No gradient, nothing drawn, and no sum over a loop that is cut."""
    sums = any(
        isinstance(split.result, Partial) and not any(isinstance(state, Partial) for state in split.operands)
        for split in node.op.splits(node.loops)
    )
    return not (node.needs_grad or node.op.draws or sums)


def tied_params(graph: Graph) -> dict[Node, int]:
    """Trained parameters read more than once, numbered in order: their storage couples blocks."""
    tied = [node for node in graph.params if len(graph.users[node]) > 1 and node.needs_grad]
    return {node: number for number, node in enumerate(tied)}


def block_of(
    source: Node | None,
    nodes: tuple[Node, ...],
    sink: Node | None,
    outputs: tuple[Node, ...],
    updates: tuple[Node, ...],
    tied: dict[Node, int],
) -> Block:
    """A block with its key; parameters that are not ``tied`` and read more than once are its own."""
    reads = Counter(operand for node in nodes for operand in node.operands if operand.is_leaf and operand.needs_grad)
    own = {param: number for number, param in enumerate(p for p, count in reads.items() if count > 1)}
    local: dict[Node, str] = (
        {} if source is None else {source: f"source {source.type} {source.needs_grad} {is_light(source)}"}
    )
    lines = [f"{local[source]} {source in outputs} {source in updates}" if source is not None else "start"]
    for number, node in enumerate(nodes):
        operands = [local.get(operand) or _outside_key(operand, tied, own) for operand in node.operands]
        attrs = [f"{key}={value!s}" for key, value in node.attrs.items()]
        flags = f"{node in outputs} {node in updates} {node is sink}"
        lines.append(f"{node.op.name} {attrs} {operands} {node.type} {flags}")
        local[node] = f"%{number}"
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]
    return Block(source, nodes, sink, outputs, updates, key)


def _outside_key(leaf: Node, tied: Mapping[Node, int], own: Mapping[Node, int]) -> str:
    if not leaf.is_leaf:
        return f"beside {leaf.type} {is_light(leaf)}"
    if leaf.is_const:
        return f"const {leaf.type}"
    if leaf in tied:
        return f"tied {tied[leaf]} {leaf.type}"
    if leaf in own:
        return f"own {own[leaf]} {leaf.type}"
    return f"{leaf.op.name} {leaf.type} {leaf.needs_grad}"
