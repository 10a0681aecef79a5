"""A chain of blocks whose tables are bounds, made exact entry by entry where the cheapest path goes through them.

The path that is cheapest by the bounds is looked up; its entries that are but bounds are solved exactly, for their
boundary alone, where few configurations come near the bound; and so on until the cheapest path is exact throughout.
Then it is the optimum, for every other path costs no less by its bounds (lazy shortest paths; Dellin and Srinivasa,
ICAPS 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.graph import Node
from ir.proof.repeats import Repeat
from ir.sharding import Sharding
from pdv.config import REWRITE_GAIN
from pdv.search.blocks import Block
from pdv.search.priced_blocks import LIMIT, BlockPricer, PricedBlocks
from pdv.search.solver.alike import cheapest_alike
from pdv.search.solver.block_table import Solved, solve_model
from pdv.search.solver.configs import Config
from pdv.search.solver.min_plus import Path, at
from pdv.search.solver.network import BlockModel, Domain
from pdv.search.solver.tables import Table
from pdv.search.solver.ties import Ties

# How far above its bound an entry is first sought, nearest first.
SLACKS = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# How often what is left of a block is bounded again, how much larger tables may get each time, and at most.
ROUNDS = 5
GROWTH = 2
LARGEST = 8 * LIMIT
# How often the cheapest path on which equal layers do alike is looked up anew.
LOOKS = 8
# Rounding that sums of seconds may differ by.
TOLERANCE = 1e-9

Where = tuple[int, ...]
"""An entry of a block's table: source, sink, and the states of the tied parameters that it reads."""


@dataclass(frozen=True)
class BlockChoice:
    """What one block of a plan does: a variant (by number), its nodes' configurations, and what it costs.

    ``source`` and ``sink`` are the shardings at its boundary; ``price`` says where its parameters rest; the block costs
    no less than ``least`` seconds between them, bytes priced. ``ties`` are the states of the tied parameters that it
    decides, in the order in which it reads them.
    """

    number: int
    configs: tuple[Config, ...]
    source: Sharding | None
    sink: Sharding | None
    price: float
    seconds: float
    num_bytes: float
    least: float
    ties: tuple[int, ...]

    @property
    def value(self) -> float:
        """Seconds, bytes priced."""
        return self.seconds + self.price * self.num_bytes

    def is_like(self, other: BlockChoice) -> bool:
        """True if an equal block does the same there, whatever sharding its source comes in."""
        mine, others = (
            (self.number, self.price, self.ties, self.sink),
            (other.number, other.price, other.ties, other.sink),
        )
        return mine == others and self.configs == other.configs


class Tables:
    """Every block at one price of memory."""

    def __init__(self, stages: BlockPricer, price: float, bound: PricedBlocks) -> None:
        self.price = price
        self._stages = stages
        self._bound = bound
        self._tables = {key: found.table.copy() for key, found in bound.portfolios.items()}
        self._parts: dict[tuple[str, Where], BlockChoice | None] = {}
        self._value = -math.inf

    @property
    def ties(self) -> Ties:
        """Who decides tied parameters here."""
        return self._stages.ties

    def settle(self) -> tuple[tuple[int, ...], list[BlockChoice]] | None:
        """(states of the tied axes, what each block does) on the cheapest path; None if no path can be solved.

        An entry that cannot be solved is gone around; what all plans cost at least is then known from before. When it
        is late, the path that is cheapest by what is known then is taken.
        """
        unsolved = False
        while True:
            path = self._path
            self._value = self._value if unsolved else path.value
            if math.isinf(path.value):
                return None
            states, steps = path.best()
            exact, parts = self._walked(states, steps)
            if exact and parts is not None:
                return states, parts
            unsolved = unsolved or exact

    def settle_alike(
        self, states: tuple[int, ...], repeats: Sequence[Repeat], most: float, *, entered: bool
    ) -> list[BlockChoice] | None:
        """What each block does on the cheapest path whose stretches that repeat always end in the same shardings.

        None if it costs more than ``most``, bytes priced, or is not known after a few looks.

        Args:
            states: of the tied axes.
            repeats: the stretches.
            most: seconds, bytes priced.
            entered: whether each stretch may be entered from another sharding than it ends in.
        """
        for _ in range(LOOKS):
            value, steps = cheapest_alike(self._path, states, repeats, entered=entered)
            if not value <= most:
                break
            exact, parts = self._walked(states, steps)
            if exact and parts is not None:
                return parts
        return None

    def _walked(
        self, states: tuple[int, ...], steps: Sequence[tuple[int, int]]
    ) -> tuple[bool, list[BlockChoice] | None]:
        """Whether a path costs what its tables say, and what its blocks do; entries without are not gone again.

        Entries that are but bounds are solved; if one turns out dearer, there may be a cheaper path.
        """
        late = self._stages.late()
        wheres = [self._where(block, *step, states) for block, step in zip(self._bound.blocks, steps, strict=True)]
        fresh = [key for key in dict.fromkeys(wheres) if key not in self._parts]
        for key in fresh:
            self._refine(*key, states)
        if not late and any(self._tables[key][where] > self._entry(key, where) for key, where in fresh):
            return False, None
        parts = [self._parts[key] for key in wheres]
        for at_block, part in zip(wheres, parts, strict=True):
            if part is None:
                self._tables[at_block[0]][at_block[1]] = math.inf
        known = [part for part in parts if part is not None]
        return True, known if len(known) == len(parts) else None

    @property
    def value(self) -> float:
        """What every plan costs at least, bytes priced, as ``settle`` found."""
        return self._value

    def part(self, block: Block, source: int, sink: int, states: tuple[int, ...]) -> BlockChoice | None:
        """What a block does between two shardings (by number in its portfolio); None where that is not known."""
        key = self._where(block, source, sink, states)
        if key not in self._parts and all(solved.exact for solved in self._bound.portfolios[block.key].solved):
            self._refine(*key, states)
        return self._parts.get(key)

    def boundary(self, key: str) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
        """The shardings that a block's portfolio numbers: sources, sinks."""
        found = self._bound.portfolios[key]
        return found.sources, found.sinks

    @property
    def _path(self) -> Path:
        entries = [
            replace(entry, table=self._tables[block.key])
            for entry, block in zip(self._bound.path.entries, self._bound.blocks, strict=True)
        ]
        return Path(entries, self._bound.own)

    def _entry(self, key: str, where: Where) -> float:
        return float(self._bound.portfolios[key].table[where]) * (1 + TOLERANCE)

    def _where(self, block: Block, source: int, sink: int, states: tuple[int, ...]) -> tuple[str, Where]:
        shape = self._tables[block.key].shape[2:]
        return block.key, (source, sink, *at(states, shape))

    def _refine(self, key: str, where: Where, states: tuple[int, ...]) -> None:
        """Solve one entry, or look it up where it was solved while outputs left in another way."""
        name = key, where, self.price, states
        shared = self._stages.shares(key)
        if not shared or name not in self._stages.refined:
            found = self._solved(key, where, states)
            if not shared or self._stages.late():
                self._set(key, where, *found)
                return
            self._stages.refined[name] = found
        self._set(key, where, *self._stages.refined[name])

    def _set(self, key: str, where: Where, best: BlockChoice | None, least: float) -> None:
        self._parts[key, where] = best
        if best is not None:
            self._tables[key][where] = max(self._tables[key][where], least)

    def _solved(self, key: str, where: Where, states: tuple[int, ...]) -> tuple[BlockChoice | None, float]:
        """One entry, and what it costs at least: its variants from the lowest bound on, until the next is no better."""
        found = self._bound.portfolios[key]
        floor = math.inf
        by_param = dict(zip(self._stages.ties.axes, states, strict=True))
        candidates = []
        for number, solved in zip(self._bound.numbers[key], found.solved, strict=True):
            sink = found.sinks[where[1]] if found.sinks else None
            if sink is None or sink in solved.sinks:
                own = (
                    where[0],
                    solved.sinks.index(sink) if sink is not None else 0,
                    *at(where[2:], solved.table.shape[2:]),
                )
                candidates.append((float(solved.table[own]), number, solved, own))
        best: BlockChoice | None = None
        written: BlockChoice | None = None
        for bound, number, solved, own in sorted(candidates, key=lambda c: c[:2]):
            as_written = not self._stages.variants[key][number].rules
            # a rewrite must pay for itself; ties keep the graph that the user wrote
            most = math.inf if best is None else best.value * (1 + (REWRITE_GAIN if as_written else -TOLERANCE))
            if bound >= most:
                continue
            part = _TableEntry(self._stages, self.price, number, solved, own, by_param).part()
            if part is None:
                floor = min(floor, bound)
                continue
            floor = min(floor, part.least)
            written = part if as_written else written
            if best is None or part.value < best.value * (1 - TOLERANCE):
                best = part
        if best is None:
            return None, floor
        pays = written is None or best.value * (1 + REWRITE_GAIN) < written.value
        return best if pays else written, min(floor, best.value)


@dataclass(frozen=True)
class _TableEntry:
    """One entry of one variant's table."""

    stages: BlockPricer
    price: float
    number: int
    solved: Solved
    where: Where
    states: Mapping[Node, int]

    def part(self) -> BlockChoice | None:
        """Solved exactly if it can be, else as well as it can be; None if not at all."""
        if self.solved.exact:
            return self._read(self.solved, self.where, float(self.solved.table[self.where]))
        bound, limit, least = self.solved, LIMIT, float(self.solved.table[self.where])
        marginals = bound.marginals(self.where)
        best = self._near(marginals, least)
        for _ in range(ROUNDS):
            if self.stages.late():
                break
            if best is not None and best.value <= least * (1 + TOLERANCE):
                break
            most = best.value if best is not None else least * (1 + SLACKS[-1])
            domain = _cheap_enough(marginals, most)
            if domain is None:  # nothing is left below the cut
                least = most
                continue
            bound = self._solve(domain, optimistic=True, limit=limit)
            value = self._value(bound)
            least = max(least, min(most, value))
            if bound.whole and bound.exact:
                found = self._read(bound, self._at(bound), value)
            else:
                marginals = bound.marginals(self._at(bound))
                found = self._near(marginals, value)
            best = found if best is None or (found is not None and found.value < best.value) else best
            if bound.whole or limit >= LARGEST:
                break
            limit *= GROWTH
        return None if best is None else replace(best, least=min(least, best.value))

    @property
    def _sink(self) -> Sharding | None:
        return self.solved.sinks[self.where[1]] if self.solved.sinks else None

    def _at(self, solved: Solved) -> Where | None:
        """The entry in the table of a smaller model, which has one source; None if nothing there reaches the sink."""
        if self._sink is None:
            return (0, 0, *self.where[2:])
        return (0, solved.sinks.index(self._sink), *self.where[2:]) if self._sink in solved.sinks else None

    def _value(self, solved: Solved) -> float:
        at = self._at(solved)
        return math.inf if at is None else float(solved.table[at])

    def _near(self, marginals: Mapping[Node, Table], least: float) -> BlockChoice | None:
        """The best of what comes close to a bound, which is ``least``; None if that is too much to solve."""
        for slack in SLACKS:
            domain = _cheap_enough(marginals, least * (1 + slack))
            if domain is None:
                continue
            solved = self._solve(domain, optimistic=False, limit=LIMIT)
            if not solved.whole:
                return self._guess(solved, least)
            value = self._value(solved)
            if math.isfinite(value):
                return self._read(solved, self._at(solved), value, least=least)
        return None

    def _guess(self, bound: Solved, least: float) -> BlockChoice | None:
        """What a bound reads back, priced; where plans are alike, it often is one."""
        at = self._at(bound)
        if at is None or not math.isfinite(least):
            return None
        values = bound.values_for(at[0], at[1], self.states)
        numbers = bound.model.domain or {}
        chosen = {node: values[bound.variables[node]] for node in bound.block.nodes}
        domain = {node: (numbers[node][x] if node in numbers else x,) for node, x in chosen.items()}
        solved = self._solve(domain, optimistic=False, limit=LIMIT)
        value = self._value(solved) if solved.whole else math.inf
        return self._read(solved, self._at(solved), value, least=least)

    def _solve(self, domain: Domain, *, optimistic: bool, limit: int) -> Solved:
        """What is left of the block, from its one source."""
        block, stages = self.solved.block, self.stages
        sources = (self.solved.sources[self.where[0]],)
        model = BlockModel(
            block, stages.configs, stages.ties, sources, optimistic=optimistic, limit=limit, domain=domain
        )
        return solve_model(model, self.price)

    def _read(
        self, solved: Solved, where: Where | None, value: float, *, least: float | None = None
    ) -> BlockChoice | None:
        if where is None or not math.isfinite(value):
            return None
        values = solved.values_for(where[0], where[1], self.states)
        num_bytes = solved.model.bytes_of(values, self.price)
        return BlockChoice(
            self.number,
            tuple(solved.configs[node][values[solved.variables[node]]] for node in solved.block.nodes),
            self.solved.sources[self.where[0]] if self.solved.block.source is not None else None,
            self._sink,
            self.price,
            value - self.price * num_bytes,
            num_bytes,
            value if least is None else min(least, value),
            tuple(self.stages.ties.states(p)[values[solved.variables[p]]] for p in solved.model.inside),
        )


def _cheap_enough(marginals: Mapping[Node, Table], most: float) -> Domain | None:
    """The configurations that cost at most so much; None if some node has none."""
    left = {node: np.flatnonzero(table <= most * (1 + TOLERANCE)).tolist() for node, table in marginals.items()}
    return left if all(left.values()) else None
