"""Activations that move in pieces, each beside the product of the piece before it. Entry point: `Pieces`.

Of p pieces the first (of what is gathered) or the last (of what is summed) is waited for, and whatever the products
are too short to hide. Source: `pdv.problem.workload.Overlap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ir.ops.parallel import transition_of
from pdv.problem.workload import Execution
from pdv.simulate.lowering.entries import Entry
from pdv.simulate.lowering.links import Links
from pdv.simulate.lowering.price import DevicePrices
from pdv.simulate.lowering.scaled import is_scaled


@dataclass
class Pieces:
    """Moves of one run of entries.

    Attributes:
        reached: share of the best that is hidden (`Calibration.pieces_hidden`).
        room: by place and way, what of a product hides no move yet.
    """

    links: Links
    prices: DevicePrices
    execution: Execution
    run: Sequence[Entry]
    reached: float = 1.0
    room: dict[tuple[int, int], int] = field(default_factory=dict)

    def left(self, number: int, way: int) -> int:
        """Picoseconds of a move that nothing hides, forward or backward; -1: it is waited for as a whole.

        What a product takes can hide one move each way: what one move took of it, the next has not.
        """
        entry = self.run[number]
        axis, whole = self.links.mesh.spans[entry.axis], self.links.move(entry)[way]
        partners = self._partners(number, entry)
        moved = round(whole * self._cast_share(entry, partners, way))
        if axis not in self.execution.overlap.pieces:
            return moved if moved < whole else -1
        pieces = self.links.axes[entry.axis].size
        most = round((moved - moved // pieces) * self.reached)
        hidden = 0
        for place in partners:
            price = self.prices.entries[self.run[place].number]
            own = round((price.forward, price.backward)[way] * (pieces - 1) / pieces * self.reached)
            part = min(most - hidden, self.room.setdefault((place, way), own))
            self.room[place, way] -= part
            hidden += part
        return moved - hidden

    def _partners(self, number: int, entry: Entry) -> list[int]:
        """Places of the products (or attention) that read what a move gathers, or of the one that makes what it sums.

        Products that stand one behind the other read the same; attention is alone.
        """
        gathers = transition_of(entry.name).gathers
        found: list[int] = []
        for place in range(number + 1, len(self.run)) if gathers else range(number - 1, -1, -1):
            other = self.run[place]
            if other.role != "local" or not other.kernels[0]:
                continue
            product = other.node.op.kind == "contraction" or other.node.op.has_scores
            if product:
                found.append(place)
            if found and (not product or not gathers or other.node.op.has_scores):
                break
            if not product and not gathers:
                break
        return found

    def _cast_share(self, entry: Entry, partners: Sequence[int], way: int) -> float:
        """The part of a move's bytes that is sent, where a gathered factor is cast before it."""
        chosen = self.execution.products
        if chosen is None or not chosen.travels or way or not transition_of(entry.name).gathers:
            return 1.0
        scaled = bool(partners) and all(is_scaled(self.run[place], self.prices.layers) for place in partners)
        return chosen.bytes / entry.node.type.dtype.itemsize if scaled else 1.0
