"""Recognise the field's named techniques in a PCG. Nothing is planned from these names; they only describe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ir.graph import Graph, Node
from ir.mesh import JOINT, Mesh
from ir.operator import Split
from ir.sharding import Shard, Sharding
from ir.verify import infer_shardings, node_splits
from pdv.pcg.units import gathered_once


def techniques(pcg: Graph, mesh: Mesh, *, several: bool = False) -> dict[str, list[str]]:
    """For each mesh axis, the techniques at work along it, most used first; ``several``: as in ``joins_unit``."""
    shardings = infer_shardings(pcg, mesh)
    found: dict[str, Counter[str]] = {axis.name: Counter() for axis in mesh.axes}
    for node in pcg.nodes:
        if node.is_param:
            _storage(pcg, node, shardings[node], mesh, found, several=several)
        elif not node.is_leaf and node.op.kind != "parallel":
            splits = node_splits(node, [shardings[operand] for operand in node.operands], mesh)
            for axis, split in zip(mesh.axes, splits, strict=True):
                name = technique_of(node, split)
                if name is not None:
                    found[axis.name][name] += 1
    return {axis: [name for name, _ in counts.most_common()] for axis, counts in found.items()}


def technique_of(node: Node, split: Split) -> str | None:
    """The name of cutting this loop of this operator; None for work that says nothing (views, repeated work)."""
    if split.loop is None or not node.op.kernel or not node.needs_grad:
        return None
    result = split.result
    if node.op.looks_up_rows and split.loop == node.op.offset_loop:
        return "vocabulary parallel"
    if isinstance(result, Shard) and result.dim == 0:
        return "data parallel"
    if node.op.kind in ("contraction", "stencil"):
        if not isinstance(result, Shard):
            return "tensor parallel (row)"
        weight_cut = any(isinstance(state, Shard) for state in split.operands[1:])
        return "tensor parallel (column)" if weight_cut else "sequence parallel"
    if node.op.has_scores:
        return "context parallel" if split.loop == "s" else "tensor parallel (heads)"
    if node.op.is_row_norm:
        return "sequence parallel"
    return None


def _storage(
    graph: Graph, node: Node, sharding: Sharding, mesh: Mesh, found: Mapping[str, Counter[str]], *, several: bool
) -> None:
    """A weight that rests cut but is used whole along an axis is ZeRO; one used cut belongs to its product."""
    gathered = gathered_axes(graph, node)
    once = any(gathered_once(move, several=several) for move in graph.users[node])
    kind = "ZeRO-3" if node.attr("regather") else "ZeRO-1" if once else "ZeRO-2"
    for axis, state in zip(mesh.axes, sharding, strict=True):
        if isinstance(state, Shard) and axis.name in gathered and node.needs_grad:
            found[axis.name][kind] += 1


def gathers_weights(graph: Graph) -> bool:
    """Whether a parameter is gathered before it is used."""
    return any(gathered_axes(graph, node) for node in graph.params)


def gathered_axes(graph: Graph, node: Node) -> set[str]:
    """Axes along which a parameter is gathered before it is used."""
    axes: set[str] = set()
    waiting = [node]
    while waiting:
        for reader in graph.users[waiting.pop()]:
            if reader.op.transition.gathers:
                axes.update(reader.attr("axis").split(JOINT))
            if reader.op.kind == "parallel":
                waiting.append(reader)
    return axes
