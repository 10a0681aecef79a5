"""Products in narrow formats: their kernels, and the casts of what they read. Entry point: `scaled_products`."""

from __future__ import annotations

from collections.abc import Collection

from ir.cost_model import NodeEstimate, Query
from ir.graph import Node, unmoved
from ir.verify import node_local_loops
from pdv.problem import Problem
from pdv.problem.formats import Format
from pdv.simulate.lowering.entries import Entry


def is_scaled(entry: Entry, layers: Collection[Node]) -> bool:
    """Whether an entry is a product of a layer with a weight: neither attention nor what stands outside of layers."""
    node = entry.node
    product = entry.role == "local" and node.op.kind == "contraction" and not node.op.has_scores
    return product and node in layers and any(unmoved(operand).is_param for operand in node.operands)


def scaled_products(entry: Entry, chosen: Format, problem: Problem) -> NodeEstimate:
    """The products alone, forward and backward."""
    loops = node_local_loops(entry.node, entry.splits, problem.mesh)
    query = Query.of(entry.node, loops, train=problem.train)._replace(number=chosen.number)
    (found,) = problem.compute.nodes([query])
    return found


def cast_bytes(entry: Entry, chosen: Format, problem: Problem, *, weights: bool) -> tuple[float, float]:
    """Read and written for casts: forward of activations (and ``weights``), backward of the result's gradient."""
    loops = node_local_loops(entry.node, entry.splits, problem.mesh)
    sizes = [
        loops.size_of(dims)
        for dims, operand in zip(loops.operands, entry.node.operands, strict=True)
        if weights or not unmoved(operand).is_param
    ]
    backward = loops.size_of(loops.result) if entry.backward else 0
    return chosen.cast_bytes * sum(sizes), chosen.cast_bytes * backward
