"""Replay a derivation's parallel substitutions: a serial graph and an assignment give the PCG.

Each ``split-<op>-<loop>`` puts its node between the parallel operators that its loops ask for; between two nodes those
meet as a chain of parallel operators, which the cancellation and fusion laws reduce to the cheapest equal chain
(``redistribute``). Everything built here is checked by ``ir.verify`` and then proved over Z_p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ir.builder import Builder
from ir.graph import Node
from ir.sharding import Sharding, format_sharding, invariant
from pdv.pcg.redistribute import Chain, Redistribution
from pdv.problem import Assignment, Derived, Problem, Storage

Leaves = Callable[[Node, Sharding], Sharding]
"""Where an output leaves the program, given where it was made."""


def derive(problem: Problem, assignment: Assignment, moves: Redistribution, leaves: Leaves | None = None) -> Derived:
    """The PCG of an assignment: every node in its split, every value moved once per sharding that is wanted of it.

    ``leaves``: where outputs leave; by default all alike, as the assignment says, or as is cheapest.
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
        together = self._together()
        outputs = {name: self._leave(node, together) for name, node in graph.outputs}
        updates = {name: self._leave(node, invariant(self._problem.mesh)) for name, node in graph.updates}
        places = {node: made for node, (made, _) in self._made.items()}
        return Derived(self._builder.graph(outputs, updates, graph.name), places)

    def _leaf(self, node: Node) -> tuple[Node, Sharding]:
        whole = invariant(self._problem.mesh)
        if not node.is_param:
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
            self._move(operand, tuple(split.operands[i] for split in splits)) for i, operand in enumerate(node.operands)
        )
        return self._builder.copy(node, operands), tuple(split.result for split in splits)

    def _move(self, value: Node, after: Sharding) -> Node:
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

    def _together(self) -> Sharding:
        """How all outputs leave."""
        if self._assignment.leaving is not None or self._leaves is not None:
            return self._assignment.leaving or invariant(self._problem.mesh)
        made = {node: self._made[node][1] for _, node in self._problem.graph.outputs}
        after = exit_sharding(self._moves, made.items(), self._problem.exits, train=self._problem.train)
        assert after is not None, f"{made} cannot leave the program"
        return after

    def _leave(self, value: Node, after: Sharding) -> Node:
        return self._move(value, after if self._leaves is None else self._leaves(value, self._made[value][1]))


def exit_sharding(
    moves: Redistribution, made: Iterable[tuple[Node, Sharding]], allowed: Sequence[Sharding], *, train: bool
) -> Sharding | None:
    """Where values leave the program together, given how each is made: the cheapest of ``allowed`` that there is."""
    made = list(made)
    best: tuple[float, str, Sharding] | None = None
    for after in allowed:
        chains = [moves.chain(node.type, before, after, gradient=train and node.needs_grad) for node, before in made]
        seconds = sum(math.inf if chain is None else chain.seconds for chain in chains)
        offer = seconds, format_sharding(after), after
        if seconds < math.inf and (best is None or offer[:2] < best[:2]):
            best = offer
    return None if best is None else best[2]
