"""All blocks of a graph as tables at one price of memory, chained: a bound, or the optimum of what is left.

``Stages`` makes them: first over everything, with tables bounded in size, so that what comes out bounds the cost from
below and says of every configuration what a program costs at least that uses it. Configurations that cost more than a
plan already found are left out, and what remains is solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.pcg.redistribute import all_shardings
from pdv.problem import Problem
from pdv.search.backtrack import Deadline, Portfolio, explore, portfolio
from pdv.search.block_table import Solved, solve_model
from pdv.search.blocks import Block
from pdv.search.configs import ConfigTable
from pdv.search.exact import Table, TooWideError
from pdv.search.network import BlockModel, Domain
from pdv.search.path import Entry, Path
from pdv.search.survey import Survey, wanted_sinks
from pdv.search.tied import TiedTable
from pdv.search.variants import Variant

# Entries of a table in the first, bounding pass (16 MB): large enough that two axes are exact at once.
LIMIT = 2_000_000
# How far above a bound plans are sought, nearest first.
SLACKS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
# How often what is left is bounded again, and how much larger tables may get where that brings little, and at most.
ROUNDS = 6
GROWTH = 4
LARGEST = 16 * LIMIT
# Rounding that sums of seconds may differ by.
TOLERANCE = 1e-9

Domains = Mapping[str, Mapping[int, Domain]]
"""By block key and number of variant: what is left of it. Variants that are not named are left out."""


@dataclass(frozen=True)
class Stage:
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
            entries.append(Entry(found.sources, found.sinks, found.table))
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

    @property
    def whole(self) -> bool:
        """False if the best path is only a guess."""
        return all(solved.whole for found in self.portfolios.values() for solved in found.solved)

    @cached_property
    def marginals(self) -> Mapping[str, Mapping[int, Mapping[Node, Table]]]:
        """By block key, variant and node: what a program costs at least in which the node does this or that."""
        contexts: dict[str, Table] = {}
        for number, block in enumerate(self.blocks):
            context = self.path.context(number)
            known = contexts.get(block.key)
            contexts[block.key] = context if known is None else np.minimum(known, context)
        found: dict[str, dict[int, Mapping[Node, Table]]] = {}
        for key, entry in self.portfolios.items():
            found[key] = {}
            for number, solved in zip(self.numbers[key], entry.solved, strict=True):
                columns = [entry.sinks.index(sink) for sink in solved.sinks]
                found[key][number] = solved.marginals(contexts[key][:, columns] if columns else contexts[key])
        return found

    def left(self, most: float) -> Domains:
        """What programs of at most ``most`` seconds may be made of."""
        domains: dict[str, dict[int, Domain]] = {}
        for key, variants in self.marginals.items():
            domains[key] = {}
            for number, marginals in variants.items():
                left = {n: np.flatnonzero(t <= most * (1 + TOLERANCE)).tolist() for n, t in marginals.items()}
                if all(left.values()):
                    domains[key][number] = left
        return domains


class Stages:
    """Solves one problem's blocks; variants are explored once, models built once, and priced each time."""

    def __init__(
        self,
        problem: Problem,
        blocks: Sequence[Block],
        configs: ConfigTable,
        tied: Mapping[Node, TiedTable],
        late: Deadline = lambda: False,
    ) -> None:
        self.problem = problem
        self.blocks = blocks
        self.configs = configs
        self.tied = tied
        self._late = late
        self.variants: dict[str, list[Variant]] = {}
        self._models: dict[tuple[str, int], BlockModel] = {}
        self._survey = Survey(problem) if len(problem.mesh.axes) > 1 else None
        self._first = {block.key: block for block in reversed(blocks)}

    def bounded(self, price: float) -> Stage:
        """Over everything, with tables of limited size."""
        found = {}
        for key, block in self._first.items():
            if key not in self.variants:
                self._explore(block)
            models = [self._models[key, number] for number in range(len(self.variants[key]))]
            found[key] = [solve_model(model, self.tied, price, limit=LIMIT) for model in models]
        return self._stage(price, found, {key: tuple(range(len(solved))) for key, solved in found.items()})

    def solved(self, price: float, domains: Domains, *, optimistic: bool, limit: float = LIMIT) -> Stage:
        """Over what is left; ``optimistic`` is from below where many want one value, and otherwise from above."""
        sources = self._sources(domains)
        found: dict[str, list[Solved]] = {}
        for key, variants in domains.items():
            found[key] = []
            for number, domain in variants.items():
                block = self.variants[key][number].block
                model = BlockModel(
                    block, self.configs, self.tied, sources[key], optimistic=optimistic, limit=limit, domain=domain
                )
                found[key].append(solve_model(model, self.tied, price, limit=limit))
        return self._stage(price, found, {key: tuple(variants) for key, variants in domains.items()})

    def _explore(self, block: Block) -> None:
        """Variants of a block, explored free of memory's price, each with its model."""
        sources = all_shardings(block.source.type, self.problem.mesh) if block.source is not None else ((),)
        models: dict[Block, BlockModel] = {}

        def solve(variant: Block) -> Solved:
            models[variant] = BlockModel(variant, self.configs, self.tied, sources, optimistic=True, limit=LIMIT)
            return solve_model(models[variant], self.tied, 0.0, limit=LIMIT)

        numbers = {param: number for number, param in enumerate(self.tied)}
        wanted = wanted_sinks(block, self.problem.mesh)
        explored = explore(block, self.problem.rules, numbers, solve, self._survey, self._late, wanted)
        loses = self.problem.pins.loses
        kept = [variant for variant, _ in explored if not loses(block.nodes, variant.block.nodes)]
        self.variants[block.key] = kept
        self._models |= {(block.key, number): models[variant.block] for number, variant in enumerate(kept)}

    def _sources(self, domains: Domains) -> dict[str, tuple[Sharding, ...]]:
        """By block key: the shardings in which what is left of the blocks before may hand on its source."""
        given: dict[str, dict[Sharding, None]] = {}
        before: dict[Sharding, None] = {(): None}
        for block in self.blocks:
            given.setdefault(block.key, {}).update(before)
            if block.sink is not None:
                before = dict.fromkeys(
                    self.configs.of(sink)[i].result
                    for number, domain in domains[block.key].items()
                    if (sink := self.variants[block.key][number].block.sink) is not None
                    for i in domain[sink]
                )
        return {key: tuple(shardings) for key, shardings in given.items()}

    def _stage(
        self, price: float, found: Mapping[str, Sequence[Solved]], numbers: Mapping[str, tuple[int, ...]]
    ) -> Stage:
        own: Table = np.zeros((1,) * len(self.tied))
        for position, table in enumerate(self.tied.values()):
            own = own + table.own(price).reshape([-1 if i == position else 1 for i in range(len(self.tied))])
        portfolios = {}
        for key, solved in found.items():
            rules = [self.variants[key][number].rules for number in numbers[key]]
            portfolios[key] = portfolio(list(zip(rules, solved, strict=True)))
        return Stage(self.blocks, portfolios, numbers, tuple(self.tied), own)


def narrowed(stages: Stages, price: float, bound: Stage) -> tuple[Stage, float]:
    """(the best plan found at a price, what every plan costs at least), from a bound over everything.

    A plan is sought close to the bound. What no cheaper plan can be made of is left out, the rest bounded again: with
    smaller domains fewer tables are split, until none is and the bound is exact.

    Raises:
        TooWideError: if not even the closest surroundings of the bound can be solved.
    """
    best = _near(stages, price, bound)
    floor, limit = bound.value, LIMIT
    for _ in range(ROUNDS):
        if best is not None and best.value <= floor * (1 + TOLERANCE):
            break
        most = bound.value * (1 + SLACKS[-1]) if best is None else best.value
        tighter = stages.solved(price, bound.left(most), optimistic=True, limit=limit)
        found = tighter if tighter.exact else _near(stages, price, tighter)
        if found is not None and (best is None or found.value < best.value):
            best = found
        floor = max(floor, min(most, tighter.value))
        if tighter.whole:
            break
        if tighter.value - bound.value < (most - bound.value) / GROWTH:
            if limit == LARGEST:
                break
            limit *= GROWTH
        bound = tighter
    if best is None:
        raise TooWideError("every block, close to its bound")
    return best, min(floor, best.value)


def _near(stages: Stages, price: float, bound: Stage) -> Stage | None:
    """The best plan among those that a little more than the bound may buy; None if too many may be bought."""
    for slack in SLACKS:
        domains = bound.left(bound.value * (1 + slack))
        if not all(domains.values()):
            continue
        found = stages.solved(price, domains, optimistic=False)
        if not found.whole:
            return None
        if math.isfinite(found.value):
            return found
    return None
