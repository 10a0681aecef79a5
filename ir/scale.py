"""The same programs at small sizes, so that proving them costs seconds.

What is proved is proved of the small programs. That it holds for the large ones rests on premises that this file sees
to (docs/proof.md): a program names sizes only in its loops and attributes, all of which change together here, none to
one, and with two or more elements in every cut block; numbers that depend on a size keep the value that they have at
the true one; constants are symbols, known by a hash of their whole content; and two nodes that differ stay different.

A serial graph and its PCG get one common assignment of sizes (``atoms.py``), such that every cut still divides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.common_sizes import Alike, CommonSizes, Small, StuckError, is_parallel
from ir.errors import ShapeError, ShardingError, VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.smaller_mesh import meshes_to_try
from ir.verify import infer_shardings
from ir.views import bases

FEW_ELEMENTS = 1 << 25  # of all nodes on all ranks: some 0.5 GiB at two trials, and seconds
MOST_ELEMENTS = 1 << 28  # where nothing is smaller


def shrink(
    graphs: Sequence[Graph],
    mesh: Mesh,
    *,
    scale: bool = True,
    turn: int = 0,
    symbols: bool = False,
    alike: Alike = (),
) -> Small:
    """The graphs (any number, serial or PCGs for ``mesh``) at small common sizes; as they are if ``scale`` is False.

    Args:
        graphs: the programs.
        mesh: what they are for.
        scale: whether sizes may change.
        turn: 0 or 1: the sizes and meshes of one are not the other's.
        symbols: constants that all graphs have become inputs, named by a hash of their content; else they keep their
            leading elements.
        alike: pairs of nodes that are to get the same sizes.

    Raises:
        ShardingError: if a graph is no legal PCG for ``mesh``.
        VerificationError: if readers of a stored tensor disagree about it, or the programs are large and do not scale.
    """
    found = bases(graphs)
    for graph in graphs:
        infer_shardings(graph, mesh if is_parallel(graph) else Mesh(()))  # name nodes and sizes as the user knows them
    known = shared_constants(graphs) if symbols else None
    best: Small | None = None
    for smaller in meshes_to_try(mesh, turn) if scale else ():
        small = _shrunk(graphs, CommonSizes(found, mesh, smaller, turn, known, alike))
        if small is not None and (best is None or small.elements < best.elements):
            best = small
        if best is not None and best.elements <= FEW_ELEMENTS:
            return best
    if best is None:
        best = CommonSizes(found, mesh, mesh, turn, None).rebuilt(graphs)
    if scale and best.elements > MOST_ELEMENTS:
        raise VerificationError(
            f"at {best.note or 'full size'} the programs are too large to be evaluated ({best.elements:.1e} elements)",
            f"At most {MOST_ELEMENTS:.1e}",
            "Report which part of the model does not scale down",
        )
    return best


def _shrunk(graphs: Sequence[Graph], sizes: CommonSizes) -> Small | None:
    try:
        sizes.solve(graphs)
        small = sizes.rebuilt(graphs)
        for graph in small.graphs:
            infer_shardings(graph, small.mesh if is_parallel(graph) else Mesh(()))
    except (ShapeError, ShardingError, ValueError, StuckError):
        return None
    return small


def shared_constants(graphs: Sequence[Graph]) -> frozenset[str]:
    """Digests of the constants, if all graphs have the same ones; else none: then their values may matter."""
    each = [
        {node.attr("value").digest for node in graph.nodes if node.op.name == "const" and node.type.num_elements > 1}
        for graph in graphs
    ]
    return frozenset(each[0]) if all(digests == each[0] for digests in each) else frozenset()


__all__ = ["FEW_ELEMENTS", "MOST_ELEMENTS", "Alike", "Small", "shared_constants", "shrink"]
