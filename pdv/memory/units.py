"""Weights that an emitted program gathers for each use, a unit at a time (``pdv/emit/templates/gathers.py``), in bytes.

One unit is here, the next one's blocks are coming; gradients of a unit are scattered when all are there, and lie there
until those of the next one are. On a CPU gloo gathers into a tensor of its own first, and sums a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Node
from pdv.memory.log import Heap, Holder, Storage
from pdv.memory.setting import Setting
from pdv.pcg.units import Key, gathered_units

GATHERED, SCATTERED = Holder("collectives", "all_gather"), Holder("collectives", "reduce_scatter")


@dataclass
class Units:
    """Of the nodes that a chunk runs; ``on_gpu``: on what."""

    setting: Setting
    nodes: Sequence[Node]
    heap: Heap
    on_gpu: bool
    here: tuple[Key, Storage] | None = None
    coming: tuple[Key, Storage] | None = None
    sent: Storage | None = None
    saved: list[Key] = field(default_factory=list)
    """Those of which backward reads weights, in the order of the forward pass."""
    read: int = 0
    """How many were read in this pass."""
    terms: dict[Key, list[Storage]] = field(default_factory=dict)
    due: Counter[Key] = field(default_factory=Counter)
    reduced: set[Key] = field(default_factory=set)

    @cached_property
    def of(self) -> dict[Node, Key]:
        """By move."""
        if not self.setting.eager:
            return {}
        found = gathered_units((operand for node in self.nodes for operand in node.operands), several=False)
        return {move: key for move, key in found.items() if self.setting.axis_size(move) > 1}

    @cached_property
    def order(self) -> list[Key]:
        """As they are read."""
        found = [self.of[operand] for node in self.nodes for operand in node.operands if operand in self.of]
        return _once(found)

    @cached_property
    def sizes(self) -> dict[Key, tuple[float, float]]:
        """Bytes of a unit: of this rank's part, and of all."""
        found = dict.fromkeys(self.order, (0.0, 0.0))
        for move, key in self.of.items():
            part, whole = found[key]
            found[key] = part + self.setting.num_bytes(move.operands[0]), whole + self.setting.num_bytes(move)
        return found

    def begin(self) -> None:
        """A forward pass begins."""
        self.let_go()
        self.read = 0
        reads = (operand for node in self.nodes if self.setting.is_differentiated(node) for operand in node.operands)
        self.due = Counter(self.of[operand] for operand in reads if operand in self.of)

    def reach(self, key: Key, *, backward: bool) -> None:
        """A unit's weights are read."""
        if self.here is not None and self.here[0] == key:
            if backward and not self.read:
                self._look_ahead(backward=True)
            return
        self.let_go()
        if self.coming is None or self.coming[0] != key:
            self._start(key)
        assert self.coming is not None, "started"
        self.here = key, self.heap.allocate(self.sizes[key][1], GATHERED)
        self.heap.drop(self.coming[1])
        self.coming = None
        self._look_ahead(backward=backward)

    def _look_ahead(self, *, backward: bool) -> None:
        """Start to gather what is read next."""
        self.read += 1
        path = _once(self.saved or self.order)[::-1] if backward else self.order
        if self.read < len(path):
            self._start(path[self.read])

    def _start(self, key: Key) -> None:
        part, whole = self.sizes[key]
        if self.coming is not None:
            self.heap.drop(self.coming[1])
        self.coming = key, self.heap.allocate(part + whole, GATHERED)
        self.heap.drop(self.heap.allocate(0.0 if self.on_gpu else whole, GATHERED))

    def turn(self) -> None:
        """A backward pass begins."""
        self.read = 0

    def let_go(self) -> None:
        """No unit is here."""
        if self.here is not None:
            self.heap.drop(self.here[1])
        self.here = None

    def give(self, key: Key, term: Storage) -> None:
        """The gradient of one of a unit's weights, whole; the last one has all of them summed."""
        self.terms.setdefault(key, []).append(term)
        self.due[key] -= 1
        if self.due[key]:
            return
        if self.here is not None and self.here[0] == key:
            self.let_go()
        share = max(self.setting.gradient_share(move) for move, own in self.of.items() if own == key)
        part, whole = (share * size for size in self.sizes[key])
        sent = self.heap.allocate(whole * (1 if self.on_gpu else 2), SCATTERED)
        total = self.heap.allocate(part, Holder("gradients"))  # it stays until the optimizer ran
        if key in self.reduced:
            self.heap.drop(total)
        self.reduced.add(key)
        self.finish()
        self.sent = sent
        for one in self.terms.pop(key):
            self.heap.drop(one)

    def finish(self) -> None:
        """What was sent has come."""
        if self.sent is not None:
            self.heap.drop(self.sent)
        self.sent = None


def _once(keys: Sequence[Key]) -> list[Key]:
    """Without repetitions of one behind itself."""
    return [key for at, key in enumerate(keys) if not at or keys[at - 1] != key]
