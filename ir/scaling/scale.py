"""The same programs at small sizes, so that proving them costs seconds.

What is proved is proved of the small programs. That it holds for the large ones rests on premises that this file sees
to (docs/proof.md): a program names sizes only in its loops and attributes, all of which change together here, none to
one, and with two or more elements in every cut block; numbers that depend on a size keep the value that they have at
the true one; constants are symbols, known by a hash of their whole content; and two nodes that differ stay different.

A serial graph and its PCG get one common assignment of sizes (``atoms.py``), such that every cut still divides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.errors import ShapeError, ShardingError, VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.smaller_mesh import meshes_to_try
from ir.scaling.common_sizes import Alike, CommonSizes, Small, StuckError, is_parallel
from ir.verify import infer_shardings
from ir.views import bases

FEW_ELEMENTS = 1 << 25  # of all nodes on all ranks: some 0.5 GiB at two trials, and seconds
MOST_ELEMENTS = 1 << 28  # where nothing is smaller


class Shrinking:
    """Graphs (any number, serial or PCGs for ``mesh``) whose sizes are unified once, to be made small in several ways.

    Attributes:
        symbols: constants that all graphs have become inputs, named by a hash of their content; else they keep their
            leading elements.
        alike: pairs of nodes that are to get the same sizes.

    Raises:
        ShardingError: if a graph is no legal PCG for ``mesh``.
        VerificationError: if readers of a stored tensor disagree about it.
    """

    def __init__(self, graphs: Sequence[Graph], mesh: Mesh, *, symbols: bool = False, alike: Alike = ()) -> None:
        self._graphs = graphs
        self._mesh = mesh
        self._found = bases(graphs)
        for graph in graphs:
            infer_shardings(graph, mesh if is_parallel(graph) else Mesh(()))  # name nodes and sizes as the user does
        sizes = CommonSizes(self._found, mesh, mesh, shared_constants(graphs) if symbols else None, alike)
        try:
            sizes.unify(graphs)
            self._sizes: CommonSizes | None = sizes
        except (ShapeError, ShardingError, ValueError):
            self._sizes = None

    def full(self) -> Small:
        """The graphs as they are."""
        return CommonSizes(self._found, self._mesh, self._mesh, None).rebuilt(self._graphs)

    def at(self, turn: int) -> Small:
        """The graphs at small common sizes, where they have any; those of turn 0, and their mesh, are not those of 1.

        Raises:
            VerificationError: if the programs are large and do not scale.
        """
        small = self._least(turn) or self.full()
        if small.elements > MOST_ELEMENTS:
            raise VerificationError(
                f"at {small.note or 'full size'} the programs are too large to be evaluated "
                f"({small.elements:.1e} elements)",
                f"At most {MOST_ELEMENTS:.1e}",
                "Report which part of the model does not scale down",
            )
        return small

    def _least(self, turn: int) -> Small | None:
        """On the first mesh on which there are few elements, else on the one with fewest."""
        larger: list[CommonSizes] = []
        if self._sizes is None:
            return None
        for mesh in meshes_to_try(self._mesh, turn):
            try:
                sizes = self._sizes.on(mesh, turn)
            except ValueError:
                continue
            if sizes.elements > FEW_ELEMENTS:
                larger.append(sizes)
            elif (small := _rebuilt(sizes, self._graphs)) is not None:
                return small
        larger.sort(key=lambda sizes: sizes.elements)
        return next(filter(None, (_rebuilt(sizes, self._graphs) for sizes in larger)), None)


def shrink(graphs: Sequence[Graph], mesh: Mesh, *, turn: int = 0, symbols: bool = False, alike: Alike = ()) -> Small:
    """The graphs at small common sizes: see ``Shrinking``."""
    return Shrinking(graphs, mesh, symbols=symbols, alike=alike).at(turn)


def _rebuilt(sizes: CommonSizes, graphs: Sequence[Graph]) -> Small | None:
    """The programs at the sizes chosen, if they are programs there, too."""
    try:
        small = sizes.rebuilt(graphs)
        for graph in small.graphs:
            infer_shardings(graph, small.mesh if is_parallel(graph) else Mesh(()))
    except (ShapeError, ShardingError, StuckError):
        return None
    return small


def shared_constants(graphs: Sequence[Graph]) -> frozenset[str]:
    """Digests of the constants, if all graphs have the same ones; else none: then their values may matter."""
    each = [
        {node.attr("value").digest for node in graph.nodes if node.is_const and node.type.num_elements > 1}
        for graph in graphs
    ]
    return frozenset(each[0]) if all(digests == each[0] for digests in each) else frozenset()


__all__ = ["FEW_ELEMENTS", "MOST_ELEMENTS", "Alike", "Shrinking", "Small", "shared_constants", "shrink"]
