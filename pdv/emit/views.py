"""Which parameters a stored tensor holds, and that no two of them share an element.

Two parameters over the same elements would be trained apart though the model ties them; such a model is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ir.errors import ModelError
from ir.graph import Graph, Node
from ir.views import Reading, readings

Box = tuple[tuple[float, float], ...]
"""Per dim of a stored tensor, the part that a view reads, as fractions of the dim."""


def stored_views(graph: Graph) -> dict[str, list[Node]]:
    """Stored tensor -> the parameters that are views of it, or joined of views of several.

    Raises:
        ModelError: if two trained parameters read the same elements in different ways.
    """
    found: dict[str, list[Node]] = {}
    trained: dict[str, list[Reading]] = {}
    for param in graph.params:
        for reading in readings(param):
            found.setdefault(reading.source, []).append(param)
            if param.attr("trainable"):
                trained.setdefault(reading.source, []).append(reading)
    for source, parts in trained.items():
        for a, b in itertools.combinations(parts, 2):
            if overlap(box(a), box(b)):
                raise ModelError(
                    f"{source} is read both as {a.view or 'it is'} and as {b.view or 'it is'}",
                    "A tied weight is read in one way, or in parts that do not overlap",
                    "Read it in one layout, e.g. as the weight of linear layers only",
                )
    return found


def box(reading: Reading) -> Box:
    """What is read of a stored tensor; what follows a reshape no longer narrows it."""
    view = reading.view
    rank = next((len(step[1]) for step in view if step[0] == "permute"), len(reading.shape))
    if view and view[0][0] == "reshape":
        return ()
    dims = list(range(rank))
    parts = [(0.0, 1.0)] * rank
    for step in view:
        match step:
            case ("permute", perm):
                dims = [dims[dim] for dim in perm]
            case ("chunk", dim, count, index):
                start, stop = parts[dims[dim]]
                width = (stop - start) / count
                parts[dims[dim]] = start + index * width, start + (index + 1) * width
            case ("slice", dim, first, last, extent):
                start, stop = parts[dims[dim]]
                width = (stop - start) / extent
                parts[dims[dim]] = start + first * width, start + last * width
            case _:
                break
    return tuple(parts)


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> bool:
    """True if two boxes share more than a border."""
    tolerance = 1e-9  # of a dim; no dim has a billion elements
    return all(max(x[0], y[0]) < min(x[1], y[1]) - tolerance for x, y in zip(a, b, strict=False))
