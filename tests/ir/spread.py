"""A simple planner for tests: cut the inputs' batch, and let every operator follow what its operands say.

Where operands cannot agree, what is cut is combined. Leaves that are Invariant enter any state. Good enough to make a
legal PCG of any program; no search, no cost.
"""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.ops import OPERATORS
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, Shard, Sharding, State, fits
from ir.verify import divides


def spread(graph: Graph, mesh: Mesh) -> Graph:
    """A PCG of ``graph``: every axis cuts dim 0 of the inputs."""
    return _Spread(mesh).run(graph)


class _Spread:
    def __init__(self, mesh: Mesh) -> None:
        self.k = Builder()
        self.mesh = mesh
        self.made: dict[Node, Node] = {}
        self.states: dict[Node, Sharding] = {}

    def run(self, graph: Graph) -> Graph:
        whole: Sharding = (Invariant(),) * len(self.mesh.axes)
        for node in graph.nodes:
            if node.is_leaf:
                self.made[node] = self.k.copy(node, ())
                self.states[node] = whole
                cut: Sharding = (Shard(0),) * len(self.mesh.axes)
                if node.is_input and fits(node.type, cut, self.mesh):
                    self.made[node] = self.bring(node, cut)
                    self.states[node] = cut
            else:
                self.follow(node)
        outputs = {name: self.bring(node, whole) for name, node in graph.outputs}
        return self.k.graph(outputs, {name: self.bring(node, whole) for name, node in graph.updates})

    def follow(self, node: Node) -> None:
        chosen = [self.choose(node, axis) for axis in range(len(self.mesh.axes))]
        if not divides(node.loops, chosen, self.mesh):
            chosen = [self.none(node)] * len(chosen)
        operands = tuple(self.bring(x, tuple(s.operands[i] for s in chosen)) for i, x in enumerate(node.operands))
        self.made[node] = self.k.copy(node, operands)
        self.states[node] = tuple(split.result for split in chosen)
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Sums are taken at once."""
        after = tuple(Invariant() if isinstance(state, Partial) else state for state in self.states[node])
        self.made[node] = self.bring(node, after)
        self.states[node] = after

    def choose(self, node: Node, axis: int) -> Split:
        found = [self.states[x][axis] for x in node.operands]
        for split in node.op.splits(node.loops):
            ready = [self.reaches(old, new) for old, new in zip(found, split.operands, strict=True)]
            if split.loop is not None and all(ready) and any(isinstance(state, Shard) for state in found):
                return split
        return self.none(node)

    def reaches(self, before: State, after: State) -> bool:
        return before == after or (isinstance(before, Invariant) and move(before, after) is not None)

    def none(self, node: Node) -> Split:
        return node.op.splits(node.loops)[0]

    def bring(self, node: Node, after: Sharding) -> Node:
        """Axis by axis: out of cuts innermost first, then into them outermost first."""
        x, states = self.made[node], list(self.states[node])
        for axis in reversed(range(len(states))):
            if isinstance(states[axis], Shard) and states[axis] != after[axis]:
                x = self.step(x, states[axis], Invariant(), axis)
                states[axis] = Invariant()
        for axis, state in enumerate(after):
            if states[axis] != state:
                x = self.step(x, states[axis], state, axis)
        return x

    def step(self, x: Node, before: State, after: State, axis: int) -> Node:
        found = move(before, after)
        assert found is not None, (before, after)
        name, dims = found
        return self.k.apply(OPERATORS[name], (x,), {**dims, "axis": self.mesh.axes[axis].name})
