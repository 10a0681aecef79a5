"""A program's pieces were each spread evenly over the devices of a stage: what they take and hold at least.

Entry point: ``even_pieces``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Graph
from pdv.pcg.plan_cost import kept_values
from pdv.pipelines.bounding.packing import sum_pieces
from pdv.pipelines.profile import Numbers
from pdv.problem import Problem
from pdv.schedule.pieces import pieces
from pdv.search.blocks import Block
from pdv.search.variants.variants import SourceBlocks

PRICE = 1e3  # seconds a byte: who has no room for one has no time for it


@dataclass(frozen=True, eq=False)
class EvenPieces:
    """By piece, seconds of one micro-batch on one device of a stage, bytes that rest on it, and that are kept.

    ``again``: of a layer's forward once more.
    """

    forward: Numbers
    backward: Numbers
    again: Numbers
    resting: Numbers
    kept: Numbers

    def runs(self, resting: float) -> dict[float, Numbers]:
        """By price of memory, as ``LeastInside.runs``; what rests counts as ``resting``."""
        seconds = sum_pieces(self.forward + self.backward)
        return {0.0: seconds, PRICE: seconds + PRICE * sum_pieces(resting * self.resting + self.kept)}


@dataclass(frozen=True)
class HeldBlocks:
    """Of a program's blocks, those beside the way aside: the pieces that each is in, bytes at rest, and bytes kept.

    ``apart``: how many are beside the way, and come first.
    """

    apart: int
    spans: Sequence[range]
    resting: Numbers
    kept: Numbers

    @classmethod
    def of(cls, source: SourceBlocks, problem: Problem, *, lean: bool) -> HeldBlocks:
        """Whatever the mesh is; blocks that are there again hold the same. ``lean``: as of ``kept_values``."""
        blocks = [block for block in source.blocks if not block.beside]
        held = {
            block.nodes: (_resting(block, source, problem), _kept(block, lean=lean)) for block in dict.fromkeys(blocks)
        }
        resting, kept = np.array([held[block.nodes] for block in blocks]).T
        return cls(len(source.blocks) - len(blocks), spans(source.graph, blocks), resting, kept)


def even_pieces(held: HeldBlocks, seconds: Sequence[Numbers], devices: int, *, loss_s: float) -> EvenPieces:
    """Of a micro-batch's program; ``seconds``: of its blocks, forward, backward, and forward of those in layers."""
    of_blocks = (*(one[held.apart :] for one in seconds), held.resting / devices, held.kept / devices)
    each = [_by_piece(held.spans, one) for one in of_blocks]
    each[1][-1] += loss_s
    return EvenPieces(*each)


def spans(graph: Graph, blocks: Sequence[Block]) -> list[range]:
    """By block, the pieces that it is in; blocks that are there again are further pieces."""
    of, found = pieces(graph).of, [range(1)]
    before: list[Block] = []
    at = 0
    for block in blocks:
        here = {of[node] for node in block.nodes}
        if block in before or (before and of[before[-1].nodes[-1]] not in here):  # the same piece over again
            at = found[-1].stop
            before = []
        found.append(range(at, at + len(here)))
        at = found[-1].stop - 1
        before.append(block)
    return found[1:]


def _by_piece(found: Sequence[range], of_blocks: Numbers) -> Numbers:
    """Of blocks that are in several pieces nothing."""
    total = np.zeros(found[-1].stop)
    for span, one in zip(found, of_blocks, strict=True):
        total[span.start] += one if len(span) == 1 else 0.0
    return total


def _resting(block: Block, source: SourceBlocks, problem: Problem) -> float:
    """Bytes of the trained parameters that a block alone reads."""
    read = dict.fromkeys(operand for node in block.nodes for operand in node.operands)
    trained = [one.type for one in read if one.is_param and one.needs_grad and one not in source.tied]
    return float(sum(problem.held_bytes(one, one.num_bytes) for one in trained))


def _kept(block: Block, *, lean: bool) -> float:
    """Bytes of the block's own values that backward keeps for sure."""
    kept = kept_values(block.nodes, lean=lean)
    return float(sum(value.type.num_bytes for value in set(block.nodes).intersection(kept)))
