"""The source graph beside its plan, so that a plan can be proved again anywhere: ``source.graph`` and its constants."""

from __future__ import annotations

from pathlib import Path

from ir.errors import UsageError
from ir.graph import Graph
from ir.text import constants, parse_graph, print_graph

GRAPH = "source.graph"
CONSTANTS = "source.safetensors"


def write_source(graph: Graph, directory: Path) -> None:
    """Print the graph; constants too large for a line go to a file of their own."""
    (directory / GRAPH).write_text(print_graph(graph), encoding="utf-8")
    arrays = constants(graph)
    if arrays:
        from safetensors.numpy import save_file

        save_file(dict(sorted(arrays.items())), directory / CONSTANTS)


def read_source(directory: Path) -> Graph:
    """``read_source`` after ``write_source`` gives the graph back.

    Raises:
        UsageError: if the files are missing.
        ModelError: if they are damaged.
    """
    try:
        text = (directory / GRAPH).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{directory / GRAPH} cannot be read: {error}", "A directory that `pdv optimize` wrote"
        ) from error
    arrays = {}
    if (directory / CONSTANTS).is_file():
        from safetensors.numpy import load_file

        arrays = load_file(directory / CONSTANTS)
    return parse_graph(text, arrays)
