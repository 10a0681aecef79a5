"""Passes over the serial graph: each takes a graph and returns an equal one.

Entry point: `canonicalize`, which brings what any frontend lowered to the one form that search and emission expect.
"""

from __future__ import annotations

from ir.graph import Graph
from pdv.passes.fuse import FUSIONS
from pdv.passes.rewrite import rewrite
from pdv.passes.simplify import SIMPLIFICATIONS, rows_once
from pdv.passes.tied_views import untangle, whole_buffers


def canonicalize(graph: Graph) -> Graph:
    """Give a graph that computes what `graph` does; equal models give equal digests, whichever frontend they came
    through.
    """
    rows = next((node.type.shape[0] for node in graph.inputs if node.type.rank), 1)
    return whole_buffers(untangle(rewrite(graph, (*SIMPLIFICATIONS, rows_once(rows), *FUSIONS))))
