"""What layers keep for backward, on its way to the host and back, beside the layers that run. Entry: ``Hosting.of``.

As the emitted ``on_host`` has it: before a layer runs, the copy of the one before the last is waited for; in backward
each layer asks for what the next one needs. Of a pass, the first layer of backward waits for all of its own; the
program finds that on the device where backward follows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.graph import Node, unmoved
from pdv.pcg.plan_cost import kept_of
from pdv.problem.recomputation import WHOLE
from pdv.simulate.engine.task import Placed
from pdv.simulate.lowering.entries import Nodes
from pdv.simulate.lowering.runs import NodeRun
from pdv.simulate.lowering.segments import Segments


@dataclass(frozen=True)
class Hosting:
    """Of one chunk. bytes_of: by place in the list of runs, what a layer keeps; starts: where each run starts."""

    segments: Segments
    bytes_of: dict[int, float]
    starts: list[int]

    @classmethod
    def of(cls, runs: Sequence[NodeRun], nodes: Nodes, segments: Segments) -> Hosting:
        """Nothing, where layers keep it on the device."""
        starts = [run.start for run in runs]
        if not segments.links.hosted:
            return cls(segments, {}, starts)
        again = segments.execution.recompute in WHOLE
        found: dict[int, float] = {}
        for number, run in enumerate(runs):
            if run.layer >= 0:
                kept = _taken(run) if again else kept_of(run.nodes, several=segments.execution.several)
                found[number] = sum(nodes.of[node].bytes for node in kept)
        return cls(segments, found, starts)

    def forward(self, placed: Sequence[Placed]) -> list[Placed]:
        """The runs, first to last, behind what the host does, each with what it sends."""
        found, ahead = list(placed[: len(placed) - len(self.starts)]), len(placed) - len(self.starts)
        layers = list(self.bytes_of)
        for number, start in enumerate(self.starts):
            found.append(placed[ahead + number])
            if number in self.bytes_of:
                before = [self.starts[layers[at - 1]]] if (at := layers.index(number)) else []
                found.append(self.segments.host_moves(start, {start: self.bytes_of[number]}, before, back=False))
        return found

    def backward(self, placed: Sequence[Placed]) -> list[Placed]:
        """The runs, last to first, each behind what it has from the host and asks for."""
        found, ahead = list(placed[: len(placed) - len(self.starts)]), len(placed) - len(self.starts)
        layers = list(self.bytes_of)
        for turn, number in enumerate(reversed(range(len(self.starts)))):
            if number in self.bytes_of:
                at, start = layers.index(number), self.starts[number]
                asked = layers[at:][:1] if at == len(layers) - 1 else []
                asked += layers[at - 1 : at] if at else []
                moves = {self.starts[one]: self.bytes_of[one] for one in asked}
                found.append(self.segments.host_moves(start, moves, [start], back=True))
            found.append(placed[ahead + turn])
        return found


def _taken(run: NodeRun) -> list[Node]:
    """What a layer takes of others, beside weights."""
    inside = set(run.nodes)
    read = dict.fromkeys(x for node in run.nodes for x in node.operands if x not in inside)
    return [node for node in read if not node.is_leaf and node.needs_grad and not unmoved(node).is_leaf]
