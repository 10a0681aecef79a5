"""Backtracking search over algebraic variants of a block, each priced by its exact parallel assignment.

A queue ordered by cost; a variant is expanded unless it costs more than α times the best one, so a rewrite that costs
time alone is kept if what follows it may pay (TASO, SOSP'19, algorithm 2; Unity, OSDI'22, section 5).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Node
from ir.sharding import Sharding
from pdv.rewrite.rule import Rule
from pdv.search.block_table import Choices, Solved
from pdv.search.blocks import Block
from pdv.search.exact import Table
from pdv.search.variants import Variant, apply_rule

ALPHA = 1.2  # Unity's published setting, OSDI'22 section 7
MAX_VARIANTS = 64


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


def explore(
    block: Block, rules: Sequence[Rule], tied: dict[Node, int], solve: Callable[[Block], Solved]
) -> list[tuple[Variant, Solved]]:
    """All variants reached, the block itself first."""
    first = Variant(block)
    solved = solve(block)
    found = [(first, solved)]
    best = cheapest(solved)
    seen = {block.key}
    queue = [(best, 0, first)]
    while queue and len(found) < MAX_VARIANTS:
        cost, _, variant = heapq.heappop(queue)
        if cost > ALPHA * best:
            break
        for rule in rules:
            following = apply_rule(variant, rule, tied)
            if following is None or following.block.key in seen:
                continue
            seen.add(following.block.key)
            solved = solve(following.block)
            found.append((following, solved))
            best = min(best, cheapest(solved))
            heapq.heappush(queue, (cheapest(solved), len(found), following))
    return found


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
