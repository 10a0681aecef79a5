"""What autograd keeps of a program's values for backward, and what may be made again of what it keeps.

An operator is *light* if it keeps all that it takes, and not what it gives: so its result can be made again whenever
backward reads it, by arithmetic that is cheap beside products. So can a gathered activation, of this rank's block
(Korthikanti et al., MLSys'23, section 4.2.2). Entry points: ``needed``, ``light_values``, ``made_of``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ir.graph import Graph, Node, unmoved
from ir.memory.layout import Memory

DEPTH = 2  # light operators behind one another, of which each is made again of the one before: a gate, of an activation


def declared_kept(node: Node) -> tuple[int | str, ...] | None:
    """Operand numbers and/or "out" that backward may need; None where that depends on how operands lie in memory."""
    memory = node.op.memory
    if not isinstance(memory, Memory):
        return None
    return node.op.saved if memory.saved is None else memory.saved


def needed(node: Node, declared: Sequence[int | str]) -> list[int]:
    """Of operands that are declared to be kept, those that are.

    A gradient by what an operator is linear in has no need of it.
    """
    kept = [number for number in declared if isinstance(number, int) and number < len(node.operands)]
    if node.op.kind not in ("contraction", "map"):
        return kept
    others = {n: [x for m, x in enumerate(node.operands) if m != n] for n in kept}
    return [n for n in kept if frozenset({n}) not in node.op.linear or any(x.needs_grad for x in others[n])]


def is_light(node: Node) -> bool:
    """Whether a value could be made again of what is kept anyway, or of its block."""
    if not node.needs_grad or unmoved(node).is_leaf:
        return False
    if node.op.kind == "parallel":
        return node.op.transition.gathers
    declared = declared_kept(node)
    if node.op.kind not in ("map", "row") or not node.op.kernel or node.op.draws or declared is None:
        return False
    taken = {number for number, operand in enumerate(node.operands) if not unmoved(operand).is_leaf}
    return "out" not in declared and bool(taken) and taken <= set(needed(node, declared))


def light_values(graph: Graph, depth: int = DEPTH) -> Mapping[Node, tuple[Node, ...]]:
    """Values that backward reads and that are light, each with those that it is made again of.

    Of light values behind one another ``depth`` at most: who reads the last of them makes all of them.
    """
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.needs_grad and node.op.kind != "parallel" and not node.is_leaf:
            declared = declared_kept(node)
            read.update(node.operands[n] for n in needed(node, node.op.saved if declared is None else declared))
        if node in read and (_lies_within(node) or node.op.transition.gathers):
            read.add(node.operands[0])
    behind: dict[Node, int] = {}
    found: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node in read and is_light(node):
            sources = tuple(dict.fromkeys(owner(operand) for operand in node.operands if not unmoved(operand).is_leaf))
            steps = max(behind.get(source, 0) for source in sources) + (node.op.kind != "parallel")
            if steps <= depth:
                behind[node], found[node] = steps, sources
    return found


def made_of(values: Iterable[Node], light: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """What is kept in place of values of which those that are light are made again, each once."""
    found: dict[Node, None] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        sources = light.get(owner(value))
        if sources is None:
            found[value] = None
        else:
            stack += sources
    return list(found)


def owner(node: Node) -> Node:
    """The value in whose memory one lies: of a view what it shows."""
    while _lies_within(node):
        node = node.operands[0]
    return node


def _lies_within(node: Node) -> bool:
    return bool(node.operands) and (node.op.strides is not None or node.op.transition.only_names)
