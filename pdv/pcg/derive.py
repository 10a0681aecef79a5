"""Replay a derivation's parallel substitutions: a serial graph and an assignment give the PCG.

Each ``split-<op>-<loop>`` puts its node between the parallel operators that its loops ask for; between two nodes those
meet as a chain of parallel operators, which the cancellation and fusion laws reduce to the cheapest equal chain
(``redistribute``). Everything built here is checked by ``ir.verify`` and then proved over Z_p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.sharding import Invariant, Shard, Sharding, format_sharding, invariant
from pdv.pcg.redistribute import Chain, Redistribution
from pdv.problem import Assignment, Problem, Storage


@dataclass(frozen=True)
class Derived:
    """A PCG, and the node of it that runs each node of the serial graph."""

    pcg: Graph
    places: Mapping[Node, Node]


Leaves = Callable[[Node, Sharding], Sharding]
"""Where an output leaves the program, given where it was made."""


def derive(problem: Problem, assignment: Assignment, moves: Redistribution, leaves: Leaves | None = None) -> Derived:
    """The PCG of an assignment: every node in its split, every value moved once per sharding that is wanted of it.

    ``leaves``: where outputs leave; by default whole, or cut by samples where that is cheaper.
    """
    return _Derivation(problem, assignment, moves, leaves).run()


class _Derivation:
    def __init__(self, problem: Problem, assignment: Assignment, moves: Redistribution, leaves: Leaves | None) -> None:
        self._leaves = leaves
        self._problem = problem
        self._assignment = assignment
        self._moves = moves
        self._builder = Builder()
        self._made: dict[Node, tuple[Node, Sharding]] = {}

    def run(self) -> Derived:
        graph = self._problem.graph
        for node in graph.nodes:
            self._made[node] = self._leaf(node) if node.is_leaf else self._split(node)
        outputs = {name: self._leave(node, whole=not self._problem.train) for name, node in graph.outputs}
        updates = {name: self._leave(node, whole=True) for name, node in graph.updates}
        places = {node: made for node, (made, _) in self._made.items()}
        return Derived(self._builder.graph(outputs, updates, graph.name), places)

    def _leaf(self, node: Node) -> tuple[Node, Sharding]:
        whole = invariant(self._problem.mesh)
        if node.op.name != "param":
            return self._builder.copy(node, ()), whole
        storage = self._assignment.storage.get(node, Storage(whole))
        stored = format_sharding(storage.sharding) if storage.sharding != whole else ""
        copy = self._builder.param(
            node.attr("name"),
            node.type,
            source=node.attr("source"),
            view=node.attr("view"),
            trainable=node.attr("trainable"),
            stored=stored,
            regather=storage.regather,
        )
        return copy, storage.sharding

    def _split(self, node: Node) -> tuple[Node, Sharding]:
        splits = self._assignment.splits[node]
        operands = tuple(
            self._moved(operand, tuple(split.operands[i] for split in splits))
            for i, operand in enumerate(node.operands)
        )
        return self._builder.copy(node, operands), tuple(split.result for split in splits)

    def _moved(self, value: Node, after: Sharding) -> Node:
        made, before = self._made[value]
        gradient = self._problem.train and value.needs_grad
        chain = self._moves.chain(value.type, before, after, gradient=gradient)
        assert chain is not None, f"{value!r} cannot go from {before} to {after}"
        return self._apply(made, chain)

    def _apply(self, node: Node, chain: Chain) -> Node:
        for step in chain.steps:
            attrs: Mapping[str, int | str] = {**dict(step.dims), "axis": step.axis}
            node = getattr(self._builder, step.name)(node, **attrs)
        return node

    def _leave(self, value: Node, *, whole: bool) -> Node:
        before = self._made[value][1]
        if self._leaves is not None:
            return self._moved(value, self._leaves(value, before))
        gradient = self._problem.train and value.needs_grad
        after = exit_sharding(self._moves, value, before, whole=whole, gradient=gradient)
        assert after is not None, f"{value!r} cannot leave the program from {before}"
        return self._moved(value, after)


def exit_sharding(moves: Redistribution, node: Node, made: Sharding, *, whole: bool, gradient: bool) -> Sharding | None:
    """Where an output leaves the program: the cheapest of Invariant or (in training) Shard(batch) per axis.

    Samples are dim 0 of an output; a loss is a mean over them, so each rank may take its own (DESIGN section 7).
    """
    chains = moves.from_(node.type, made, gradient=gradient)
    allowed = (Invariant(),) if whole or node.type.rank == 0 else (Invariant(), Shard(0))
    legal = [after for after in chains if all(state in allowed for state in after)]
    return min(legal, key=lambda after: (chains[after].seconds, format_sharding(after)), default=None)
