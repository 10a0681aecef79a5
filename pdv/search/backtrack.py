"""Backtracking search over algebraic variants of a block, each priced by its exact parallel assignment.

A queue ordered by cost; a variant is expanded unless it costs more than α times the best one, so a rewrite that costs
time alone is kept if what follows it may pay (TASO, SOSP'19, algorithm 2; Unity, OSDI'22, section 5).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.rewrite.rule import COMMUTATIVE, Rule
from pdv.search.block_table import Choices, Solved
from pdv.search.blocks import Block
from pdv.search.configs import ConfigTable
from pdv.search.exact import Table
from pdv.search.variants import Variant, apply_rule, builder_of

ALPHA = 1.2  # Unity's published setting, OSDI'22 section 7
MAX_VARIANTS = 64  # of one block that are priced exactly
ROUNDS = 4  # times that one rule is applied on end: a product of five that share an input
GROWTH = 2  # a variant has at most so many times the operators of its block


@dataclass(frozen=True)
class Portfolio:
    """The variants of a block that survived, and for each pair of boundary shardings the best of them.

    ``table`` and ``choice`` are [sources, sinks, tied…]; ``choice`` indexes ``solved``.
    """

    variants: tuple[tuple[str, ...], ...]
    solved: tuple[Solved, ...]
    sources: tuple[Sharding, ...]
    sinks: tuple[Sharding, ...]
    table: Table
    choice: Choices


Bound = Callable[[Block], float]
Deadline = Callable[[], bool]


def explore(
    block: Block,
    rules: Sequence[Rule],
    tied: dict[Node, int],
    solve: Callable[[Block], Solved],
    bound: Bound = lambda block: 0.0,
    deadline: Deadline = lambda: False,
) -> list[tuple[Variant, Solved]]:
    """All variants reached and worth keeping, the block itself first.

    Args:
        block: what is rewritten.
        rules: each is tried everywhere at once, and again until it no longer matches.
        tied: parameters that are read more than once.
        solve: the exact price of a variant.
        bound: seconds below which no boundary shardings bring a variant, cheap to say.
        deadline: True when it is time to stop; what was found is kept.
    """
    return _Exploration(block, rules, tied, solve, bound, deadline).run()


class _Exploration:
    def __init__(
        self,
        block: Block,
        rules: Sequence[Rule],
        tied: dict[Node, int],
        solve: Callable[[Block], Solved],
        bound: Bound,
        deadline: Deadline,
    ) -> None:
        self._block = block
        self._rules = rules
        self._tied = tied
        self._solve = solve
        self._bound = bound
        self._deadline = deadline
        self._builder = builder_of(block)
        self._canonical: dict[Node, str] = {} if block.source is None else {block.source: block.source.digest}
        self._seen: set[tuple[str, ...]] = set()
        self._queue: list[tuple[float, int, Variant, bool]] = []  # (cost or bound, order of arrival, _, solved)
        self._arrivals = 0
        self._best = float("inf")

    def run(self) -> list[tuple[Variant, Solved]]:
        first = Variant(self._block)
        self._seen.add(self._key(first))
        found = [(first, self._solve(self._block))]
        self._best = cheapest(found[0][1])
        self._push(self._best, first, solved=True)
        while self._queue and len(found) < MAX_VARIANTS and not self._deadline():
            cost, _, variant, solved = heapq.heappop(self._queue)
            if cost > ALPHA * self._best:
                break
            if solved:
                self._expand(variant)
                continue
            found.append((variant, self._solve(variant.block)))
            cost = cheapest(found[-1][1])
            self._best = min(self._best, cost)
            self._push(cost, variant, solved=True)
        return found

    def _push(self, cost: float, variant: Variant, *, solved: bool) -> None:
        if cost <= ALPHA * self._best:
            heapq.heappush(self._queue, (cost, self._arrivals, variant, solved))
            self._arrivals += 1

    def _expand(self, variant: Variant) -> None:
        """Queue what each rule makes of a variant, once and as often as it matches."""
        for rule in self._rules:
            before = variant
            for number in range(ROUNDS):
                following = apply_rule(before, rule, self._tied, self._builder)
                if following is None or len(following.block.nodes) > GROWTH * len(self._block.nodes) + GROWTH:
                    break
                key = self._key(following)
                if key in self._seen and number == 0:
                    break
                if key not in self._seen:
                    self._seen.add(key)
                    self._push(self._bound(following.block), following, solved=False)
                before = following

    def _key(self, variant: Variant) -> tuple[str, ...]:
        """Equal for variants that differ only in the order of operands that commute."""
        for node in variant.block.nodes:
            if node not in self._canonical:
                below = [self._canonical.get(operand, operand.digest) for operand in node.operands]
                if node.op.name in COMMUTATIVE:
                    below.sort()
                attrs = [f"{name}={value!s}" for name, value in node.attrs.items()]
                text = f"{node.op.name} {attrs} {node.type} {below}"
                self._canonical[node] = hashlib.sha256(text.encode()).hexdigest()[:24]
        return tuple(self._canonical.get(root, root.digest) for root in variant.roots)


def least_seconds(configs: ConfigTable) -> Bound:
    """What a block costs at least: each operator at its cheapest, nothing moved."""
    least: dict[Node, float] = {}

    def bound(block: Block) -> float:
        for node in block.nodes:
            if node not in least:
                least[node] = min((config.totals(0.0)[0] for config in configs.of(node)), default=float("inf"))
        return sum(least[node] for node in block.nodes)

    return bound


def cheapest(solved: Solved) -> float:
    """The cost of a block under its best boundary shardings."""
    return float(solved.table.min()) if solved.table.size else float("inf")


def portfolio(found: Sequence[tuple[tuple[str, ...], Solved]]) -> Portfolio:
    """The best of the variants, entry by entry; the earlier (less rewritten) of equals."""
    first = found[0][1]
    sinks = tuple(dict.fromkeys(sharding for _, solved in found for sharding in solved.sinks))
    tied = np.broadcast_shapes(*(solved.table.shape[2:] for _, solved in found))
    shape = (first.table.shape[0], len(sinks) if first.block.sink is not None else 1, *tied)
    table = np.full(shape, np.inf)
    choice = np.zeros(shape, dtype=np.int64)
    for number, (_, solved) in enumerate(found):
        columns = [sinks.index(sharding) for sharding in solved.sinks] if first.block.sink is not None else [0]
        part = table[:, columns]
        # a rewrite must pay for itself: ties keep the graph that the user wrote
        better = solved.table < part * (1 - 1e-9) if number else np.ones_like(part, dtype=bool)
        table[:, columns] = np.where(better, solved.table, part)
        choice[:, columns] = np.where(better, number, choice[:, columns])
    variants, solutions = zip(*found, strict=True)
    return Portfolio(tuple(variants), tuple(solutions), first.sources, sinks, table, choice)
