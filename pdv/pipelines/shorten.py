"""A deep program with a few of its equal layers, which says what all of them take. Entry point: ``shorten``.

Equal blocks behind each other are solved once however many there are; what is left of a search's time goes into making
and pricing the whole program, which a short one saves wherever only the order of candidates is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.proof.repeats import Repeat
from pdv.pipelines.lengthen import places_of
from pdv.pipelines.profile import Numbers
from pdv.rewrite.rule import Rule
from pdv.schedule.pieces import Pieces, pieces
from pdv.search.blocks import Block, longest_repeat, split_blocks

KEPT = 3  # turns of a stretch that repeats: the first and the last, which border on others, and one for the rest


@dataclass(frozen=True)
class Short:
    """A short program; its pieces ``[start, stop)`` stand for ``times`` as many."""

    graph: Graph
    start: int
    stop: int
    times: int

    @property
    def middle(self) -> tuple[int, int, int]:
        """The pieces that stand for more, and for how many times."""
        return self.start, self.stop, self.times

    @property
    def repeated(self) -> range:
        """The pieces that stand for more; none where the program is as it was."""
        return range(self.start, self.stop) if self.times > 1 else range(0)

    def stretch(self, numbers: Numbers) -> Numbers:
        """[pieces] of the whole program from [pieces] of the short one."""
        inside = np.tile(numbers[self.start : self.stop], self.times)
        return np.concatenate([numbers[: self.start], inside, numbers[self.stop :]])


def shorten(graph: Graph, rules: Sequence[Rule], *, whole: bool = False) -> Short:
    """The program with its longest stretch of equal blocks shortened; as it is where pieces do not show that.

    rules: that both are searched with, and that blocks are as long as they span.
    whole: as it is, as its equal blocks are told apart.
    """
    found = pieces(graph)
    same = Short(graph, 0, found.count, 1)
    if whole:
        return same
    blocks = split_blocks(graph)
    longest = longest_repeat([block.key for block in blocks])
    repeat = None if longest is None else _at_pieces(blocks, longest, found)
    if repeat is None or repeat.count <= KEPT:
        return same
    period = repeat.period
    dropped = range(repeat.start + 2 * period, repeat.stop - period)
    short = _without(graph, blocks, dropped)
    kept = pieces(short)
    left_out, rest = divmod(found.count - kept.count, repeat.count - KEPT)
    middle = blocks[repeat.start + period : repeat.start + 2 * period]
    numbers = {found.of[node] for block in middle for node in block.nodes}
    start, stop = min(numbers), max(numbers) + 1
    if rest or left_out != stop - start:
        return same
    made = Short(short, start, stop, repeat.count - KEPT + 1)
    left, wholes = split_blocks(short, rules), split_blocks(graph, rules)
    places = places_of(short, left, made.middle)
    return made if [left[at].key for at in places] == [block.key for block in wholes] else same


def _at_pieces(blocks: Sequence[Block], repeat: Repeat, found: Pieces) -> Repeat | None:
    """The same stretch from the first block on with which a piece begins."""
    for start in range(repeat.start, repeat.start + repeat.period):
        if start == 0 or found.of[blocks[start - 1].nodes[-1]] != found.of[blocks[start].nodes[0]]:
            return Repeat(start, repeat.period, (repeat.stop - start) // repeat.period)
    return None


def _without(graph: Graph, blocks: Sequence[Block], dropped: range) -> Graph:
    """The program without some blocks: who read the last of them reads what the first of them read."""
    gone = {node for number in dropped for node in blocks[number].nodes}
    first, last = blocks[dropped[0]].source, blocks[dropped[-1]].sink
    assert first is not None, "a stretch inside the program"
    assert last is not None, "a stretch inside the program"
    k = Builder()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.is_input:
            made[node] = k.copy(node, ())
        elif node not in gone:
            made[node] = k.copy(node, tuple(made[first if operand is last else operand] for operand in node.operands))
        if node is first:
            made[last] = made[node]
    outputs, updates = ({name: made[node] for name, node in named} for named in (graph.outputs, graph.updates))
    return k.graph(outputs, updates, graph.name)
