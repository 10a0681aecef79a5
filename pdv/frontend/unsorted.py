"""Rows that are sorted by their number, worked on one by one, and put back: each is worked on where it is.

Mixtures of experts sort their rows by expert, so that those of one lie together, multiply in groups, and sort back. A
sort is of all rows, which would keep them from being cut; a product that is told the number of each row is none.
Entry point: ``unsort``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ir.builder import Builder
from ir.graph import Graph, Node

_ATEN = "torch.ops.aten."
_ASCENDING = re.compile(r"\{0\}(, (stable=(True|False)|(dim=)?(-1|0)))*(, (descending=)?False)?")
_DIVIDED = re.compile(r"\{0\}, (\d+), rounding_mode='floor'")
_PUT = re.compile(r"\{0\}, \[\{1\}\], \{2\}(, (accumulate=)?False)?")
_MOVES = ("reshape", "cast", "permute", "slice")  # of numbers: what keeps them from being negative


def unsort(graph: Graph) -> Graph:
    """index_select(f(index_select(x, order)), inverse) == f(x), where f goes row by row and order is a sort's"""
    if not any(node.op.name == "grouped_linear" for node in graph.nodes):
        return graph
    k = Builder()
    orders: dict[Node, _Order] = {}

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        found = _sorted_back(k, operands, orders) if node.op.name == "index_select" and node.attr("dim") == 0 else None
        return k.copy(node, operands) if found is None else found

    return k.rebuild(graph, make)[0]


def _sorted_back(k: Builder, operands: tuple[Node, ...], orders: dict[Node, _Order]) -> Node | None:
    """What rows that are put back are made of, as they were before they were sorted."""
    rows, chosen = operands
    order = _inverted(_from_the_start(chosen))
    if order is None or rows.type.shape[0] != order.type.shape[0] or not _is_of_places(order.operands[0]):
        return None
    return orders.setdefault(order, _Order(k, order)).unsorted(rows)


@dataclass
class _Order:
    """One sort, and what values in its order were before.

    Attributes:
        order: the number of each row, in the order in which they are sorted: [s].
        found: values in that order -> the same unsorted; None where that cannot be said.
    """

    k: Builder
    order: Node
    found: dict[Node, Node | None] = field(default_factory=dict)

    @property
    def numbers(self) -> Node:
        """What is sorted."""
        return self.order.operands[0]

    def unsorted(self, node: Node) -> Node | None:
        """A value whose rows are in this order, as they were before."""
        if node not in self.found:
            self.found[node] = self._unsorted(node)
        return self.found[node]

    def _unsorted(self, node: Node) -> Node | None:
        if _sorts(node, 0) and node.operands == self.order.operands:
            return self.numbers
        if node.op.name == "index_select" and node.attr("dim") == 0:
            taken = self._taken(node)
            if taken is not None:
                return taken
        if node.op.name == "grouped_linear":
            x = self.unsorted(node.operands[0]) if self._ends(node.operands[2], node.operands[1]) else None
            return None if x is None else self.k.routed_linear(x, node.operands[1], self.numbers, name=node.name)
        return self._row_by_row(node)

    def _row_by_row(self, node: Node) -> Node | None:
        """Of an operator that makes each row of those of its operands."""
        nest = node.loops
        if node.is_leaf or node.op.draws or not nest.result or len(nest.result[0]) != 1:
            return None
        (row,) = nest.result[0]
        if row in nest.whole or row == node.op.offset_loop or any(row in group for group in nest.result[1:]):
            return None
        operands: list[Node | None] = []
        for operand, groups in zip(node.operands, nest.operands, strict=True):
            if any(row in group for group in groups):
                alone = groups[0] == (row,) and not any(row in group for group in groups[1:])
                operands.append(self.unsorted(operand) if alone else None)
            else:
                operands.append(operand)
        if None in operands or operands == list(node.operands):
            return None
        return self.k.copy(node, cast(tuple[Node, ...], tuple(operands)))

    def _taken(self, node: Node) -> Node | None:
        """Of rows taken in this order the rows, each as often as it is taken."""
        x, chosen = node.operands
        places, count, given = self._places(chosen), self.order.type.shape[0], x.type.shape[0]
        if places is None or count % given or (places != np.arange(count) // (count // given)).any():
            return None
        if given == count:
            return x
        rest, times = x.type.shape[1:], count // given
        apart = self.k.expand(self.k.reshape(x, shape=(given, 1, *rest)), shape=(given, times, *rest))
        return self.k.reshape(apart, shape=(count, *rest), name=node.name)

    def _places(self, node: Node) -> Any:  # Any: an array of integers or truth values; None
        """What is made of the order, where this is that of the rows as they were: 0, 1, 2, …"""
        if node == self.order:
            return np.arange(node.type.shape[0])
        if node.is_const:
            alike = node.attr("value").array
            return alike if alike.size == 1 else None
        if node.op.name == "index_select" and node.operands[0].is_const and node.attr("dim") == 0:
            at = self._places(node.operands[1])
            return None if at is None else node.operands[0].attr("value").array[at]
        each = [self._places(operand) for operand in node.operands]
        if not each or any(one is None for one in each):
            return None
        if node.op.is_foreign:
            divided = _DIVIDED.fullmatch(str(node.attr("arguments")))
            by = node.attr("function") == f"{_ATEN}div.Tensor_mode" and divided
            return each[0] // int(by[1]) if by else None
        return node.op.fold(*each, **node.attrs) if node.op.kind == "map" and node.op.fold is not None else None

    def _ends(self, node: Node, matrices: Node) -> bool:
        """Whether these say where the rows of each number end, for as many numbers as there are matrices."""
        node = _unmoved(node)
        if node.op.name != "cumsum":
            return False
        counts, groups = _unmoved(node.operands[0]), matrices.type.shape[0]
        if not (counts.op.is_foreign and counts.attr("function") == f"{_ATEN}histc.default"):
            return False
        counted = _unmoved(counts.operands[0])
        ours = counted == self.numbers or (_sorts(counted, 0) and counted.operands == self.order.operands)
        return ours and counts.attr("arguments") == f"{{0}}, {groups}, 0, {groups - 1}"


def _inverted(node: Node) -> Node | None:
    """The order that this puts back, if it does."""
    if _sorts(node, 1) and _sorts(node.operands[0], 1):
        return node.operands[0]
    if not (node.op.is_foreign and node.attr("function") == f"{_ATEN}index_put.default" and len(node.operands) == 3):
        return None
    before, order, values = node.operands
    order = _from_the_start(order)
    first = values.is_const and np.array_equal(values.attr("value").array, np.arange(values.type.num_elements))
    fits = before.type.shape == order.type.shape == values.type.shape and _PUT.fullmatch(str(node.attr("arguments")))
    return order if first and fits and _sorts(order, 1) else None


def _sorts(node: Node, output: int) -> bool:
    """Whether this is what an ascending sort of one dim gives: values (0) or where they were (1)."""
    if not node.op.is_foreign or node.type.rank != 1 or not _ASCENDING.fullmatch(str(node.attr("arguments"))):
        return False
    function = str(node.attr("function")).removeprefix(_ATEN)
    alone = output == 1 and function in ("argsort.default", "argsort.stable")
    return alone or (function in ("sort.default", "sort.stable") and node.attr("output") == output)


def _is_of_places(node: Node) -> bool:
    """Whether these are places, which are never negative: what chooses or sorts gave them."""
    while node.op.name in _MOVES:
        node = node.operands[0]
    function = str(node.attr("function")) if node.op.is_foreign else ""
    named = function.removeprefix(_ATEN).split(".")[0]
    return named in ("argmax", "argmin", "argsort") or (named in ("topk", "sort") and node.attr("output") == 1)


def _from_the_start(node: Node) -> Node:
    """where(x < 0, x + n, x) == x of an order, which has no places counted from the end."""
    if node.op.name != "where" or node.operands[0].op.name != "compare_number":
        return node
    below, x = node.operands[0], node.operands[2]
    own = below.operands[0] == x and (below.attr("relation"), below.attr("number")) == ("<", 0)
    return x if own and (_sorts(x, 1) or _inverted(x) is not None) else node


def _unmoved(node: Node) -> Node:
    while node.op.names_dtype or node.op.name == "to_integer":
        node = node.operands[0]
    return node
