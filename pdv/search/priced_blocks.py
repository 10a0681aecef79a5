"""All blocks of a graph as tables at one price of memory: exact where they are small, else bounds from below."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ir.graph import Node
from pdv.pcg.redistribute import all_shardings
from pdv.problem import Problem
from pdv.search.blocks import Block
from pdv.search.solver.block_table import Solved, solve_model
from pdv.search.solver.configs import ConfigTable, KnownConfigs
from pdv.search.solver.min_plus import Path, PathBlock
from pdv.search.solver.network import BlockModel
from pdv.search.solver.tables import Table
from pdv.search.solver.ties import Ties
from pdv.search.variants.backtrack import Deadline, Noticed, Portfolio, explore, portfolio
from pdv.search.variants.survey import Survey, wanted_sinks
from pdv.search.variants.variants import SourceBlocks, Variant

# Entries of a table in the first, bounding pass (16 MB): large enough that two axes are exact at once.
LIMIT = 2_000_000


Refined = dict[tuple[Hashable, ...], tuple[Any, float]]
"""By kind of block, entry, price and states of tied parameters: what ``refine`` found, and what it costs at least.

Any: a ``BlockChoice`` or None, which are declared there.
"""


@dataclass(frozen=True)
class PricedBlocks:
    """Every block at one price. ``portfolios`` are by block key; their variants are numbered as ``numbers`` says."""

    blocks: Sequence[Block]
    portfolios: Mapping[str, Portfolio]
    numbers: Mapping[str, tuple[int, ...]]
    tied: tuple[Node, ...]
    own: Table

    @cached_property
    def path(self) -> Path:
        """The blocks in program order."""
        entries = []
        for block in self.blocks:
            found = self.portfolios[block.key]
            entries.append(PathBlock(block.key, found.sources, found.sinks, found.table))
        return Path(entries, self.own)

    @cached_property
    def value(self) -> float:
        """The least cost: exact, or a bound from below."""
        legal = all(np.isfinite(found.table).any() for found in self.portfolios.values())
        return self.path.value if legal else math.inf

    @property
    def exact(self) -> bool:
        """False if the value is only a bound."""
        return all(solved.exact for found in self.portfolios.values() for solved in found.solved)


class BlockPricer:
    """Solves one problem's blocks; variants are explored once, models built once, and priced each time."""

    def __init__(
        self,
        problem: Problem,
        blocks: Sequence[Block],
        configs: ConfigTable,
        ties: Ties,
        late: Deadline = lambda: False,
        known: KnownConfigs | None = None,
        limit: int = LIMIT,
        source: SourceBlocks | None = None,
        other: BlockPricer | None = None,
    ) -> None:
        """``known``: of the problem, or of one that differs in its limits alone; ``limit``: entries of a table;
        ``source``: where ``blocks`` come from, which keeps what rules make of them; ``other``: of the same problem but
        for how outputs leave.
        """
        self._source, self._other = source, other
        self.explored: set[str] = set()  # by key, those of which no variant was left out
        self.refined: Refined = {} if other is None else other.refined
        self._known = known
        self._limit = limit
        self.problem = problem
        self.blocks = blocks
        self.configs = configs
        self.ties = ties
        self.late = late
        self._late = Noticed(late)
        self.variants: dict[str, list[Variant]] = {}
        self._models: dict[tuple[str, int], BlockModel] = {}
        self._free: dict[tuple[str, int], Solved] = {}  # where memory is free
        self._first = {block.key: block for block in reversed(blocks)}

    @property
    def exact(self) -> bool:
        """True if no model but bounds what a block costs."""
        return all(model.exact for model in self._models.values())

    @property
    def cut(self) -> bool:
        """True if rewrites were left out because it was late: what else there is, no bound here speaks of."""
        return self._late.noticed

    def bounded(self, price: float) -> PricedBlocks:
        """Over everything, with tables of limited size."""
        found = {}
        for key, block in self._first.items():
            if key not in self.variants:
                self._explore(block)
            found[key] = [self._solve(key, number, price) for number in range(len(self.variants[key]))]
        return self._stage(price, found, {key: tuple(range(len(solved))) for key, solved in found.items()})

    def least(self, key: str) -> float:
        """Seconds of a kind of block at least, whatever is before and behind it."""
        if key not in self.variants:
            self._explore(self._first[key])
        tables = [self._solve(key, number, 0.0).table for number in range(len(self.variants[key]))]
        return min((float(table.min(initial=math.inf)) for table in tables), default=math.inf)

    def fixed(self, ties: Ties) -> BlockPricer:
        """The same variants, with loose parameters fixed."""
        found = BlockPricer(self.problem, self.blocks, self.configs, ties, self.late, limit=self._limit)
        found.variants = self.variants
        return found

    def _solve(self, key: str, number: int, price: float) -> Solved:
        if price == 0.0 and (key, number) in self._free:
            return self._free[key, number]
        if (key, number) not in self._models:
            self._models[key, number] = self._model(self.variants[key][number].block)
        solved = solve_model(self._models[key, number], price)
        if price == 0.0:
            self._free[key, number] = solved
        return solved

    def _model(self, variant: Block) -> BlockModel:
        source = variant.source
        sources = all_shardings(source.type, self.problem.mesh) if source is not None else ((),)
        return BlockModel(variant, self.configs, self.ties, sources, optimistic=True, limit=self._limit)

    def _explore(self, block: Block) -> None:
        """Variants of a block, explored free of memory's price, each with its model."""
        if self._other is not None and not block.outputs and block.key in self._other.explored:
            self._take(block.key, self._other)
            return
        models: dict[Block, BlockModel] = {}

        def solve(variant: Block) -> Solved:
            models[variant] = self._model(variant)
            return solve_model(models[variant], 0.0)

        numbers = {param: number for number, param in enumerate(self.ties.tables)}
        wanted = wanted_sinks(block, self.problem.mesh)
        rules, loses, train = self.problem.rules, self.problem.pins.loses, self.problem.train
        rewrites = self._source.rewrites(block) if self._source is not None else None
        kept = explore(block, rules, numbers, solve, self._survey, self._late, wanted, loses, rewrites, train=train)
        self.variants[block.key] = [variant for variant, _ in kept]
        self._free |= {(block.key, number): solved for number, (_, solved) in enumerate(kept)}
        self._models |= {(block.key, number): models[variant.block] for number, (variant, _) in enumerate(kept)}
        if not self._late.noticed:
            self.explored.add(block.key)

    def shares(self, key: str) -> bool:
        """Whether what is found of a kind of block is the same however outputs leave (``refined``)."""
        return key in self.explored and not self._first[key].outputs

    def _take(self, key: str, other: BlockPricer) -> None:
        """The same variants, with what another found for them: of values that do not leave, leaving says nothing."""
        self.variants[key] = other.variants[key]
        for number in range(len(other.variants[key])):
            self._models[key, number] = other._models[key, number]
            self._free[key, number] = other._free[key, number]
        self.explored.add(key)

    @cached_property
    def _survey(self) -> Survey | None:
        return Survey(self.problem, self._known) if len(self.problem.mesh.axes) > 1 else None

    def _stage(
        self, price: float, found: Mapping[str, Sequence[Solved]], numbers: Mapping[str, tuple[int, ...]]
    ) -> PricedBlocks:
        portfolios = {}
        for key, solved in found.items():
            rules = [self.variants[key][number].rules for number in numbers[key]]
            portfolios[key] = portfolio(list(zip(rules, solved, strict=True)))
        return PricedBlocks(self.blocks, portfolios, numbers, self.ties.axes, self.ties.own(price))
