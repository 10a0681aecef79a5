"""One change to a program: other nodes, other outputs, or other moves between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.evaluation.collectives import MOVES, Group, Move
from ir.graph import Graph, Node
from ir.ops import OPERATORS
from ir.types import DType

Change = Callable[[Builder, Node, tuple[Node, ...]], Node]
"""(builder, the right node, its new operands) -> what stands in its place."""
Moved = tuple[Move, Move]


@dataclass(frozen=True)
class Edit:
    """A change, and what it is in words. ``outputs`` and ``updates`` rename, or leave out, what is returned."""

    what: str
    changes: Mapping[Node, Change] = field(default_factory=dict)
    moves: Mapping[str, Moved] = field(default_factory=dict)
    outputs: Mapping[str, str] | None = None
    updates: Mapping[str, str] | None = None

    @property
    def all_moves(self) -> Mapping[str, Moved]:
        """Every parallel operator, the wrong ones among them."""
        return {**MOVES, **self.moves}


def edited(graph: Graph, edit: Edit) -> Graph:
    """``graph`` with the change in it.

    Raises:
        ShapeError, AssertionError: if there is no such program.
    """
    k = Builder()
    made: dict[Node, Node] = {}
    for node in graph.inputs:
        k.copy(node, ())
    for node in graph.nodes:
        operands = tuple(made[operand] for operand in node.operands)
        change = edit.changes.get(node)
        made[node] = k.copy(node, operands) if change is None else change(k, node, operands)
        assert made[node].type.shape == node.type.shape or node not in graph.roots, "an output of another shape"
    named = []
    for pairs, names in ((graph.outputs, edit.outputs), (graph.updates, edit.updates)):
        by_name = {name: made[node] for name, node in pairs}
        renamed = {name: name for name in by_name} if names is None else names
        named.append({name: by_name[origin] for name, origin in renamed.items()})
    return k.graph(named[0], named[1], graph.name)


# ---- Changes of one node ----


def drop(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Leave the node out."""
    del k, node
    return x[0]


def twice(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Do it again to its result."""
    return k.apply(node.op, (k.copy(node, x), *x[1:]), dict(node.attrs), node.name)


def attrs(**changed: Any) -> Change:
    """Other attributes."""
    return lambda k, node, x: k.apply(node.op, x, {**node.attrs, **changed}, node.name)


def declared(**changed: Any) -> Change:
    """An operator declared otherwise."""
    return lambda k, node, x: k.apply(replace(node.op, **changed), x, dict(node.attrs), node.name)


def other(op: str, **given: Any) -> Change:
    """Another operator over the same operands."""
    return lambda k, node, x: k.apply(OPERATORS[op], x, given, node.name)


def then(op: str, **given: Any) -> Change:
    """The node, and an operator after it."""
    return lambda k, node, x: k.apply(OPERATORS[op], (k.copy(node, x),), given, node.name)


def reordered(*order: int) -> Change:
    """Operands in another order."""
    return lambda k, node, x: k.copy(node, tuple(x[i] for i in order))


def parameter(**changed: Any) -> Change:
    """A parameter stored or read otherwise."""

    def change(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
        del x
        kept = {key: node.attr(key) for key in ("source", "view", "trainable", "stored", "regather")}
        name = changed.get("name", node.attr("name"))
        return k.param(name, node.type, **{**kept, **{key: value for key, value in changed.items() if key != "name"}})

    return change


def constant(array: Any) -> Change:
    """Another constant."""
    return lambda k, node, x: k.const(array, node.name, node.type.dtype)


# ---- Changes of one node, to be given the first arguments ----


def sum_times(attributes: Mapping[str, object], factor: float, k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """A sum times a factor, for a mean."""
    return k.scale(k.reduce_sum(*x, **attributes), factor=factor)


def copy_of(rival: Node, k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Another leaf."""
    return k.copy(rival, ())


def before_its_move(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """The operator, then the move that came before it."""
    return k.copy(x[0], (k.copy(node, (x[0].operands[0], *x[1:])),))


def halves_exchanged(number: int, dim: int, k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Both halves of an operand exchanged along a dim."""
    parts = [k.chunk(x[number], dim=dim, parts=2, index=i) for i in (1, 0)]
    return k.copy(node, (*x[:number], k.concat(*parts, dim=dim), *x[number + 1 :]))


def first_blocks(dim: int, size: int, k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """The first block of an operand in the place of every block."""
    return k.copy(node, (k.concat(*[k.chunk(x[0], dim=dim, parts=size, index=0)] * size, dim=dim),))


def rounded(k: Builder, node: Node, x: tuple[Node, ...]) -> Node:
    """Cast to half precision, and back."""
    return k.cast(k.cast(k.copy(node, x), dtype=DType.BF16.value), dtype=node.type.dtype.value)


# ---- Changes of moves ----


def on_axis(wrong: Move, right: Move, axis: str) -> Move:
    """Wrong along one axis only."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        return (wrong if given["axis"] == axis else right)(group, x, given)

    return run


def multiplied(move: Move) -> Move:
    """``move``, times the number of ranks."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        moved: Any = group.total(np.stack([move(group, x, given)] * group.size, axis=1), (1,))
        return moved

    return run


def reversed_ranks(move: Move) -> Move:
    """``move`` between ranks that are numbered from the other end of the axis."""

    def run(group: Group, x: Any, given: Mapping[str, Any]) -> Any:
        grid = x.reshape(group.trials, *group.mesh.shape, *x.shape[1:])
        turned = np.flip(grid, [1 + axis for axis in group.axes])
        return move(group, turned.reshape(x.shape), given)

    return run
