"""From nodes to tasks: the programs of each chunk on one kind of stage. Entry point: ``Lowering``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ir.graph import Node
from pdv.problem.recomputation import runs_again
from pdv.simulate.engine.task import Placed
from pdv.simulate.lowering.entries import Nodes
from pdv.simulate.lowering.fusion import fusion
from pdv.simulate.lowering.hosting import Hosting
from pdv.simulate.lowering.runs import NodeRun
from pdv.simulate.lowering.segments import KINDS, Due, Item, Segments, Waits
from pdv.simulate.lowering.sums import Sums


@dataclass(frozen=True)
class ChunkProgram:
    """One chunk on one kind of stage: what runs forward, backward, and in the last micro-batch's backward."""

    forward: tuple[Placed, ...]
    backward: tuple[Placed, ...]
    last: tuple[Placed, ...]


class Lowering:
    """Chunks of a PCG as programs of segments."""

    def __init__(self, nodes: Nodes, segments: Segments) -> None:
        self.nodes, self.segments = nodes, segments

    def program(self, runs: Sequence[NodeRun], sums: Sums) -> ChunkProgram:
        """The segments of one chunk."""
        items = self._items(runs)
        ahead = self.segments.execution.overlap.gathers
        forward, backward, last = self.segments.host_start(), self.segments.host_start(), self.segments.host_start()
        for number, run in enumerate(runs):
            window = [*range(ahead + 1)] if number == 0 else [number + ahead]
            early = [(n - number, items[n]) for n in window if ahead and n < len(runs)]
            forward.append(self._place("forward", items[number], run, early, ()))
        if not self.nodes.problem.train:
            return ChunkProgram(tuple(forward), (), ())
        hosting = Hosting.of(runs, self.nodes, self.segments)
        forward = hosting.forward(forward)
        buckets = sums.buckets(runs) if self.segments.execution.overlap.gradients else {}
        for number in reversed(range(len(runs))):
            top = number == len(runs) - 1
            window = [number - n for n in range(ahead + 1)] if top else [number - ahead]
            early = [(n - number, items[n]) for n in window if ahead and n >= 0]
            arguments = (items[number], runs[number], early)
            backward.append(self._place("backward", *arguments, ()))
            start = runs[number].start
            due = tuple((i.place - start, *one) for i in items[number] for one in buckets.get(i.place, ()))
            last.append(self._place("backward", *arguments, due) if due else backward[-1])
        backward, last = hosting.backward(backward), hosting.backward(last)
        return ChunkProgram(tuple(forward), tuple(backward), tuple(last))

    # ---- What waits for what ----

    def _items(self, runs: Sequence[NodeRun]) -> list[tuple[Item, ...]]:
        """Nodes with their waits; only moves that run beside compute are ever waited for."""
        plain = not self.segments.execution.overlap.activations
        place: dict[Node, int] = {node: run.start + i for run in runs for i, node in enumerate(run.nodes)}
        of = self.nodes.of
        light = self.nodes.light if self.segments.execution.recompute == "light" else ()
        if plain:
            return [
                tuple(Item(of[n], run.start + i, light=n in light) for i, n in enumerate(run.nodes)) for run in runs
            ]
        waits: dict[Node, Waits] = {}
        for node in place:
            found = dict.fromkeys(w for operand in node.operands for w in self._wait_for(operand, 0, waits, place))
            waits[node] = tuple(found)
        behind: dict[Node, Waits] = {}
        users = self.nodes.pcg.users
        for node in reversed(place):
            readers = [user for user in users[node] if user in place and of[user].backward]
            behind[node] = tuple(dict.fromkeys(w for user in readers for w in self._wait_for(user, 1, behind, place)))
        return [
            tuple(Item(of[n], run.start + i, waits[n], behind[n], n in light) for i, n in enumerate(run.nodes))
            for run in runs
        ]

    def _wait_for(self, node: Node, way: int, waits: dict[Node, Waits], place: dict[Node, int]) -> Waits:
        """What a reader of a node's value (or of its gradient) waits for: kernels are done when it starts."""
        if node not in place:
            return ()
        entry = self.nodes.of[node]
        if entry.role == "move" and self.segments.links.move(entry)[way] > 0:
            return ((place[node], entry.axis),)
        if entry.role == "local" and entry.kernels[way]:
            return ()
        return waits[node]

    # ---- Segments where they stand ----

    def _place(
        self,
        phase: Literal["forward", "backward"],
        items: tuple[Item, ...],
        run: NodeRun,
        early: Sequence[tuple[int, tuple[Item, ...]]],
        due: Due,
    ) -> Placed:
        """The segment of a run; ``early``: runs by distance whose parameters are gathered here."""
        gathers = [
            (item.entry, item.place - run.start)
            for distance, found in early
            for item in found
            if item.entry.role == "parameter" and (phase == "forward" or item.entry.regathers)
        ]
        fused = fusion(run.nodes, self.nodes) if self.segments.execution.fused else None
        layer = run.layer >= 0 and runs_again(run.layer, self.segments.execution.recompute)
        segment = self.segments.of(phase, items, layer=layer, gathers=gathers, due=due, fused=fused)
        return Placed(segment, run.start * KINDS * len(self.segments.links.devices))
