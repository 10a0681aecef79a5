"""Which parameters a stored tensor holds, and that no two of them share an element.

Two parameters over the same elements would be trained apart though the model ties them; such a model is refused.
"""

from __future__ import annotations

from ir.errors import ModelError
from ir.graph import Graph, Node
from ir.views import read_twice, readings


def stored_views(graph: Graph) -> dict[str, list[Node]]:
    """Stored tensor -> the parameters that are views of it, or joined of views of several.

    Raises:
        ModelError: if two trained parameters read the same elements in different ways.
    """
    found: dict[str, list[Node]] = {}
    for param in graph.params:
        for reading in readings(param):
            found.setdefault(reading.source, []).append(param)
    for a, b in read_twice(param for param in graph.params if param.attr("trainable")):
        raise ModelError(
            f"{a.source} is read both as {a.view or 'it is'} and as {b.view or 'it is'}",
            "A tied weight is read in one way, or in parts that do not overlap",
            "Read it in one layout, e.g. as the weight of linear layers only",
        )
    return found
