"""Which parameters a stored tensor holds, and that no two of them share an element.

Two parameters over the same elements would be trained apart though the model ties them; such a model is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ir.errors import ModelError
from ir.graph import Graph, Node, param_view

Box = tuple[tuple[float, float], ...]
"""Per dim of a stored tensor, the part that a view reads, as fractions of the dim."""


def stored_views(graph: Graph) -> dict[str, list[Node]]:
    """Stored tensor -> the parameters that are views of it.

    Raises:
        ModelError: if two trained parameters read the same elements in different ways.
    """
    found: dict[str, list[Node]] = {}
    for param in graph.params:
        found.setdefault(param.attr("source"), []).append(param)
    for source, params in found.items():
        for a, b in itertools.combinations([param for param in params if param.attr("trainable")], 2):
            if overlap(box(a), box(b)):
                raise ModelError(
                    f"{source} is read both as {param_view(a) or 'it is'} and as {param_view(b) or 'it is'}",
                    "A tied weight is read in one way, or in parts that do not overlap",
                    "Read it in one layout, e.g. as the weight of linear layers only",
                )
    return found


def box(param: Node) -> Box:
    """What a parameter reads of its stored tensor; what follows a reshape no longer narrows it."""
    view = param_view(param)
    rank = next((len(step[1]) for step in view if step[0] == "permute"), param.type.rank)
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
            case _:
                break
    return tuple(parts)


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> bool:
    """True if two boxes share more than a border."""
    tolerance = 1e-9  # of a dim; no dim has a billion elements
    return all(max(x[0], y[0]) < min(x[1], y[1]) - tolerance for x, y in zip(a, b, strict=False))
