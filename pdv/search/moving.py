"""One value as tables: moving it from where it is made to those who read or return it, and keeping it for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.pcg.derive import exit_sharding
from pdv.search.configs import ConfigTable
from pdv.search.exact import Factor, Table, Variable
from pdv.search.sharing import EXACT_WANTS, Ways


@dataclass(frozen=True)
class Reader:
    """An operand position: what each configuration of its node needs, and whether it is kept for backward."""

    variable: Variable
    needs: Sequence[Sharding]
    keeps: bool


@dataclass(frozen=True)
class Moving:
    """Builds the factors of values at one price of memory (seconds per byte).

    ``optimistic`` factors bound the cost from below where more than three want a value; elsewhere they are the same.
    """

    configs: ConfigTable
    price: float
    optimistic: bool = False

    def factors(
        self,
        value: Node,
        source: Variable,
        made: Sequence[Sharding],
        readers: Sequence[Reader],
        leaves: Sequence[bool],
        helper: Callable[[int], Variable],
    ) -> list[Factor]:
        """Factors over ``source`` (its domain is ``made``), the readers' variables and a helper's.

        Args:
            value: what is moved.
            source: the variable of the node that makes it.
            made: the sharding that each of its configurations gives.
            readers: who reads it in this block.
            leaves: for each way that it leaves the program, whether it has to leave whole.
            helper: makes a variable of a given size.
        """
        if not made:
            return []  # nothing makes it: the plan is impossible, whatever moves cost
        ways = {before: self._ways(value, before) for before in dict.fromkeys(made)}
        exits = {before: self._exits(value, before, leaves) for before in ways}
        if len(readers) < 2:
            return self._single(value, source, made, readers, ways, exits)
        return self._shared(value, source, made, readers, ways, exits, helper)

    def _ways(self, value: Node, before: Sharding) -> Ways:
        return self.configs.sharing.ways(value.type, before, gradient=self._backward(value))

    def _backward(self, value: Node) -> bool:
        return self.configs.problem.train and value.needs_grad

    def _exits(self, value: Node, before: Sharding, leaves: Sequence[bool]) -> list[Sharding] | None:
        """Where the value goes to leave the program; None if it cannot."""
        found = []
        for whole in leaves:
            gradient = self._backward(value)
            after = exit_sharding(self.configs.moves, value, before, whole=whole, gradient=gradient)
            if after is None:
                return None
            found.append(after)
        return found

    def _single(
        self,
        value: Node,
        source: Variable,
        made: Sequence[Sharding],
        readers: Sequence[Reader],
        ways: dict[Sharding, Ways],
        exits: dict[Sharding, list[Sharding] | None],
    ) -> list[Factor]:
        """At most one reader: all wants are known from two configurations."""
        needs = tuple(dict.fromkeys(readers[0].needs)) if readers else (None,)
        small = {before: np.full(len(needs), np.inf) for before in ways}
        for before, way in ways.items():
            leaving = exits[before]
            if leaving is None:
                continue
            for column, need in enumerate(needs):
                cost = way.together_s(leaving if need is None else [need, *leaving])
                if need is not None and readers[0].keeps and np.isfinite(cost):
                    cost += self.price * float(self._held(value, way, [need])[0])
                small[before][column] = cost
        if not readers:
            return [Factor((source,), np.array([small[before][0] for before in made]))]
        number = {need: column for column, need in enumerate(needs)}
        columns = [number[need] for need in readers[0].needs]
        return [Factor((source, readers[0].variable), np.stack([small[before][columns] for before in made]))]

    def _shared(
        self,
        value: Node,
        source: Variable,
        made: Sequence[Sharding],
        readers: Sequence[Reader],
        ways: dict[Sharding, Ways],
        exits: dict[Sharding, list[Sharding] | None],
        helper: Callable[[int], Variable],
    ) -> list[Factor]:
        """A helper names a want, the way to which is paid once, and says whether its copy is held once for all."""
        named = tuple(dict.fromkeys(need for reader in readers for need in reader.needs))
        wants = len(readers) + max(len(found or ()) for found in exits.values())
        keepers = sum(reader.keeps for reader in readers)
        loose = self.optimistic and wants > EXACT_WANTS
        sharers, holders = (wants - 1, max(1, keepers)) if loose else (1, 1)
        held = self._choices(keepers, all_keep=keepers == wants, loose=loose)
        variable = helper(len(named) * len(held))
        tables: list[dict[Sharding, Table]] = [{} for _ in range(len(readers) + 1)]
        for before, way in ways.items():
            names, leaving = way.rows(named), exits[before]
            copies = self._held(value, way, named)
            own = way.rest_s[0, names] + (
                np.inf if leaving is None else way.rest_s[names][:, way.rows(leaving)].sum(axis=1) / sharers
            )
            tables[0][before] = np.concatenate([own + self.price * copies * once for once in held])
            for number, reader in enumerate(readers, start=1):
                rows = way.rows(reader.needs)
                table = way.rest_s[np.ix_(names, rows)] / sharers
                parts = []
                for once in held:
                    memory = self._held(value, way, reader.needs)[None, :] * reader.keeps / holders
                    paid = once & (way.copy[names][:, None] == way.copy[rows][None, :])
                    parts.append(table + self.price * np.where(paid, 0.0, memory))
                tables[number][before] = np.concatenate(parts)
        factors = [Factor((source, variable), np.stack([tables[0][before] for before in made]))]
        for table_of, reader in zip(tables[1:], readers, strict=True):
            factors.append(Factor((source, variable, reader.variable), np.stack([table_of[before] for before in made])))
        return factors

    def _choices(self, keepers: int, *, all_keep: bool, loose: bool) -> tuple[bool, ...]:
        """Whether the named copy is held at the helper's expense."""
        if keepers == 0 or self.price == 0.0 or loose:
            return (False,)
        return (True,) if all_keep else (False, True)

    def _held(self, value: Node, way: Ways, needs: Sequence[Sharding]) -> Table:
        """[needs] bytes held by a reader that keeps what it reads; nothing where the value's own node holds it."""
        rows = way.rows(needs)
        held = way.bytes[rows]
        if self._backward(value) and "out" in value.op.saved:
            held = np.where(way.copy[rows] == 0, 0.0, held)
        return held
