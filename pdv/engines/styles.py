"""Tensor parallelism by module, as transformers writes it: which style each module of a cut model has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ir.graph import Graph, Node

LINEAR = {0: "colwise", 1: "rowwise"}  # by the dim of the weight [out, in] that is cut
EMBEDDING = {0: "embedding_rowwise", 1: "embedding_colwise"}
GATHERED = "colwise_gather_output"  # of a product whose result leaves the program


def styles(graph: Graph, cut: Mapping[Node, int]) -> dict[str, str]:
    """By pattern of a module's name its style; ``cut``: of parameters, the dim that tensor-parallel ranks share.

    A weight that several operators read (tied), or that is read through a view, has none: no style says its cut.
    """
    found: dict[str, str] = {}
    for param, dim in cut.items():
        module, dot, last = str(param.attr("name")).rpartition(".")
        readers = graph.users[param]
        if last != "weight" or not dot or param.attr("view") or len(readers) != 1:
            continue
        style = _style(graph, readers[0], dim)
        if style is not None:
            found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", module), style)
    return found


def _style(graph: Graph, reader: Node, dim: int) -> str | None:
    if reader.op.looks_up_rows:
        return EMBEDDING.get(dim)
    if not reader.op.is_dense:
        return None
    leaves = dim == 0 and any(reader is node for _, node in graph.outputs)
    return GATHERED if leaves else LINEAR.get(dim)
