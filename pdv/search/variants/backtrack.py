"""Backtracking search over algebraic variants of a block, each priced by its exact parallel assignment.

A queue ordered by cost; a variant is expanded unless it costs more than α times the best one, so a rewrite that costs
time alone is kept if what follows it may pay (TASO, SOSP'19, algorithm 2; Unity, OSDI'22, section 5).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.problem.problem import loses_nothing
from pdv.rewrite.rewriter import serve_alike
from pdv.rewrite.rule import Rule
from pdv.search.blocks import Block
from pdv.search.solver.block_table import Choices, Solved
from pdv.search.solver.tables import Table, table_of
from pdv.search.variants.survey import Survey, by_sink, gain, ratio, ratios_of
from pdv.search.variants.variants import Rewrites, Variant

ALPHA = 1.2  # Unity's published setting, OSDI'22 section 7
MAX_LOOKED_AT = 400  # operators, of all variants of a block that are looked at together
FEWEST = 4  # variants that are looked at however large the block
MAX_VARIANTS = 6  # of these that are kept
WORTH = 1e-3  # what a variant must save under some boundary shardings, relatively, to be kept
ROUNDS = 4  # times that one rule is applied on end: a product of five that share an input
GROWTH = 2  # a variant has at most so many times the operators of its block,
MORE = 64  # and so many more: a folded weight takes a dozen, which cost nothing


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


Deadline = Callable[[], bool]


class Noticed:
    """A deadline that remembers whether somebody met it."""

    def __init__(self, late: Deadline) -> None:
        self._late = late
        self.noticed = False

    def __call__(self) -> bool:
        """True once it is late."""
        self.noticed = self.noticed or self._late()
        return self.noticed


def explore(
    block: Block,
    rules: Sequence[Rule],
    tied: dict[Node, int],
    solve: Callable[[Block], Solved],
    survey: Survey | None = None,
    deadline: Deadline = lambda: False,
    wanted: Sequence[Sharding] = (),
    loses: Callable[[Sequence[Node], Sequence[Node]], bool] = loses_nothing,
    rewrites: Rewrites | None = None,
    *,
    train: bool = False,
) -> list[tuple[Variant, Solved]]:
    """The block itself, and the variants of it that save something somewhere, priced exactly.

    Args:
        block: what is rewritten.
        rules: each is tried everywhere at once, and again until it no longer matches.
        tied: parameters that are read more than once.
        solve: the price of a variant on the whole mesh.
        survey: cheap prices, by which variants are found and chosen; without it every variant is solved.
        deadline: True when it is time to stop; what was found is kept.
        wanted: shardings of the sink by which variants are compared, whatever each can make.
        loses: whether a variant loses what is pinned of the block; such are not looked at, for they look cheap.
        rewrites: what the rules made of the block before, read and added to.
        train: whether each parameter is to serve what it serves in the block. Of a product of several heads' weights
            each would have a gradient, of zeros, where the loss reads the other's output alone.
    """
    first = Variant(block)
    solved = {first: solve(block)}

    def tables(variant: Variant) -> Sequence[Table]:
        if survey is not None:
            return survey.tables(variant.block)
        if variant not in solved:
            solved[variant] = solve(variant.block)
        return (by_sink(solved[variant], wanted),)

    least = survey.least_seconds if survey is not None else lambda block: 0.0

    def is_lost(variant: Variant) -> bool:
        apart = train and not serve_alike(variant.serves, first.serves)
        return apart or loses(block.nodes, variant.block.nodes)

    exploration = _Exploration(block, rules, rewrites or Rewrites(block, tied), tables, least, deadline, is_lost)
    chosen = _choose(exploration.run(first), MAX_VARIANTS)
    return [(variant, solved[variant] if variant in solved else solve(variant.block)) for variant in chosen]


def _choose(found: Sequence[tuple[Variant, Sequence[Table]]], most: int) -> list[Variant]:
    """The first, then one after another the variant that saves most over those chosen, as long as one saves."""
    (first, known), *rest = found
    chosen = [first]
    known = list(known)
    while rest and len(chosen) < most:
        gains = [gain(tables, known) for _, tables in rest]
        best = max(range(len(rest)), key=lambda i: gains[i][1])
        if gains[best][0] < WORTH:
            break
        variant, tables = rest.pop(best)
        chosen.append(variant)
        known = [np.minimum(old, new) for old, new in zip(known, tables, strict=True)]
    return chosen


class _Exploration:
    """Best-first over variants; costs are relative to those of the block as it is, axis by axis."""

    def __init__(
        self,
        block: Block,
        rules: Sequence[Rule],
        rewrites: Rewrites,
        tables: Callable[[Variant], Sequence[Table]],
        least: Callable[[Block], float],
        deadline: Deadline,
        is_lost: Callable[[Variant], bool],
    ) -> None:
        self._block = block
        self._rules = rules
        self._rewrites = rewrites
        self._tables = tables
        self._least = least
        self._deadline = deadline
        self._is_lost = is_lost
        self._canonical = rewrites.canonical
        self._seen: set[tuple[str, ...]] = set()
        self._queue: list[tuple[float, int, Variant, bool]] = []  # (cost or bound, order of arrival, _, priced)
        self._arrivals = 0
        self._best = 1.0

    def run(self, first: Variant) -> list[tuple[Variant, Sequence[Table]]]:
        """Variants that were priced, the first one first."""
        self._seen.add(self._key(first))
        behind_first = list(self._following(first))
        if not behind_first:
            return [(first, ())]
        before = self._tables(first)
        found = [(first, before)]
        now = float(before[0].min(initial=np.inf))
        for following in behind_first:
            self._push(ratio(self._least(following.block), now), following, priced=False)
        most = max(FEWEST, MAX_LOOKED_AT // len(self._block.nodes))
        while self._queue and len(found) < most and not self._deadline():
            cost, _, variant, priced = heapq.heappop(self._queue)
            if cost > ALPHA * self._best:
                break
            if priced:
                for following in self._following(variant):
                    self._push(ratio(self._least(following.block), now), following, priced=False)
                continue
            found.append((variant, self._tables(variant)))
            cost = _relative(found[-1][1], before)
            self._best = min(self._best, cost)
            self._push(cost, variant, priced=True)
        return found

    def _push(self, cost: float, variant: Variant, *, priced: bool) -> None:
        if cost <= ALPHA * self._best:
            heapq.heappush(self._queue, (cost, self._arrivals, variant, priced))
            self._arrivals += 1

    def _following(self, variant: Variant) -> Iterator[Variant]:
        """What each rule makes of a variant, applied once and as often as it matches; each but once."""
        most = GROWTH * len(self._block.nodes) + MORE
        for rule in self._rules:
            if self._deadline():  # in a block of hundreds of operators, each takes long
                return
            before = variant
            for number in range(ROUNDS):
                following = self._rewrites.following(before, rule)
                if following is None or len(following.block.nodes) > most:
                    break
                if self._is_lost(following):
                    break
                key = self._key(following)
                if key not in self._seen:
                    self._seen.add(key)
                    yield following
                elif number == 0:
                    break
                before = following

    def _key(self, variant: Variant) -> tuple[str, ...]:
        """Equal for variants that differ only in the order of operands that commute, or in how a piece is named."""
        for node in variant.block.nodes:
            if node not in self._canonical:
                below = [self._canonical.get(operand, operand.digest) for operand in node.operands]
                if node.op.commutative:
                    below.sort()
                text = f"{_signature(node)} {node.type} {below}"
                self._canonical[node] = hashlib.sha256(text.encode()).hexdigest()[:24]
        return tuple(self._canonical.get(root, root.digest) for root in variant.roots)


def _signature(node: Node) -> str:
    """Operator and attributes; a chunk as the slice that it is."""
    if node.op.takes_part:
        dim, index = node.attr("dim"), node.attr("index")
        size = node.type.shape[dim]
        return f"slice dim={dim} start={index * size} stop={(index + 1) * size}"
    return " ".join([node.op.name, *(f"{name}={value!s}" for name, value in node.attrs.items())])


def _relative(found: Sequence[Table], before: Sequence[Table]) -> float:
    """The best that a variant does along any axis, relative to the block as it is."""
    ratios = []
    for new, old in zip(found, before, strict=True):
        known = np.isfinite(old)
        ratios.append(float(ratios_of(new[known], old[known]).min(initial=np.inf)))
    return min(ratios)


def portfolio(found: Sequence[tuple[tuple[str, ...], Solved]]) -> Portfolio:
    """The best of the variants, entry by entry; the earlier (less rewritten) of equals."""
    first = found[0][1]
    sinks = tuple(dict.fromkeys(sharding for _, solved in found for sharding in solved.sinks))
    tied = np.broadcast_shapes(*(solved.table.shape[2:] for _, solved in found))
    shape = (first.table.shape[0], len(sinks) if first.block.sink is not None else 1, *tied)
    table = table_of(shape, np.inf)
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
