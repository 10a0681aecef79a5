"""Split a graph at bottleneck values into blocks, and recognise equal blocks by hash.

A bottleneck is a value that everything after it depends on alone (Unity, OSDI'22, section 6.2, splits at
post-dominators); leaves do not count, for they can be read anywhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ir.graph import Graph, Node


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
    """

    source: Node | None
    nodes: tuple[Node, ...]
    sink: Node | None
    outputs: tuple[Node, ...]
    updates: tuple[Node, ...]
    key: str


def split_blocks(graph: Graph) -> tuple[Block, ...]:
    """Blocks in program order; together they hold every operator once."""
    nodes = _in_place(graph)
    order = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((order[user] for user in graph.users[node]), default=-1) for node in nodes}
    tied = tied_params(graph)
    blocks: list[Block] = []
    start = 0
    source: Node | None = None
    live: set[Node] = set()
    for index, node in enumerate(nodes):
        live = {value for value in live if last_use[value] > index}
        if last_use[node] > index:
            live.add(node)
        last = index == len(nodes) - 1
        if last or live == {node}:
            block_nodes = tuple(nodes[start : index + 1])
            inside = {source, *block_nodes} if last else {source, *block_nodes[:-1]}
            outputs = tuple(value for _, value in graph.outputs if value in inside)
            updates = tuple(value for _, value in graph.updates if value in inside)
            blocks.append(block_of(source, block_nodes, None if last else node, outputs, updates, tied))
            start, source = index + 1, node
    return tuple(blocks)


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
    """A block with its key."""
    local: dict[Node, str] = {} if source is None else {source: f"source {source.type} {source.needs_grad}"}
    lines = [f"{local[source]} {source in outputs} {source in updates}" if source is not None else "start"]
    for number, node in enumerate(nodes):
        operands = [local.get(operand) or _leaf_key(operand, tied) for operand in node.operands]
        attrs = [f"{key}={value!s}" for key, value in node.attrs.items()]
        flags = f"{node in outputs} {node in updates} {node is sink}"
        lines.append(f"{node.op.name} {attrs} {operands} {node.type} {flags}")
        local[node] = f"%{number}"
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]
    return Block(source, nodes, sink, outputs, updates, key)


def _leaf_key(leaf: Node, tied: dict[Node, int]) -> str:
    if leaf.op.name == "const":
        return f"const {leaf.type}"
    if leaf in tied:
        return f"tied {tied[leaf]} {leaf.type}"
    return f"{leaf.op.name} {leaf.type} {leaf.needs_grad}"
