"""A program at other rows of its batch: what one micro-batch computes, or a larger batch.

Entry points: ``micro_batch``, ``fewer_rows``, ``few_rows``, ``more_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ir.dims import divisors
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.rows import rows_apart
from ir.scaling.resize import Sizes


def micro_batch(graph: Graph, count: int) -> Graph | None:
    """What one of ``count`` micro-batches of a step computes; None where a batch of its rows cannot be told apart.

    Rows that are apart in the whole batch may be together in fewer: pairs of them, in a micro-batch of two rows.
    """
    found = fewer_rows(graph, count)
    return found if found is not None and rows_apart(found) else None


def fewer_rows(graph: Graph, share: int) -> Graph | None:
    """``graph`` over one ``share``-th of the rows of each input; None where rows cannot be told from other sizes."""
    found = _resized(graph, share)
    return None if found is None else found[0]


def few_rows(graph: Graph, rows: int) -> tuple[Graph, Mapping[Node, Node]] | None:
    """``graph`` over as few rows as divide those that it has and are no less than ``rows``, and what its nodes became.

    None where there are no fewer, or rows cannot be told from other sizes.
    """
    batch = next((int(node.type.shape[0]) for node in graph.inputs if node.type.rank), 0)
    share = max((batch // few for few in divisors(batch) if rows <= few < batch), default=1)
    return None if share == 1 else _resized(graph, share)


def more_rows(graph: Graph, times: int) -> Graph:
    """``graph`` over so many times the rows of each input; the same where rows cannot be told from other sizes."""
    found = None if times == 1 else _resized(graph, 1, times)
    return graph if found is None else found[0]


def _resized(graph: Graph, share: int, times: int = 1) -> tuple[Graph, Mapping[Node, Node]] | None:
    sizes = _sizes(graph)
    rows = [sizes.open_atoms(node, 0) if node.type.rank else () for node in graph.inputs]
    if not all(atoms and sizes.atoms.extents[atoms[0]] % share == 0 for atoms in rows):
        return None
    try:
        return sizes.resize({atoms[0]: sizes.atoms.extents[atoms[0]] * times // share for atoms in rows})
    except ShapeError:
        return None


@lru_cache(maxsize=4)
def _sizes(graph: Graph) -> Sizes:
    """What changes together in a program: the same for all numbers of micro-batches that are tried of it."""
    return Sizes(graph)
