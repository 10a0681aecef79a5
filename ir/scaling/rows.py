"""A program at fewer rows of its batch: what one micro-batch computes. Entry point: ``fewer_rows``."""

from __future__ import annotations

from ir.errors import ShapeError
from ir.graph import Graph
from ir.scaling.resize import Sizes


def fewer_rows(graph: Graph, share: int) -> Graph | None:
    """``graph`` over one ``share``-th of the rows of each input; None where rows cannot be told from other sizes."""
    sizes = Sizes(graph)
    rows = [sizes.open_atoms(node, 0) if node.type.rank else () for node in graph.inputs]
    if not all(atoms and sizes.atoms.extents[atoms[0]] % share == 0 for atoms in rows):
        return None
    try:
        return sizes.resize({atoms[0]: sizes.atoms.extents[atoms[0]] // share for atoms in rows})[0]
    except ShapeError:
        return None
