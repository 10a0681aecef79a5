"""Passes over the serial graph: each takes a graph and returns an equal one.

Entry point: `canonicalize`, which brings what any frontend lowered to the one form that search and emission expect.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ir.graph import Graph, param_view
from pdv.passes.simplify import STEPS, fold_constant, rows_once
from pdv.passes.tied_views import untangle, whole_buffers
from pdv.rewrite.library import read_laws
from pdv.rewrite.normal_form import normalized
from pdv.rewrite.rule import Rule, forwards

LAWS = Path(__file__).with_name("canonical.laws")


def canonicalize(graph: Graph) -> Graph:
    """Give a graph that computes what `graph` does; equal models give equal digests, whichever frontend they came
    through.
    """
    rows = next((node.type.shape[0] for node in graph.inputs if node.type.rank), 1)
    stored = {str(param.attr("source")): param.type.shape for param in graph.params if not param_view(param)}
    found = normalized(graph, (fold_constant, *_rules(), *STEPS, rows_once(rows)))
    found = normalized(found, (rows_once(rows, inner=True),))  # folding would undo it
    return whole_buffers(untangle(found, stored))


@cache
def _rules() -> tuple[Rule, ...]:
    """The laws, left to right."""
    return tuple(map(forwards, read_laws(LAWS)))
