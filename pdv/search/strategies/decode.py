"""A strategy made operator by operator, in program order: each knows what its choices add to what stands.

``Decoder`` makes several at once; who calls it says how to choose (the cheapest, a sample of a policy, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ir.sharding import Shard
from pdv.search.solver.tables import Table, Variable
from pdv.search.strategies.network import Flat, Term, Values

Indices = np.ndarray[Any, np.dtype[np.int64]]
Choose = Callable[[int, Table], Indices]


class Decoder:
    """Makes plans of one network in program order."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        order = {variable: number for number, variable in enumerate(flat.choices)}
        # of each choice: the parts of each term that are settled with it
        self._settled: list[list[tuple[int, Term, list[tuple[tuple[int, ...], Table]]]]] = [[] for _ in flat.choices]
        for number, term in enumerate(flat.terms):
            by_last: dict[int, list[tuple[tuple[int, ...], Table]]] = {}
            for at, table in term.parts:
                last = max(order[term.variables[p]] for p in at)
                by_last.setdefault(last, []).append((at, table))
            for last, parts in by_last.items():
                self._settled[last].append((number, term, parts))

    def run(self, choose: Choose, batch: int) -> tuple[Indices, Table]:
        """([batch, choices] values, [batch] their cost).

        ``choose`` is given a choice's number and [batch, its values] what each adds (``illegal`` or more: nothing
        goes), and returns [batch] the values taken.
        """
        flat = self.flat
        taken = np.zeros((batch, len(flat.choices)), dtype=np.int64)
        chosen: dict[Variable, Indices] = {}
        pending: dict[int, Table] = {}  # [batch, h] of terms with parts that are not settled yet
        spent = np.zeros(batch)
        rows = np.arange(batch)
        for number, variable in enumerate(flat.choices):
            added = np.zeros((batch, flat.sizes[variable]))
            sums = []
            for term_number, term, parts in self._settled[number]:
                before = pending.get(term_number)
                total: Table = np.zeros((1, 1, 1))
                for at, table in parts:
                    total = total + _rows(term, at, table, variable, chosen)
                if before is not None:
                    total = total + before[:, None, :]
                    added = added - before.min(axis=-1)[:, None]
                added = added + total.min(axis=-1)
                sums.append((term_number, total))
            choice = choose(number, added)
            taken[:, number] = chosen[variable] = choice
            spent += added[rows, choice]
            for term_number, total in sums:
                pending[term_number] = np.broadcast_to(total, (batch, *total.shape[1:]))[rows, choice]
        return taken, spent

    def values(self, taken: Indices) -> Values:
        """One row as values."""
        return {variable: int(value) for variable, value in zip(self.flat.choices, taken, strict=True)}


def _rows(term: Term, at: tuple[int, ...], table: Table, variable: Variable, chosen: dict[Variable, Indices]) -> Table:
    """[batch or one, values of ``variable``, h] a part, where all its other variables are chosen."""
    names = [term.variables[p] for p in at]
    axis = names.index(variable)
    table = np.moveaxis(table, axis, -2)
    others = tuple(chosen[name] for name in names if name != variable)
    rows: Table = table[others] if others else table[None]
    return rows


def find_start(flat: Flat) -> Values:
    """The better of two plans to start from: the greedy one, and the one that cuts samples wherever it can."""
    names = {variable: node for node, variable in flat.network.variables.items()}
    favour = []
    for variable in flat.choices:
        node = names[variable]
        options = flat.network.options.get(node, ()) if node.type.rank > 1 else ()  # rank one: statistics, not samples
        cuts = [sum(state == Shard(0) for state in config.result) for config in options]
        favour.append(np.array(cuts or [0] * flat.sizes[variable], dtype=np.float64))
    decoder = Decoder(flat)

    def choose(number: int, added: Table) -> Indices:
        few = np.where(added < flat.illegal / 2, -favour[number], np.inf)
        cheapest = np.where(few == few.min(axis=1, keepdims=True), added, np.inf)
        chosen: Indices = cheapest.argmin(axis=1)
        return chosen

    taken, _ = decoder.run(choose, 1)
    return min(greedy(flat), decoder.values(taken[0]), key=flat.value)


def greedy(flat: Flat) -> Values:
    """Each operator in turn takes what adds least."""
    decoder = Decoder(flat)
    taken, _ = decoder.run(lambda number, added: added.argmin(axis=1), 1)
    return decoder.values(taken[0])
