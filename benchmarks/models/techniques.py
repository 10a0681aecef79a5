"""Plans that mix techniques on purpose, forced by pins: what the search would not choose for models this small.

Axes called ``dp`` cut the batch, axes called ``tp`` cut what is inside an operator. With ``zero`` parameters rest cut
along ``dp`` and are gathered for each use, or with ``once`` kept until backward, of micro-batches for a whole step;
with ``sequence`` norms are cut along the sequence over ``tp``; with ``context`` attention is cut along its queries and
embedding along the vocabulary, whose blocks must know their start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Shard, State, fits
from pdv.cluster import load_cluster
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.problem import Pins, Problem
from pdv.search.meshes import search_mesh

CLUSTER = Path(__file__).parents[2] / "examples/clusters/laptop-4.yaml"
NORMS = ("layer_norm", "rms_norm")
INSIDE = ("linear", "conv2d", "attention", "matmul")


@dataclass(frozen=True)
class Technique:
    """A mix of techniques on a mesh: axis sizes, slow to fast."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    zero: bool = False
    once: bool = False
    sequence: bool = False
    context: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh it runs on."""
        return Mesh.of(**dict(self.sizes))

    @property
    def pins(self) -> Pins:
        """What forces the search into it."""
        regather: Literal["free", "always", "never"] = "never" if self.once else "always" if self.zero else "free"
        return Pins(self.allows, self.stores, regather, self.name)

    def allows(self, node: Node, axis: str, split: Split) -> bool:
        """Whether an operator may run in a split along an axis."""
        if axis == "dp":
            return cuts_rows(node, split) == has_rows(node)
        if cuts_rows(node, split) and has_rows(node):
            return False
        if self.context and node.op.offset_loop in node.loops.extents and node.operands[-1].type.rank > 1:
            return split.loop == node.op.offset_loop or node.loops.extents[str(node.op.offset_loop)] % 2 == 1
        if self.sequence and node.op.name in NORMS:
            return split.result == Shard(1)
        return split.label != "none" or node.op.name not in INSIDE

    def stores(self, param: Node, axis: str, state: State) -> bool:
        """Whether a parameter may rest in a state along an axis."""
        if axis != "dp" or not self.zero:
            return True
        one_cut = any(
            fits(param.type, tuple(Shard(dim) if a.name == "dp" else Shard(0) for a in self.mesh.axes), self.mesh)
            for dim in range(param.type.rank)
        )
        return isinstance(state, Shard) or not one_cut


def has_rows(node: Node) -> bool:
    """True if a node computes on rows of the batch: on what depends on an input, and is no vector of statistics."""
    return any(operand.type.rank > 1 and depends_on_input(operand) for operand in node.operands)


def cuts_rows(node: Node, split: Split) -> bool:
    """True if the split cuts dim 0 of what depends on an input."""
    return any(
        state == Shard(0) and depends_on_input(operand)
        for operand, state in zip(node.operands, split.operands, strict=True)
    )


_KNOWN: dict[Node, bool] = {}


def depends_on_input(node: Node) -> bool:
    """True if an input is among the leaves below a node."""
    stack = [node]
    while stack:
        top = stack[-1]
        unknown = [operand for operand in top.operands if operand not in _KNOWN]
        if unknown:
            stack += unknown
        else:
            _KNOWN[top] = top.is_input or any(_KNOWN[operand] for operand in top.operands)
            stack.pop()
    return _KNOWN[node]


def forced_plan(graph: Graph, technique: Technique) -> Graph:
    """The cheapest parallel computation graph that keeps to a technique."""
    cluster = load_cluster(CLUSTER)
    link = cluster.levels[-1].link
    axes = tuple(AxisLink(axis.size, link) for axis in technique.mesh.axes)
    problem = Problem(graph, technique.mesh, axes, ComputeModel.of(cluster), pins=technique.pins)
    return search_mesh(problem).pcg


ZERO2 = Technique("zero2", (("dp", 2),), zero=True)
ZERO4 = Technique("zero4", (("dp", 4),), zero=True)
DP_TP = Technique("dp+tp", (("dp", 2), ("tp", 2)))
TP_SP = Technique("tp+sp", (("tp", 2),), sequence=True)
CONTEXT = Technique("dp+context", (("dp", 2), ("tp", 2)), context=True)
ZERO_TP = Technique("zero+tp", (("dp", 2), ("tp", 2)), zero=True)
DP_TP_SP = Technique("dp+tp+sp", (("dp", 2), ("tp", 2)), sequence=True)
ZERO_TP_8 = Technique("zero+tp-8", (("dp", 2), ("tp", 4)), zero=True)
