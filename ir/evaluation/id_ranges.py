"""From where integer inputs are drawn, so that what a program computes of them lies in the tables that it looks up.

Rows beyond a table read as zero where programs are evaluated: a proof in which most ids lie beyond would say little.
Entry points: ``ranges_of``; ``id_ranges``; ``narrower``; ``divisors``; ``are_computed``; ``made_of``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np

from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node

Ranges = Mapping[str, tuple[int, int]]
"""Input -> the least id that is drawn, and the least that is not any more; of floats, the whole numbers in them."""

_HALVINGS = 12
_DRAWN = 256


def are_computed(ids: Node) -> bool:
    """True if ids are not as a caller passes them, but moved by arithmetic: ``table[ids + offset]``."""
    if ids.is_leaf:
        return False
    if becomes_integer(ids):
        return not _is_moved(ids.operands[0])
    moved = ids.op.kind in ("move", "parallel") and all(not x.type.dtype.is_floating for x in ids.operands)
    return not moved or any(are_computed(operand) for operand in ids.operands)


def becomes_integer(node: Node) -> bool:
    """Whether a node cuts floats off to integers, element by element."""
    kinds = [x.type.dtype.is_floating for x in node.operands]
    return node.op.kind == "map" and kinds == [True] and node.type.dtype.value[0] in "iu"


def _is_moved(floats: Node) -> bool:
    """Whether floats are those of one input, as a caller passes them: columns of a table of features."""
    if floats.is_leaf:
        return floats.is_input
    return floats.op.kind in ("move", "parallel") and all(map(_is_moved, floats.operands))


def made_of(ids: Node) -> tuple[Node, ...]:
    """Of which operands an id's numbers come: integers, and floats as they are passed in (``x[:, 0].long()``)."""
    if ids.type.dtype.is_floating:
        return ids.operands if _is_moved(ids) else ()
    if becomes_integer(ids):
        return ids.operands if _is_moved(ids.operands[0]) else ()
    return tuple(x for x in ids.operands if not x.type.dtype.is_floating)


def divisors(graph: Graph) -> set[str]:
    """The integer inputs that something is divided by: devices stop at a zero, and floats are infinite there."""
    left = [
        node.operands[1]
        for node in graph.nodes
        if node.op.takes_positive and len(node.operands) == 2 and not node.type.dtype.is_floating
    ]
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node not in seen and not node.type.dtype.is_floating:
            seen.add(node)
            left += node.operands
    floats = [node.operands[1] for node in graph.nodes if node.op.takes_positive and len(node.operands) == 2]
    return {node.attr("name") for node in (*seen, *map(_counted, floats)) if node.is_input}


def _counted(floats: Node) -> Node:
    """The integers that floats are, moved alone: lengths of rows by which their sums are divided."""
    while len(floats.operands) == 1 and floats.type.dtype.is_floating:
        (below,) = floats.operands
        if floats.op.kind not in ("move", "parallel") and below.type.dtype.is_floating:
            return floats
        floats = below
    while floats.op.kind in ("move", "parallel") and len(floats.operands) == 1:
        (floats,) = floats.operands
    return floats


def ranges_of(serial: Graph) -> Ranges:
    """``id_ranges`` of a program's integer inputs that index tables."""
    limits: dict[str, int] = {}
    for node in serial.nodes:
        if node.op.kind == "index":
            for name in _integer_inputs(node.operands[1], set()):
                limits[name] = min(limits.get(name, 1 << 30), node.loops.extents["v"])
    return id_ranges(serial, limits)


def _integer_inputs(node: Node, seen: set[Node]) -> set[str]:
    if node in seen:
        return set()
    seen.add(node)
    if node.is_input:
        return {node.attr("name")}
    return {name for operand in made_of(node) for name in _integer_inputs(operand, seen)}


def id_ranges(serial: Graph, limits: Mapping[str, int]) -> Ranges:
    """Where ids of the inputs are drawn from.

    Below the least table that they index; of those that others are computed of, in that part of it which keeps most of
    these in their tables, the widest first.

    Args:
        serial: the program.
        limits: inputs of integers -> the least table that they index.
    """
    whole = {name: (0, limit) for name, limit in limits.items()}
    looked_up = [node for node in serial.nodes if node.op.kind == "index" and are_computed(node.operands[1])]
    if not looked_up:
        return whole
    graph = Graph((), tuple((str(i), node.operands[1]) for i, node in enumerate(looked_up)))
    if graph.params or any(_is_unknown(node, limits) for node in graph.nodes):
        return whole
    moved = {node.attr("name") for node in graph.nodes if node.is_input}
    tables = {str(i): node.loops.extents["v"] for i, node in enumerate(looked_up)}
    best, most = whole, -1.0
    for begin, end in _parts():
        ranges = {name: _part(limit, begin, end) if name in moved else whole[name] for name, limit in limits.items()}
        inside = _inside(graph, ranges, tables)
        if inside > most:
            best, most = ranges, inside
        if inside == 1.0:
            break
    return best


def narrower(serial: Graph, ranges: Ranges) -> Iterator[Ranges]:
    """Ranges in which undeclared functions may take ids, too, the widest first: what they index is not known.

    Ids end below each size of what such a function is given.
    """
    sizes: set[int] = set()
    names: set[str] = set()
    for node in serial.nodes:
        whole = [x for x in node.operands if not x.type.dtype.is_floating] if node.op.is_foreign else []
        own = {name for x in whole for name in _integer_inputs(x, set())}
        sizes |= {size for x in node.operands for size in x.type.shape} if own else set()
        names |= own
    before = dict(ranges)
    for end in sorted(sizes, reverse=True):
        given = {name: ranges.get(name, (0, 2)) for name in names}
        found = {**ranges, **{name: (min(least, end - 1), min(most, end)) for name, (least, most) in given.items()}}
        if end and found != before and any(found[name] != given[name] for name in names):
            yield found
        before = found


def _is_unknown(node: Node, limits: Mapping[str, int]) -> bool:
    return node.op.is_foreign or (node.is_input and node.type.dtype.is_floating and node.attr("name") not in limits)


def _parts() -> Iterator[tuple[Fraction, Fraction]]:
    """All of it, its halves, its quarters, …: those at the ends."""
    yield Fraction(0), Fraction(1)
    for halving in range(1, _HALVINGS):
        share = Fraction(1, 2**halving)
        yield Fraction(0), share
        yield share, min(2 * share, Fraction(1))
        yield 1 - share, Fraction(1)


def _part(limit: int, begin: Fraction, end: Fraction) -> tuple[int, int]:
    low = min(int(limit * begin), limit - 1)
    return low, max(int(limit * end), low + 1)


def _inside(graph: Graph, ranges: Ranges, tables: Mapping[str, int]) -> float:
    """The share of ids that lie in their tables: of inputs at both ends of their ranges, and of drawn ones.

    Of few ids several are drawn: by luck all of them may lie in a table that others do not.
    """
    random = np.random.default_rng(0)
    inputs = [(node.attr("name"), node.type.shape) for node in graph.nodes if node.is_input]
    least = {name: np.full(shape, ranges.get(name, (0, 2))[0]) for name, shape in inputs}
    most = {name: np.full(shape, ranges.get(name, (0, 2))[1] - 1) for name, shape in inputs}
    count = 1 + _DRAWN // max((node.type.num_elements for _, node in graph.outputs), default=1)
    drawn = [
        {name: random.integers(*ranges.get(name, (0, 2)), size=shape) for name, shape in inputs} for _ in range(count)
    ]
    shares = []
    for values in (least, most, *drawn):
        with np.errstate(all="ignore"):  # logarithms of zero, where a mask takes something else
            found = evaluate(graph, values).gather()
        shares += [((found[name] >= 0) & (found[name] < rows)).mean() for name, rows in tables.items()]
    return float(np.mean(shares))
